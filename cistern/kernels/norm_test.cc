#include "cistern/kernels/norm.h"

#include "cistern/base/parallel.h"
#include "cistern/kernels/slot_test.h"

namespace cistern::slot_test {
namespace {

struct NormProblem {
  NormShape shape;
  bool centred;
  std::vector<float> x, weight, bias;
  std::vector<BFloat16> dy;
  NormWeights weights() const { return {weight.data(), centred ? bias.data() : nullptr}; }
};

NormProblem MakeNorm(uint64_t seed, int64_t rows, int64_t width, bool centred) {
  Random random(seed);
  const auto floats = [&](int64_t n, double mean) {
    std::vector<float> v;
    for (int64_t i = 0; i < n; ++i) v.push_back(float(random.Normal() + mean));
    return v;
  };
  NormProblem p{{rows, width, 1e-5}, centred,          floats(rows * width, 0.7),
                floats(width, 1),    floats(width, 0), {}};
  for (const float g : floats(rows * width, 0)) p.dy.emplace_back(g);
  return p;
}

struct NormResult {
  std::vector<double> y, dx, d_weight, d_bias;
};

// The definition in double.
NormResult Reference(const NormProblem& p) {
  const auto [rows, width, eps] = p.shape;
  NormResult r{{}, {}, std::vector<double>(size_t(width)), std::vector<double>(size_t(width))};
  for (int64_t i = 0; i < rows; ++i) {
    const float* x = p.x.data() + i * width;
    const BFloat16* g = p.dy.data() + i * width;
    double mean = 0, square = 0, sum = 0, along = 0;
    for (int64_t j = 0; p.centred && j < width; ++j) mean += double(x[j]) / double(width);
    for (int64_t j = 0; j < width; ++j) square += std::pow(x[j] - mean, 2) / double(width);
    const double scale = 1 / std::sqrt(square + eps);
    const auto n = [&](int64_t j) { return (x[j] - mean) * scale; };
    const auto gw = [&](int64_t j) { return double(float(g[j])) * p.weight[size_t(j)]; };
    for (int64_t j = 0; j < width; ++j) {
      r.y.push_back(n(j) * p.weight[size_t(j)] + (p.centred ? p.bias[size_t(j)] : 0.0f));
      r.d_weight[size_t(j)] += double(float(g[j])) * n(j);
      r.d_bias[size_t(j)] += double(float(g[j]));
      sum += p.centred ? gw(j) / double(width) : 0, along += gw(j) * n(j) / double(width);
    }
    for (int64_t j = 0; j < width; ++j) r.dx.push_back(scale * (gw(j) - sum - n(j) * along));
  }
  return r;
}

struct NormOutputs {
  std::vector<BFloat16> y;
  std::vector<float> stats, dx, d_weight, d_bias;
};

NormOutputs Computed(const NormProblem& p) {
  const auto size = p.x.size(), width = size_t(p.shape.width);
  NormOutputs o{std::vector<BFloat16>(size), std::vector<float>(2 * size_t(p.shape.rows)),
                std::vector<float>(size), std::vector<float>(width), std::vector<float>(width)};
  Norm<float>(p.shape, p.weights(), p.x.data(), nullptr, nullptr, o.y.data(), o.stats.data());
  NormBackward(p.shape, p.weights(), p.x.data(), o.stats.data(), p.dy.data(), nullptr,
               {o.dx.data(), nullptr, o.d_weight.data(), p.centred ? o.d_bias.data() : nullptr});
  return o;
}

TEST(Norm, Definition) {
  ForEachIsa([] {
    uint64_t seed = 1;
    for (const bool centred : {true, false}) {
      for (const int64_t width : {1, 3, 16, 37, 128}) {
        for (const int64_t rows : {1, 7, 300}) {
          const NormProblem p = MakeNorm(seed++, rows, width, centred);
          const NormResult want = Reference(p);
          const NormOutputs got = Computed(p);
          const std::string where = std::to_string(rows) + " x " + std::to_string(width) +
                                    (centred ? " " : " rms ") + ActiveIsa();
          for (size_t i = 0; i < want.y.size(); ++i) {
            EXPECT_NEAR(float(got.y[i]), want.y[i], 0.004 * std::abs(want.y[i]) + 1e-5) << where;
            // Differences of terms as large as r |dy w|.
            const double r = got.stats[2 * (i / size_t(width)) + 1];
            EXPECT_NEAR(got.dx[i], want.dx[i], 1e-5 * (1 + r)) << where;
          }
          for (size_t j = 0; j < want.d_weight.size(); ++j) {
            const double eps = 1e-6 * double(rows + 10);
            EXPECT_NEAR(got.d_weight[j], want.d_weight[j], eps) << where;
            EXPECT_NEAR(got.d_bias[j], centred ? want.d_bias[j] : 0, eps) << where;
          }
        }
      }
    }
  });
}

TEST(Norm, ThreadsChangeNoBit) {
  const NormProblem p = MakeNorm(9, 1000, 48, true);
  const int before = NumThreads();
  std::vector<NormOutputs> outputs;
  for (const int threads : {1, 3}) {
    SetNumThreads(threads);
    outputs.push_back(Computed(p));
  }
  SetNumThreads(before);
  EXPECT_EQ(outputs[0].dx, outputs[1].dx);
  EXPECT_EQ(outputs[0].d_weight, outputs[1].d_weight);
  EXPECT_EQ(outputs[0].d_bias, outputs[1].d_bias);
  EXPECT_EQ(outputs[0].stats, outputs[1].stats);
}

// The sum and its norm in one pass are those of two, to the bit, and the gradients are, in every
// type of what is added and of what is read.
template <class Added, class Out>
void SumsFirst(bool centred) {
  const NormProblem p = MakeNorm(5, 9, 37, centred);
  const auto size = p.x.size();
  Random random(8);
  std::vector<Added> added;
  std::vector<Out> dy(size), y(size), want_y(size);
  std::vector<float> d_sum;
  for (size_t i = 0; i < size; ++i) {
    added.emplace_back(float(random.Normal()));
    d_sum.push_back(float(random.Normal()));
    dy[i] = Out(float(random.Normal()));
  }
  std::vector<float> want_sum(size), sum(size), stats(18), want_stats(18), dx(size), want_dx(size);
  for (size_t i = 0; i < size; ++i) want_sum[i] = p.x[i] + float(added[i]);
  Norm<float>(p.shape, p.weights(), want_sum.data(), nullptr, nullptr, want_y.data(),
              want_stats.data());
  Norm(p.shape, p.weights(), p.x.data(), added.data(), sum.data(), y.data(), stats.data());
  EXPECT_EQ(sum, want_sum);
  EXPECT_EQ(stats, want_stats);
  for (size_t i = 0; i < size; ++i) EXPECT_EQ(float(y[i]), float(want_y[i]));
  std::vector<float> w(37), want_w(37), b(37), want_b(37);
  std::vector<BFloat16> rounded(size);
  float* const d_bias = centred ? b.data() : nullptr;
  NormBackward(p.shape, p.weights(), sum.data(), stats.data(), dy.data(), nullptr,
               {want_dx.data(), nullptr, want_w.data(), centred ? want_b.data() : nullptr});
  NormBackward(p.shape, p.weights(), sum.data(), stats.data(), dy.data(), d_sum.data(),
               {dx.data(), rounded.data(), w.data(), d_bias});
  EXPECT_EQ(w, want_w);
  EXPECT_EQ(b, want_b);
  for (size_t i = 0; i < size; ++i) {
    // Both roundings may be one.
    EXPECT_NEAR(dx[i], want_dx[i] + d_sum[i], 2e-7f * (std::abs(want_dx[i]) + std::abs(d_sum[i])));
    EXPECT_EQ(rounded[i].bits, BFloat16(dx[i]).bits);
  }
}

TEST(Norm, SumsFirst) {
  ForEachIsa([] {
    for (const bool centred : {true, false}) {
      SumsFirst<float, float>(centred);
      SumsFirst<float, BFloat16>(centred);
      SumsFirst<BFloat16, float>(centred);
      SumsFirst<BFloat16, BFloat16>(centred);
    }
  });
}

// A row that is not finite spoils itself alone.
TEST(Norm, RowsAreApart) {
  ForEachIsa([] {
    NormProblem p = MakeNorm(3, 5, 20, true);
    const NormOutputs whole = Computed(p);
    p.x[2 * 20 + 19] = NAN;
    const NormOutputs broken = Computed(p);
    for (size_t i = 0; i < p.x.size(); ++i) {
      if (i / 20 == 2) {
        EXPECT_TRUE(std::isnan(float(broken.y[i])) && std::isnan(broken.dx[i])) << ActiveIsa();
      } else {
        EXPECT_EQ(broken.y[i].bits, whole.y[i].bits);
        EXPECT_EQ(broken.dx[i], whole.dx[i]);
      }
    }
  });
}

TEST(AddBFloat16, SumsAndRounding) {
  ForEachIsa([] {
    for (const int64_t n : {0, 1, 15, 16, 50}) {
      Random random(uint64_t(n) + 1);
      std::vector<float> x, want;
      std::vector<BFloat16> y;
      for (int64_t i = 0; i < n; ++i) {
        x.push_back(float(random.Normal()));
        y.emplace_back(float(random.Normal()));
        want.push_back(x.back() + float(y.back()));
      }
      std::vector<float> sum(x.size());
      AddBFloat16(n, x.data(), y.data(), sum.data());
      EXPECT_EQ(sum, want);
      AddBFloat16(n, x.data(), y.data(), x.data());
      EXPECT_EQ(x, want);
    }
  });
}

// To nearest, ties to even, in the scalar form and in the vectors' alike.
TEST(BFloat16, Rounding) {
  const auto bits = [](float x) { return BFloat16(x).bits; };
  EXPECT_EQ(bits(1.0f), 0x3f80);
  EXPECT_EQ(bits(1.0f + 0x1p-8f), 0x3f80);             // a tie, down to even
  EXPECT_EQ(bits(1.0f + 3 * 0x1p-8f), 0x3f82);         // a tie, up to even
  EXPECT_EQ(bits(1.0f + 0x1p-8f + 0x1p-20f), 0x3f81);  // above a tie
  EXPECT_EQ(bits(-0.0f), 0x8000);
  EXPECT_EQ(bits(INFINITY), 0x7f80);
  EXPECT_EQ(bits(3.4e38f), 0x7f80);  // rounds to infinity
  uint32_t all_ones = 0x7fffffff;    // whose rounding would leave NaN
  float nan;
  std::memcpy(&nan, &all_ones, sizeof nan);
  EXPECT_TRUE(std::isnan(float(BFloat16(nan))));
  ForEachIsa([&] {
    std::vector<float> x = {1.0f + 0x1p-8f, 1.0f + 3 * 0x1p-8f, 3.4e38f, nan, -nan, 1e-40f};
    Random random(4);
    while (x.size() < 64) x.push_back(float(std::exp(20 * random.Normal())));
    // RMSNorm of a row of one value x, with the weight w: w times the sign of x.
    for (const float v : x) {
      float one = 1, stats[2];
      BFloat16 y;
      Norm<float>({1, 1, 0}, {&v, nullptr}, &one, nullptr, nullptr, &y, stats);
      if (std::isnan(v)) {
        EXPECT_TRUE(std::isnan(float(y)));
      } else {
        EXPECT_EQ(y.bits, BFloat16(v).bits) << v << ActiveIsa();
      }
    }
  });
}

}  // namespace
}  // namespace cistern::slot_test
