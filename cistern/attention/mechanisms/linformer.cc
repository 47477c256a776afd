#include "cistern/attention/mechanisms/linformer.h"

#include <ATen/ATen.h>

#include <cmath>

#include "cistern/attention/definition.h"
#include "cistern/attention/token_positions.h"
#include "cistern/base/error.h"
#include "cistern/ops/dropout.h"
#include "cistern/ops/exact_attention.h"
#include "cistern/ops/slot_attention.h"
#include "cistern/ops/sum_memory.h"
#include "cistern/ops/tensor_rows.h"

namespace cistern {
namespace {

at::Tensor Initial(LinformerMechanism::Init init, int64_t length, int64_t heads, int64_t slots) {
  using Init = LinformerMechanism::Init;
  const at::Tensor x = at::empty({length, heads, slots});
  const double N = double(length), k = double(slots);
  auto uniform = [&](double bound) { return x.uniform_(-bound, bound); };
  switch (init) {
    case Init::kXavierUniform:
      return uniform(std::sqrt(6 / (N + k)));
    case Init::kUniform:
      return uniform(1 / std::sqrt(k));
    case Init::kXavierNormal:
      return x.normal_(0, std::sqrt(2 / (N + k)));
    case Init::kNormal:
      return x.normal_(0, 0.02);
    case Init::kKaiming:
      return x.normal_(0, std::sqrt(2 / N));
    case Init::kJohnsonLindenstrauss:
      return x.normal_(0, 1 / std::sqrt(k));
    case Init::kLecun: {  // a normal variable cut at two deviations has a deviation of 0.8796
      const double inside = std::erf(std::sqrt(2.0)),
                   deviation = 1 / std::sqrt(N * double(heads)) / 0.87962566103423978;
      return x.uniform_(-inside, inside).erfinv_().mul_(std::sqrt(2.0) * deviation);
    }
  }
  return x;
}

}  // namespace

MechanismInfo linformer_mechanism() {
  MechanismInfo i = InfoOf<LinformerMechanism>("linformer");
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
  i.positions = AddedPositions();
  i.slots = true;
  i.time = "O(T k d)";
  i.state = "2 k d per head";
  i.fixed_length = true;
  i.cases.clear();
  for (const char* sharing : {"key_value", "headwise", "none", "layerwise", "layerwise_per_head"})
    i.cases.push_back(Json{{"slots", 4}, {"sharing", sharing}});
  for (const char* init :
       {"xavier_normal", "normal", "uniform", "kaiming", "johnson_lindenstrauss", "lecun"}) {
    i.cases.push_back(Json{{"slots", 3}, {"init", init}});
  }
  i.cases.push_back(Json{{"slots", 3}, {"mask", "none"}});
  return i;
}

Fields LinformerMechanism::Describe(Options& options) {
  Fields f;
  f.Add("slots", &options.slots, "memory slots of each head (k)", {1, 65536});
  f.Add("sharing", &options.sharing,
        "what shares one matrix: nothing, the heads (headwise), also keys and values (key_value), "
        "also the layers (layerwise), or the layers, keys and values but not the heads "
        "(layerwise_per_head: Nystromformer's repository)",
        {{Sharing::kNone, "none"},
         {Sharing::kHeadwise, "headwise"},
         {Sharing::kKeyValue, "key_value"},
         {Sharing::kLayerwise, "layerwise"},
         {Sharing::kLayerwisePerHead, "layerwise_per_head"}});
  f.Add("init", &options.init,
        "initial weights as in Long Range Arena (xavier_uniform), P003 (xavier_normal), "
        "Nystromformer (normal), lucidrains (uniform), P002 "
        "(kaiming), the paper's theorem (johnson_lindenstrauss), P004's code (lecun)",
        {{Init::kXavierUniform, "xavier_uniform"},
         {Init::kXavierNormal, "xavier_normal"},
         {Init::kNormal, "normal"},
         {Init::kUniform, "uniform"},
         {Init::kKaiming, "kaiming"},
         {Init::kJohnsonLindenstrauss, "johnson_lindenstrauss"},
         {Init::kLecun, "lecun"}});
  f.Add("length", &options.length,
        "columns of the matrices (N): the longest text they know, the task's; 0: max_length",
        {0, 1 << 24});
  f.Add(
      "mask", &options.mask,
      "tokens: padding is left out; none, as in Long Range Arena: it is mixed into the slots like "
      "any token, so that added padding changes results. Bidirectional only",
      {{Masking::kTokens, "tokens"}, {Masking::kNone, "none"}});
  f.Add("normalise", &options.normalise,
        "tokens are divided by their l2 norm before the maps of queries, keys and values, as in "
        "P004's code; done by the layer, not by the core");
  return f;
}

LinformerMechanism::LinformerMechanism(const MechanismInfo& info, const Options& options,
                                       const AttentionDims& dims)
    : Mechanism(info, dims),
      options_(options),
      length_(options.length > 0 ? options.length : dims.max_length) {
  const auto add_tokens = [&](const std::string& name, Side side) {
    Projection p = {name, side, dims.dim};
    p.normalised = options.normalise;
    return AddProjection(p);
  };
  q_ = add_tokens("q", Side::kQuery);
  k_ = add_tokens("k", Side::kKey);
  v_ = add_tokens("v", Side::kKey);
  key_memory_ = AddState("key_memory");
  value_memory_ = AddState("value_memory");
  count_ = AddState("count");
  if (length_ < 1)
    FailUsage("[linformer] has weights for each position and needs a max_length, got ", length_);
  const bool per_head =
      options.sharing == Sharing::kNone || options.sharing == Sharing::kLayerwisePerHead;
  const bool all_layers =
      options.sharing == Sharing::kLayerwise || options.sharing == Sharing::kLayerwisePerHead;
  if (all_layers && dims.first) {
    key_ = static_cast<const LinformerMechanism&>(*dims.first).key_;
    return;
  }
  const int64_t heads = per_head ? dims.heads : 1;
  auto add = [&](const std::string& name, at::Tensor& member) {
    AddWeight(name, member, Initial(options.init, length_, heads, options.slots),
              CoreWeight::Kind::kTrained);
  };
  add("key.weight", key_);
  if (options.sharing == Sharing::kNone || options.sharing == Sharing::kHeadwise)
    add("value.weight", value_);
}

State LinformerMechanism::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  const int64_t heads = dims().heads, width = dims().dim / heads;
  State state = UndefinedState();
  state[key_memory_] = ops::EmptySums(batch, heads, options_.slots, width, options);
  state[value_memory_] = ops::EmptySums(batch, heads, options_.slots, width, options);
  state[count_] = at::zeros({batch}, options.dtype(at::kLong).requires_grad(false));
  return state;
}

at::Tensor LinformerMechanism::Positions(const State& state, int64_t length,
                                         const ops::Mask& mask) const {
  const at::Tensor positions = PiecePositions(state[count_], length, mask);
  if (positions.numel() == 0) return positions;
  const at::Tensor of_tokens =
      mask.lengths ? positions.masked_fill(mask.Padding(length), 0) : positions;
  const int64_t last = of_tokens.max().item<int64_t>(), limit = length_;
  CISTERN_CHECK(last<limit, "[linformer] position ", last, " is beyond ", options_.length> 0
                    ? "length="
                    : "max_length=",
                limit,
                ": each position has weights of its own; make the model with a larger one, "
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
  const at::Tensor p = at::softmax(logits.transpose(1, 2) * Scale(), -1);
  return ops::Dropout(p, dims().dropout, is_training()).transpose(1, 2);
}

at::Tensor LinformerMechanism::DoExtend(const std::vector<at::Tensor>& x, State& state,
                                        const ops::Mask& mask) {
  const auto type = ops::ComputeTypeOf(x[q_]);
  const at::Tensor positions = Positions(state, x[q_].size(2), mask),
                   e = Weights(key_, positions, type);
  const at::Tensor f = value_.defined() ? Weights(value_, positions, type) : e;
  const at::Tensor matched = ops::SumMatchExtend(x[q_], e, x[k_], state[key_memory_], mask);
  const at::Tensor out = ops::SumReadExtend(Attend(matched), f, x[v_], state[value_memory_], mask);
  state[count_] = PositionsAfter(state[count_], positions, mask);
  return out;
}

void LinformerMechanism::DoWrite(const std::vector<at::Tensor>& x, State& state,
                                 const ops::Mask& mask) {
  const auto type = x[k_].scalar_type();
  const at::Tensor positions = Positions(state, x[k_].size(2), mask),
                   e = Weights(key_, positions, type);
  const at::Tensor f = value_.defined() ? Weights(value_, positions, type) : e;
  state[key_memory_] = ops::SumWrite(e, x[k_], state[key_memory_], mask);
  state[value_memory_] = ops::SumWrite(f, x[v_], state[value_memory_], mask);
  state[count_] = PositionsAfter(state[count_], positions, mask);
}

at::Tensor LinformerMechanism::ReadFrom(const at::Tensor& q, const at::Tensor& keys,
                                        const at::Tensor& values) const {
  if (!Drops()) return ops::AbcRead(q, keys, values, {}, Scale());
  const auto type = q.scalar_type();
  return at::matmul(Attend(at::matmul(q, keys.to(type).transpose(2, 3))), values.to(type));
}

at::Tensor LinformerMechanism::Read(const std::vector<at::Tensor>& x, const State& state) {
  return ReadFrom(x[q_], state[key_memory_], state[value_memory_]);
}

bool LinformerMechanism::TakesBFloat16(Form form) const {
  return form == Form::kCausal || (form == Form::kBidirectional && !Drops());
}

std::string LinformerMechanism::FormRefusal(Form form) const {
  if (!SeesPadding() || form == Form::kBidirectional) return "";
  return FormName(form) +
         " form with mask=none, which is Long Range Arena's for encoders; use "
         "mask=tokens";
}

// The slots of whole rows: all have the same positions, so that heads which share a matrix are
// columns of one product. Sums of pieces are in double.
at::Tensor LinformerMechanism::Mixed(const at::Tensor& matrix, const at::Tensor& x) const {
  constexpr int64_t kPiece = 1024;
  const int64_t batch = x.size(0), length = std::min(x.size(2), length_);
  const bool per_head = matrix.size(1) > 1;
  const auto type = ops::ProductTypeOf(x);
  const at::Tensor tokens = per_head ? x : x.transpose(1, 2).flatten(2),  // or [B,T,H d]
      weights = matrix.permute({1, 2, 0}).to(type);                       // [1 or H,k,N]
  // Split, whose gradient is one tensor; that of each narrow would be as large as the whole.
  const auto pieces = [&](const at::Tensor& whole, int64_t dim) {
    return (length < whole.size(dim) ? whole.narrow(dim, 0, length) : whole).split(kPiece, dim);
  };
  const std::vector<at::Tensor> of_tokens = pieces(tokens, per_head ? 2 : 1),
                                of_weights = pieces(weights, 2);
  at::Tensor sum;
  for (size_t i = 0; i < of_tokens.size(); ++i) {
    const at::Tensor piece = of_tokens[i].to(type),
                     y = per_head ? at::matmul(of_weights[i], piece)
                                  : at::bmm(of_weights[i].expand({batch, -1, -1}), piece);
    sum = sum.defined() ? sum + y.to(at::kDouble) : y.to(at::kDouble);
  }
  return per_head ? sum : sum.unflatten(2, {x.size(1), x.size(3)}).transpose(1, 2);
}

at::Tensor LinformerMechanism::BidirectionalRows(const std::vector<at::Tensor>& x,
                                                 const ops::Mask& mask) {
  const ops::Mask seen = SeesPadding() ? ops::Mask() : mask;
  const int64_t batch = x[q_].size(0), length = x[q_].size(2);
  if (length == 0 || batch == 0) return Mechanism::BidirectionalRows(x, seen);
  Positions(EmptyState(batch, x[q_].options()), length, seen);
  return ReadFrom(x[q_], Mixed(key_, x[k_]), Mixed(value_.defined() ? value_ : key_, x[v_]));
}

at::Tensor LinformerMechanism::Definition(Form form, const std::vector<at::Tensor>& queries,
                                          const std::vector<at::Tensor>& x) const {
  const double scale = 1 / std::sqrt(double(dims().dim / dims().heads));
  return EachQuery(form, queries, x, x[v_].size(3), [&](const auto& query, const auto& seen) {
    auto mixed = [&](const at::Tensor& matrix,
                     const at::Tensor& y) {  // E[:, 0..S) y for every head
      const at::Tensor weights =
          matrix.to(at::kDouble).narrow(0, 0, y.size(2)).permute({1, 2, 0});  // [1 or H,k,S]
      return at::matmul(weights, y);
    };
    const at::Tensor keys = mixed(key_, seen[k_]),
                     values = mixed(value_.defined() ? value_ : key_, seen[v_]);
    return at::matmul(at::softmax(at::matmul(query[q_], keys.transpose(2, 3)) * scale, 3), values);
  });
}

LeastOperations LinformerMechanism::Operations(Form form, int64_t tokens, int64_t) const {
  return MemoryOperations(form, tokens, 2 * double(options_.slots) * double(dims().dim));
}

}  // namespace cistern
