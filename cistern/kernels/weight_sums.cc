#include "cistern/kernels/weight_sums.h"

#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/weight_sums.cc"
#include "hwy/foreach_target.h"  // must come before highway.h

#include "cistern/kernels/linear_core-inl.h"  // LoadPart

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

template <class T>
HWY_INLINE WeightSums SumsOf(const T* w, size_t count, int64_t query, int64_t first_source) {
  const Tag<T> d;
  const Vec<T> least = hn::Set(d, static_cast<T>(1e-30));
  Vec<T> absolute = hn::Zero(d), logs = absolute, sum = absolute, distance = absolute;
  for (size_t j = 0; j < count; j += kLanes<T>) {
    const Vec<T> x = LoadPart(w, j, count), a = hn::Abs(x);
    const Vec<T> source =
        hn::Iota(d, static_cast<T>(first_source + static_cast<int64_t>(j) - query));
    absolute = hn::Add(absolute, a);
    logs = hn::MulAdd(a, LogOrNaN<T>(hn::Max(a, least)), logs);
    sum = hn::Add(sum, x);
    distance = hn::MulAdd(a, hn::Abs(source), distance);
  }
  const auto total = [&](Vec<T> v) HWY_ATTR { return double(hn::GetLane(hn::SumOfLanes(d, v))); };
  return {total(absolute), total(logs), total(sum), total(distance)};
}

template <class T>
HWY_INLINE void AddAll(const WeightBlock<T>& block, int64_t all_queries, WeightSums* sums) {
  for (int64_t h = 0; h < block.heads; ++h) {
    for (int64_t i = 0; i < block.queries; ++i) {
      const int64_t query = block.first_query + i;
      const WeightSums row = SumsOf(block.data + h * block.head_stride + i * block.query_stride,
                                    static_cast<size_t>(block.sources), query, block.first_source);
      WeightSums& to = sums[h * all_queries + query];
      to.absolute += row.absolute;
      to.logs += row.logs;
      to.signed_sum += row.signed_sum;
      to.distance += row.distance;
    }
  }
}

void AddFloat(const WeightBlock<float>& block, int64_t all_queries, WeightSums* sums) {
  AddAll(block, all_queries, sums);
}
void AddDouble(const WeightBlock<double>& block, int64_t all_queries, WeightSums* sums) {
  AddAll(block, all_queries, sums);
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(AddFloat);
HWY_EXPORT(AddDouble);

template <>
void AddWeightSums(const WeightBlock<float>& block, int64_t all_queries, WeightSums* sums) {
  CISTERN_DISPATCH(AddFloat)(block, all_queries, sums);
}
template <>
void AddWeightSums(const WeightBlock<double>& block, int64_t all_queries, WeightSums* sums) {
  CISTERN_DISPATCH(AddDouble)(block, all_queries, sums);
}

}  // namespace cistern
#endif  // HWY_ONCE
