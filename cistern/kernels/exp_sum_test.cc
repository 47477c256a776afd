#include "cistern/kernels/exp_sum.h"

#include "cistern/kernels/slot_test.h"

namespace cistern::slot_test {
namespace {

TEST(ExpSum, Definition) {
  ForEachIsa([] {
    Random random(5);
    for (const int64_t n : {0, 1, 2, 3, 7, 8, 9, 31, 32, 33, 65, 1000}) {
      for (const double divisor : {1.0, 0.3, 7.0}) {
        std::vector<double> x = Normals(random, n, 5);
        if (n > 2) x[1] = -kInf, x[2] = -1e6;
        const double largest = Largest(n, x.data());
        EXPECT_EQ(largest, n == 0 ? -kInf : *std::max_element(x.begin(), x.end())) << ActiveIsa();
        std::vector<double> e(size_t(n) + 1, 9);
        const double sum = ExpSum(n, x.data(), largest, divisor, e.data());
        double want = 0;
        for (int64_t i = 0; i < n; ++i) {
          const double exact = std::exp((x[size_t(i)] - largest) / divisor);
          EXPECT_NEAR(e[size_t(i)], exact, 1e-15 * exact) << x[size_t(i)] << " " << ActiveIsa();
          want += exact;
        }
        EXPECT_EQ(e.back(), 9) << "behind the end";
        EXPECT_NEAR(sum, want, 4e-15 * want) << n << " " << ActiveIsa();
        EXPECT_EQ(ExpSum(n, x.data(), largest, divisor, nullptr), sum);
        EXPECT_EQ(ExpSum(n, x.data(), largest, divisor, x.data()), sum);  // in place
        e.pop_back();
        EXPECT_EQ(x, e);
      }
    }
  });
}

// Wherever it stands, among whole vectors and in the rest.
TEST(ExpSum, LargestSeesEveryPlace) {
  ForEachIsa([] {
    for (const int64_t n : {1, 5, 37, 70}) {
      for (size_t at = 0; at < size_t(n); ++at) {
        std::vector<double> x(size_t(n), -3.0);
        x[at] = 2;
        EXPECT_EQ(Largest(n, x.data()), 2) << at << " of " << n << ActiveIsa();
        x[at] = kInf;
        EXPECT_EQ(Largest(n, x.data()), kInf) << at << " of " << n << ActiveIsa();
        x[at] = NAN;
        EXPECT_TRUE(std::isnan(Largest(n, x.data()))) << at << " of " << n << ActiveIsa();
      }
    }
  });
}

}  // namespace
}  // namespace cistern::slot_test
