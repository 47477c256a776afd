// Buckets and biases of relative positions, against the definition of T5 in plain loops.
#include "cistern/attention/relative_positions.h"

#include <ATen/ATen.h>

#include <cmath>

#include "cistern/ops/testing.h"

namespace cistern {
namespace {

using namespace cistern::testing;

// T5 (Raffel et al. 2020, mesh_tensorflow's transformer_layers): n = query - key. The logarithm is
// rounded up by 1e-9, because 8 log(n/8) / log(16) is an integer at n = 16, 32, 64.
int64_t Bucket(int64_t distance, bool causal) {
  int64_t buckets = 32, offset = 0, n = -distance;
  if (!causal) {
    buckets = 16;
    if (n < 0) offset = 16;
    n = n < 0 ? -n : n;
  } else if (n < 0) {
    n = 0;
  }
  const int64_t exact = buckets / 2;
  if (n < exact) return offset + n;
  const double large =
      double(exact) + std::floor(std::log(double(n) / double(exact)) /
                                     std::log(128.0 / double(exact)) * double(buckets - exact) +
                                 1e-9);
  return offset + int64_t(std::min(large, double(buckets - 1)));
}

TEST(RelativePositions, BucketsByTheirDefinition) {
  const at::Tensor distance = at::arange(-400, 401, at::kLong);
  for (const bool causal : {false, true}) {
    const at::Tensor got = RelativeBuckets(distance.view({9, 89}), causal).flatten();
    for (int64_t i = 0; i < distance.size(0); ++i)
      EXPECT_EQ(got[i].item<int64_t>(), Bucket(i - 400, causal)) << causal << " " << i - 400;
  }
  // By hand: 8 exact ones, then each bound is the last one times 2^(1/2).
  const std::vector<std::pair<int64_t, int64_t>> known = {
      {0, 0},    {-7, 7},   {-8, 8},   {-11, 8},    {-12, 9}, {-16, 10},
      {-32, 12}, {-64, 14}, {-91, 15}, {-9999, 15}, {1, 17},  {16, 26}};
  for (const auto& [from, bucket] : known)
    EXPECT_EQ(RelativeBuckets(at::tensor({from}, at::kLong), false).item<int64_t>(), bucket)
        << from;
}

TEST(RelativePositions, BiasesAreThoseOfTheBuckets) {
  const at::Tensor table = Normal({32, 3}),
                   queries = at::tensor({5, 200, 7, 0}, at::kLong).view({2, 2}),
                   keys = at::randint(0, 300, {2, 9}, at::kLong);
  for (const bool causal : {false, true}) {
    const at::Tensor leaf = Leaf(table), got = RelativeBias(leaf, queries, keys, causal);
    ASSERT_EQ(got.sizes(), at::IntArrayRef({2, 3, 2, 9}));
    const at::Tensor want = at::zeros_like(got), count = at::zeros_like(table);
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t t = 0; t < 2; ++t) {
        for (int64_t s = 0; s < 9; ++s) {
          const int64_t bucket = Bucket((keys[b][s] - queries[b][t]).item<int64_t>(), causal);
          count[bucket].add_(1);
          for (int64_t h = 0; h < 3; ++h) want[b][h][t][s] = table[bucket][h];
        }
      }
    }
    EXPECT_TRUE(at::equal(got, want));
    EXPECT_TRUE(at::equal(Gradients(got.sum(), {leaf})[0], count));
  }
}

}  // namespace
}  // namespace cistern
