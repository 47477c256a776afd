#include "cistern/kernels/weight_sums.h"

#include "cistern/kernels/slot_test.h"

namespace cistern::slot_test {
namespace {

template <class T>
void ExpectDefinition(int64_t sources, int64_t first_query, int64_t first_source) {
  const int64_t heads = 2, queries = 3, all = first_query + queries + 1, stride = sources + 5;
  Random random(static_cast<uint64_t>(sources));
  std::vector<T> w(size_t(heads * queries * stride), T(1e9));  // behind the columns: never read
  std::vector<WeightSums> sums(size_t(heads * all), WeightSums{1, 2, 3, 4}), want = sums;
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t i = 0; i < queries; ++i) {
      for (int64_t j = 0; j < sources; ++j) {
        const bool zero = random.Below(4) == 0;
        const T x = zero ? T(0) : static_cast<T>(0.3 * random.Normal());
        w[size_t((h * queries + i) * stride + j)] = x;
        WeightSums& to = want[size_t(h * all + first_query + i)];
        const double a = std::abs(double(x));
        to.absolute += a, to.signed_sum += double(x), to.logs += a > 0 ? a * std::log(a) : 0;
        to.distance += a * std::abs(double(first_query + i - first_source - j));
      }
    }
  }
  AddWeightSums<T>(
      {w.data(), heads, queries, sources, queries * stride, stride, first_query, first_source}, all,
      sums.data());
  const double eps = std::is_same_v<T, float> ? 1e-6 : 1e-14;
  for (size_t i = 0; i < sums.size(); ++i) {
    const double size = 1 + want[i].absolute;
    EXPECT_NEAR(sums[i].absolute, want[i].absolute, eps * size) << ActiveIsa();
    EXPECT_NEAR(sums[i].logs, want[i].logs, eps * size) << ActiveIsa();
    EXPECT_NEAR(sums[i].signed_sum, want[i].signed_sum, eps * size) << ActiveIsa();
    EXPECT_NEAR(sums[i].distance, want[i].distance, eps * (1 + want[i].distance)) << ActiveIsa();
  }
}

TEST(WeightSums, Definition) {
  ForEachIsa([] {
    for (const int64_t sources : {0, 1, 7, 16, 37, 130}) {
      ExpectDefinition<float>(sources, 0, 0);
      ExpectDefinition<float>(sources, 40, 10);
      ExpectDefinition<double>(sources, 2, 64);
    }
  });
}

TEST(WeightSums, ValuesThatAreNotFinite) {
  ForEachIsa([] {
    const std::vector<float> w = {0.5f, NAN, 0.5f};
    WeightSums sums;
    AddWeightSums<float>({w.data(), 1, 1, 3, 3, 3}, 1, &sums);
    EXPECT_TRUE(std::isnan(sums.absolute) && std::isnan(sums.logs) && std::isnan(sums.signed_sum) &&
                std::isnan(sums.distance));
  });
}

}  // namespace
}  // namespace cistern::slot_test
