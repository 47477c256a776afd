#include "cistern/kernels/sin_cos.h"

#include "cistern/kernels/slot_test.h"

namespace cistern::slot_test {
namespace {

TEST(SinCos, Definition) {
  ForEachIsa([] {
    Random random(3);
    for (const int64_t width : {1, 3, 16, 37}) {
      const int64_t rows = 50;
      std::vector<float> x(size_t(rows * width)), y(2 * x.size()), dy(y.size()), dx(x.size());
      for (size_t i = 0; i < x.size(); ++i) {
        const double scale = i % 11 == 0 ? 1e5 : i % 7 == 0 ? 1e3 : 3;
        x[i] = float(scale * random.Normal());
      }
      for (float& g : dy) g = float(random.Normal());
      SinCos(rows, width, 0.25f, x.data(), y.data());
      SinCosBackward(rows, width, dy.data(), y.data(), dx.data());
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < width; ++j) {
          const double v = x[size_t(i * width + j)];
          const size_t at = size_t(2 * i * width + j), other = at + size_t(width);
          EXPECT_NEAR(y[at], 0.25 * std::sin(v), 0.25 * 5e-7) << v << ActiveIsa();
          EXPECT_NEAR(y[other], 0.25 * std::cos(v), 0.25 * 5e-7) << v << ActiveIsa();
          EXPECT_NEAR(dx[size_t(i * width + j)],
                      0.25 * (double(dy[at]) * std::cos(v) - double(dy[other]) * std::sin(v)), 2e-6)
              << v << ActiveIsa();
        }
      }
    }
  });
}

TEST(SinCos, NotFinite) {
  ForEachIsa([] {
    for (const float bad : {std::nanf(""), float(kInf), float(-kInf)}) {
      std::vector<float> x(20, 0.5f), y(40);
      x[7] = bad;
      SinCos(1, 20, 1, x.data(), y.data());
      for (size_t i = 0; i < 40; ++i) EXPECT_EQ(std::isnan(y[i]), i % 20 == 7) << i << ActiveIsa();
    }
  });
}

}  // namespace
}  // namespace cistern::slot_test
