#include "cistern/attention/mechanisms/latte.h"

#include <ATen/ATen.h>

#include "cistern/attention/definition.h"
#include "cistern/base/error.h"
#include "cistern/ops/dropout.h"
#include "cistern/ops/slot_attention.h"

namespace cistern {

MechanismInfo latte_mechanism() {
  MechanismInfo i = InfoOf<LatteMechanism>("latte");
  i.title = "Latte";
  i.source = "P004 eq. 8-14; spec 2.15";
  i.summary =
      "Queries mix a few latents, each latent holds a running softmax-weighted mean of the "
      "values. Fast, with a small state.";
  i.definition =
      "y_t = sum_l softmax_l(q_t)_l M_{t,l}, M_{t,l} = sum_s softmax_s(k_{s,l}) v_s over the "
      "tokens s seen by t";
  i.forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
  i.positions = AddedPositions();
  i.time = "O(T (L/H) d)";
  i.state = "(L/H) (d + 1) per head";
  i.cases = {Json{{"latents", 6}}, Json{{"latents", 6}, {"gate", "slot"}},
             Json{{"latents", 6}, {"gate", "head"}, {"gate_temperature", 1.0}}};
  i.merges = true;
  return i;
}

Fields LatteMechanism::Describe(Options& options) {
  Fields f;
  f.Add("latents", &options.latents, "latents over all heads (L); 0 takes the width of the model",
        {0, 65536});
  f.Add("dropout", &options.dropout,
        "what attention_dropout drops: the read weights of every form (weights); or as P004's code "
        "(published): the read weights and, after the output projection, what the layer gives, in "
        "the causal form, which alone may have it",
        {{Dropped::kWeights, "weights"}, {Dropped::kPublished, "published"}});
  DescribeDecay(f, options.decay);
  return f;
}

LatteMechanism::LatteMechanism(const MechanismInfo& info, const Options& options,
                               const AttentionDims& dims)
    : LatteMechanism(info, options.latents > 0 ? options.latents : dims.dim, dims) {
  dropped_ = options.dropout;
  decay_options_ = options.decay;
  CheckDecay(info, options.decay);
  DeclareStates();
  if (!options.decay.gated()) return;
  gate_ = AddProjection(GateProjection(options.decay, dims.heads, latents_ / dims.heads));
  decay_ = AddState("decay");
}

LatteMechanism::LatteMechanism(const MechanismInfo& info, int64_t latents,
                               const AttentionDims& dims)
    : Mechanism(info, dims), latents_(latents) {
  if (latents_ % dims.heads != 0)
    FailUsage("[latte] latents=", latents_, " is not divisible by heads=", dims.heads);
  q_ = AddProjection({"q", Side::kQuery, latents_});
  k_ = AddProjection({"k", Side::kKey, latents_});
  v_ = AddProjection({"v", Side::kKey, dims.dim});
}

void LatteMechanism::DeclareStates() {
  memory_ = AddState("memory");
  z_ = AddState("z");
  decoding_ = {{}, memory_, z_, AddState(kDecodingName), dims().heads, Slots(), Width()};
}

State LatteMechanism::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  const ops::SlotState slots = ops::EmptySlots(batch, dims().heads, Slots(), Width(), options);
  State state = UndefinedState();
  state[memory_] = slots.memory;
  state[z_] = slots.z;
  if (decay_options_.gated()) {
    const bool each = decay_options_.gate == GateKind::kSlot;
    state[decay_] = at::zeros({batch, dims().heads, each ? Slots() : 1}, slots.z.options());
  }
  return state;
}

std::vector<at::Tensor> LatteMechanism::Faded(const std::vector<at::Tensor>& x,
                                              const Decay& decay) const {
  std::vector<at::Tensor> faded(x.size());
  for (const ProjectionId& id : {q_, k_, v_}) {
    if (x[id].defined()) faded[id] = x[id].to(at::kDouble);
  }
  faded[k_] = faded[k_] - decay.sum;
  return faded;
}

void LatteMechanism::FadeState(const Decay& decay, State& state) const {
  state[z_] = state[z_] + decay.total;
  state[decay_] = decay.After(state[decay_]);
}

// Softmax over the last dimension of a [B,H,T,n] view of [B,T,H,n] memory, keeping that layout.
at::Tensor LatteMechanism::ReadWeights(const at::Tensor& x, double dropout) const {
  const at::Tensor p = at::softmax(x.transpose(1, 2), -1);
  return ops::Dropout(p, dropout, is_training()).transpose(1, 2);
}

double LatteMechanism::WeightDropout(Form form) const {
  const bool drops = dropped_ == Dropped::kWeights || form == Form::kCausal;
  return is_training() && drops ? dims().dropout : 0;
}

double LatteMechanism::OutputDropout(Form form) const {
  return dropped_ == Dropped::kPublished && form == Form::kCausal ? dims().dropout : 0;
}

std::string LatteMechanism::FormRefusal(Form form) const {
  if (dropped_ == Dropped::kPublished && form != Form::kCausal && dims().dropout > 0)
    return StrCat(FormName(form), " form with dropout=published, where P004's code drops nothing: ",
                  "attention_dropout=", dims().dropout,
                  " would have no effect; leave out both, or "
                  "take dropout=weights");
  return DecayRefusal(decay_options_, form);
}

bool LatteMechanism::TakesBFloat16(Form form) const {
  return !decay_options_.gated() && WeightDropout(form) == 0;
}

bool LatteMechanism::PutsOffWrites() const {
  return !decay_options_.gated() && WeightDropout(Form::kCausal) == 0;
}

at::Tensor LatteMechanism::DoExtend(const std::vector<at::Tensor>& x, State& state,
                                    const ops::Mask& mask) {
  if (!decay_options_.gated()) return ExtendWith(x, state, mask);
  const Decay decay = DecayOf(x[gate_], decay_options_, mask);
  const at::Tensor out = ExtendWith(Faded(x, decay), state, mask);
  FadeState(decay, state);
  return out.to(x[q_].scalar_type());
}

at::Tensor LatteMechanism::ExtendWith(const std::vector<at::Tensor>& x, State& state,
                                      const ops::Mask& mask) {
  if (const double dropout = WeightDropout(Form::kCausal); dropout > 0) {
    decoding_.End(state);
    return ops::SlotReadExtend(ReadWeights(x[q_], dropout), x[k_], x[v_], state[memory_], state[z_],
                               mask);
  }
  return ops::LatteExtend(x[q_], x[k_], x[v_], decoding_.Of(state), mask);
}

void LatteMechanism::DoWrite(const std::vector<at::Tensor>& x, State& state,
                             const ops::Mask& mask) {
  decoding_.End(state);
  if (decay_options_.gated()) {
    const Decay decay = DecayOf(x[gate_], decay_options_, mask);
    const std::vector<at::Tensor> faded = Faded(x, decay);
    const ops::SlotState slots =
        ops::SlotWrite(faded[k_], faded[v_], {state[memory_], state[z_]}, mask);
    state[memory_] = slots.memory;
    state[z_] = slots.z;
    return FadeState(decay, state);
  }
  const ops::SlotState slots = ops::SlotWrite(x[k_], x[v_], {state[memory_], state[z_]}, mask);
  state[memory_] = slots.memory;
  state[z_] = slots.z;
}

at::Tensor LatteMechanism::Read(const std::vector<at::Tensor>& x, const State& written) {
  const State state = Settled(written);
  const double dropout = WeightDropout(Form::kCross);
  if (dropout == 0) return ops::SlotSoftmaxRead(x[q_], state[memory_]);
  return at::matmul(ReadWeights(x[q_], dropout), state[memory_].to(x[q_].scalar_type()));
}

at::Tensor LatteMechanism::Definition(Form form, const std::vector<at::Tensor>& queries,
                                      const std::vector<at::Tensor>& x) const {
  return EachQuery(form, queries, x, x[v_].size(3), [&](const auto& query, const auto& seen) {
    const at::Tensor s =
        decay_options_.gated() ? seen[k_] + DefinedFading(seen[gate_], decay_options_) : seen[k_];
    return at::matmul(at::softmax(query[q_], 3),
                      at::matmul(at::softmax(s, 2).transpose(2, 3), seen[v_]));
  });
}

State LatteMechanism::Merge(const State& earlier, const State& later) const {
  const State first = Settled(earlier), second = Settled(later);
  const bool gated = decay_options_.gated();
  const ops::SlotState whole =
      ops::MergeSlots({first[memory_], gated ? first[z_] + second[decay_] : first[z_]},
                      {second[memory_], second[z_]});
  State state = UndefinedState();
  state[memory_] = whole.memory;
  state[z_] = whole.z;
  if (gated) state[decay_] = first[decay_] + second[decay_];
  return state;
}

LeastOperations LatteMechanism::Operations(Form form, int64_t tokens, int64_t) const {
  return MemoryOperations(form, tokens, double(latents_) * double(dims().dim / dims().heads));
}

}  // namespace cistern
