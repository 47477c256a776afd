#include "cistern/attention/mechanisms/abc_mlp.h"

#include <ATen/ATen.h>

#include <limits>

namespace cistern {

MechanismInfo abc_mlp_mechanism() {
  MechanismInfo i = InfoOf<AbcMlpMechanism>("abc_mlp");
  i.title = "ABC, MLP control";
  i.source = "P003 eq. 7, App. B.1; spec 2.13";
  i.summary =
      "Tokens write keys and values into n slots, weighted by a learned control; a query attends "
      "to the slots by softmax.";
  i.definition =
      "y_t = softmax(q_t K_t^T / sqrt(d)) V_t, K_t = sum_s phi_s k_s^T, V_t likewise, phi_s = "
      "a_s / sum_s a_s, a_s = exp(W_phi x_s)";
  i.forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
  i.positions = AddedPositions();
  i.slots = true;
  i.time = "O(T n d)";
  i.state = "n (2 d + 1) per head";
  i.cases = {Json{{"slots", 3}},
             Json{{"slots", 3}, {"activation", "relu"}},
             Json{{"slots", 3}, {"activation", "relu"}, {"empty_slots", "take_part"}},
             Json{{"slots", 3}, {"activation", "sigmoid"}},
             Json{{"slots", 4}, {"shared_heads", true}},
             Json{{"slots", 3}, {"gate", "slot"}},
             Json{{"slots", 3},
                  {"gate", "head"},
                  {"gate_temperature", 1.0},
                  {"activation", "relu"},
                  {"shared_heads", true}}};
  i.merges = true;
  return i;
}

Fields AbcMlpMechanism::Describe(Options& options) {
  Fields f;
  DescribeMemory(f, options.memory);
  f.Add(
      "activation", &options.activation,
      "makes write weights of the control: exp, relu or sigmoid. No floor is added to them or to "
      "their sum: where relu gives 0, and where a control is -inf, nothing is written, and a slot "
      "with a sum of 0 is empty",
      {{Activation::kExp, "exp"}, {Activation::kRelu, "relu"}, {Activation::kSigmoid, "sigmoid"}});
  f.Add("shared_heads", &options.shared_heads,
        "one control for all heads, of n channels in place of n per head");
  f.Add("tied", &options.tied,
        "one control for all layers of the model with this mechanism (P003)");
  f.Add("control_bias", &options.control_bias,
        "of the control's map: none, whatever the model's `bias` says (P003 eq. 7), or as the "
        "model's other maps (model)",
        {{ControlBias::kNone, "none"}, {ControlBias::kModel, "model"}});
  DescribeDecay(f, options.decay);
  return f;
}

AbcMlpMechanism::AbcMlpMechanism(const MechanismInfo& info, const Options& options,
                                 const AttentionDims& dims)
    : AbcMechanism(
          info, options.memory,
          options.activation == Activation::kRelu ? Weights::kSomeSlots : Weights::kEverySlot, dims,
          options.decay),
      activation_(options.activation),
      shared_heads_(options.shared_heads) {
  Projection control = {"control", Side::kKey, shared_heads_ ? slots() : dims.heads * slots()};
  if (shared_heads_) control.heads = 1;
  control.tied = options.tied;
  if (options.control_bias == ControlBias::kNone) control.bias = false;
  control_ = AddProjection(control);
  DeclareGate();
}

at::Tensor AbcMlpMechanism::LogWeights(const std::vector<at::Tensor>& x, const Piece&) const {
  const at::Tensor s = shared_heads_ ? x[control_].expand({-1, dims().heads, -1, -1}) : x[control_];
  if (activation_ == Activation::kExp) return s;
  if (activation_ == Activation::kSigmoid) return at::log_sigmoid(s);
  const at::Tensor off = s <= 0;  // 1 in the place of 0 keeps the logarithm's gradient finite
  return s.masked_fill(off, 1.0).log().masked_fill(off, -std::numeric_limits<double>::infinity());
}

bool AbcMlpMechanism::TakesBFloat16(Form form) const {
  return activation_ == Activation::kExp && AbcMechanism::TakesBFloat16(form);
}

at::Tensor AbcMlpMechanism::DefinedWeights(Form, const std::vector<at::Tensor>& seen) const {
  const at::Tensor control =
      shared_heads_ ? seen[control_].repeat({1, dims().heads, 1, 1}) : seen[control_];
  if (const at::Tensor fading = DefinedFadingOf(seen); fading.defined()) {
    at::Tensor log_alpha = control;
    if (activation_ == Activation::kRelu) log_alpha = at::relu(control).log();
    if (activation_ == Activation::kSigmoid) log_alpha = at::sigmoid(control).log();
    const at::Tensor faded = log_alpha + fading, never = at::isneginf(faded).all(2, true);
    return at::softmax(faded.masked_fill(never, 0.0), 2).masked_fill(never, 0.0).transpose(2, 3);
  }
  if (activation_ == Activation::kExp) {
    const at::Tensor never = at::isneginf(control).all(2, true);
    return at::softmax(control.masked_fill(never, 0.0), 2).masked_fill(never, 0.0).transpose(2, 3);
  }
  const at::Tensor alpha =
      activation_ == Activation::kRelu ? at::relu(control) : at::sigmoid(control);
  const at::Tensor sum = alpha.sum({2}, true);
  return (alpha / sum.masked_fill(sum == 0, 1.0)).transpose(2, 3);
}

LeastOperations AbcMlpMechanism::Operations(Form form, int64_t tokens, int64_t) const {
  return MemoryOperations(form, tokens, 2 * double(slots()) * double(dims().dim));
}

}  // namespace cistern
