#include "cistern/attention/abc_mlp.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "cistern/attention/definition.h"

namespace cistern {

const MechanismInfo& abc_mlp_mechanism() {
  static MechanismInfo info = [] {
    MechanismInfo i;
    i.name = "abc_mlp";
    i.title = "ABC, MLP control";
    i.source = "P003 eq. 7, App. B.1; spec 2.13";
    i.summary = "Tokens write keys and values into n slots, weighted by a learned control; a query attends to the slots by softmax.";
    i.forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
    i.positions = {"none", "learned", "sinusoidal"};
    i.time = "O(T n d)";
    i.state = "n (2 d + 1) per head";
    i.cases = {Json{{"slots", 3}}};
    i.merges = true;
    return i;
  }();
  static const bool bound = (BindMechanism<AbcMlpMechanism>(info), true);
  (void)bound;
  return info;
}

Fields AbcMlpMechanism::Describe(Options& options) {
  return Fields().Add("slots", &options.slots, "memory slots of each head (n)", {1, 65536});
}

AbcMlpMechanism::AbcMlpMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims)
    : Mechanism(info, dims), slots_(options.slots) {}

std::vector<Projection> AbcMlpMechanism::Projections() const {
  return {{"q", Side::kQuery, dims().dim},
          {"k", Side::kKey, dims().dim},
          {"v", Side::kKey, dims().dim},
          {"control", Side::kKey, dims().heads * slots_}};
}

State AbcMlpMechanism::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  const ops::SlotState slots = ops::EmptySlots(batch, dims().heads, slots_, dims().dim / dims().heads, options);
  return {{{"key_memory", slots.memory}, {"value_memory", slots.memory.clone()}, {"z", slots.z}}};
}

// Softmax over the slots that have been written (all or none of a head's, unless log-weights are -inf); undefined `occupied`: all.
at::Tensor AbcMlpMechanism::Attend(const at::Tensor& logits, const at::Tensor& occupied) const {
  const double scale = 1.0 / std::sqrt(double(dims().dim) / double(dims().heads));
  at::Tensor x = logits.transpose(1, 2) * scale;  // [B,T,H,n]
  if (occupied.defined()) x = x.masked_fill(occupied.logical_not().unsqueeze(1), std::numeric_limits<float>::lowest());
  at::Tensor p = at::softmax(x, -1);
  if (is_training() && dims().dropout > 0) p = at::dropout(p, dims().dropout, true);
  return p.transpose(1, 2);
}

at::Tensor AbcMlpMechanism::Extend(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) {
  // Finite log-weights write every slot at every real token, so a token that reads has itself been written to all slots.
  const at::Tensor &q = x[0], &k = x[1], &v = x[2], &s = x[3], z = state["z"];
  ops::SlotResult matched = ops::SlotMatch(q, s, k, {state["key_memory"], z}, mask);
  ops::SlotResult result = ops::SlotRead(Attend(matched.out, {}), s, v, {state["value_memory"], z}, mask);
  state["key_memory"] = matched.state.memory;
  state["value_memory"] = result.state.memory;
  state["z"] = result.state.z;
  return result.out;
}

void AbcMlpMechanism::Write(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) {
  const at::Tensor z = state["z"];
  state["key_memory"] = ops::SlotWrite(x[3], x[1], {state["key_memory"], z}, mask).memory;
  const ops::SlotState values = ops::SlotWrite(x[3], x[2], {state["value_memory"], z}, mask);
  state["value_memory"] = values.memory;
  state["z"] = values.z;
}

at::Tensor AbcMlpMechanism::Read(const std::vector<at::Tensor>& x, const State& state) {
  const at::Tensor occupied = at::isneginf(state["z"]).logical_not();
  return at::matmul(Attend(at::matmul(x[0], state["key_memory"].transpose(2, 3)), occupied), state["value_memory"]);
}

at::Tensor AbcMlpMechanism::Definition(Form form, const std::vector<at::Tensor>& queries, const std::vector<at::Tensor>& x) const {
  const double scale = 1 / std::sqrt(double(dims().dim / dims().heads));
  return EachQuery(form, queries, x, x[2].size(3), [&](const auto& query, const auto& seen) {
    const at::Tensor phi = at::softmax(seen[3], 2).transpose(2, 3);  // [B,H,n,T]: each slot's weights over the tokens
    const at::Tensor keys = at::matmul(phi, seen[1]), values = at::matmul(phi, seen[2]);
    return at::matmul(at::softmax(at::matmul(query[0], keys.transpose(2, 3)) * scale, 3), values);
  });
}

State AbcMlpMechanism::Merge(const State& first, const State& second) const {
  const ops::SlotState keys = ops::MergeSlots({first["key_memory"], first["z"]}, {second["key_memory"], second["z"]});
  const ops::SlotState values = ops::MergeSlots({first["value_memory"], first["z"]}, {second["value_memory"], second["z"]});
  return {{{"key_memory", keys.memory}, {"value_memory", values.memory}, {"z", values.z}}};
}

}  // namespace cistern
