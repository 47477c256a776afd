#include "cistern/attention/mechanisms/t2r.h"

#include <ATen/ATen.h>

#include <cmath>

#include "cistern/attention/definition.h"
#include "cistern/base/error.h"
#include "cistern/ops/learned_features.h"
#include "cistern/ops/tensor_rows.h"

namespace cistern {
MechanismInfo t2r_mechanism() {
  MechanismInfo i = InfoOf<T2rMechanism>("t2r");
  i.title = "T2R, learned features";
  i.source = "Kasai et al. 2021 (Finetuning Pretrained Transformers into RNNs); spec 2.4";
  i.summary =
      "Linear attention whose features relu(W x + b) are learned, with a memory of m x d per "
      "head. Made to replace softmax in a trained "
      "model and be finetuned; from scratch it learns more slowly. Outside of training the map "
      "is folded into the projections (not with "
      "`norm`, a convolution, head groups, or features that outnumber the channels of a head by "
      "far).";
  i.definition =
      "as linear, phi(x) = relu(W_h x + b_h), q_t / sqrt(d), the denominator at least `minimum`";
  i.forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
  i.positions = AddedPositions();
  i.time = "O(T m d)";
  i.state = "m (d + 1) per head";
  i.cases = {Json{{"features", 6}}, Json{{"features", 3}, {"norm", true}, {"minimum", 0.5}}};
  i.merges = true;
  return i;
}

Fields T2rMechanism::Describe(Options& options) {
  Fields f;
  f.Add("features", &options.features, "learned features of each head (m)", {1, 65536});
  f.Add("norm", &options.norm, "normalise queries and keys before the map");
  f.Add("minimum", &options.minimum, "smallest denominator", {1e-12, 1e6});
  return f;
}

T2rMechanism::T2rMechanism(const MechanismInfo& info, const Options& options,
                           const AttentionDims& dims, bool mapped)
    : FoldingMechanism(info, dims),
      options_(options),
      denominator_{Denominator::Rule::kAtLeast, options.minimum},
      scale_(1 / std::sqrt(double(dims.dim / dims.heads))) {
  RefuseAttentionDropout(info, dims);
  const int64_t given = mapped ? dims.heads * options.features : dims.dim;
  q_ = AddProjection({"q", Side::kQuery, given});
  k_ = AddProjection({"k", Side::kKey, given});
  v_ = AddProjection({"v", Side::kKey, dims.dim});
  memory_ = AddState("memory");
  decoding_ = {{},
               memory_,
               {},
               AddState(kDecodingName),
               dims.heads,
               options.features,
               dims.dim / dims.heads};
  if (mapped) return;
  const int64_t width = dims.dim / dims.heads;
  const double bound = 1 / std::sqrt(double(width));
  auto uniform = [bound](at::IntArrayRef shape) {
    return at::empty(shape).uniform_(-bound, bound);
  };
  AddWeight("map.weight", weight_, uniform({dims.heads, options.features, width}),
            CoreWeight::Kind::kTrained);
  AddWeight("map.bias", bias_, uniform({dims.heads, options.features}), CoreWeight::Kind::kTrained);
}

State T2rMechanism::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  State state = UndefinedState();
  state[memory_] = EmptyFeatureSums(batch, dims(), options_.features, denominator_, options);
  return state;
}

at::Tensor T2rMechanism::Features(const at::Tensor& x, double scale) const {
  if (!weight_.defined()) return at::relu(x);
  const auto type = ops::ComputeTypeOf(x);
  const at::Tensor weight = weight_.to(type), bias = bias_.to(type);
  return options_.norm ? ops::LearnedFeatures(Normalised(x * scale), weight, bias, 1)
                       : ops::LearnedFeatures(x, weight, bias, scale);
}

at::Tensor T2rMechanism::DoExtend(const std::vector<at::Tensor>& x, State& state,
                                  const ops::Mask& mask) {
  return FeatureExtend(Features(x[q_], scale_), Features(x[k_], 1), x[v_], decoding_.Of(state),
                       mask, denominator_);
}

void T2rMechanism::DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) {
  decoding_.End(state);
  FeatureWrite(Features(x[k_], 1), x[v_], state[memory_], mask, denominator_);
}

at::Tensor T2rMechanism::Read(const std::vector<at::Tensor>& x, const State& state) {
  return FeatureRead(Features(x[q_], scale_), Settled(state)[memory_], denominator_);
}

at::Tensor T2rMechanism::Definition(Form form, const std::vector<at::Tensor>& queries,
                                    const std::vector<at::Tensor>& x) const {
  auto phi = [&](at::Tensor y, double scale) {
    if (!weight_.defined()) return y.clamp_min(0);
    const at::Tensor weight = weight_.to(at::kDouble), bias = bias_.to(at::kDouble);
    y = y * scale;
    if (options_.norm) y = y / (y.square().sum(3, true).sqrt() + 1e-3);
    return (at::einsum("bhtd,hmd->bhtm", {y, weight}) +
            bias.view({1, bias.size(0), 1, bias.size(1)}))
        .clamp_min(0);
  };
  return EachQuery(form, queries, x, x[v_].size(3), [&](const auto& query, const auto& seen) {
    return WeightedValues(at::matmul(phi(query[q_], scale_), phi(seen[k_], 1).transpose(2, 3)),
                          seen[v_], denominator_);
  });
}

State T2rMechanism::Merge(const State& first, const State& second) const {
  State whole = UndefinedState();
  whole[memory_] = SumOf(memory_, Settled(first), Settled(second));
  return whole;
}

bool T2rMechanism::TakesBFloat16(Form) const { return !options_.norm; }

std::string T2rMechanism::FoldRefusal() const {
  if (options_.norm) return "norm=true normalises between the projections and the map";
  const int64_t dim = dims().dim, width = dim / dims().heads;
  // Products for a token and head: D m in place of D d + d m.
  if (options_.features * (dim - width) <= dim * width) return "";
  return StrCat("features=", options_.features, " are so many more than the ", width,
                " channels of a head that the product of both maps would cost more");
}

FoldingMechanism::HeadMap T2rMechanism::FirstMap(size_t projection) const {
  if (projection == v_) return {};
  return {projection == q_ ? weight_ * scale_ : weight_, bias_};
}

std::shared_ptr<Mechanism> T2rMechanism::AfterMaps() const {
  return std::make_shared<T2rMechanism>(info(), options_, dims(), true);
}

LeastOperations T2rMechanism::Operations(Form form, int64_t tokens, int64_t) const {
  return MemoryOperations(form, tokens, double(options_.features) * double(dims().dim));
}

}  // namespace cistern
