#include "cistern/attention/mechanisms/luna_causal.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "cistern/attention/definition.h"
#include "cistern/attention/token_positions.h"
#include "cistern/base/error.h"
#include "cistern/ops/dropout.h"
#include "cistern/ops/exact_attention.h"
#include "cistern/ops/sum_memory.h"
#include "cistern/ops/tensor_rows.h"

namespace cistern {

MechanismInfo luna_causal_mechanism() {
  MechanismInfo i = InfoOf<LunaCausalMechanism>("luna_causal");
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
  i.positions = AddedPositions();
  i.slots = true;
  i.time = "O(T M d)";
  i.state = "2 M d per head";
  i.merges = true;
  i.cases = {Json{{"slots", 3}}, Json{{"slots", 4},
                                      {"weight", "elu"},
                                      {"tie_kv", false},
                                      {"init", "scaled"},
                                      {"sinusoid", true}}};
  return i;
}

Fields LunaCausalMechanism::Describe(Options& options) {
  Fields f;
  MemoryMechanism::Describe(options, f);
  f.Add("weight", &options.weight,
        "how a token's fit becomes its weight: log2(1 + 2^u) as Luna's code, or elu(u) + 1, which "
        "the paper allows",
        {{Weight::kSoftplus, "softplus"}, {Weight::kElu, "elu"}});
  f.Add("tie_kv", &options.tie_kv, "keys are also the values, as in Luna");
  return f;
}

LunaCausalMechanism::LunaCausalMechanism(const MechanismInfo& info, const Options& options,
                                         const AttentionDims& dims)
    : MemoryMechanism(info, options, dims), options_(options) {
  q_ = AddProjection({"q", Side::kQuery, dims.dim});
  fit_k_ = AddProjection({"pc", Side::kKey, dims.dim});
  k_ = AddProjection({options.tie_kv ? "c" : "k", Side::kKey, dims.dim});
  v_ = options.tie_kv ? k_ : AddProjection({"v", Side::kKey, dims.dim});
  memory_q_ = AddProjection({"pq", Side::kMemory, dims.dim});
  key_memory_ = AddState("key_memory");
  value_memory_ = AddState("value_memory");
  count_ = AddState("count");
  if (!dims.memory_given) return;
  memory_ = AddState("memory");
  readable_ = AddState("readable");
}

bool LunaCausalMechanism::TakesBFloat16(Form form) const { return form == Form::kCausal; }

at::Tensor LunaCausalMechanism::DoPack(const std::vector<at::Tensor>&, const ops::Mask&) {
  throw Error("[luna_causal] packs nothing; use luna instead");
}
at::Tensor LunaCausalMechanism::DoUnpack(const std::vector<at::Tensor>&,
                                         const std::vector<at::Tensor>&, const ops::Mask&) {
  throw Error("[luna_causal] unpacks nothing; use luna instead");
}

State LunaCausalMechanism::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  State state = UndefinedState();
  state[key_memory_] = ops::EmptySums(batch, dims().heads, Slots(), Width(), options);
  state[value_memory_] = ops::EmptySums(batch, dims().heads, Slots(), Width(), options);
  const at::TensorOptions counts = options.dtype(at::kLong).requires_grad(false);
  state[count_] = at::zeros({batch}, counts);
  if (!dims().memory_given) return state;
  state[memory_] = at::zeros({batch, dims().heads, Slots(), Width()}, options.requires_grad(false));
  state[readable_] = at::zeros({batch}, counts);
  return state;
}

void LunaCausalMechanism::GiveMemory(const std::vector<at::Tensor>& memory,
                                     const at::Tensor& readable, State& state) const {
  const int64_t batch = state[count_].size(0);
  state[memory_] = memory.at(0).expand({batch, -1, -1, -1}).contiguous();
  state[readable_] = readable.defined() ? readable : at::full_like(state[count_], Slots());
}

void LunaCausalMechanism::CheckState(const State& state) const {
  if (!dims().memory_given) return;
  const at::Tensor& readable = state[readable_];
  CISTERN_CHECK(readable.ge(0).logical_and(readable.le(Slots())).all().item<bool>(),
                "[luna_causal] readable must be from 0 to slots=", Slots());
}

at::Tensor LunaCausalMechanism::Omega(const at::Tensor& u) const {
  return options_.weight == Weight::kElu ? at::elu(u) + 1 : at::softplus(u, std::log(2.0), 64);
}

at::Tensor LunaCausalMechanism::WriteWeights(const std::vector<at::Tensor>& x,
                                             const State& state) const {
  const at::Tensor memory =
      dims().memory_given ? state[memory_] : OfMemory(x, memory_q_, x[fit_k_].size(0));
  const auto type = ops::ProductTypeOf(x[fit_k_]);
  const at::Tensor fit = at::matmul(x[fit_k_].to(type), memory.to(type).transpose(2, 3));
  const at::Tensor a = Omega(fit.to(ops::ComputeTypeOf(fit)) / std::sqrt(double(Width())));
  // By tokens, so that what is dropped does not depend on how many there are.
  return ops::Dropout(a.transpose(1, 2), Dropout(), is_training()).transpose(1, 2);
}

at::Tensor LunaCausalMechanism::ReadWeights(const at::Tensor& matched, const at::Tensor& tokens,
                                            const State& state) const {
  at::Tensor logits = matched / (tokens * std::sqrt(double(Width())));
  if (!dims().memory_given) return at::softmax(logits, -1) / tokens;
  const at::Tensor& readable = state[readable_];
  const at::Tensor hidden =
      ops::Within(readable.clamp_min(1), Slots()).logical_not().unsqueeze(1).unsqueeze(1);
  const at::Tensor none = readable.eq(0).view({-1, 1, 1, 1});
  logits = logits.masked_fill(hidden, -std::numeric_limits<double>::infinity());
  return at::softmax(logits, -1).masked_fill(none, 0.0) / tokens;
}

at::Tensor LunaCausalMechanism::DoExtend(const std::vector<at::Tensor>& x, State& state,
                                         const ops::Mask& mask) {
  const at::Tensor a = WriteWeights(x, state),
                   positions = PiecePositions(state[count_], x[q_].size(2), mask);
  const at::Tensor tokens = (positions + 1).to(a.dtype()).unsqueeze(1).unsqueeze(-1);  // [B,1,T,1]
  const at::Tensor matched = ops::SumMatchExtend(x[q_], a, x[k_], state[key_memory_], mask);
  const at::Tensor out =
      ops::SumReadExtend(ReadWeights(matched, tokens, state), a, x[v_], state[value_memory_], mask);
  state[count_] = PositionsAfter(state[count_], positions, mask);
  return out;
}

void LunaCausalMechanism::DoWrite(const std::vector<at::Tensor>& x, State& state,
                                  const ops::Mask& mask) {
  const at::Tensor a = WriteWeights(x, state),
                   positions = PiecePositions(state[count_], x[k_].size(2), mask);
  state[key_memory_] = ops::SumWrite(a, x[k_], state[key_memory_], mask);
  state[value_memory_] = ops::SumWrite(a, x[v_], state[value_memory_], mask);
  state[count_] = PositionsAfter(state[count_], positions, mask);
}

at::Tensor LunaCausalMechanism::Read(const std::vector<at::Tensor>& x, const State& state) {
  const auto type = x[q_].scalar_type();
  const at::Tensor tokens = state[count_].clamp_min(1).to(type).view({-1, 1, 1, 1});
  const at::Tensor matched = at::matmul(x[q_], state[key_memory_].to(type).transpose(2, 3));
  return at::matmul(ReadWeights(matched, tokens, state), state[value_memory_].to(type));
}

at::Tensor LunaCausalMechanism::Definition(Form form, const std::vector<at::Tensor>& queries,
                                           const std::vector<at::Tensor>& x) const {
  const double root = std::sqrt(double(Width()));
  return EachQuery(form, queries, x, Width(), [&](const auto& query, const auto& seen) {
    const double t = double(seen[fit_k_].size(2));
    const at::Tensor u =
        at::matmul(DefinedMemory(), seen[fit_k_].transpose(2, 3)) / root;  // [B,H,M,t]
    const at::Tensor a = options_.weight == Weight::kElu ? at::where(u > 0, u + 1, u.exp())
                                                         : at::logaddexp2(u, at::zeros_like(u));
    const at::Tensor keys = at::matmul(a, seen[k_]) / t, values = at::matmul(a, seen[v_]) / t;
    return at::matmul(at::softmax(at::matmul(query[q_], keys.transpose(2, 3)) / root, 3), values);
  });
}

State LunaCausalMechanism::Merge(const State& first, const State& second) const {
  State whole = UndefinedState();
  for (const StateId& id : {key_memory_, value_memory_, count_})
    whole[id] = SumOf(id, first, second);
  if (dims().memory_given) whole[memory_] = first[memory_], whole[readable_] = first[readable_];
  return whole;
}

}  // namespace cistern
