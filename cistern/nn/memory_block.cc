#include "cistern/nn/memory_block.h"

namespace cistern {

MemoryBlock::MemoryBlock(const BlockOptions& options)
    : Block(options), replaced_(attention_->mechanism().info().memory == MemoryUse::kReplaced) {
  if (!replaced_ && (options.memory_out || pre())) norm_ = AddNorm("memory_norm");
}

Stream MemoryBlock::Bidirectional(Stream stream) {
  const ops::SumAndNorm in = BeforeAttention(stream.x);
  const at::Tensor memory =
      stream.memory.defined() ? stream.memory : attention_->InitialMemory(stream.x.size(0));
  stream.x = in.norm;
  stream.memory = replaced_ ? memory : Before({memory, {}}, norm_.get()).norm;
  const AttentionLayer::Attended attended = attention_->Bidirectional(stream, &stream.handles);
  stream.memory = replaced_             ? attended.packed
                  : options_.memory_out ? Add(memory, attended.packed, norm_.get())
                                        : memory;
  if (!ffn_) {
    stream.x = at::Tensor();
    return stream;
  }
  stream.x = in.sum;
  return Rest(std::move(stream), attended.tokens, nullptr);
}

}  // namespace cistern
