#include "cistern/attention/mechanisms/shared_workspace.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cistern/attention/definition.h"
#include "cistern/base/error.h"
#include "cistern/ops/dropout.h"
#include "cistern/ops/linear_product.h"
#include "cistern/ops/softmax_attention.h"
#include "cistern/ops/tensor_rows.h"

namespace cistern {
namespace {

constexpr double kNormEps = 1e-5;

}  // namespace

MechanismInfo shared_workspace_mechanism() {
  MechanismInfo i = InfoOf<SharedWorkspaceMechanism>("shared_workspace");
  i.title = "Shared workspace";
  i.source =
      "Goyal et al. 2022 (Coordination among neural modules through a shared global workspace); "
      "P003 eq. 10; spec 2.14";
  i.summary =
      "Slots compete for a few tokens each, change through gates, and are read by all tokens; "
      "the memory goes on from block to block.";
  i.definition =
      "y_t = softmax(q_t M'^T / sqrt(d)) M', M' = sigmoid(i) tanh(A) + sigmoid(f + 1) M, A from "
      "M and top_k(softmax(M K^T)) V over the "
      "tokens";
  i.forms = {Form::kBidirectional};
  i.refusals = {
      "causal: its slots attend to all tokens at once; use gated_slots instead, whose slots have "
      "gates and run causally",
      "cross: no source defines it; use luna instead"};
  i.verbs = false;
  i.memory = MemoryUse::kReplaced;
  i.positions = AddedPositions();
  i.time = "O(T M d + M D^2)";
  i.state = "none";
  i.fixes_length = [](const Json& options) {
    return options.value("gate_input", "mean") == "flattened";
  };
  // With the identity a head may weigh all tokens alike, and then any of them is among its first
  // three.
  i.cases = {Json{{"slots", 3}, {"init", "normal"}}, Json{{"slots", 4}, {"top_k", 0}},
             Json{{"slots", 3}, {"top_k", 0}, {"gate_input", "flattened"}}};
  return i;
}

Fields SharedWorkspaceMechanism::Describe(Options& options) {
  options.init = MemoryInit::kIdentity;
  Fields f;
  MemoryMechanism::Describe(options, f);
  f.Add("top_k", &options.top_k, "tokens a slot takes from, those it weighs most; 0: all",
        {0, 1 << 20});
  f.Add("gate_input", &options.gate_input,
        "the tokens' part of the gates: a map of their mean, or of all of them behind each other "
        "(flattened), which has 2 D D weights for each position up to max_length",
        {{GateInput::kMean, "mean"}, {GateInput::kFlattened, "flattened"}});
  return f;
}

SharedWorkspaceMechanism::SharedWorkspaceMechanism(const MechanismInfo& info,
                                                   const Options& options,
                                                   const AttentionDims& dims)
    : MemoryMechanism(info, options, dims), top_k_(options.top_k) {
  const auto add = [&](const std::string& name, Affine& affine, const at::Tensor& weight) {
    AddWeight(name + ".weight", affine.weight, weight, CoreWeight::Kind::kTrained);
    AddWeight(name + ".bias", affine.bias, at::zeros({weight.size(0)}), CoreWeight::Kind::kTrained);
  };
  const auto uniform = [&](int64_t out) {
    const double bound = 1 / std::sqrt(double(dims.dim));
    return at::empty({out, dims.dim}).uniform_(-bound, bound);
  };
  add("packed_norm", packed_norm_, at::ones({dims.dim}));
  add("up_proj", up_, uniform(dims.dim));
  add("down_proj", down_, uniform(dims.dim));
  add("mlp_norm", mlp_norm_, at::ones({dims.dim}));
  add("memory_gate_proj", gate_, uniform(2 * dims.dim));
  q_ = AddProjection({"q", Side::kQuery, dims.dim});
  k_ = AddProjection({"k", Side::kKey, dims.dim});
  v_ = AddProjection({"v", Side::kKey, dims.dim});
  Projection gate = {"gate", Side::kKey, 2 * dims.dim};
  gate.heads = 1;
  if (options.gate_input == GateInput::kFlattened) {
    if (dims.max_length < 1)
      FailUsage(
          "[shared_workspace] gate_input=flattened has weights for each position and needs a "
          "max_length, got ",
          dims.max_length);
    gate = {"tokens", Side::kKey, dims.dim};
    gate.heads = 1;
    gate.identity = true;
    const double bound = 1 / std::sqrt(double(dims.max_length) * double(dims.dim));
    add("flattened_gate_proj", flattened_,
        at::empty({2 * dims.dim, dims.max_length * dims.dim}).uniform_(-bound, bound));
  }
  gate_inputs_ = AddProjection(gate);
  memory_q_ = AddProjection({"memory_q", Side::kMemory, dims.dim});
  Projection memory = {"memory", Side::kMemory, dims.dim};
  memory.identity = true;
  memory_itself_ = AddProjection(memory);
  packed_k_ = AddProjection({"packed_k", Side::kPacked, dims.dim});
  packed_v_ = AddProjection({"packed_v", Side::kPacked, dims.dim});
}

at::Tensor SharedWorkspaceMechanism::DoPack(const std::vector<at::Tensor>& x,
                                            const ops::Mask& mask) {
  const int64_t batch = x[k_].size(0), length = x[k_].size(2);
  at::Tensor queries = OfMemory(x, memory_q_, batch);
  const auto type = x[k_].scalar_type();
  ops::SoftmaxOptions options;
  options.dropout = Dropout();
  options.scale = 1;
  if (top_k_ == 0 || top_k_ >= length)
    return ops::SoftmaxAttention(queries.to(type), x[k_], x[v_], options, mask.WithoutStarts());
  // Not rounded: they decide which tokens a slot takes from. [B,H,M,T]
  queries = queries.to(ops::ComputeTypeOf(queries));
  at::Tensor scores = at::matmul(queries, x[k_].to(queries.scalar_type()).transpose(2, 3));
  at::Tensor pad = mask.Padding(length);
  if (pad.defined()) {
    pad = pad.unsqueeze(1).unsqueeze(1);
    scores = scores.masked_fill(pad, std::numeric_limits<float>::lowest());
  }
  at::Tensor p = at::softmax(scores, -1);
  if (pad.defined()) p = p.masked_fill(pad, 0.0);
  const auto [weights, tokens] = p.topk(top_k_, -1);  // [B,H,M,k]
  const at::Tensor kept = ops::Dropout(weights, Dropout(), is_training());
  const at::Tensor index = tokens.flatten(2).unsqueeze(-1).expand({-1, -1, -1, Width()});
  const at::Tensor values = x[v_].gather(2, index).unflatten(2, {Slots(), top_k_});  // [B,H,M,k,d]
  return (kept.unsqueeze(-1) * values).sum(3).to(type);
}

at::Tensor SharedWorkspaceMechanism::Update(const std::vector<at::Tensor>& x,
                                            const at::Tensor& packed, const ops::Mask& mask) const {
  const int64_t dim = dims().dim;
  const bool wide = up_.weight.scalar_type() == at::kDouble;
  CISTERN_CHECK((x[k_].scalar_type() == at::kDouble) == wide,
                "[shared_workspace] expected tokens and weights of one dtype, got ",
                x[k_].scalar_type(), " and ", up_.weight.scalar_type());
  auto norm = [&](const at::Tensor& y, const Affine& a) {
    return at::layer_norm(y, {dim}, a.weight, a.bias, kNormEps);
  };
  const at::Tensor memory = OfMemory(x, memory_itself_, packed.size(0)).transpose(1, 2).flatten(2);
  at::Tensor next = norm(memory + packed, packed_norm_);
  next = norm(next + ops::LinearProduct(at::relu(ops::LinearProduct(next, up_.weight, up_.bias)),
                                        down_.weight, down_.bias),
              mlp_norm_);
  const at::Tensor gates = OfTokens(x[gate_inputs_], mask) +
                           ops::LinearProduct(at::tanh(memory), gate_.weight, gate_.bias);
  return at::sigmoid(gates.narrow(2, 0, dim)) * at::tanh(next) +
         at::sigmoid(gates.narrow(2, dim, dim) + 1) * memory;
}

at::Tensor SharedWorkspaceMechanism::OfTokens(const at::Tensor& x, const ops::Mask& mask) const {
  const at::Tensor inputs = ZeroPadding(x, mask);  // [B,1,T,2D], or the tokens themselves
  const int64_t length = inputs.size(2);
  const auto type = ops::ComputeTypeOf(x);
  if (flattened_.weight.defined()) {
    CISTERN_CHECK(length <= dims().max_length, "[shared_workspace] ", length,
                  " tokens are more than max_length=", dims().max_length,
                  ": gate_input=flattened has weights for each position");
    const at::Tensor weight = flattened_.weight.narrow(1, 0, length * dims().dim);
    return ops::LinearProduct(inputs.flatten(2).to(weight.scalar_type()), weight, flattened_.bias);
  }
  const at::Tensor count = mask.lengths ? mask.lengths->view({-1, 1, 1}).clamp_min(1)
                                        : at::full({1, 1, 1}, std::max<int64_t>(1, length));
  return inputs.sum({2}, false, type) / count.to(x.device(), type);
}

at::Tensor SharedWorkspaceMechanism::DoUnpack(const std::vector<at::Tensor>& x,
                                              const std::vector<at::Tensor>& packed,
                                              const ops::Mask&) {
  ops::SoftmaxOptions options;
  options.dropout = Dropout();
  return ops::SoftmaxAttention(x[q_], packed[packed_k_], packed[packed_v_], options);
}

at::Tensor SharedWorkspaceMechanism::Definition(Form form, const std::vector<at::Tensor>& queries,
                                                const std::vector<at::Tensor>& x) const {
  const int64_t dim = dims().dim;
  auto norm = [&](const at::Tensor& y, const Affine& a) {
    const at::Tensor centred = y - y.mean(-1, true);
    return centred / (centred.square().mean(-1, true) + kNormEps).sqrt() * a.weight + a.bias;
  };
  auto map = [](const at::Tensor& y, const Affine& a) {
    return at::matmul(y, a.weight.t()) + a.bias;
  };
  return EachQuery(form, queries, x, Width(), [&](const auto& query, const auto& seen) {
    const int64_t batch = seen[k_].size(0), length = seen[k_].size(2);
    at::Tensor p = at::softmax(at::matmul(DefinedMemory(), seen[k_].transpose(2, 3)), 3);
    if (top_k_ > 0 && top_k_ < length)
      p = p * (p >= std::get<0>(p.sort(-1, true)).narrow(3, top_k_ - 1, 1)).to(at::kDouble);
    const at::Tensor packed =
                         at::matmul(p, seen[v_]).transpose(1, 2).reshape({batch, Slots(), dim}),
                     memory = DefinedMemory(1).squeeze(1);  // one head: [1,M,D]
    const at::Tensor a = norm(memory + packed, packed_norm_),
                     b = norm(a + map(map(a, up_).clamp_min(0), down_), mlp_norm_);
    at::Tensor of_tokens = seen[gate_inputs_].squeeze(1);  // [B,T,2D] or [B,T,D]
    if (flattened_.weight.defined()) {
      at::Tensor sum = flattened_.bias.view({1, 1, -1}).expand({batch, 1, -1});
      for (int64_t t = 0; t < length; ++t) {
        const at::Tensor weight = flattened_.weight.narrow(1, t * dim, dim);
        sum = sum + at::matmul(of_tokens.narrow(1, t, 1), weight.t());
      }
      of_tokens = sum;
    } else {
      of_tokens = of_tokens.mean(1, true);
    }
    const at::Tensor gates = of_tokens + map(at::tanh(memory), gate_);
    const at::Tensor next = at::tanh(b) / (1 + (-gates.narrow(2, 0, dim)).exp()) +
                            memory / (1 + (-gates.narrow(2, dim, dim) - 1).exp());
    const at::Tensor heads = next.reshape({batch, Slots(), dims().heads, Width()}).transpose(1, 2);
    return at::matmul(
        at::softmax(at::matmul(query[q_], heads.transpose(2, 3)) / std::sqrt(double(Width())), 3),
        heads);
  });
}

}  // namespace cistern
