#include "cistern/attention/mechanisms/latte.h"

#include <ATen/ATen.h>

#include "cistern/attention/definition.h"
#include "cistern/base/error.h"
#include "cistern/ops/slot_attention.h"

namespace cistern {

const MechanismInfo& latte_mechanism() {
  static MechanismInfo info = [] {
    MechanismInfo i;
    i.name = "latte";
    i.title = "Latte";
    i.source = "P004 eq. 8-14; spec 2.15";
    i.summary =
        "Queries mix a few latents, each latent holds a running softmax-weighted mean of the "
        "values. Fast, with a small state.";
    i.definition =
        "y_t = sum_l softmax_l(q_t)_l M_{t,l}, M_{t,l} = sum_s softmax_s(k_{s,l}) v_s over the "
        "tokens s seen by t";
    i.forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
    i.positions = {"none", "learned", "sinusoidal"};
    i.time = "O(T (L/H) d)";
    i.state = "(L/H) (d + 1) per head";
    i.cases = {Json{{"latents", 6}}};
    i.merges = true;
    return i;
  }();
  static const bool bound = (BindMechanism<LatteMechanism>(info), true);
  (void)bound;
  return info;
}

Fields LatteMechanism::Describe(Options& options) {
  return Fields().Add("latents", &options.latents,
                      "latents over all heads (L); 0 takes the width of the model", {0, 65536});
}

LatteMechanism::LatteMechanism(const MechanismInfo& info, const Options& options,
                               const AttentionDims& dims)
    : Mechanism(info, dims), latents_(options.latents > 0 ? options.latents : dims.dim) {
  if (latents_ % dims.heads != 0)
    FailUsage("[latte] latents=", latents_, " is not divisible by heads=", dims.heads);
}

std::vector<Projection> LatteMechanism::Projections() const {
  return {
      {"q", Side::kQuery, latents_}, {"k", Side::kKey, latents_}, {"v", Side::kKey, dims().dim}};
}

State LatteMechanism::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  const ops::SlotState slots = ops::EmptySlots(batch, dims().heads, latents_ / dims().heads,
                                               dims().dim / dims().heads, options);
  return {{{"memory", slots.memory}, {"z", slots.z}}};
}

// Softmax over the last dimension of a [B,H,T,n] view of [B,T,H,n] memory, keeping that layout.
at::Tensor LatteMechanism::ReadWeights(const at::Tensor& x) const {
  const at::Tensor p = at::softmax(x.transpose(1, 2), -1).transpose(1, 2);
  return is_training() && dims().dropout > 0 ? at::dropout(p, dims().dropout, true) : p;
}

at::Tensor LatteMechanism::DoExtend(const std::vector<at::Tensor>& x, State& state,
                                    const ops::Mask& mask) {
  const ops::SlotState before = {state["memory"], state["z"]};
  at::Tensor out;
  ops::SlotState after;
  if (is_training() && dims().dropout > 0) {
    const ops::SlotResult result = ops::SlotRead(ReadWeights(x[0]), x[1], x[2], before, mask);
    out = result.out, after = result.state;
  } else {
    const ops::AttentionResult result = ops::LatteAttention(x[0], x[1], x[2], before, mask);
    out = result.out, after = result.state;
  }
  state["memory"] = after.memory;
  state["z"] = after.z;
  return out;
}

void LatteMechanism::DoWrite(const std::vector<at::Tensor>& x, State& state,
                             const ops::Mask& mask) {
  const ops::SlotState slots = ops::SlotWrite(x[1], x[2], {state["memory"], state["z"]}, mask);
  state["memory"] = slots.memory;
  state["z"] = slots.z;
}

at::Tensor LatteMechanism::Read(const std::vector<at::Tensor>& x, const State& state) {
  return at::matmul(ReadWeights(x[0]), state["memory"].to(x[0].scalar_type()));
}

at::Tensor LatteMechanism::Definition(Form form, const std::vector<at::Tensor>& queries,
                                      const std::vector<at::Tensor>& x) const {
  return EachQuery(form, queries, x, x[2].size(3), [](const auto& query, const auto& seen) {
    return at::matmul(at::softmax(query[0], 3),
                      at::matmul(at::softmax(seen[1], 2).transpose(2, 3), seen[2]));
  });
}

State LatteMechanism::Merge(const State& first, const State& second) const {
  const ops::SlotState whole =
      ops::MergeSlots({first["memory"], first["z"]}, {second["memory"], second["z"]});
  return {{{"memory", whole.memory}, {"z", whole.z}}};
}

}  // namespace cistern
