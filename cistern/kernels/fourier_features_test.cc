#include "cistern/kernels/fourier_features.h"

#include "cistern/base/parallel.h"
#include "cistern/kernels/slot_test.h"

namespace cistern::slot_test {
namespace {

using Numbers = std::vector<double>;

struct Problem {
  int64_t batch, heads, length, width, features;
  bool normalise;
  Numbers x, scale, matrices, d_out;  // scale: empty for none
};
constexpr double kFactor = 0.25;

Problem Make(int64_t batch, int64_t heads, int64_t length, int64_t width, int64_t features,
             bool normalise, bool scaled, double spread = 1) {
  Problem p = {batch, heads, length, width, features, normalise, {}, {}, {}, {}};
  Random random(3);
  p.x = Normals(random, batch * heads * length * width, spread);
  if (scaled) p.scale = Normals(random, heads * width);
  p.matrices = Normals(random, heads * features * width);
  p.d_out = Normals(random, batch * heads * length * 2 * features);
  return p;
}

// out, dx and d_scale, one loop a number.
struct Results {
  Numbers out, dx, d_scale;
};
Results Definition(const Problem& p) {
  const auto& [batch, heads, length, width, features, normalise, given, scales, matrices, g] = p;
  Results r = {Numbers(p.d_out.size()), Numbers(p.x.size()), Numbers(size_t(heads * width))};
  for (int64_t row = 0; row < batch * heads * length; ++row) {
    const int64_t h = row / length % heads;
    const double* const x = p.x.data() + row * width;
    double squares = 0;
    for (int64_t j = 0; j < width; ++j) squares += x[j] * x[j];
    const double size = std::sqrt(squares), share = normalise ? 1 / (size + kLengthEpsilon) : 1;
    const auto scale = [&](int64_t j) {
      return p.scale.empty() ? 1 : p.scale[size_t(h * width + j)];
    };
    Numbers d_scaled(static_cast<size_t>(width));
    for (int64_t i = 0; i < features; ++i) {
      const double* const w = p.matrices.data() + (h * features + i) * width;
      double y = 0;
      for (int64_t j = 0; j < width; ++j) y += w[j] * scale(j) * share * x[j];
      const size_t at = size_t(row * 2 * features + i), other = at + size_t(features);
      r.out[at] = kFactor * std::sin(y), r.out[other] = kFactor * std::cos(y);
      const double dy = p.d_out[at] * r.out[other] - p.d_out[other] * r.out[at];
      for (int64_t j = 0; j < width; ++j) d_scaled[size_t(j)] += dy * w[j];
    }
    double dot = 0;
    for (int64_t j = 0; j < width; ++j) {
      dot += x[j] * scale(j) * d_scaled[size_t(j)];
      r.d_scale[size_t(h * width + j)] += d_scaled[size_t(j)] * share * x[j];
    }
    for (int64_t j = 0; j < width; ++j) {
      r.dx[size_t(row * width + j)] = share * scale(j) * d_scaled[size_t(j)];
      if (normalise && size > 0) r.dx[size_t(row * width + j)] -= x[j] * dot * share * share / size;
    }
  }
  return r;
}

template <class S>
Results Computed(const Problem& p) {
  using T = ComputeType<S>;
  const FourierShape shape = {p.batch, p.heads, p.length};
  const int64_t wide = 2 * p.features;
  const std::vector<S> x = As<S>(p.x);
  const std::vector<T> g = As<T>(p.d_out), scale = As<T>(p.scale), matrices = As<T>(p.matrices);
  std::vector<T> out(g.size());
  std::vector<S> dx(x.size());
  std::vector<T> d_scale(size_t(p.heads * p.width));
  const auto rows = [&](auto* data, int64_t width) {
    return Rows<std::remove_pointer_t<decltype(data)>>{data, p.heads * p.length * width,
                                                       p.length * width, width};
  };
  const FourierMap<T> map = {p.scale.empty() ? nullptr : scale.data(),
                             matrices.data(),
                             p.width,
                             p.features,
                             p.normalise,
                             kFactor};
  FourierFeatures<S>(shape, map, rows(x.data(), p.width), rows(out.data(), wide));
  FourierFeaturesBackward<S>(shape, map, rows(x.data(), p.width),
                             rows(static_cast<const T*>(out.data()), wide), rows(g.data(), wide),
                             rows(dx.data(), p.width), d_scale.data());
  return {Wide(out), Wide(dx), Wide(d_scale)};
}

TEST(FourierFeatures, Definition) {
  ForEachIsa([] {
    for (const auto& [length, width, features] :
         {std::array<int64_t, 3>{1, 1, 1}, {33, 5, 7}, {70, 16, 32}, {600, 64, 64}}) {
      for (const bool normalise : {false, true}) {
        for (const bool scaled : {false, true}) {
          const Problem p = Make(2, 3, length, width, features, normalise, scaled);
          const Results want = Definition(p), fine = Computed<double>(p),
                        plain = Computed<float>(p);
          ExpectNearInAll(fine.out, want.out, 1e-13, "out");
          ExpectNearInAll(fine.dx, want.dx, 1e-12, "dx");
          ExpectNearInAll(fine.d_scale, want.d_scale, 1e-12, "d_scale");
          ExpectNearInAll(plain.out, want.out, 3e-6, "out in float");
          ExpectNearInAll(plain.dx, want.dx, 1e-5, "dx in float");
          ExpectNearInAll(plain.d_scale, want.d_scale, 3e-5, "d_scale in float");
        }
      }
    }
  });
}

TEST(FourierFeatures, TokensInBFloat16) {
  ForEachIsa([] {
    Problem p = Make(1, 2, 45, 16, 24, true, true);
    p.x = Wide(As<BFloat16>(p.x));
    const Results want = Definition(p), got = Computed<BFloat16>(p);
    ExpectNearInAll(got.out, want.out, 3e-6, "out");
    ExpectNearInAll(got.dx, want.dx, 3e-3, "dx");  // rounded
    ExpectNearInAll(got.d_scale, want.d_scale, 3e-5, "d_scale");
  });
}

// Arguments beyond what vectors reduce, a token of zeros, and what is not finite.
TEST(FourierFeatures, FarZeroAndNotFinite) {
  ForEachIsa([] {
    Problem p = Make(1, 1, 40, 8, 16, false, false, 1e5);
    ExpectNearInAll(Computed<double>(p).out, Definition(p).out, 1e-9, "far");
    p = Make(1, 1, 40, 8, 16, true, true);
    std::fill(p.x.begin() + 8, p.x.begin() + 16, 0.0);
    const Results want = Definition(p), got = Computed<float>(p);
    ExpectNearInAll(got.dx, want.dx, 1e-5, "dx beside a token of zeros");
    p.x[19] = kInf, p.x[30] = std::nan("");
    const Results bad = Computed<float>(p);
    for (size_t t = 0; t < 40; ++t) {
      for (size_t i = 0; i < 32; ++i)
        EXPECT_EQ(std::isnan(bad.out[t * 32 + i]), t == 2 || t == 3) << t << ActiveIsa();
    }
  });
}

TEST(FourierFeatures, SameBitsForAnyThreads) {
  const Problem p = Make(2, 3, 1300, 16, 16, true, true);
  const int before = NumThreads();
  SetNumThreads(1);
  const Results want = Computed<float>(p);
  for (const int threads : {2, 3}) {
    SetNumThreads(threads);
    const Results got = Computed<float>(p);
    EXPECT_EQ(got.out, want.out);
    EXPECT_EQ(got.dx, want.dx);
    EXPECT_EQ(got.d_scale, want.d_scale);
  }
  SetNumThreads(before);
}

}  // namespace
}  // namespace cistern::slot_test
