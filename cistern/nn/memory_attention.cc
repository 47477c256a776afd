#include "cistern/nn/memory_attention.h"

#include "cistern/base/error.h"
#include "cistern/nn/attention_observer.h"
#include "cistern/nn/full_precision.h"
#include "cistern/nn/padding_reads.h"

namespace cistern {

MemoryAttention::MemoryAttention(const AttentionLayerOptions& options,
                                 std::shared_ptr<Mechanism> mechanism)
    : AttentionLayer(options, mechanism), memory_mechanism_(*mechanism->memory_mechanism()) {
  const auto map = [&](const std::string& name) {
    return register_module(name, std::make_shared<Linear>(options.dims.dim, options.dims.dim,
                                                          options.bias, options.out_std));
  };
  switch (memory_mechanism_.packed_output()) {
    case MemoryMechanism::PackedOutput::kNone:
      break;
    case MemoryMechanism::PackedOutput::kOwn:
      packed_out_ = map("packed_o_proj");
      break;
    case MemoryMechanism::PackedOutput::kShared:
      if (!out_) out_ = map("o_proj");
      packed_out_ = out_;
  }
}

at::Tensor MemoryAttention::Read(const Stream& target, State& state, Handles* handles) {
  std::vector<at::Tensor> x = Project(target, nullptr, Side::kQuery);
  Project(packed_, Packed(state), &x);
  return Attend(Form::kCross, x, &state, target.mask, handles);
}

at::Tensor MemoryAttention::Packed(const State& state) const {
  const auto type = out_->weight.scalar_type();  // a state holds doubles
  const at::Tensor heads = Merge(memory_mechanism_.Packed(state)).to(type);
  return packed_out_ ? packed_out_->Forward(heads).to(type) : heads;
}

at::Tensor MemoryAttention::ReadableSlots(const State& state) const {
  return memory_mechanism_.ReadableSlots(state);
}

AttentionLayer::Attended MemoryAttention::Bidirectional(const Stream& stream, Handles* handles) {
  if (stream.mask.valid) return MovedToFront(stream, handles);
  if (stream.padding_reads && stream.mask.lengths) RequirePaddingReads(mechanism());
  std::vector<at::Tensor> x = Project(stream, nullptr);
  if (handles) handles->clear();
  if (stream.mask.starts) {
    FailUsage("[", mechanism().info().name,
              "] has one memory for each row, and a row of several documents would need one for "
              "each: give each document a row of its own, "
              "with lengths, or use a mechanism without a memory, such as latte");
  }
  const bool handed_on = mechanism().info().HandsOnMemory() && stream.memory.defined();
  Project(memory_, handed_on ? stream.memory : InitialMemory(stream.x.size(0)), &x);
  at::Tensor heads = Merge(InFullPrecision([&] { return memory_mechanism_.Pack(x, stream.mask); }));
  // The memory goes on in the type of the weights: in float beside tokens in bfloat16.
  const auto type = memory_.front().map->weight.scalar_type();
  heads = heads.to(type);
  const at::Tensor mapped = packed_out_ ? packed_out_->Forward(heads).to(type) : heads;
  const at::Tensor packed =
      InFullPrecision([&] { return memory_mechanism_.Update(x, mapped, stream.mask); }).to(type);
  std::vector<at::Tensor> read;
  at::Tensor y;
  if (options_.tokens_out) {
    Project(packed_, packed, &read);
    y = InFullPrecision([&] { return memory_mechanism_.Unpack(x, read, stream.mask); });
  }
  if (AttentionObserver* observer = AttentionObserver::Active()) {
    observer->Attended({this, options_, memory_mechanism_, Form::kBidirectional, x, stream.mask,
                        Handles(), y, &read, heads, handed_on ? stream.memory : at::Tensor()});
  }
  if (!y.defined()) return {{}, packed};
  const bool seen = mechanism().SeesPadding();
  return {out_->Forward(Merge(seen ? y : ZeroPadding(y, stream.mask))), packed};
}

}  // namespace cistern
