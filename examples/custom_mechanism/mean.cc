#include "mean.h"

#include <ATen/ATen.h>

#include "cistern/attention/definition.h"
#include "cistern/ops/slot_memory.h"

namespace cistern {

MechanismInfo mean_mechanism() {
  MechanismInfo i = InfoOf<MeanMechanism>("mean");
  i.title = "Gated running mean";
  i.source = "examples/custom_mechanism";
  i.summary = "A few slots, each the running mean of the values, weighted by a gate of the token.";
  i.forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
  i.positions = AddedPositions();
  i.time = "O(T n d)";
  i.state = "n (d + 1) per head";
  i.cases = {Json{{"slots", 3}}, Json{{"slots", 3}, {"gated", false}}};
  return i;
}

Fields MeanMechanism::Describe(Options& options) {
  Fields f;
  f.Add("slots", &options.slots, "memory slots of each head (n)", {1, 65536});
  f.Add("gated", &options.gated, "weigh tokens by a learned gate; false: all alike");
  return f;
}

MeanMechanism::MeanMechanism(const MechanismInfo& info, const Options& options,
                             const AttentionDims& dims)
    : Mechanism(info, dims), options_(options) {
  // The layer makes a linear map for each projection, over all heads; the core sees [B,H,T,width/H]
  // as x[q_], x[gate_] and x[v_].
  const int64_t width = dims.heads * options.slots;
  q_ = AddProjection({"q", Side::kQuery, width});
  gate_ = AddProjection({"gate", Side::kKey, width});
  v_ = AddProjection({"v", Side::kKey, dims.dim});
  memory_ = AddState("memory");
  z_ = AddState("z");
}

State MeanMechanism::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  const ops::SlotState slots =
      ops::EmptySlots(batch, dims().heads, options_.slots, dims().dim / dims().heads, options);
  State state = UndefinedState();
  state[memory_] = slots.memory;
  state[z_] = slots.z;
  return state;
}

at::Tensor MeanMechanism::LogWeights(const std::vector<at::Tensor>& x) const {
  return options_.gated ? x[gate_] : at::zeros_like(x[gate_]);
}

at::Tensor MeanMechanism::DoExtend(const std::vector<at::Tensor>& x, State& state,
                                   const ops::Mask& mask) {
  ops::SlotResult result = ops::SlotRead(at::softmax(x[q_], -1), LogWeights(x), x[v_],
                                         {state[memory_], state[z_]}, mask);
  state[memory_] = result.state.memory;
  state[z_] = result.state.z;
  return result.out;
}

void MeanMechanism::DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) {
  const ops::SlotState slots =
      ops::SlotWrite(LogWeights(x), x[v_], {state[memory_], state[z_]}, mask);
  state[memory_] = slots.memory;
  state[z_] = slots.z;
}

at::Tensor MeanMechanism::Read(const std::vector<at::Tensor>& x, const State& state) {
  return at::matmul(at::softmax(x[q_], -1), state[memory_].to(x[q_].scalar_type()));
}

at::Tensor MeanMechanism::Definition(Form form, const std::vector<at::Tensor>& queries,
                                     const std::vector<at::Tensor>& x) const {
  return EachQuery(form, queries, x, x[v_].size(3), [&](const auto& query, const auto& seen) {
    const at::Tensor weights = at::softmax(LogWeights(seen), 2);  // of each slot, over the tokens
    return at::matmul(at::softmax(query[q_], 3), at::matmul(weights.transpose(2, 3), seen[v_]));
  });
}

}  // namespace cistern
