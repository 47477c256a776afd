#include "cistern/attention/mechanisms/gated_slots.h"

#include <ATen/ATen.h>

#include <cmath>

#include "cistern/attention/definition.h"
#include "cistern/ops/dropout.h"
#include "cistern/ops/gated_slots.h"

namespace cistern {

MechanismInfo gated_slots_mechanism() {
  MechanismInfo i = InfoOf<GatedSlotsMechanism>("gated_slots");
  i.title = "ABC with gated slots";
  i.source = "P003 sec. 4; Zhang et al. 2024 (Gated Slot Attention); spec 2.14";
  i.summary =
      "Each slot forgets and takes in by a learned gate of the token; a query attends to the "
      "slots by softmax. ABC's successor for text: "
      "it can drop what it no longer needs.";
  i.definition =
      "K_t = g_t K_{t-1} + (1 - g_t) k_t^T, V_t likewise, g_t = sigmoid(W_g "
      "x_t)^(1/temperature); y_t = softmax(q_t K_t^T / sqrt(d)) V_t";
  i.forms = {Form::kCausal};
  i.refusals = {
      "bidirectional: its gates forget what is further back, and a token in the middle has no "
      "back; use abc_mlp instead",
      "cross: its gates favour what was written last, and no source token is nearest to a query; "
      "use abc_mlp instead"};
  i.positions = AddedPositions();
  i.slots = true;
  i.time = "O(T n d)";
  i.state = "2 n d per head";
  i.cases = {Json{{"slots", 3}}, Json{{"slots", 4}, {"temperature", 1.0}}};
  return i;
}

Fields GatedSlotsMechanism::Describe(Options& options) {
  Fields f;
  f.Add("slots", &options.slots, "memory slots of each head (n)", {1, 65536});
  f.Add("temperature", &options.temperature,
        "the gate is sigmoid(x)^(1/temperature): larger remembers longer", {1e-2, 1e4});
  return f;
}

GatedSlotsMechanism::GatedSlotsMechanism(const MechanismInfo& info, const Options& options,
                                         const AttentionDims& dims)
    : Mechanism(info, dims), options_(options) {
  q_ = AddProjection({"q", Side::kQuery, dims.dim});
  k_ = AddProjection({"k", Side::kKey, dims.dim});
  v_ = AddProjection({"v", Side::kKey, dims.dim});
  gate_ = AddProjection({"gate", Side::kKey, dims.heads * options.slots});
  key_memory_ = AddState("key_memory");
  value_memory_ = AddState("value_memory");
  decoding_ = {key_memory_,   value_memory_,        {}, AddState(kDecodingName), dims.heads,
               options.slots, dims.dim / dims.heads};
}

State GatedSlotsMechanism::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  const int64_t heads = dims().heads, width = dims().dim / heads;
  State state = UndefinedState();
  state[key_memory_] = ops::EmptySums(batch, heads, options_.slots, width, options);
  state[value_memory_] = ops::EmptySums(batch, heads, options_.slots, width, options);
  return state;
}

double GatedSlotsMechanism::Scale() const {
  return 1 / std::sqrt(double(dims().dim / dims().heads));
}

bool GatedSlotsMechanism::DropsWeights() const { return is_training() && dims().dropout > 0; }

bool GatedSlotsMechanism::TakesBFloat16(Form form) const {
  return form == Form::kCausal && !DropsWeights();
}

at::Tensor GatedSlotsMechanism::Attend(const at::Tensor& logits) const {
  const at::Tensor p = at::softmax(logits.transpose(1, 2) * Scale(), -1);
  return ops::Dropout(p, dims().dropout, is_training()).transpose(1, 2);
}

at::Tensor GatedSlotsMechanism::DoExtend(const std::vector<at::Tensor>& x, State& state,
                                         const ops::Mask& mask) {
  if (!DropsWeights())
    return ops::GatedSlotsExtend(x[q_], x[k_], x[v_], x[gate_], decoding_.Of(state), Scale(),
                                 options_.temperature, mask);
  decoding_.End(state);
  const ops::Gate gate = ops::MakeGate(x[gate_], options_.temperature);
  const at::Tensor matched =
      ops::SumMatchExtend(x[q_], gate.write, x[k_], state[key_memory_], mask, gate.log_gate);
  return ops::SumReadExtend(Attend(matched), gate.write, x[v_], state[value_memory_], mask,
                            gate.log_gate);
}

void GatedSlotsMechanism::DoWrite(const std::vector<at::Tensor>& x, State& state,
                                  const ops::Mask& mask) {
  decoding_.End(state);
  const ops::Gate gate = ops::MakeGate(x[gate_], options_.temperature);
  state[key_memory_] = ops::SumWrite(gate.write, x[k_], state[key_memory_], mask, gate.log_gate);
  state[value_memory_] =
      ops::SumWrite(gate.write, x[v_], state[value_memory_], mask, gate.log_gate);
}

at::Tensor GatedSlotsMechanism::Read(const std::vector<at::Tensor>& x, const State& written) {
  const State state = Settled(written);
  const auto type = x[q_].scalar_type();
  return at::matmul(Attend(at::matmul(x[q_], state[key_memory_].to(type).transpose(2, 3))),
                    state[value_memory_].to(type));
}

at::Tensor GatedSlotsMechanism::Definition(Form form, const std::vector<at::Tensor>& queries,
                                           const std::vector<at::Tensor>& x) const {
  const double scale = 1 / std::sqrt(double(dims().dim / dims().heads));
  return EachQuery(form, queries, x, x[v_].size(3), [&](const auto& query, const auto& seen) {
    at::Tensor keys, values;
    for (int64_t t = 0; t < seen[k_].size(2); ++t) {
      const at::Tensor gate = at::sigmoid(seen[gate_].select(2, t))
                                  .pow(1 / options_.temperature)
                                  .unsqueeze(-1);  // [B,H,n,1]
      const at::Tensor k = (1 - gate) * seen[k_].narrow(2, t, 1),
                       v = (1 - gate) * seen[v_].narrow(2, t, 1);
      keys = t == 0 ? k : gate * keys + k;
      values = t == 0 ? v : gate * values + v;
    }
    return at::matmul(at::softmax(at::matmul(query[q_], keys.transpose(2, 3)) * scale, 3), values);
  });
}

LeastOperations GatedSlotsMechanism::Operations(Form form, int64_t tokens, int64_t) const {
  return MemoryOperations(form, tokens, 2 * double(options_.slots) * double(dims().dim));
}

}  // namespace cistern
