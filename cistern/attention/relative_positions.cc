#include "cistern/attention/relative_positions.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace cistern {
namespace {

// The bucket of 0 .. kRelativeDistance tokens among `buckets` of one direction: half of them are of
// one distance each; of the others, number b begins where (n / half)^half reaches ratio^b, which is
// exact in double at both ends and wherever a distance is a power of two.
std::vector<int64_t> BucketsOfOneDirection(int64_t buckets) {
  const int64_t half = buckets / 2;
  const double ratio = double(kRelativeDistance) / double(half);
  std::vector<int64_t> bucket;
  for (int64_t n = 0; n <= kRelativeDistance; ++n) {
    int64_t found = std::min(n, half);
    while (found >= half && found < buckets - 1 &&
           std::pow(double(n) / double(half), double(half)) >=
               std::pow(ratio, double(found + 1 - half)))
      ++found;
    bucket.push_back(found);
  }
  return bucket;
}

}  // namespace

at::Tensor RelativeBuckets(const at::Tensor& distance, bool causal) {
  const int64_t buckets = causal ? kRelativeBuckets : kRelativeBuckets / 2;
  static const std::vector<int64_t> causal_buckets = BucketsOfOneDirection(kRelativeBuckets),
                                    half_buckets = BucketsOfOneDirection(kRelativeBuckets / 2);
  const at::Tensor known =
      at::tensor(causal ? causal_buckets : half_buckets, at::kLong).to(distance.device());
  const at::Tensor before = causal ? (-distance).clamp_min(0) : distance.abs();
  const at::Tensor bucket =
      known.index_select(0, before.clamp_max(kRelativeDistance).flatten()).view(distance.sizes());
  return causal ? bucket : bucket + (distance > 0) * buckets;
}

at::Tensor RelativeBias(const at::Tensor& table, const at::Tensor& queries, const at::Tensor& keys,
                        bool causal) {
  const at::Tensor distance = keys.unsqueeze(1) - queries.unsqueeze(2);  // [1 or B,T,S]
  return at::embedding(table, RelativeBuckets(distance, causal)).permute({0, 3, 1, 2});
}

}  // namespace cistern
