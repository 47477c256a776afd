#pragma once
// Luna (Ma et al. 2021; P004 eq. 21-26; spec 2.10): a memory of M slots packs the tokens by softmax
// attention, and the tokens read what was packed by softmax attention: packed = softmax(P K^T /
// sqrt(d)) V over the tokens, y = softmax(Q Kp^T / sqrt(d)) Vp over the slots, with Kp and Vp made
// of `packed`. Linear in the length; the memory goes on to the next block. The causal form is
// luna_causal. Packing may have other heads than unpacking, with d the width of one of them;
// `packed` is merged from the ones and split into the others.
//
// Cross attention packs the source piece by piece: its state is the slot memory in exp mode with
// log-weights P k^T / sqrt(d).
#include "cistern/attention/memory_mechanism.h"

namespace cistern {

class LunaMechanism : public MemoryMechanism {
 public:
  // Maps that packing and unpacking have in common: none (Luna), those of queries and keys (the
  // Set-Transformer-like model of P000's code), all (P000's Luna).
  enum class Sharing { kNone, kQueryKey, kAll };
  struct Options : MemoryOptions {
    bool tie_kv = true;  // keys = values in packing and in unpacking: Luna's modules; its Long
                         // Range Arena models have it off
    Sharing sharing = Sharing::kNone;
    PackedOutput packed_output = PackedOutput::kNone;  // Luna's; P000's Luna: kShared
    bool dynamic_projection =
        false;  // tokens read no more slots than there are tokens, as Luna's option of that name
    int64_t packing_heads = 0;  // heads by which the memory attends to the tokens (Luna's projected
                                // heads); 0: the layer's
  };
  static Fields Describe(Options& options);
  LunaMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);

  PackedOutput packed_output() const override { return options_.packed_output; }
  at::Tensor Packed(const State& state) const override { return state[packed_]; }
  at::Tensor ReadableSlots(const State& state) const override;
  at::Tensor DoPack(const std::vector<at::Tensor>& x, const ops::Mask& mask) override;
  at::Tensor DoUnpack(const std::vector<at::Tensor>& x, const std::vector<at::Tensor>& packed,
                      const ops::Mask& mask) override;
  // memory [B,H,M,d] and z [B,H,M] as of ops::SlotState, by packing heads; count [B] int64: tokens
  // written, for dynamic_projection.
  State EmptyState(int64_t batch, const at::TensorOptions& options) const override;
  void DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  // x: tensors of the tokens, then of the packed memory, or its heads in their places.
  at::Tensor Read(const std::vector<at::Tensor>& x, const State& state) override;
  State Merge(const State& first, const State& second) const override;
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override;

 protected:
  bool LeavesPaddingOut(Form form) const override { return form == Form::kBidirectional; }

 private:
  int64_t PackingHeads() const {
    return options_.packing_heads > 0 ? options_.packing_heads : dims().heads;
  }
  // What was packed, [B,H,M,d] by packing heads, by the heads of the layer.
  at::Tensor LayerHeads(const at::Tensor& packed) const;
  // [B,M] bool: slots a row of `lengths` tokens may read; undefined where all.
  at::Tensor Readable(const at::Tensor& lengths) const;

  Options options_;
  ProjectionId q_, k_, v_, memory_q_, packed_k_, packed_v_;  // tie_kv: v_ is k_
  StateId packed_, z_, count_;
};

}  // namespace cistern
