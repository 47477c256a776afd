#pragma once
// Exact softmax attention by tiles (online softmax: Milakov and Gimelshein 2018; tiles and the
// gradients from recomputed weights: Dao et al. 2022):
//
//   out_t = sum_j f_tj p_tj v_j,   p_tj = softmax_j(scale q_t . k_j) over the keys j that t sees
//
// with the factors f of dropout, 0 or 1 / (1 - rate), or 1.
//
// Time O(pairs of blocks that see each other x (dk + dv)), no memory of the size of T S: tiles that
// no query of a block sees are not visited, so windows cost their width. What is not seen has no
// part in any bit of an output, be it NaN: so causality is bitwise. What is seen and NaN makes the
// output NaN, as the definition does. Results are the same bits for any number of threads.
//
// In float, weights below 2^-64 of a query's largest are 0: they change an output by at most 2^-64
// of its largest value each, and would be computed in subnormal numbers.
//
// S, the type of tokens: float, double, or BFloat16, which is computed in float (ComputeType) and
// gives what the same numbers in float would, rounded once; dq and dk take the output as it was
// rounded. exact_attention_bfloat16.h has products of bfloat16, where the processor multiplies it.
#include <cstdint>

#include "cistern/kernels/bfloat16.h"
#include "cistern/kernels/dropout.h"
#include "cistern/kernels/rows.h"

namespace cistern {

struct AttentionShape {
  int64_t batch = 0, heads = 0, queries = 0, keys = 0, key_width = 0, value_width = 0;
  // Query t sees keys j with j = t modulo this; other than 1 it has to divide keys - queries.
  int64_t dilation = 1;
};

// The keys that a query sees: begin <= j < end, within 0 .. keys. Beside them it sees `empty` keys
// of score 0 and value 0 (the empty slots of a queue).
struct KeyRange {
  int64_t begin = 0, end = 0, empty = 0;
};

// Which keys queries see, and what is dropped of their probabilities. Null pointers: every query
// sees every key.
struct AttentionMask {
  const KeyRange* ranges = nullptr;  // [B,T], or [T] for all rows where range_batch is 0
  int64_t range_batch = 0;           // T or 0
  const uint8_t* valid = nullptr;    // [B,S]: 0 where nothing sees a key
  DropoutDraw dropout = {};
};

// q [B,H,T,dk], k [B,H,S,dk], v [B,H,S,dv] -> out [B,H,T,dv]. A query that sees nothing gives 0.
//   stats [B,H,T,2] contiguous, wanted by the backward, or null: the largest score, 0 where
//   nothing is seen, and 1 / sum_j e^(score - largest)
template <class S>
void AttentionForward(const AttentionShape& shape, double scale, Rows<const S> q, Rows<const S> k,
                      Rows<const S> v, const AttentionMask& mask, Rows<S> out,
                      ComputeType<S>* stats);

// Up to so many queries, as decoding has them, go against their keys one by one, where neither
// stats nor dropout are wanted: at the speed of memory.
constexpr int64_t kFewQueries = 4;

// Its gradients, which are sums: of BFloat16 in float, not rounded. out, stats: as the forward gave
// them.
template <class S>
void AttentionBackward(const AttentionShape& shape, double scale, Rows<const S> q, Rows<const S> k,
                       Rows<const S> v, Rows<const S> out, Rows<const S> d_out,
                       const AttentionMask& mask, const ComputeType<S>* stats,
                       Rows<ComputeType<S>> dq, Rows<ComputeType<S>> dk, Rows<ComputeType<S>> dv);

}  // namespace cistern
