#include "cistern/kernels/learned_features.h"

#include "cistern/base/testing_threads.h"
#include "cistern/kernels/slot_test.h"

namespace cistern::slot_test {
namespace {

using Numbers = std::vector<double>;
constexpr double kScale = 0.5;

struct Problem {
  SlotShape shape;
  Numbers x, weights, bias, d_out;
};

Problem Make(const SlotShape& shape) {
  Problem p = {shape, {}, {}, {}, {}};
  Random random(3);
  const int64_t rows = shape.batch * shape.heads * shape.length;
  p.x = Normals(random, rows * shape.width);
  p.weights = Normals(random, shape.heads * shape.slots * shape.width);
  p.bias = Normals(random, shape.heads * shape.slots);
  p.d_out = Normals(random, rows * shape.slots);
  return p;
}

struct Results {
  Numbers out, dx, d_weights, d_bias;
};

// One loop a number.
Results Definition(const Problem& p) {
  const auto [batch, heads, length, n, width] = p.shape;
  Results r = {Numbers(p.d_out.size()), Numbers(p.x.size()), Numbers(p.weights.size()),
               Numbers(p.bias.size())};
  for (int64_t row = 0; row < batch * heads * length; ++row) {
    const int64_t h = row / length % heads;
    for (int64_t l = 0; l < n; ++l) {
      const size_t at = size_t(row * n + l), of = size_t(h * n + l);
      double y = p.bias[of];
      for (int64_t j = 0; j < width; ++j)
        y += kScale * p.weights[of * size_t(width) + size_t(j)] * p.x[size_t(row * width + j)];
      if (y <= 0) continue;
      r.out[at] = y;
      r.d_bias[of] += p.d_out[at];
      for (int64_t j = 0; j < width; ++j) {
        const size_t w = of * size_t(width) + size_t(j), i = size_t(row * width + j);
        r.dx[i] += p.d_out[at] * kScale * p.weights[w];
        r.d_weights[w] += p.d_out[at] * kScale * p.x[i];
      }
    }
  }
  return r;
}

// heads_last: x, out and their gradients as layers leave them, [B,T,H,w] in memory.
template <class S>
Results Computed(const Problem& p, bool heads_last = false) {
  using T = ComputeType<S>;
  const auto [batch, heads, length, n, width] = p.shape;
  const auto place = [&](int64_t row, int64_t of) {
    const int64_t b = row / (heads * length), h = row / length % heads, t = row % length;
    return size_t((heads_last ? (b * length + t) * heads + h : row) * of);
  };
  const auto moved = [&](const auto& from, int64_t of, bool back) {
    auto to = from;
    for (int64_t row = 0; row < batch * heads * length; ++row) {
      const size_t here = size_t(row * of), there = place(row, of);
      std::copy_n(from.begin() + ptrdiff_t(back ? there : here), of,
                  to.begin() + ptrdiff_t(back ? here : there));
    }
    return to;
  };
  const auto rows = [&](auto* data, int64_t of) {
    using Number = std::remove_pointer_t<decltype(data)>;
    return heads_last ? Rows<Number>{data, length * heads * of, of, heads * of}
                      : Rows<Number>{data, heads * length * of, length * of, of};
  };
  const std::vector<S> x = moved(As<S>(p.x), width, false), g = moved(As<S>(p.d_out), n, false);
  const std::vector<T> weights = As<T>(p.weights), bias = As<T>(p.bias);
  std::vector<S> out(g.size()), dx(x.size());
  std::vector<T> d_weights(weights.size()), d_bias(bias.size());
  const LearnedMap<T> map = {weights.data(), bias.data(), kScale};
  LearnedFeatures<S>(p.shape, map, rows(x.data(), width), rows(out.data(), n));
  LearnedFeaturesBackward<S>(p.shape, map, rows(x.data(), width),
                             rows(static_cast<const S*>(out.data()), n), rows(g.data(), n),
                             rows(dx.data(), width), d_weights.data(), d_bias.data());
  return {Wide(moved(out, n, true)), Wide(moved(dx, width, true)), Wide(d_weights), Wide(d_bias)};
}

void ExpectNear(const Results& got, const Results& want, double tolerance, double rounded) {
  ExpectNearInAll(got.out, want.out, rounded, "out");
  ExpectNearInAll(got.dx, want.dx, rounded, "dx");
  ExpectNearInAll(got.d_weights, want.d_weights, tolerance, "d_weights");
  ExpectNearInAll(got.d_bias, want.d_bias, tolerance, "d_bias");
}

TEST(LearnedFeatures, Definition) {
  ForEachIsa([] {
    for (const SlotShape& shape : {SlotShape{1, 1, 1, 1, 1},
                                   {2, 3, 33, 7, 5},
                                   {2, 2, 70, 32, 16},
                                   {1, 2, 200, 3, 64},
                                   {1, 1, 2100, 16, 8}}) {
      const Problem p = Make(shape);
      const Results want = Definition(p);
      for (const bool heads_last : {false, true}) {
        ExpectNear(Computed<double>(p, heads_last), want, 1e-12, 1e-13);
        ExpectNear(Computed<float>(p, heads_last), want, 2e-6, 2e-6);
      }
    }
  });
}

TEST(LearnedFeatures, TokensInBFloat16) {
  ForEachIsa([] {
    Problem p = Make({2, 2, 75, 24, 20});
    p.x = Wide(As<BFloat16>(p.x)), p.d_out = Wide(As<BFloat16>(p.d_out));
    // Where sums of pairs of bfloat16 are (isa.h), products round nothing more.
    ExpectNear(Computed<BFloat16>(p, true), Definition(p), 1e-5, 3e-3);
  });
}

TEST(LearnedFeatures, KeepsNaN) {
  ForEachIsa([] {
    Problem p = Make({1, 1, 20, 9, 6});
    p.x[size_t(4 * 6 + 2)] = std::nan("");
    const Results got = Computed<float>(p);
    for (size_t i = 0; i < got.out.size(); ++i)
      EXPECT_EQ(std::isnan(got.out[i]), i / 9 == 4) << i << ActiveIsa();
  });
}

TEST(LearnedFeatures, SameBitsForAnyThreads) {
  const Problem p = Make({2, 3, 4200, 16, 16});
  const auto with = [&](int threads) {
    const testing::Threads set(threads);
    return Computed<float>(p);
  };
  const Results want = with(1);
  for (const int threads : {2, 3}) {
    const Results got = with(threads);
    EXPECT_EQ(got.out, want.out);
    EXPECT_EQ(got.dx, want.dx);
    EXPECT_EQ(got.d_weights, want.d_weights);
    EXPECT_EQ(got.d_bias, want.d_bias);
  }
}

}  // namespace
}  // namespace cistern::slot_test
