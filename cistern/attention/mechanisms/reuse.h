#pragma once
// Reuse attention (P001; spec 2.16): exact softmax attention whose last K heads take over the
// scores of the first K heads of the layer before, so that they need no queries and no keys of
// their own: A_l = [new_1 .. new_{H-K}; A_{l-1} of its heads 1 .. K]. Values are made for all heads
// in every layer. Gradients flow through the copies. Which layers copy is the placement (below).
//
// A copied head either calls exact softmax on the older queries and keys with its own values (keep
// = handles: linear memory) or multiplies the probabilities that the older layer formed, before
// their dropout (keep = scores: saves time, T S numbers a head). In a decoding state every layer
// holds its values, and keys only of the heads that it computes.
//
// Outside of a model (AttentionDims::kAlone) the core is given the copied heads' queries and keys
// as projections copied_q and copied_k.
#include "cistern/attention/mechanisms/softmax.h"

namespace cistern {

class ReuseMechanism : public SoftmaxMechanism {
 public:
  enum class Placement { kPartial, kFull, kAlternate, kAllEnd, kSkip };  // ReusePlan
  enum class Keep { kHandles, kScores };
  struct Options {
    int64_t heads = -1;  // K; -1: all
    int64_t layers = 0;  // P; 0: as many as the placement has room for
    Placement placement = Placement::kAlternate;
    Keep keep = Keep::kHandles;
    int64_t memory_mib = 1024;
    Scale scale = Scale::kSqrt;
    bool clamp_heads = false;
  };
  static Fields Describe(Options& options);
  ReuseMechanism(const MechanismInfo& info, const Options& options,
                 const AttentionDims& dims);  // UsageError: K > H

  at::Tensor DoExtend(const std::vector<at::Tensor>& x, State& state,
                      const ops::Mask& mask) override;
  void DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  at::Tensor Read(const std::vector<at::Tensor>& x, const State& state) override;
  // Takes the scores of the copied heads from `handles`, and leaves there those that the next layer
  // copies.
  bool TakesBFloat16(Form form) const override;  // not of scores that are kept
  at::Tensor DoAttend(Form form, const std::vector<at::Tensor>& x, State* state,
                      const ops::Mask& mask, Handles& handles) override;
  // Of the core alone.
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override;

 private:
  ReuseMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims,
                 int64_t copied);
  bool alone() const { return dims().copied == AttentionDims::kAlone; }
  // q, k, v as softmax has them, from x in declared order. In a layer of a model q and k are of the
  // new heads, which may be none.
  Own Joined(const std::vector<at::Tensor>& x) const;
  Compute Sharing(Handles& handles) const;
  void CheckMemory(int64_t heads, const at::Tensor& q, const at::Tensor& k) const;

  Options options_;
  int64_t copied_;
  ProjectionId copied_q_, copied_k_;
};

// AttentionDims::copied of each of `layers` layers: heads that it copies, 0, or kSkipped. Layers
// below are counted from 1.
//   partial    layers 2 to P+1, P <= L-2: the last layer is exact
//   full       the same with all heads, P <= L-1
//   alternate  every second layer: 2, 4, ..., the first P of them
//   all_end    layers L-P to L-1: the last is exact
//   skip       layers 2 to P+1 have no attention at all, only the feed-forward, P <= L-1
// UsageError where the options do not fit the model, L = 1 among them: there is nothing to reuse.
std::vector<int64_t> ReusePlan(const Json& options, int64_t heads, int64_t layers);

}  // namespace cistern
