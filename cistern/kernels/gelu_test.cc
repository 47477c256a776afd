#include "cistern/kernels/gelu.h"

#include "cistern/kernels/slot_test.h"

namespace cistern::slot_test {
namespace {

// By the definition, in double: erfc has all its digits in both tails.
double Phi(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }
double Slope(double x) {
  return Phi(x) + x * std::exp(-x * x / 2) / std::sqrt(2 * std::acos(-1.0));
}

// Values from everywhere, and where the parts of the formula meet.
std::vector<float> Inputs() {
  std::vector<float> x = {0.0f,  -0.0f,  1e-30f, -1e-30f, 1e-4f, -1e-4f,
                          13.0f, -13.0f, 40,     -40,     1e30f};
  for (int i = -6000; i <= 6000; ++i) x.push_back(float(i) / 500);
  Random random(3);
  for (int i = 0; i < 4000; ++i) x.push_back(float(3 * random.Normal()));
  return x;
}

TEST(Gelu, Definition) {
  ForEachIsa([] {
    const std::vector<float> x = Inputs();
    std::vector<float> y(x.size()), dx(x.size()), dy(x.size());
    for (size_t i = 0; i < x.size(); ++i) dy[i] = 1 + float(i % 7);
    Gelu(int64_t(x.size()), x.data(), y.data());
    GeluBackward(int64_t(x.size()), dy.data(), x.data(), dx.data());
    for (size_t i = 0; i < x.size(); ++i) {
      const double want = double(x[i]) * Phi(x[i]);
      // Of the value in the left tail, where the rounding of x^2 / 2 weighs as much as its size.
      EXPECT_NEAR(y[i], want,
                  std::abs(want) * (5e-7 + 1e-7 * std::min(100.0, double(x[i]) * x[i])) + 1e-37)
          << x[i] << ActiveIsa();
      EXPECT_NEAR(dx[i], double(dy[i]) * Slope(x[i]), double(dy[i]) * 5e-7) << x[i];
    }
  });
}

// Every value there is: the definition, but for what rounding to eight bits takes.
TEST(Gelu, BFloat16) {
  ForEachIsa([] {
    std::vector<BFloat16> x;
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      x.emplace_back();
      x.back().bits = static_cast<uint16_t>(bits);
    }
    std::vector<BFloat16> y(x.size()), dx(x.size()), dy(x.size(), BFloat16(3));
    Gelu(int64_t(x.size()), x.data(), y.data());
    GeluBackward(int64_t(x.size()), dy.data(), x.data(), dx.data());
    for (size_t i = 0; i < x.size(); ++i) {
      const double v = double(float(x[i]));
      if (std::isnan(v) || std::isinf(v)) {
        EXPECT_TRUE(v > 0 ? float(y[i]) > 1e38f : std::isnan(float(y[i]))) << v << ActiveIsa();
        continue;
      }
      const double want = v * Phi(v), slope = 3 * Slope(v);
      const double tail = 1e-7 * std::min(100.0, v * v);
      EXPECT_NEAR(float(y[i]), want, std::abs(want) * (0.0041 + tail) + 1e-37) << v << ActiveIsa();
      EXPECT_NEAR(float(dx[i]), slope, std::abs(slope) * 0.0041 + 2e-4) << v << ActiveIsa();
    }
  });
}

TEST(Gelu, AnyLengthInPlace) {
  ForEachIsa([] {
    const std::vector<float> x = Inputs();
    std::vector<float> all(x.size());
    Gelu(int64_t(x.size()), x.data(), all.data());
    for (int64_t n = 0; n < 70; ++n) {
      std::vector<float> y(x.begin() + 11, x.begin() + 11 + n);
      y.push_back(5);  // behind the end
      Gelu(n, y.data(), y.data());
      EXPECT_EQ(y.back(), 5);
      for (int64_t i = 0; i < n; ++i) EXPECT_EQ(y[size_t(i)], all[size_t(11 + i)]) << n;
      std::vector<float> g(size_t(n), 2), apart(size_t(n), 0);
      GeluBackward(n, g.data(), x.data() + 11, apart.data());
      GeluBackward(n, g.data(), x.data() + 11, g.data());
      EXPECT_EQ(g, apart);
      std::vector<float> value(size_t(n), 0), both(size_t(n), 2);
      GeluWithBackward(n, both.data(), x.data() + 11, value.data(), both.data());
      y.pop_back();
      EXPECT_EQ(value, y);
      EXPECT_EQ(both, apart);
    }
  });
}

TEST(Gelu, ValuesThatAreNotFinite) {
  ForEachIsa([] {
    const float inf = std::numeric_limits<float>::infinity();
    const std::vector<float> x = {NAN, inf, -inf, 1};
    std::vector<float> y(4), dx(4);
    const std::vector<float> one(4, 1);
    Gelu(4, x.data(), y.data());
    EXPECT_TRUE(std::isnan(y[0]) && y[1] == inf && std::isnan(y[2]) && y[3] > 0.8f);
    GeluBackward(4, x.data(), one.data(), dx.data());
    EXPECT_TRUE(std::isnan(dx[0]) && dx[1] == inf && dx[2] == -inf && dx[3] > 1);
  });
}

}  // namespace
}  // namespace cistern::slot_test
