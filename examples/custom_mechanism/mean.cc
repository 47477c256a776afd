#include "mean.h"

#include <ATen/ATen.h>

#include "cistern/attention/definition.h"

namespace cistern {

const MechanismInfo& mean_mechanism() {
  static MechanismInfo info = [] {
    MechanismInfo i;
    i.name = "mean";
    i.title = "Gated running mean";
    i.source = "examples/custom_mechanism";
    i.summary =
        "A few slots, each the running mean of the values, weighted by a gate of the token.";
    i.forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
    i.positions = {"none", "learned", "sinusoidal"};
    i.time = "O(T n d)";
    i.state = "n (d + 1) per head";
    i.cases = {Json{{"slots", 3}}, Json{{"slots", 3}, {"gated", false}}};
    return i;
  }();
  static const bool bound = (BindMechanism<MeanMechanism>(info), true);
  (void)bound;
  return info;
}

Fields MeanMechanism::Describe(Options& options) {
  Fields f;
  f.Add("slots", &options.slots, "memory slots of each head (n)", {1, 65536});
  f.Add("gated", &options.gated, "weigh tokens by a learned gate; false: all alike");
  return f;
}

MeanMechanism::MeanMechanism(const MechanismInfo& info, const Options& options,
                             const AttentionDims& dims)
    : Mechanism(info, dims), options_(options) {}

// The layer makes a linear map for each, over all heads; the core sees [B,H,T,width/H].
std::vector<Projection> MeanMechanism::Projections() const {
  const int64_t width = dims().heads * options_.slots;
  return {{"q", Side::kQuery, width}, {"gate", Side::kKey, width}, {"v", Side::kKey, dims().dim}};
}

State MeanMechanism::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  const ops::SlotState slots =
      ops::EmptySlots(batch, dims().heads, options_.slots, dims().dim / dims().heads, options);
  return {{{"memory", slots.memory}, {"z", slots.z}}};
}

at::Tensor MeanMechanism::LogWeights(const std::vector<at::Tensor>& x) const {
  return options_.gated ? x[1] : at::zeros_like(x[1]);
}

at::Tensor MeanMechanism::DoExtend(const std::vector<at::Tensor>& x, State& state,
                                   const ops::Mask& mask) {
  ops::SlotResult result = ops::SlotRead(at::softmax(x[0], -1), LogWeights(x), x[2],
                                         {state["memory"], state["z"]}, mask);
  state["memory"] = result.state.memory;
  state["z"] = result.state.z;
  return result.out;
}

void MeanMechanism::DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) {
  const ops::SlotState slots =
      ops::SlotWrite(LogWeights(x), x[2], {state["memory"], state["z"]}, mask);
  state["memory"] = slots.memory;
  state["z"] = slots.z;
}

at::Tensor MeanMechanism::Read(const std::vector<at::Tensor>& x, const State& state) {
  return at::matmul(at::softmax(x[0], -1), state["memory"].to(x[0].scalar_type()));
}

at::Tensor MeanMechanism::Definition(Form form, const std::vector<at::Tensor>& queries,
                                     const std::vector<at::Tensor>& x) const {
  return EachQuery(form, queries, x, x[2].size(3), [&](const auto& query, const auto& seen) {
    const at::Tensor weights = at::softmax(LogWeights(seen), 2);  // of each slot, over the tokens
    return at::matmul(at::softmax(query[0], 3), at::matmul(weights.transpose(2, 3), seen[2]));
  });
}

}  // namespace cistern
