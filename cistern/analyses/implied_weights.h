#pragma once
// The weights with which each query of a layer's heads attends to each token, of any mechanism:
// W [H,T,S] with y[h,t] = sum_s W[h,t,s] v[h,s] for what the head gives, exact up to rounding.
//
// A core that is linear in its values, given everything else, is run again with slices of the
// identity in place of the values: channel c of copy i of a row holds 1 at source i d + c and 0
// elsewhere, so that what the core gives are columns of W. That is the production code with all its
// details (masks, padding, chunks, features, caches) and needs nothing that a mechanism would have
// to offer. Cost of S columns: S/d runs of the row. Exact softmax is formed explicitly instead,
// from its queries and keys: one run.
//
// Mechanisms whose keys are also their values (tie_kv) are run untied, with the same tensor in both
// places, so that the weights are those of the attention alone.
//
// With a memory stream two attentions follow each other: slots pack the tokens, tokens read the
// slots. W[h] = U[h] mean_g P[g]: the weights U of reading times the weights P of packing, the mean
// over packing's heads, which the maps in between mix. What lies between the two besides (the maps,
// and the shared workspace's feed-forward and gates) is not part of it: so W says how far attention
// carries a token, not what y is.
//
// Not linear, so refused with an Error that says by how much W v misses y: a maximum over values
// (conv_luna's filter=maxpool), mechanisms whose rows depend on the batch (nystrom's start=batch).
#include <memory>

#include "cistern/analyses/captured_layers.h"

namespace cistern {

// W v may differ from y by this much, relative RMS over a row: float's rounding of long sums, and
// what approximations of inverses amplify. What is not linear misses by far more.
inline constexpr double kImpliedTolerance = 2e-3;

class ImpliedWeights {
 public:
  // One row of a captured layer, which must outlive it. UsageError where the layer has no such
  // weights. packing: false leaves out, with a memory stream, what the slots attend to, and with it
  // the weights of the tokens.
  ImpliedWeights(const CapturedLayer& layer, int64_t row, bool packing = true);

  int64_t heads() const { return heads_; }
  int64_t queries() const { return queries_; }
  int64_t sources() const { return sources_; }
  // [H,T,count]: weights of sources begin .. begin+count-1. Memory O(H T count) for the result and
  // count/d copies of the row's projections while it is made. A causal core begins at `begin`, from
  // the state that it has there, so blocks are best asked for in ascending order.
  at::Tensor Columns(int64_t begin, int64_t count) const;
  // All of them, [H,T,S], checked: Error where they do not give the layer's output.
  at::Tensor All() const;
  // |W v - y| / |y| over the row, along one fixed direction of the channels; `probe` is sum over
  // column blocks of Probe(begin, columns). NaN: no such output (a memory stream, whose check is
  // that of its two attentions).
  at::Tensor Probe(int64_t begin, const at::Tensor& columns) const;  // [H,T]
  void Check(const at::Tensor& probe) const;                         // Error

  // With a memory stream: the two attentions, [H,T,M] and [G,M,S]; undefined elsewhere.
  const at::Tensor& Unpacking() const { return unpacking_; }
  const at::Tensor& Packing() const { return packing_; }

 private:
  void PrepareMemory(bool packing);
  at::Tensor CausalColumns(int64_t begin, int64_t count) const;

  const CapturedLayer& layer_;
  int64_t row_, heads_, queries_, sources_;
  std::shared_ptr<Mechanism> untied_;  // null: the core itself
  Mechanism* core_;
  std::vector<at::Tensor> x_, written_;  // of the row alone
  ops::Mask mask_, written_mask_;
  Handles handles_;
  std::vector<size_t> values_;  // indices of the values' projections
  // Exact softmax: e^(scores - total), with total [H,T,1] the log of a query's sum; of short rows
  // all of them are made at once and kept.
  at::Tensor Scores(int64_t first, int64_t queries, int64_t begin, int64_t count) const;
  void PrepareWhole();
  // Of a causal core whose tokens are all there is: the state before token prefix_tokens_, with
  // values of zero.
  bool resumes_ = false;
  mutable State prefix_;
  mutable int64_t prefix_tokens_ = 0;
  bool softmax_ = false;
  double scale_ = 1;
  at::Tensor total_, whole_, unpacking_, packing_;
  at::Tensor probe_values_, probe_out_;  // [H,S], [H,T]
};

}  // namespace cistern
