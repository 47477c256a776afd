#include "cistern/attention/mechanisms/luna_causal.h"

#include <ATen/ATen.h>

#include <cmath>

#include "cistern/attention/definition.h"
#include "cistern/attention/token_positions.h"
#include "cistern/base/error.h"
#include "cistern/ops/sum_memory.h"

namespace cistern {

const MechanismInfo& luna_causal_mechanism() {
  static MechanismInfo info = [] {
    MechanismInfo i;
    i.name = "luna_causal";
    i.title = "Luna, causal";
    i.source = "Ma et al. 2021 sec. 3.3; P004 eq. 24-26; spec 2.10";
    i.summary =
        "Slots hold running sums of keys and of values, weighed by how well a token fits a learned "
        "memory; a query chooses among them.";
    i.definition =
        "y_t = softmax(q_t G_t^T / sqrt(d)) R_t, G_t = 1/t sum_s a_s k_s^T, R_t = 1/t sum_s a_s "
        "v_s^T, a_s = omega(P c_s / sqrt(d)), over "
        "s <= t";
    i.forms = {Form::kCausal};
    i.refusals = {
        "bidirectional: it divides by the position; use luna instead, whose slots attend to all "
        "tokens",
        "cross: it divides by the position; use luna instead"};
    i.memory = MemoryUse::kFixed;
    i.positions = {"none", "learned", "sinusoidal"};
    i.time = "O(T M d)";
    i.state = "2 M d per head";
    i.cases = {Json{{"slots", 3}}, Json{{"slots", 4},
                                        {"weight", "elu"},
                                        {"tie_kv", false},
                                        {"init", "scaled"},
                                        {"sinusoid", true}}};
    return i;
  }();
  static const bool bound = (BindMechanism<LunaCausalMechanism>(info), true);
  (void)bound;
  return info;
}

Fields LunaCausalMechanism::Describe(Options& options) {
  Fields f;
  MemoryMechanism::Describe(options, f);
  f.Add("weight", &options.weight,
        "how a token's fit becomes its weight: log2(1 + 2^u) as Luna's code, or elu(u) + 1, which "
        "the paper allows",
        {"softplus", "elu"});
  f.Add("tie_kv", &options.tie_kv, "keys are also the values, as in Luna");
  return f;
}

LunaCausalMechanism::LunaCausalMechanism(const MechanismInfo& info, const Options& options,
                                         const AttentionDims& dims)
    : MemoryMechanism(info, options, dims), options_(options) {}

std::vector<Projection> LunaCausalMechanism::Projections() const {
  const int64_t dim = dims().dim;
  if (options_.tie_kv)
    return {{"q", Side::kQuery, dim},
            {"pc", Side::kKey, dim},
            {"c", Side::kKey, dim},
            {"pq", Side::kMemory, dim}};
  return {{"q", Side::kQuery, dim},
          {"pc", Side::kKey, dim},
          {"k", Side::kKey, dim},
          {"v", Side::kKey, dim},
          {"pq", Side::kMemory, dim}};
}

at::Tensor LunaCausalMechanism::DoPack(const std::vector<at::Tensor>&, const ops::Mask&) {
  throw Error("[luna_causal] packs nothing; use luna instead");
}
at::Tensor LunaCausalMechanism::DoUnpack(const std::vector<at::Tensor>&,
                                         const std::vector<at::Tensor>&, const ops::Mask&) {
  throw Error("[luna_causal] unpacks nothing; use luna instead");
}

State LunaCausalMechanism::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  return {{{"key_memory", ops::EmptySums(batch, dims().heads, Slots(), Width(), options)},
           {"value_memory", ops::EmptySums(batch, dims().heads, Slots(), Width(), options)},
           {"count", at::zeros({batch}, options.dtype(at::kLong).requires_grad(false))}}};
}

at::Tensor LunaCausalMechanism::Omega(const at::Tensor& u) const {
  return options_.weight == "elu" ? at::elu(u) + 1 : at::softplus(u, std::log(2.0), 64);
}

at::Tensor LunaCausalMechanism::WriteWeights(const std::vector<at::Tensor>& x) const {
  const at::Tensor a = Omega(at::matmul(x[1], OfMemory(x, 0, x[1].size(0)).transpose(2, 3)) /
                             std::sqrt(double(Width())));
  return Dropout() > 0 ? at::dropout(a, Dropout(), true) : a;
}

at::Tensor LunaCausalMechanism::ReadWeights(const at::Tensor& matched,
                                            const at::Tensor& tokens) const {
  return at::softmax(matched / (tokens * std::sqrt(double(Width()))), -1) / tokens;
}

at::Tensor LunaCausalMechanism::DoExtend(const std::vector<at::Tensor>& x, State& state,
                                         const ops::Mask& mask) {
  const at::Tensor a = WriteWeights(x),
                   positions = PiecePositions(state["count"], x[0].size(2), mask);
  const at::Tensor tokens =
      (positions + 1).to(x[0].scalar_type()).unsqueeze(1).unsqueeze(-1);  // [B,1,T,1]
  const ops::SumResult matched = ops::SumMatch(x[0], a, x[2], state["key_memory"], mask);
  const ops::SumResult result =
      ops::SumRead(ReadWeights(matched.out, tokens), a, Values(x), state["value_memory"], mask);
  state["key_memory"] = matched.memory;
  state["value_memory"] = result.memory;
  state["count"] = PositionsAfter(state["count"], positions, mask);
  return result.out;
}

void LunaCausalMechanism::DoWrite(const std::vector<at::Tensor>& x, State& state,
                                  const ops::Mask& mask) {
  const at::Tensor a = WriteWeights(x),
                   positions = PiecePositions(state["count"], x[2].size(2), mask);
  state["key_memory"] = ops::SumWrite(a, x[2], state["key_memory"], mask);
  state["value_memory"] = ops::SumWrite(a, Values(x), state["value_memory"], mask);
  state["count"] = PositionsAfter(state["count"], positions, mask);
}

at::Tensor LunaCausalMechanism::Read(const std::vector<at::Tensor>& x, const State& state) {
  const auto type = x[0].scalar_type();
  const at::Tensor tokens = state["count"].clamp_min(1).to(type).view({-1, 1, 1, 1});
  const at::Tensor matched = at::matmul(x[0], state["key_memory"].to(type).transpose(2, 3));
  return at::matmul(ReadWeights(matched, tokens), state["value_memory"].to(type));
}

at::Tensor LunaCausalMechanism::Definition(Form form, const std::vector<at::Tensor>& queries,
                                           const std::vector<at::Tensor>& x) const {
  const double root = std::sqrt(double(Width()));
  return EachQuery(form, queries, x, Width(), [&](const auto& query, const auto& seen) {
    const double t = double(seen[1].size(2));
    const at::Tensor u = at::matmul(MemoryHeads(), seen[1].transpose(2, 3)) / root;  // [B,H,M,t]
    const at::Tensor a = options_.weight == "elu" ? at::where(u > 0, u + 1, u.exp())
                                                  : at::logaddexp2(u, at::zeros_like(u));
    const at::Tensor keys = at::matmul(a, seen[2]) / t, values = at::matmul(a, Values(seen)) / t;
    return at::matmul(at::softmax(at::matmul(query[0], keys.transpose(2, 3)) / root, 3), values);
  });
}

}  // namespace cistern
