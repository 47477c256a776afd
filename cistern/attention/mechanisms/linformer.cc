#include "cistern/attention/mechanisms/linformer.h"

#include <ATen/ATen.h>

#include <cmath>

#include "cistern/attention/definition.h"
#include "cistern/attention/token_positions.h"
#include "cistern/base/error.h"
#include "cistern/ops/sum_memory.h"

namespace cistern {
namespace {

at::Tensor Initial(const std::string& init, int64_t length, int64_t heads, int64_t slots) {
  const at::Tensor x = at::empty({length, heads, slots});
  const double N = double(length), k = double(slots);
  auto uniform = [&](double bound) { return x.uniform_(-bound, bound); };
  if (init == "xavier_uniform") return uniform(std::sqrt(6 / (N + k)));
  if (init == "uniform") return uniform(1 / std::sqrt(k));
  if (init == "xavier_normal") return x.normal_(0, std::sqrt(2 / (N + k)));
  if (init == "normal") return x.normal_(0, 0.02);
  if (init == "kaiming") return x.normal_(0, std::sqrt(2 / N));
  return x.normal_(0, 1 / std::sqrt(k));
}

}  // namespace

const MechanismInfo& linformer_mechanism() {
  static MechanismInfo info = [] {
    MechanismInfo i;
    i.name = "linformer";
    i.title = "Linformer";
    i.source = "Wang et al. 2020; P002 sec. 2.2; P003 sec. 3.1; spec 2.7";
    i.summary =
        "Keys and values are mixed into k slots by weights learned for each position; a query "
        "attends to the slots by softmax. Good where "
        "inputs have one length; it knows no position beyond max_length.";
    i.definition =
        "y_t = softmax(q_t K_t^T / sqrt(d)) V_t, K_t = sum_s E[:,s] k_s^T, V_t = sum_s F[:,s] "
        "v_s^T over the tokens s seen by t";
    i.forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
    i.positions = {"none", "learned", "sinusoidal"};
    i.time = "O(T k d)";
    i.state = "2 k d per head";
    i.cases.clear();
    for (const char* sharing : {"key_value", "headwise", "none", "layerwise"})
      i.cases.push_back(Json{{"slots", 4}, {"sharing", sharing}});
    for (const char* init :
         {"xavier_normal", "normal", "uniform", "kaiming", "johnson_lindenstrauss"}) {
      i.cases.push_back(Json{{"slots", 3}, {"init", init}});
    }
    return i;
  }();
  static const bool bound = (BindMechanism<LinformerMechanism>(info), true);
  (void)bound;
  return info;
}

Fields LinformerMechanism::Describe(Options& options) {
  Fields f;
  f.Add("slots", &options.slots, "memory slots of each head (k)", {1, 65536});
  f.Add("sharing", &options.sharing,
        "what shares one matrix: nothing, the heads (headwise), also keys and values (key_value), "
        "also the layers (layerwise)",
        {"none", "headwise", "key_value", "layerwise"});
  f.Add(
      "init", &options.init,
      "initial weights as in Long Range Arena (xavier_uniform), P003 (xavier_normal), "
      "Nystromformer (normal), lucidrains (uniform), P002 "
      "(kaiming), the paper's theorem (johnson_lindenstrauss)",
      {"xavier_uniform", "xavier_normal", "normal", "uniform", "kaiming", "johnson_lindenstrauss"});
  return f;
}

LinformerMechanism::LinformerMechanism(const MechanismInfo& info, const Options& options,
                                       const AttentionDims& dims)
    : Mechanism(info, dims), options_(options) {
  if (dims.max_length < 1)
    FailUsage("[linformer] has weights for each position and needs a max_length, got ",
              dims.max_length);
  if (options.sharing == "layerwise" && dims.first) {
    key_ = static_cast<const LinformerMechanism&>(*dims.first).key_;
    return;
  }
  const int64_t heads = options.sharing == "none" ? dims.heads : 1;
  auto add = [&](const std::string& name, at::Tensor& member) {
    AddWeight(name, member, Initial(options.init, dims.max_length, heads, options.slots),
              CoreWeight::Kind::kTrained);
  };
  add("key.weight", key_);
  if (options.sharing == "none" || options.sharing == "headwise") add("value.weight", value_);
}

std::vector<Projection> LinformerMechanism::Projections() const {
  return {{"q", Side::kQuery, dims().dim},
          {"k", Side::kKey, dims().dim},
          {"v", Side::kKey, dims().dim}};
}

State LinformerMechanism::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  const int64_t heads = dims().heads, width = dims().dim / heads;
  return {{{"key_memory", ops::EmptySums(batch, heads, options_.slots, width, options)},
           {"value_memory", ops::EmptySums(batch, heads, options_.slots, width, options)},
           {"count", at::zeros({batch}, options.dtype(at::kLong).requires_grad(false))}}};
}

at::Tensor LinformerMechanism::Positions(const State& state, int64_t length,
                                         const ops::Mask& mask) const {
  const at::Tensor positions = PiecePositions(state["count"], length, mask);
  if (positions.numel() == 0) return positions;
  const at::Tensor of_tokens =
      mask.lengths ? positions.masked_fill(mask.Padding(length), 0) : positions;
  const int64_t last = of_tokens.max().item<int64_t>(), limit = dims().max_length;
  CISTERN_CHECK(last < limit, "[linformer] position ", last, " is beyond max_length=", limit,
                ": each position has weights of its own; make the model with a larger max_length, "
                "or use abc_mlp, whose weights come from "
                "the token");
  return positions.clamp_max(limit - 1);
}

at::Tensor LinformerMechanism::Weights(const at::Tensor& matrix, const at::Tensor& positions,
                                       at::ScalarType type) const {
  const at::Tensor rows = at::embedding(matrix.flatten(1), positions).to(type);  // [B,T,(1 or H) k]
  const int64_t batch = positions.size(0), length = positions.size(1);
  return rows.view({batch, length, matrix.size(1), options_.slots})
      .transpose(1, 2)
      .expand({-1, dims().heads, -1, -1});
}

at::Tensor LinformerMechanism::Attend(const at::Tensor& logits) const {
  const double scale = 1 / std::sqrt(double(dims().dim / dims().heads));
  at::Tensor p = at::softmax(logits.transpose(1, 2) * scale, -1);
  if (is_training() && dims().dropout > 0) p = at::dropout(p, dims().dropout, true);
  return p.transpose(1, 2);
}

at::Tensor LinformerMechanism::DoExtend(const std::vector<at::Tensor>& x, State& state,
                                        const ops::Mask& mask) {
  const auto type = x[0].scalar_type();
  const at::Tensor positions = Positions(state, x[0].size(2), mask),
                   e = Weights(key_, positions, type);
  const at::Tensor f = value_.defined() ? Weights(value_, positions, type) : e;
  const ops::SumResult matched = ops::SumMatch(x[0], e, x[1], state["key_memory"], mask);
  const ops::SumResult result =
      ops::SumRead(Attend(matched.out), f, x[2], state["value_memory"], mask);
  state["key_memory"] = matched.memory;
  state["value_memory"] = result.memory;
  state["count"] = PositionsAfter(state["count"], positions, mask);
  return result.out;
}

void LinformerMechanism::DoWrite(const std::vector<at::Tensor>& x, State& state,
                                 const ops::Mask& mask) {
  const auto type = x[1].scalar_type();
  const at::Tensor positions = Positions(state, x[1].size(2), mask),
                   e = Weights(key_, positions, type);
  const at::Tensor f = value_.defined() ? Weights(value_, positions, type) : e;
  state["key_memory"] = ops::SumWrite(e, x[1], state["key_memory"], mask);
  state["value_memory"] = ops::SumWrite(f, x[2], state["value_memory"], mask);
  state["count"] = PositionsAfter(state["count"], positions, mask);
}

at::Tensor LinformerMechanism::Read(const std::vector<at::Tensor>& x, const State& state) {
  const auto type = x[0].scalar_type();
  return at::matmul(Attend(at::matmul(x[0], state["key_memory"].to(type).transpose(2, 3))),
                    state["value_memory"].to(type));
}

at::Tensor LinformerMechanism::Definition(Form form, const std::vector<at::Tensor>& queries,
                                          const std::vector<at::Tensor>& x) const {
  const double scale = 1 / std::sqrt(double(dims().dim / dims().heads));
  return EachQuery(form, queries, x, x[2].size(3), [&](const auto& query, const auto& seen) {
    auto mixed = [&](const at::Tensor& matrix,
                     const at::Tensor& y) {  // E[:, 0..S) y for every head
      const at::Tensor weights =
          matrix.to(at::kDouble).narrow(0, 0, y.size(2)).permute({1, 2, 0});  // [1 or H,k,S]
      return at::matmul(weights, y);
    };
    const at::Tensor keys = mixed(key_, seen[1]),
                     values = mixed(value_.defined() ? value_ : key_, seen[2]);
    return at::matmul(at::softmax(at::matmul(query[0], keys.transpose(2, 3)) * scale, 3), values);
  });
}

}  // namespace cistern
