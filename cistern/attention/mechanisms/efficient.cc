#include "cistern/attention/mechanisms/efficient.h"

#include <ATen/ATen.h>

#include "cistern/attention/definition.h"
#include "cistern/attention/feature_attention.h"
#include "cistern/attention/token_positions.h"
#include "cistern/base/error.h"
#include "cistern/ops/sum_memory.h"

namespace cistern {

MechanismInfo efficient_mechanism() {
  MechanismInfo i = InfoOf<EfficientMechanism>("efficient");
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
  i.positions = AddedPositions();
  i.time = "O(T d^2)";
  i.state = "d (d + 1) per head; d^2 doubles with normaliser=scaling";
  i.cases = {Json::object(), Json{{"normaliser", "scaling"}},
             Json{{"normaliser", "scaling"}, {"divisor", "length"}}};
  i.merges = true;
  return i;
}

Fields EfficientMechanism::Describe(Options& options) {
  Fields f;
  f.Add("normaliser", &options.normaliser,
        "of queries and keys: softmax, or scaling for plain products",
        {{Normaliser::kSoftmax, "softmax"}, {Normaliser::kScaling, "scaling"}});
  f.Add(
      "divisor", &options.divisor,
      "with scaling: products are divided by the head width d (P002) or by the tokens seen (Shen)",
      {{Divisor::kWidth, "width"}, {Divisor::kLength, "length"}});
  return f;
}

EfficientMechanism::EfficientMechanism(const MechanismInfo& info, const Options& options,
                                       const AttentionDims& dims)
    : LatteMechanism(info, dims.dim, dims),
      scaling_(options.normaliser == Normaliser::kScaling),
      by_length_(options.divisor == Divisor::kLength) {
  if (by_length_ && !scaling_)
    FailUsage(
        "[efficient] divisor=length goes with normaliser=scaling; softmax divides by nothing");
  if (scaling_) RefuseAttentionDropout(info, dims);
  if (!scaling_) {
    DeclareStates();
    return;
  }
  memory_ = AddState("memory");
  if (by_length_) count_ = AddState("count");
}

State EfficientMechanism::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  if (!scaling_) return LatteMechanism::EmptyState(batch, options);
  const int64_t width = dims().dim / dims().heads;
  State state = UndefinedState();
  state[memory_] = ops::EmptySums(batch, dims().heads, width, width, options);
  if (by_length_) state[count_] = at::zeros({batch}, options.dtype(at::kLong));
  return state;
}

at::Tensor EfficientMechanism::DoExtend(const std::vector<at::Tensor>& x, State& state,
                                        const ops::Mask& mask) {
  if (!scaling_) return LatteMechanism::DoExtend(x, state, mask);
  const at::Tensor out = ops::SumReadExtend(x[q_], x[k_], x[v_], state[memory_], mask);
  if (!by_length_) return out / double(x[q_].size(3));
  const at::Tensor positions = PiecePositions(state[count_], x[q_].size(2), mask);
  state[count_] = PositionsAfter(state[count_], positions, mask);
  return out / (positions + 1).unsqueeze(1).unsqueeze(-1).to(out.scalar_type());
}

void EfficientMechanism::DoWrite(const std::vector<at::Tensor>& x, State& state,
                                 const ops::Mask& mask) {
  if (!scaling_) return LatteMechanism::DoWrite(x, state, mask);
  state[memory_] = ops::SumWrite(x[k_], x[v_], state[memory_], mask);
  if (by_length_)
    state[count_] =
        PositionsAfter(state[count_], PiecePositions(state[count_], x[k_].size(2), mask), mask);
}

at::Tensor EfficientMechanism::Read(const std::vector<at::Tensor>& x, const State& state) {
  if (!scaling_) return LatteMechanism::Read(x, state);
  at::Tensor memory = state[memory_] / double(x[q_].size(3));
  if (by_length_) memory = state[memory_] / state[count_].clamp_min(1).view({-1, 1, 1, 1});
  return at::matmul(x[q_], memory.to(x[q_].scalar_type()));
}

at::Tensor EfficientMechanism::Definition(Form form, const std::vector<at::Tensor>& queries,
                                          const std::vector<at::Tensor>& x) const {
  return EachQuery(form, queries, x, x[v_].size(3), [&](const auto& query, const auto& seen) {
    if (scaling_) {
      const double divisor = double(by_length_ ? seen[k_].size(2) : seen[k_].size(3));
      return at::matmul(at::matmul(query[q_], seen[k_].transpose(2, 3)) / divisor, seen[v_]);
    }
    const at::Tensor weights =
        at::matmul(at::softmax(query[q_], 3),
                   at::softmax(seen[k_], 2).transpose(2, 3));  // [B,H,1,S], rows sum to 1
    return at::matmul(weights, seen[v_]);
  });
}

State EfficientMechanism::Merge(const State& first, const State& second) const {
  if (!scaling_) return LatteMechanism::Merge(first, second);
  State whole = UndefinedState();
  whole[memory_] = SumOf(memory_, first, second);
  if (by_length_) whole[count_] = SumOf(count_, first, second);
  return whole;
}

}  // namespace cistern
