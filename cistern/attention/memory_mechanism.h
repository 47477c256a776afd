#pragma once
// A mechanism with a memory stream: M slots of the model's width D that gather from the tokens
// (packing) and are read by them (unpacking). Where MechanismInfo says kStream the memory is
// updated and handed from block to block, with a residual and a norm of its own (nn/block.h).
//
// Its initial value is a learned parameter, `memory` [1,M,D], owned by the first layer of a model
// that has the mechanism. With AttentionDims::memory_given there is none: the memory comes with
// each row, as that of Luna's decoder comes from its encoder (nn/block.h, Block::WriteSource).
// Packing is then given the memory's tensors; a causal layer keeps those of its rows in its state
// (GiveMemory).
//
// Projections() lists those of tokens first, then those of the memory, then those of what was
// packed. The attention layer appends the memory's tensors to x ([B or 1,H,M,w]; Extend, Write,
// Bidirectional, Pack) and gives the packed ones to Unpack. Where they are left away the parameter
// itself and the packed heads, split, take their places, as if all those maps were the identity: so
// the core alone is a function of the tokens' tensors like any other.
#include "cistern/attention/mechanism.h"

namespace cistern {

class MemoryMechanism : public Mechanism {
 public:
  at::Tensor InitialMemory() const override { return InitialMemoryOf(1); }
  // [1,M,D]; where it is dropped in training [rows,M,D], each row by draws of its own.
  at::Tensor InitialMemoryOf(int64_t rows) const;
  MemoryMechanism* memory_mechanism() override { return this; }
  double MemoryDropout() const { return dropout_; }  // of InitialMemory in training

  // Tokens into the memory: -> [B,H,M,d], H and d those of the packing projections, which may have
  // other heads than the layer. x: tensors of the tokens, then of the memory. Padding is left out;
  // packed rows and masked tokens (the layer has moved the real ones to the front) are an error.
  at::Tensor Pack(const std::vector<at::Tensor>& x, const ops::Mask& mask) {
    RequireNoneMasked(mask);
    CheckTokens(x, Side::kKey, mask, nullptr);
    return DoPack(WithoutPadding(x, mask, Form::kBidirectional, Side::kKey), mask);
  }
  // What the tokens read in place of `packed` [B,M,D], heads merged, after its linear map: with
  // MemoryUse::kReplaced the next memory. Padding may hold anything.
  virtual at::Tensor Update(const std::vector<at::Tensor>&, const at::Tensor& packed,
                            const ops::Mask&) const {
    return packed;
  }
  // Tokens read what was packed: -> [B,H,T,d]; padding reads anything. x: tensors of the tokens;
  // packed: tensors of the packed memory.
  at::Tensor Unpack(const std::vector<at::Tensor>& x, const std::vector<at::Tensor>& packed,
                    const ops::Mask& mask) {
    RequireNoneMasked(mask);
    CheckTokens(x, Side::kQuery, mask, nullptr);
    return DoUnpack(WithoutPadding(x, mask, Form::kBidirectional, Side::kQuery),
                    InTypeOfTokens(packed, x), mask);
  }
  // Packing and unpacking, by exact attention; their memory may be in float beside such tokens.
  bool TakesBFloat16(Form form) const override;

  // The linear map that what was packed goes through: none, a map of its own, or the tokens' output
  // projection.
  enum class PackedOutput { kNone, kOwn, kShared };
  virtual PackedOutput packed_output() const { return PackedOutput::kNone; }

  // Cross attention: the packed heads that a state holds, [B,H,M,d].
  virtual at::Tensor Packed(const State& state) const;
  // How many of the slots the queries of each row may read, [B] int64; undefined: all.
  virtual at::Tensor ReadableSlots(const State&) const { return {}; }
  // memory_given, causal: the memory's tensors for the rows of an empty state, each [1 or B,H,M,d],
  // and how many of the slots they may read, as ReadableSlots has it.
  virtual void GiveMemory(const std::vector<at::Tensor>& memory, const at::Tensor& readable,
                          State& state) const;
  int64_t Slots() const { return slots_; }

  // For those without a state: an empty one, and an Error that says what works instead.
  State EmptyState(int64_t, const at::TensorOptions&) const override { return {}; }
  at::Tensor DoExtend(const std::vector<at::Tensor>& x, State& state,
                      const ops::Mask& mask) override;
  void DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  at::Tensor Read(const std::vector<at::Tensor>& x, const State& state) override;

  enum class MemoryInit {
    kNormal,     // N(0,1): P000's code
    kEmbedding,  // N(0, 1/D): Luna's
    kScaled,     // the same, times sqrt(D) where it is used: Luna's without learned positions
    kXavier,     // U(+-sqrt(6/((M+1)D))): the Set-Transformer-like model of P000's code
    kIdentity,   // rows of the identity: shared workspace's
  };
  // The options of the parameter.
  struct MemoryOptions {
    int64_t slots = 16;
    MemoryInit init = MemoryInit::kNormal;
    // What is added to it, and then done to it, before the first layer; both as in Luna's encoders.
    bool sinusoid = false;  // sinusoids of the slot's number m: sin(m w_i) beside cos(m w_i), w_i =
                            // 10000^(-i/(D/2 - 1))
    bool norm = false;      // a layer norm: memory_norm.weight and .bias
    double dropout = 0;     // in training, after both
  };

 protected:
  MemoryMechanism(const MechanismInfo& info, const MemoryOptions& options,
                  const AttentionDims& dims);
  static void Describe(MemoryOptions& options, Fields& fields);

  // The tensor of a projection of the memory: that of x, or the initial memory split into as many
  // heads; for each of `batch` rows. In float where tokens are in bfloat16.
  at::Tensor OfMemory(const std::vector<at::Tensor>& x, ProjectionId projection,
                      int64_t batch) const;
  // The tensors of what was packed: those of x after the tokens' (Read), or `heads` for each.
  std::vector<at::Tensor> PackedOf(const std::vector<at::Tensor>& x, const at::Tensor& heads) const;
  // The initial memory split into heads, [1,H,M,d]; heads 0: as many as the layer has.
  at::Tensor MemoryHeads(int64_t heads = 0) const;
  // The same for definitions, in double and by plain loops over the parameters.
  at::Tensor DefinedMemory(int64_t heads = 0) const;
  // Pack and Unpack; padding holds zeros.
  virtual at::Tensor DoPack(const std::vector<at::Tensor>& x, const ops::Mask& mask) = 0;
  virtual at::Tensor DoUnpack(const std::vector<at::Tensor>& x,
                              const std::vector<at::Tensor>& packed, const ops::Mask& mask) = 0;
  at::Tensor BidirectionalRows(const std::vector<at::Tensor>& x, const ops::Mask& mask) override;
  int64_t Width() const { return dims().dim / dims().heads; }
  double Dropout() const { return is_training() ? dims().dropout : 0.0; }

 private:
  void RequireNoneMasked(const ops::Mask& mask) const;
  static std::vector<at::Tensor> InTypeOfTokens(std::vector<at::Tensor> packed,
                                                const std::vector<at::Tensor>& x);
  size_t Count(const std::function<bool(const Projection&)>& of) const;

  int64_t slots_;
  bool scaled_, sinusoid_;
  double dropout_;
  at::Tensor memory_;                   // undefined with memory_given
  at::Tensor norm_weight_, norm_bias_;  // undefined without
};

}  // namespace cistern
