#include "cistern/attention/decay.h"

#include <ATen/ATen.h>

#include "cistern/base/error.h"

namespace cistern {

void DescribeDecay(Fields& fields, DecayOptions& options) {
  fields.Add("gate", &options.gate,
             "what was written fades with each later token: none; by one learned gate of the token "
             "for each head; by one for each slot. Causal form alone, computed in double",
             {{GateKind::kNone, "none"}, {GateKind::kHead, "head"}, {GateKind::kSlot, "slot"}});
  fields.Add("gate_temperature", &options.temperature,
             "the gate is sigmoid(x)^(1/gate_temperature): larger remembers longer", {1e-2, 1e4});
}

void CheckDecay(const MechanismInfo& info, const DecayOptions& options) {
  if (!options.gated() && options.temperature != DecayOptions().temperature)
    FailUsage("[", info.name, "] gate_temperature=", options.temperature,
              " has no effect without a gate; give gate=head or gate=slot");
}

Projection GateProjection(const DecayOptions& options, int64_t heads, int64_t slots) {
  return {"gate", Side::kKey, options.gate == GateKind::kSlot ? heads * slots : heads};
}

std::string DecayRefusal(const DecayOptions& options, Form form) {
  if (!options.gated() || form == Form::kCausal) return "";
  return FormName(form) +
         (form == Form::kCross
              ? " form with a gate: it favours what was written last, and no source token is "
                "nearest to a query; use gate=none"
              : " form with a gate: it forgets what is further back, and a token in the middle has "
                "no back; use gate=none");
}

at::Tensor Decay::After(const at::Tensor& before) const {
  const at::Tensor on = before + total;
  return begun.defined() ? at::where(begun.view({-1, 1, 1}), total, on) : on;
}

Decay DecayOf(const at::Tensor& logits, const DecayOptions& options, const ops::Mask& mask) {
  const int64_t length = logits.size(2);
  // A gate of 0 would leave no finite sum; e^-1e5 is as good.
  at::Tensor log_gate =
      (at::log_sigmoid(logits.to(at::kDouble)) / options.temperature).clamp_min(-1e5);
  if (const at::Tensor pad = mask.HeadsPadding(length); pad.defined())
    log_gate = log_gate.masked_fill(pad, 0.0);
  Decay decay;
  if (length == 0) {
    decay.sum = log_gate;
    decay.total = at::zeros({logits.size(0), logits.size(1), logits.size(3)}, log_gate.options());
    return decay;
  }
  if (!mask.starts) {
    decay.sum = log_gate.cumsum(2);
    decay.total = decay.sum.select(2, length - 1);
    return decay;
  }
  // Each document by itself, so that nothing of one, not even NaN, is in the sums of another.
  const at::Tensor document = mask.Documents(length);  // [B,T]
  const int64_t most = document.is_meta() ? 1 : document.max().item<int64_t>();
  decay.sum = at::zeros_like(log_gate);
  decay.total = at::zeros({logits.size(0), logits.size(1), logits.size(3)}, log_gate.options());
  const at::Tensor last = document.amax(1, true);  // [B,1]
  for (int64_t d = 0; d <= most; ++d) {
    const at::Tensor own = (document == d).unsqueeze(1).unsqueeze(-1);  // [B,1,T,1]
    const at::Tensor sum = log_gate.masked_fill(own.logical_not(), 0.0).cumsum(2);
    decay.sum = at::where(own, sum, decay.sum);
    decay.total = at::where((last == d).unsqueeze(-1), sum.select(2, length - 1), decay.total);
  }
  decay.begun = last.squeeze(1) > 0;
  return decay;
}

at::Tensor DefinedFading(const at::Tensor& logits, const DecayOptions& options) {
  const int64_t length = logits.size(2);
  std::vector<at::Tensor> fading(static_cast<size_t>(length));
  at::Tensor sum = at::zeros_like(logits.select(2, 0));
  for (int64_t i = length; i-- > 0;) {
    fading[size_t(i)] = sum.clone();
    // log sigmoid(x) = -log(1 + e^-x)
    const at::Tensor x = logits.select(2, i).to(at::kDouble);
    sum = sum - at::logaddexp(at::zeros_like(x), -x) / options.temperature;
  }
  return at::stack(fading, 2);
}

}  // namespace cistern
