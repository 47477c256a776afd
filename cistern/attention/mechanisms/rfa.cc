#include "cistern/attention/mechanisms/rfa.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "cistern/attention/definition.h"
#include "cistern/attention/random_matrices.h"
#include "cistern/attention/running_max.h"
#include "cistern/base/error.h"
#include "cistern/ops/tensor_rows.h"

namespace cistern {

struct RfaMechanism::VariantOf {
  Variant variant;
  bool normalised;  // q and k to length one
  bool key_factor;  // exp(|k|^2 / 2) is kept
  bool fixed;       // nothing drawn anew, no learned scale
  double factor;    // c; 0: 1/sqrt(m)
  Denominator denominator, cross;
};

MechanismInfo rfa_mechanism() {
  MechanismInfo i = InfoOf<RfaMechanism>("rfa");
  i.title = "Random feature attention";
  i.source = "Peng et al. 2021; P002 sec. 2.4; spec 2.5";
  i.summary =
      "Linear attention with sines and cosines of random projections, which estimate softmax "
      "attention between vectors of length one. "
      "More features, smaller error: it falls as 1/sqrt(m).";
  i.definition =
      "as linear, phi(x) = [sin(w_i . x), cos(w_i . x)] / sqrt(m), x = sigma q / |q| or sigma k "
      "/ |k|, w_i ~ N(0, I / tau^2)";
  i.forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
  i.stochastic = true;
  i.padding_refusal = "its cross form may have another denominator";
  i.positions = AllPositions();
  i.time = "O(T m d)";
  i.state = "2 m (d + 1) per head; arccos m (d + 1)";
  i.cases.clear();
  for (const char* variant :
       {"paper", "repository", "fork", "ucu_notebook", "ucu_code", "plain", "exact_scale"}) {
    i.cases.push_back(Json{{"variant", variant}, {"features", 32}, {"tau", 2.0}});
  }
  i.cases.push_back(Json{{"kernel", "arccos"}, {"features", 12}});
  i.cases.push_back(Json{{"variant", "fork"}, {"features", 32}, {"input_gate", true}});
  i.cases.push_back(Json{{"matrices", "orthogonal"}, {"features", 33}});
  i.tolerance =
      5e-5;  // z is a sum of cosines of both signs: where it is small, rounding weighs more
  i.merges = true;
  return i;
}

namespace {

const EnumNames<RfaOptions::Draws> kRfaDraws = {{RfaOptions::Draws::kLayer, "layer"},
                                                {RfaOptions::Draws::kModel, "model"}};

const EnumNames<RfaOptions::Variant> kRfaVariants = {
    {RfaOptions::Variant::kPaper, "paper"},
    {RfaOptions::Variant::kRepository, "repository"},
    {RfaOptions::Variant::kFork, "fork"},
    {RfaOptions::Variant::kUcuNotebook, "ucu_notebook"},
    {RfaOptions::Variant::kUcuCode, "ucu_code"},
    {RfaOptions::Variant::kPlain, "plain"},
    {RfaOptions::Variant::kExactScale, "exact_scale"},
};

}  // namespace

const RfaMechanism::VariantOf& RfaMechanism::FindVariant(Variant variant) {
  using Rule = Denominator::Rule;
  const Denominator safe = {Rule::kSignSafe, 1e-3}, none = {Rule::kNone, 1};
  static const std::vector<VariantOf> variants = {
      {Variant::kPaper, true, false, false, 0, safe, safe},
      {Variant::kRepository, true, false, false, 0.1, {Rule::kAtLeast, 1}, {Rule::kMagnitude, 1}},
      {Variant::kFork, true, false, false, 0.01, {Rule::kAtLeast, 0.01}, {Rule::kMagnitude, 0.01}},
      {Variant::kUcuNotebook, true, false, true, 0, {Rule::kAtLeast, 1}, {Rule::kAtLeast, 1}},
      {Variant::kUcuCode, false, false, true, 0, none, none},
      {Variant::kPlain, false, true, false, 0, safe, safe},
      {Variant::kExactScale, false, true, false, 0, safe, safe},
  };
  for (const VariantOf& v : variants) {
    if (v.variant == variant) return v;
  }
  Fail("[rfa] an unknown variant: ", int64_t(variant));
}

void RfaOptions::DescribeFeatures(Fields& f) {
  f.Add("kernel", &kernel, "sines and cosines, or relu",
        {{Kernel::kGaussian, "gaussian"}, {Kernel::kArccos, "arccos"}});
  f.Add("matrices", &matrices, "rows drawn alone, or orthogonal in blocks",
        {{Matrices::kIid, "iid"}, {Matrices::kOrthogonal, "orthogonal"}});
}

Fields RfaMechanism::Describe(Options& options) {
  Fields f;
  f.Add("features", &options.features,
        "random projections of each head (m); 0 takes the width of a head", {0, 65536});
  f.Add("variant", &options.variant, "scale, normalisation and denominator", kRfaVariants);
  options.DescribeFeatures(f);
  f.Add("tau", &options.tau,
        "width of the Gaussian kernel; the temperature of the softmax is its square. The ucu "
        "variants, whose sources have no tau (1), divide queries and keys by it, too",
        {1e-3, 1e3});
  options.DescribeBank(f);
  f.Add("input_gate", &options.input_gate,
        "each key's features are multiplied by sigmoid(w . x + b), b at first 3, as in T2R's copy "
        "of the authors' code; the paper's gate is the mechanism rfa_gate");
  return f;
}

void RfaOptions::DescribeBank(Fields& f) {
  f.Add("bank", &bank,
        "matrices that training draws from, at each sequence; 0: those of evaluation always, which "
        "are the first ones, head h of every layer having matrix h",
        {0, 1 << 24});
  f.Add("draws", &draws,
        "what draws no matrix twice: the heads of a layer, each layer for itself (layer), or the "
        "heads of all layers together as in the authors' code (model; layers of Python's modules "
        "draw apart)",
        kRfaDraws);
  f.Add("seed", &seed, "of the bank", {0, std::numeric_limits<int64_t>::max()});
}

RfaMechanism::RfaMechanism(const MechanismInfo& info, const Options& options,
                           const AttentionDims& dims)
    : RfaMechanism(info, options, dims, false) {}

RfaMechanism::RfaMechanism(const MechanismInfo& info, const Options& options,
                           const AttentionDims& dims, bool gated)
    : Mechanism(info, dims),
      options_(options),
      variant_(FindVariant(options.variant)),
      gated_(gated) {
  RefuseAttentionDropout(info, dims);
  const int64_t heads = dims.heads, width = dims.dim / heads;
  q_ = AddProjection({"q", Side::kQuery, dims.dim, true});
  k_ = AddProjection({"k", Side::kKey, dims.dim, true});
  v_ = AddProjection({"v", Side::kKey, dims.dim});
  if (gated) {
    Projection gate = {"gate", Side::kKey, heads};
    if (options.gate_bias) gate.bias = true;
    gate_ = AddProjection(gate);
  }
  if (options.input_gate) {
    Projection gate = {"input_gate", Side::kKey, heads};
    gate.bias = false;  // it is input_bias_
    input_gate_ = AddProjection(gate);
    AddWeight("input_gate.bias", input_bias_, at::full({heads, 1, 1}, 3.0),
              CoreWeight::Kind::kTrained);
  }
  memory_ = AddState("memory");
  draw_ = AddState("draw");
  if (variant_.key_factor) scale_ = AddState("scale");
  if (options.bank > 0 && options.bank < heads) {
    FailUsage("[", info.name, "] bank=", options.bank, " has fewer matrices than heads=", heads,
              "; give it as many, or 0 to fix them");
  }
  if (variant_.fixed && options.bank != Options().bank)
    FailUsage("[", info.name, "] bank=", options.bank,
              " has no effect with variant=", NameOf(options.variant, kRfaVariants),
              ", which draws no other matrices; leave it out");
  if (options.draws == Options::Draws::kModel) {
    if (options.bank == 0 || variant_.fixed)
      FailUsage("[", info.name,
                "] draws=model has no effect where nothing is drawn (bank=0, and "
                "the ucu variants); leave it away");
    if (options.bank < (dims.layer + 1) * heads) {
      FailUsage("[", info.name, "] bank=", options.bank, " has fewer matrices than layer ",
                dims.layer, " needs with draws=model: ", heads,
                " for each layer up to it; give the bank more, or use draws=layer");
    }
  }
  if (options.kernel == Kernel::kArccos && (variant_.key_factor || variant_.fixed)) {
    FailUsage("[", info.name, "] variant=", NameOf(options.variant, kRfaVariants),
              " is defined for the gaussian kernel; arccos goes with paper, repository or fork");
  }
  features_ = options.features > 0 ? options.features : width;
  tau_ =
      options.tau * (options.variant == Variant::kExactScale ? std::pow(double(width), 0.25) : 1.0);
  factor_ = variant_.factor > 0 ? variant_.factor : 1 / std::sqrt(double(features_));
  denominator_ = variant_.denominator;
  cross_ = variant_.cross;
  // Weights of a gated memory sum to one and not to the number of tokens: after t of them at a gate
  // g, to 1 - g^t.
  if (gated) denominator_.value = 1e-6;
  // A key's factor and the gate make memories decay.
  decoding_ = {{}, memory_, {}, {}, heads, Sums(), width};
  if (MayDecode(denominator_) && !variant_.key_factor && !gated)
    decoding_.decoding = AddState(kDecodingName);
  if (!variant_.fixed)
    AddWeight("sigma", sigma_, at::ones({heads, 1, width}), CoreWeight::Kind::kTrained);
  std::vector<at::Tensor> matrices;
  for (int64_t h = 0; h < heads; ++h) matrices.push_back(Matrix(h));
  AddWeight("matrices", evaluation_, at::stack(matrices), CoreWeight::Kind::kDrawn);
}

State RfaMechanism::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  const int64_t heads = dims().heads;
  const at::Tensor index = Drawn();
  State state = UndefinedState();
  state[memory_] = EmptyFeatureSums(batch, dims(), Sums(), denominator_, options);
  state[draw_] = index.unsqueeze(0).expand({batch, heads}).contiguous();
  if (variant_.key_factor) state[scale_] = EmptyMax(batch, heads, options);
  return state;
}

at::Tensor RfaMechanism::Drawn() const {
  const int64_t heads = dims().heads;
  if (!is_training() || options_.bank == 0 || variant_.fixed) return at::arange(heads, at::kLong);
  if (options_.draws == Options::Draws::kLayer)
    return at::randperm(options_.bank, at::kLong).narrow(0, 0, heads);
  const RfaMechanism& first =
      dims().first ? static_cast<const RfaMechanism&>(*dims().first) : *this;
  if (&first == this || !first.order_.defined())
    first.order_ = at::randperm(options_.bank, at::kLong);
  return first.order_.narrow(0, dims().layer * heads, heads);
}

at::Tensor RfaMechanism::InputGate(const at::Tensor& weights,
                                   const std::vector<at::Tensor>& x) const {
  if (!input_gate_.declared()) return weights;
  const at::Tensor& logits = x[input_gate_];
  return weights * at::sigmoid(logits + input_bias_.to(logits.scalar_type()));
}

at::Tensor RfaMechanism::Matrix(int64_t index) const {
  return RandomMatrix(uint64_t(options_.seed), uint64_t(index), features_,
                      dims().dim / dims().heads,
                      options_.matrices == Options::Matrices::kOrthogonal);
}

at::Tensor RfaMechanism::Matrices(const State& state, const at::Tensor& x) const {
  const auto type = ops::ComputeTypeOf(x);
  const at::Tensor& draw = state[draw_];
  std::vector<int64_t> indices(size_t(dims().heads));
  std::iota(indices.begin(), indices.end(), 0);
  if (draw.size(0) == 0) return evaluation_.to(type);
  const at::Tensor row = draw.select(0, 0).to(at::kCPU).contiguous();
  const int64_t* p = row.const_data_ptr<int64_t>();
  if (std::equal(indices.begin(), indices.end(), p)) return evaluation_.to(type);
  indices.assign(p, p + dims().heads);
  if (indices != drawn_indices_) {
    std::vector<at::Tensor> matrices;
    for (const int64_t index : indices) matrices.push_back(Matrix(index));
    drawn_ = at::stack(matrices);
    drawn_indices_ = indices;
  }
  return drawn_.to(evaluation_.device(), type);
}

at::Tensor RfaMechanism::Scale(at::ScalarType type) const {
  if (!sigma_.defined()) return {};
  return tau_ == 1 ? sigma_.to(type) : sigma_.to(type) / tau_;
}

at::Tensor RfaMechanism::Scaled(const at::Tensor& x) const {
  const at::Tensor y = variant_.normalised ? Normalised(x) : x;
  if (sigma_.defined()) return y * Scale(x.scalar_type());
  return tau_ == 1 ? y : y / tau_;
}

at::Tensor RfaMechanism::FeaturesOfScaled(const at::Tensor& scaled,
                                          const at::Tensor& matrices) const {
  if (options_.kernel == Kernel::kArccos)
    return at::relu(at::matmul(scaled, matrices.to(scaled.scalar_type()).transpose(1, 2))) *
           factor_;
  return ops::FourierFeatures(scaled, {{}, matrices, false, factor_});
}

ops::FourierFeatureMap RfaMechanism::FeatureMapOf(const at::Tensor& x,
                                                  const at::Tensor& matrices) const {
  return {Scale(ops::ComputeTypeOf(x)), sigma_.defined() || tau_ == 1 ? matrices : matrices / tau_,
          variant_.normalised, factor_};
}

at::Tensor RfaMechanism::Features(const at::Tensor& x, const at::Tensor& matrices) const {
  if (options_.kernel == Kernel::kArccos) return FeaturesOfScaled(Scaled(x), matrices);
  return ops::FourierFeatures(x, FeatureMapOf(x, matrices));
}

bool RfaMechanism::FormsFeatures(Form) const {
  return options_.kernel == Kernel::kGaussian && !variant_.key_factor && !gated_ &&
         !input_gate_.declared();
}
bool RfaMechanism::TakesBFloat16(Form form) const {
  const bool gates = gated_ && form == Form::kCausal && !variant_.key_factor &&
                     !input_gate_.declared() && options_.kernel == Kernel::kGaussian;
  return FormsFeatures(form) || gates;
}

namespace {

// The logarithm of the factor of each key, [B,H,T,1] in double.
at::Tensor LogKeyFactor(const at::Tensor& scaled) {
  return scaled.to(at::kDouble).square().sum(-1, true) / 2;
}

}  // namespace

at::Tensor RfaMechanism::DoExtend(const std::vector<at::Tensor>& x, State& state,
                                  const ops::Mask& mask) {
  const auto type = x[q_].scalar_type();
  const at::Tensor matrices = Matrices(state, x[q_]);
  if (FormsFeatures(Form::kCausal))
    return FourierExtend(x[q_], x[k_], x[v_], decoding_.Of(state), FeatureMapOf(x[q_], matrices),
                         mask, denominator_);
  const at::Tensor key = variant_.key_factor ? Scaled(x[k_]) : at::Tensor();
  at::Tensor weights = InputGate(
                 key.defined() ? FeaturesOfScaled(key, matrices) : Features(x[k_], matrices), x),
             log_gate;
  if (variant_.key_factor) {
    RunningMaxResult running = RunningMax(LogKeyFactor(key), state[scale_], mask);
    weights = weights * running.weight.to(type);
    log_gate = running.log_gate.to(type);
    state[scale_] = running.last;
  }
  if (gated_) {
    const at::Tensor gate = x[gate_].to(weights.dtype());
    weights = weights * at::sigmoid(-gate);
    log_gate = at::log_sigmoid(gate);
  }
  return FeatureExtend(Features(x[q_], matrices), weights, x[v_], decoding_.Of(state), mask,
                       denominator_, log_gate);
}

void RfaMechanism::DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) {
  decoding_.End(state);
  const auto type = x[k_].scalar_type();
  const at::Tensor matrices = Matrices(state, x[k_]);
  if (FormsFeatures(Form::kCross)) {
    FourierWrite(x[k_], x[v_], state[memory_], FeatureMapOf(x[k_], matrices), mask, denominator_);
    return;
  }
  const at::Tensor key = variant_.key_factor ? Scaled(x[k_]) : at::Tensor();
  at::Tensor weights = InputGate(
                 key.defined() ? FeaturesOfScaled(key, matrices) : Features(x[k_], matrices), x),
             log_gate;
  if (variant_.key_factor) {
    PieceMaxResult piece = PieceMax(LogKeyFactor(key), state[scale_], mask);
    weights = weights * piece.weight.to(type);
    state[memory_] = state[memory_] * piece.decay;
    state[scale_] = piece.last;
  }
  if (gated_) {
    weights = weights * at::sigmoid(-x[gate_]);
    log_gate = at::log_sigmoid(x[gate_]);
  }
  FeatureWrite(weights, x[v_], state[memory_], mask, denominator_, log_gate);
}

at::Tensor RfaMechanism::Read(const std::vector<at::Tensor>& x, const State& state) {
  return ReadBy(cross_, x, state);
}

at::Tensor RfaMechanism::ReadBy(const Denominator& denominator, const std::vector<at::Tensor>& x,
                                const State& written) const {
  const State state = Settled(written);
  const at::Tensor matrices = Matrices(state, x[q_]);
  if (FormsFeatures(Form::kCross))
    return FourierRead(x[q_], state[memory_], FeatureMapOf(x[q_], matrices), denominator);
  return FeatureRead(Features(x[q_], matrices), state[memory_], denominator);
}

at::Tensor RfaMechanism::BidirectionalRows(const std::vector<at::Tensor>& x,
                                           const ops::Mask& mask) {
  State state = EmptyState(x[q_].size(0), x[q_].options());
  DoWrite(x, state, mask);
  return ReadBy(denominator_, x, state);
}

// sin a sin b + cos a cos b = cos(a - b): the weights come from the differences of q and k, without
// features. [B,H,1,S]
at::Tensor RfaMechanism::DefinitionWeights(const std::vector<at::Tensor>& query,
                                           const std::vector<at::Tensor>& seen) const {
  const at::Tensor rows = evaluation_.to(at::kDouble);
  auto scaled = [&](at::Tensor y) {
    if (variant_.normalised) y = y / (y.square().sum(3, true).sqrt() + 1e-3);
    return sigma_.defined() ? y * sigma_.to(at::kDouble) / tau_ : y / tau_;
  };
  const at::Tensor q = scaled(query[q_]), k = scaled(seen[k_]),
                   c2 = at::full({}, factor_ * factor_, q.options());
  at::Tensor weights;
  if (options_.kernel == Kernel::kArccos) {
    auto relu = [&](const at::Tensor& y) {
      return at::einsum("bhtd,hmd->bhtm", {y, rows}).clamp_min(0);
    };
    weights = c2 * (relu(q) * relu(k)).sum(3).unsqueeze(2);
  } else {
    weights = c2 * at::einsum("bhtd,hmd->bhtm", {q - k, rows}).cos().sum(3).unsqueeze(2);
  }
  if (variant_.key_factor) {
    const at::Tensor exponent = k.square().sum(3).unsqueeze(2) / 2;
    weights = weights * (exponent - exponent.amax(3, true)).exp();
  }
  if (input_bias_.defined()) {
    const at::Tensor u = seen[input_gate_] + input_bias_.to(at::kDouble);  // [B,H,S,1]
    weights = weights / (1 + (-u).exp()).transpose(2, 3);
  }
  if (gated_) {  // written with 1 - g, then decayed by the gate of every later token
    const at::Tensor later = at::sigmoid(seen[gate_]).flip(2).cumprod(2).flip(2);
    const at::Tensor decay =
        at::cat({later.narrow(2, 1, later.size(2) - 1), at::ones_like(later.narrow(2, 0, 1))}, 2);
    weights = weights * (decay * at::sigmoid(-seen[gate_])).transpose(2, 3);
  }
  return weights;
}

at::Tensor RfaMechanism::Definition(Form form, const std::vector<at::Tensor>& queries,
                                    const std::vector<at::Tensor>& x) const {
  const Denominator& denominator = form == Form::kCross ? cross_ : denominator_;
  return EachQuery(form, queries, x, x[v_].size(3), [&](const auto& query, const auto& seen) {
    return WeightedValues(DefinitionWeights(query, seen), seen[v_], denominator);
  });
}

State RfaMechanism::Merge(const State& earlier, const State& later) const {
  if (gated_) return Mechanism::Merge(earlier, later);
  const State first = Settled(earlier), second = Settled(later);
  CISTERN_CHECK(at::equal(first[draw_], second[draw_]), "[", info().name,
                "] the two states were begun with different random matrices and do not merge; "
                "begin both in evaluation");
  State whole = first;
  if (variant_.key_factor) {
    const PairMaxResult pair = PairMax(first[scale_], second[scale_]);
    whole[memory_] = first[memory_] * pair.first + second[memory_] * pair.second;
    whole[scale_] = pair.last;
  } else {
    whole[memory_] = first[memory_] + second[memory_];
  }
  return whole;
}

LeastOperations RfaMechanism::Operations(Form form, int64_t tokens, int64_t) const {
  const double features = double(options_.kernel == Kernel::kArccos ? features_ : 2 * features_);
  return MemoryOperations(form, tokens, features * double(dims().dim));
}

}  // namespace cistern
