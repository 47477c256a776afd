#pragma once
// Sums over attention weights, for what is said of a whole map (analyses/maps.h): one pass over
// memory for all of them.
#include <cstdint>

namespace cistern {

// Weights [heads, queries, sources] of queries first_query .. and sources first_source .. of a row;
// strides count elements, that of sources is 1.
template <class T>
struct WeightBlock {
  const T* data;
  int64_t heads, queries, sources;
  int64_t head_stride, query_stride;
  int64_t first_query = 0, first_source = 0;
};

// For each head and query, w being one of its weights:
struct WeightSums {
  double absolute = 0;    // sum |w|
  double logs = 0;        // sum |w| log |w|, where 0 log 0 = 0
  double signed_sum = 0;  // sum w
  double distance = 0;    // sum |w| |query - source|
};

static_assert(sizeof(WeightSums) == 4 * sizeof(double));  // an array of them is a table

// Adds those of a block to sums [heads, all queries]: query i of head h is
// sums[h * all_queries + first_query + i]. Within a block they are formed in T. One thread.
template <class T>
void AddWeightSums(const WeightBlock<T>& block, int64_t all_queries, WeightSums* sums);

}  // namespace cistern
