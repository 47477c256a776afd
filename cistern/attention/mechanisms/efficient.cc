#include "cistern/attention/mechanisms/efficient.h"

#include <ATen/ATen.h>

#include "cistern/attention/definition.h"
#include "cistern/attention/feature_attention.h"
#include "cistern/attention/token_positions.h"
#include "cistern/base/error.h"
#include "cistern/ops/sum_memory.h"

namespace cistern {

const MechanismInfo& efficient_mechanism() {
  static MechanismInfo info = [] {
    MechanismInfo i;
    i.name = "efficient";
    i.title = "Efficient attention";
    i.source = "Shen et al. 2018; P002 sec. 2.1; causal as P004 eq. 14; spec 2.2";
    i.summary =
        "Softmax over the channels of each query and over the positions of each key channel: Latte "
        "with as many latents as channels. "
        "`normaliser=scaling` drops both softmaxes and divides the plain product Q (K^T V) "
        "instead.";
    i.definition =
        "y_t = sum_l softmax_l(q_t) C_{t,l}, C_{t,l} = sum_s softmax_s(k_{s,l}) v_s over the "
        "tokens s seen by t";
    i.forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
    i.positions = {"none", "learned", "sinusoidal"};
    i.time = "O(T d^2)";
    i.state = "d (d + 1) per head; d^2 doubles with normaliser=scaling";
    i.cases = {Json::object(), Json{{"normaliser", "scaling"}},
               Json{{"normaliser", "scaling"}, {"divisor", "length"}}};
    i.merges = true;
    return i;
  }();
  static const bool bound = (BindMechanism<EfficientMechanism>(info), true);
  (void)bound;
  return info;
}

Fields EfficientMechanism::Describe(Options& options) {
  Fields f;
  f.Add("normaliser", &options.normaliser,
        "of queries and keys: softmax, or scaling for plain products", {"softmax", "scaling"});
  f.Add(
      "divisor", &options.divisor,
      "with scaling: products are divided by the head width d (P002) or by the tokens seen (Shen)",
      {"width", "length"});
  return f;
}

EfficientMechanism::EfficientMechanism(const MechanismInfo& info, const Options& options,
                                       const AttentionDims& dims)
    : LatteMechanism(info, {dims.dim}, dims),
      scaling_(options.normaliser == "scaling"),
      by_length_(options.divisor == "length") {
  if (by_length_ && !scaling_)
    FailUsage(
        "[efficient] divisor=length goes with normaliser=scaling; softmax divides by nothing");
  if (scaling_) RefuseAttentionDropout(info, dims);
}

State EfficientMechanism::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  if (!scaling_) return LatteMechanism::EmptyState(batch, options);
  const int64_t width = dims().dim / dims().heads;
  State state = {{{"memory", ops::EmptySums(batch, dims().heads, width, width, options)}}};
  if (by_length_) state.tensors.push_back({"count", at::zeros({batch}, options.dtype(at::kLong))});
  return state;
}

at::Tensor EfficientMechanism::DoExtend(const std::vector<at::Tensor>& x, State& state,
                                        const ops::Mask& mask) {
  if (!scaling_) return LatteMechanism::DoExtend(x, state, mask);
  const ops::SumResult result = ops::SumRead(x[0], x[1], x[2], state["memory"], mask);
  state["memory"] = result.memory;
  if (!by_length_) return result.out / double(x[0].size(3));
  const at::Tensor positions = PiecePositions(state["count"], x[0].size(2), mask);
  state["count"] = PositionsAfter(state["count"], positions, mask);
  return result.out / (positions + 1).unsqueeze(1).unsqueeze(-1).to(result.out.scalar_type());
}

void EfficientMechanism::DoWrite(const std::vector<at::Tensor>& x, State& state,
                                 const ops::Mask& mask) {
  if (!scaling_) return LatteMechanism::DoWrite(x, state, mask);
  state["memory"] = ops::SumWrite(x[1], x[2], state["memory"], mask);
  if (by_length_)
    state["count"] =
        PositionsAfter(state["count"], PiecePositions(state["count"], x[1].size(2), mask), mask);
}

at::Tensor EfficientMechanism::Read(const std::vector<at::Tensor>& x, const State& state) {
  if (!scaling_) return LatteMechanism::Read(x, state);
  at::Tensor memory = state["memory"] / double(x[0].size(3));
  if (by_length_) memory = state["memory"] / state["count"].clamp_min(1).view({-1, 1, 1, 1});
  return at::matmul(x[0], memory.to(x[0].scalar_type()));
}

at::Tensor EfficientMechanism::Definition(Form form, const std::vector<at::Tensor>& queries,
                                          const std::vector<at::Tensor>& x) const {
  return EachQuery(form, queries, x, x[2].size(3), [&](const auto& query, const auto& seen) {
    if (scaling_) {
      const double divisor = double(by_length_ ? seen[1].size(2) : seen[1].size(3));
      return at::matmul(at::matmul(query[0], seen[1].transpose(2, 3)) / divisor, seen[2]);
    }
    const at::Tensor weights =
        at::matmul(at::softmax(query[0], 3),
                   at::softmax(seen[1], 2).transpose(2, 3));  // [B,H,1,S], rows sum to 1
    return at::matmul(weights, seen[2]);
  });
}

State EfficientMechanism::Merge(const State& first, const State& second) const {
  if (!scaling_) return LatteMechanism::Merge(first, second);
  State whole = {{{"memory", first["memory"] + second["memory"]}}};
  if (by_length_) whole.tensors.push_back({"count", first["count"] + second["count"]});
  return whole;
}

}  // namespace cistern
