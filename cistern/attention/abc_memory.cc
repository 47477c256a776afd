#include "cistern/attention/abc_memory.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "cistern/attention/definition.h"
#include "cistern/attention/token_positions.h"
#include "cistern/base/error.h"
#include "cistern/ops/dropout.h"
#include "cistern/ops/finite.h"
#include "cistern/ops/slot_attention.h"
#include "cistern/ops/tensor_rows.h"

namespace cistern {

// The score of a slot that holds nothing, where those are masked.
constexpr float kUnseen = std::numeric_limits<float>::lowest();

AbcMechanism::AbcMechanism(const MechanismInfo& info, const MemoryOptions& memory, Weights weights,
                           const AttentionDims& dims, const DecayOptions& decay)
    : Mechanism(info, dims),
      slots_(memory.slots),
      masked_(memory.empty_slots == EmptySlots::kMasked),
      weights_(weights),
      decay_options_(decay) {
  CheckDecay(info, decay);
  q_ = AddProjection({"q", Side::kQuery, dims.dim});
  k_ = AddProjection({"k", Side::kKey, dims.dim});
  v_ = AddProjection({"v", Side::kKey, dims.dim});
  key_memory_ = AddState("key_memory");
  value_memory_ = AddState("value_memory");
  z_ = AddState("z");
  if (ByPosition()) count_ = AddState("count");
  if (decay.gated()) decay_ = AddState("decay");
  if (weights_ == Weights::kEverySlot) {
    decoding_ = {key_memory_, value_memory_,        z_, AddState(kDecodingName), dims.heads,
                 slots_,      dims.dim / dims.heads};
  }
}

void AbcMechanism::DeclareGate() {
  if (decay_options_.gated())
    gate_ = AddProjection(GateProjection(decay_options_, dims().heads, slots_));
}

void AbcMechanism::DescribeMemory(Fields& fields, MemoryOptions& memory) {
  fields.Add("slots", &memory.slots, "memory slots of each head (n)", {1, 65536});
  fields.Add("empty_slots", &memory.empty_slots,
             "slots never written: masked, or take_part in the softmax with logit 0 and value 0 "
             "(P003 to the letter)",
             EmptySlotNames());
}

const EnumNames<AbcMechanism::EmptySlots>& EmptySlotNames() {
  static const EnumNames<AbcMechanism::EmptySlots> names = {
      {AbcMechanism::EmptySlots::kMasked, "masked"},
      {AbcMechanism::EmptySlots::kTakePart, "take_part"}};
  return names;
}

State AbcMechanism::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  const ops::SlotState slots =
      ops::EmptySlots(batch, dims().heads, slots_, dims().dim / dims().heads, options);
  State state = UndefinedState();
  state[key_memory_] = slots.memory;
  state[value_memory_] = slots.memory.clone();
  state[z_] = slots.z;
  if (ByPosition()) state[count_] = at::zeros({batch}, options.dtype(at::kLong));
  if (decay_options_.gated()) {
    state[decay_] =
        at::zeros({batch, dims().heads, decay_options_.gate == GateKind::kSlot ? slots_ : 1},
                  slots.z.options());
  }
  return state;
}

std::string AbcMechanism::FormRefusal(Form form) const {
  if (const std::string refusal = DecayRefusal(decay_options_, form); !refusal.empty())
    return refusal;
  if (form != Form::kCausal || weights_ != Weights::kByLength) return "";
  return "causal form with length=row: a token does not know how long its document will be; use "
         "length=max_length";
}

// The log-weights of a piece; the count of tokens moves on.
at::Tensor AbcMechanism::PieceWeights(const std::vector<at::Tensor>& x, State& state,
                                      const ops::Mask& mask) const {
  if (!ByPosition()) return LogWeights(x, {state, {}, {}});
  const at::Tensor before = state[count_];
  const int64_t length = x[k_].size(2);
  const at::Tensor positions = PiecePositions(before, length, mask);
  at::Tensor lengths;
  if (weights_ == Weights::kByLength) {
    lengths = mask.lengths ? *mask.lengths : at::full_like(before, length);
    if (!before.is_meta() && before.gt(0).any().item<bool>()) {
      FailUsage("[", info().name,
                "] length=row takes a source at once, and this one comes in pieces; use "
                "length=max_length");
    }
  }
  const at::Tensor s = LogWeights(x, {state, positions, lengths});
  state[count_] = PositionsAfter(before, positions, mask);
  return s;
}

// What slots hold, times this, is their sum: z [B,H,T or 1,n] is the logarithm of a count.
at::Tensor AbcMechanism::SumFactor(const at::Tensor& z, const at::Tensor& tokens) const {
  const at::Tensor count = z.detach().exp().round(), divisor = SumDivisor(tokens);
  return divisor.defined() ? count / divisor : count;
}

// Softmax over the slots of q . keys [B,H,T,n]. z [B,H,T or 1,n]: log-weights written so far, -inf
// in empty slots; undefined: none is empty.
at::Tensor AbcMechanism::ReadWeights(const at::Tensor& matched, const at::Tensor& z,
                                     const at::Tensor& tokens) const {
  at::Tensor x = matched, factor;
  if (HoldsSums()) {
    factor = SumFactor(z, tokens).to(x.scalar_type());
    x = x * factor;
  }
  x = x.transpose(1, 2) * Scale();  // [B,T,H,n]
  if (z.defined() && masked_) x = x.masked_fill(at::isneginf(z).transpose(1, 2), kUnseen);
  const at::Tensor p =
      ops::Dropout(at::softmax(x, -1), dims().dropout, is_training()).transpose(1, 2);
  return factor.defined() ? p * factor : p;
}

at::Tensor AbcMechanism::DoExtend(const std::vector<at::Tensor>& x, State& state,
                                  const ops::Mask& mask) {
  const std::string refusal = FormRefusal(Form::kCausal);
  if (!refusal.empty()) FailUsage("[", info().name, "] has no ", refusal);
  if (!decay_options_.gated()) return ExtendWith(PieceWeights(x, state, mask), x, state, mask);
  const Gated gated = Fade(x, state, mask);
  const at::Tensor out = ExtendWith(gated.s, gated.x, state, mask);
  FadeState(gated.decay, state);
  return out.to(x[q_].scalar_type());
}

AbcMechanism::Gated AbcMechanism::Fade(const std::vector<at::Tensor>& x, State& state,
                                       const ops::Mask& mask) const {
  Gated gated;
  for (const at::Tensor& t : x) gated.x.push_back(t.defined() ? t.to(at::kDouble) : t);
  gated.decay = DecayOf(x[gate_], decay_options_, mask);
  gated.s = PieceWeights(gated.x, state, mask) - gated.decay.sum;
  return gated;
}

void AbcMechanism::FadeState(const Decay& decay, State& state) const {
  state[z_] = state[z_] + decay.total;
  state[decay_] = decay.After(state[decay_]);
}

at::Tensor AbcMechanism::DefinedFadingOf(const std::vector<at::Tensor>& seen) const {
  return decay_options_.gated() ? DefinedFading(seen[gate_], decay_options_) : at::Tensor();
}

bool AbcMechanism::Fused() const { return !HoldsSums() && !Drops(); }

bool AbcMechanism::TakesBFloat16(Form form) const {
  return !gated() && (form == Form::kCausal || !Drops());
}

at::Tensor AbcMechanism::ExtendWith(const at::Tensor& s, const std::vector<at::Tensor>& x,
                                    State& state, const ops::Mask& mask) {
  // Where each token writes all slots, one that reads has itself been written to all of them: no
  // slot is empty. A log-weight of -inf leaves a slot out.
  const bool every_slot = weights_ == Weights::kEverySlot && ops::AllFinite(s);
  if (every_slot && Fused()) {
    return ops::AbcExtend(x[q_], x[k_], x[v_], s, decoding_.Of(state), Scale(), mask);
  }
  decoding_.End(state);
  if (Fused()) {
    return ops::AbcExtend(x[q_], x[k_], x[v_], s, state[key_memory_], state[value_memory_],
                          state[z_], Scale(), mask, masked_);
  }
  const bool want_z = (masked_ || HoldsSums()) && !every_slot;
  const at::Tensor w = ops::OfSlots(s, x[v_]);
  at::Tensor z = state[z_].clone();  // both memories go on from it
  const ops::SlotRows matched =
      ops::SlotMatchExtend(x[q_], w, x[k_], state[key_memory_], z, mask, want_z);
  return ops::SlotReadExtend(ReadWeights(matched.out, matched.z, {}), w, x[v_],
                             state[value_memory_], state[z_], mask);
}

void AbcMechanism::DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) {
  if (decay_options_.gated()) {
    const Gated gated = Fade(x, state, mask);
    WriteWith(gated.s, gated.x, state, mask);
    return FadeState(gated.decay, state);
  }
  WriteWith(PieceWeights(x, state, mask), x, state, mask);
}

void AbcMechanism::WriteWith(const at::Tensor& s, const std::vector<at::Tensor>& x, State& state,
                             const ops::Mask& mask) const {
  decoding_.End(state);
  const ops::AbcState after =
      ops::AbcWrite(s, x[k_], x[v_], {state[key_memory_], state[value_memory_], state[z_]}, mask);
  state[key_memory_] = after.keys;
  state[value_memory_] = after.values;
  state[z_] = after.z;
}

at::Tensor AbcMechanism::Read(const std::vector<at::Tensor>& x, const State& written) {
  const State state = Settled(written);
  const at::Tensor tokens = ByPosition() ? state[count_] : at::Tensor();
  if (!Drops()) {
    at::Tensor keys = state[key_memory_], values = state[value_memory_];
    if (HoldsSums()) {
      const at::Tensor factor = SumFactor(state[z_].unsqueeze(2), tokens).transpose(2, 3);
      keys = keys * factor, values = values * factor;
    }
    return ops::AbcRead(x[q_], keys, values, masked_ ? state[z_] : at::Tensor(), Scale());
  }
  const auto type = x[q_].scalar_type();
  const at::Tensor matched = at::matmul(x[q_], state[key_memory_].to(type).transpose(2, 3));
  return at::matmul(ReadWeights(matched, state[z_].unsqueeze(2), tokens),
                    state[value_memory_].to(type));
}

at::Tensor AbcMechanism::Definition(Form form, const std::vector<at::Tensor>& queries,
                                    const std::vector<at::Tensor>& x) const {
  const double scale = 1 / std::sqrt(double(dims().dim / dims().heads));
  return EachQuery(form, queries, x, x[v_].size(3), [&](const auto& query, const auto& seen) {
    const at::Tensor phi = DefinedWeights(form, seen);  // [B,H,n,S]
    at::Tensor logits = at::matmul(query[q_], at::matmul(phi, seen[k_]).transpose(2, 3)) * scale;
    if (masked_) logits = logits.masked_fill((phi == 0).all(3).unsqueeze(2), -1e300);
    return at::matmul(at::softmax(logits, 3), at::matmul(phi, seen[v_]));
  });
}

State AbcMechanism::Merge(const State& earlier, const State& later) const {
  if (ByPosition()) return Mechanism::Merge(earlier, later);
  const State first = Settled(earlier), second = Settled(later);
  const bool gated = decay_options_.gated();
  const at::Tensor faded = gated ? first[z_] + second[decay_] : first[z_];
  const ops::SlotState keys =
      ops::MergeSlots({first[key_memory_], faded}, {second[key_memory_], second[z_]});
  const ops::SlotState values =
      ops::MergeSlots({first[value_memory_], faded}, {second[value_memory_], second[z_]});
  State whole = UndefinedState();
  whole[key_memory_] = keys.memory;
  whole[value_memory_] = values.memory;
  whole[z_] = values.z;
  if (gated) whole[decay_] = first[decay_] + second[decay_];
  return whole;
}

at::Tensor OneHotLogWeights(const at::Tensor& slot, int64_t slots,
                            const at::TensorOptions& options) {
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  std::vector<int64_t> sizes = slot.sizes().vec();
  sizes.push_back(slots);
  const at::Tensor inside = slot.clamp(0, slots - 1), plain = at::zeros(slot.sizes(), options);
  return at::full(sizes, kNone, options)
      .scatter_(-1, inside.unsqueeze(-1), plain.masked_fill_(inside != slot, kNone).unsqueeze(-1));
}

}  // namespace cistern
