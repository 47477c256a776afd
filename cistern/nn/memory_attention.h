#pragma once
// The attention layer of a mechanism with a memory stream (attention/memory_mechanism.h): it packs
// the tokens into the memory's slots, maps what was packed, and lets the tokens read it.
//
// Its rows hold one document each: packed rows are a UsageError, because the memory that goes from
// block to block is one for each row, and no source says how that of several documents in a row
// would be handed on.
#include "cistern/nn/attention_layer.h"

namespace cistern {

class MemoryAttention : public AttentionLayer {
 public:
  // `mechanism`: that of the options, with a memory stream.
  MemoryAttention(const AttentionLayerOptions& options, std::shared_ptr<Mechanism> mechanism);
  Attended Bidirectional(const Stream& stream, Handles* handles = nullptr) override;
  at::Tensor Read(const Stream& target, State& state, Handles* handles = nullptr) override;
  at::Tensor Packed(const State& state) const override;
  at::Tensor ReadableSlots(const State& state) const override;

 private:
  MemoryMechanism& memory_mechanism_;
  std::shared_ptr<Linear> packed_out_;  // null where what was packed goes through no map
};

}  // namespace cistern
