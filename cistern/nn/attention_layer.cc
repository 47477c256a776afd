#include "cistern/nn/attention_layer.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "cistern/base/error.h"
#include "cistern/nn/positions.h"
#include "cistern/ops/short_conv.h"

namespace cistern {
namespace {

// The filter of one projection, [width, taps]; begins as the identity: 1 on the token itself, small noise on the tokens before it.
class ShortConvolution : public torch::nn::Module {
 public:
  ShortConvolution(int64_t width, int64_t taps) {
    at::Tensor filter = at::randn({width, taps}) * 0.02;
    filter.select(1, taps - 1).add_(1.0);
    weight = register_parameter("weight", filter);
  }
  at::Tensor weight;
};

}  // namespace

std::shared_ptr<Mechanism> MakeMechanism(const AttentionLayerOptions& options) {
  const MechanismInfo& info = FindMechanism(options.mechanism);
  const AttentionDims& dims = options.dims;
  if (dims.dim % dims.heads != 0) FailUsage("dim=", dims.dim, " is not divisible by heads=", dims.heads);
  RequireForm(info, options.form);
  if (std::find(info.positions.begin(), info.positions.end(), options.positions) == info.positions.end()) {
    std::string fitting;
    for (const std::string& p : info.positions) fitting += (fitting.empty() ? "" : ", ") + p;
    FailUsage("positions=", options.positions, " do not fit mechanism ", info.name, "; those that do: ", fitting);
  }
  if (options.positions == "rotary" && (dims.dim / dims.heads) % 2 != 0) {
    FailUsage("rotary positions need an even head width, got dim/heads=", dims.dim / dims.heads);
  }
  if (options.conv > 0 && options.form != Form::kCausal) {
    FailUsage("conv=", options.conv, " is a causal convolution; the ", FormName(options.form), " form has none: set conv=0");
  }
  return info.make(options.mechanism_options, dims);
}

AttentionLayer::AttentionLayer(AttentionLayerOptions options) : options_(options) {
  if (options.first) options.dims.first = options.first->mechanism_.get();
  const AttentionDims& dims = options.dims;
  mechanism_ = register_module("core", MakeMechanism(options));
  if (options.form == Form::kCross) {
    FailUsage("an AttentionLayer attends to its own stream; for cross attention use the mechanism's Write and Read");
  }
  projections_ = mechanism_->Projections();
  for (Projection& p : projections_) {
    if (p.heads == 0) p.heads = dims.heads;
    if (p.tied && options.first) {
      maps_.push_back(options.first->maps_[maps_.size()]);
    } else {
      maps_.push_back(register_module(p.name + "_proj", std::make_shared<Linear>(dims.dim, p.width, options.bias, options.init_std)));
    }
    if (options.conv > 0) {
      filters_.push_back(register_module(p.name + "_conv", std::make_shared<ShortConvolution>(p.width, options.conv))->weight);
    }
  }
  out_ = register_module("o_proj", std::make_shared<Linear>(dims.dim, dims.dim, options.bias, options.out_std));
}

State AttentionLayer::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  State state = mechanism_->EmptyState(batch, options);
  if (options_.conv > 0) state.tensors.push_back({"conv", EmptyConv(batch, options)});
  return state;
}

at::Tensor AttentionLayer::EmptyConv(int64_t batch, const at::TensorOptions& options) const {
  int64_t channels = 0;
  for (const Projection& p : projections_) channels += p.width;
  return at::zeros({batch, options_.conv - 1, channels}, options);
}

int64_t AttentionLayer::StateBytes(int64_t batch, int64_t tokens, const at::TensorOptions& options) const {
  const int64_t conv = options_.conv > 0 ? int64_t(EmptyConv(batch, options.device(at::kMeta)).nbytes()) : 0;
  return mechanism_->StateBytes(batch, tokens, options) + conv;
}

std::string AttentionLayer::TruncateRefusal() const {
  if (!mechanism_->info().truncates) return "the state of " + mechanism_->info().name + " does not hold single tokens";
  if (options_.conv > 0) return StrCat("of its convolution, conv=", options_.conv, ", only the last inputs are kept");
  return "";
}

// All projections of self attention in one product (and one convolution), then split into heads: views, no copies.
std::vector<at::Tensor> AttentionLayer::Project(const Stream& stream, State* state) const {
  const int64_t batch = stream.x.size(0), length = stream.x.size(1);
  std::vector<at::Tensor> weights, biases;
  for (const auto& map : maps_) {
    weights.push_back(map->weight);
    if (map->bias.defined()) biases.push_back(map->bias);
  }
  at::Tensor y = at::linear(stream.x, at::cat(weights), biases.empty() ? std::nullopt : std::optional<at::Tensor>(at::cat(biases)));
  if (y.scalar_type() != weights[0].scalar_type()) y = y.to(weights[0].scalar_type());  // autocast: the cores run in full precision
  if (options_.conv > 0) {
    auto [filtered, after] = ops::ShortConv(y, at::cat(filters_), (*state)["conv"], stream.mask);
    y = filtered;
    (*state)["conv"] = after;
  }
  std::vector<int64_t> widths;
  for (const Projection& p : projections_) widths.push_back(p.width);
  std::vector<at::Tensor> x = y.split_with_sizes(widths, 2);  // one gradient for all parts, where narrow makes one of full size for each
  for (size_t i = 0; i < x.size(); ++i) {
    const Projection& p = projections_[i];
    x[i] = x[i].view({batch, length, p.heads, p.width / p.heads}).transpose(1, 2);
    if (options_.positions == "rotary" && p.rotary) x[i] = Rotate(x[i], stream.positions);
  }
  return x;
}

at::Tensor AttentionLayer::Merge(const at::Tensor& heads) const {
  return out_->Forward(heads.transpose(1, 2).reshape({heads.size(0), heads.size(2), options_.dims.dim}));
}

at::Tensor AttentionLayer::Extend(const Stream& stream, State& state) {
  const std::vector<at::Tensor> x = Project(stream, &state);
  return Merge(mechanism_->Extend(x, state, stream.mask));
}

at::Tensor AttentionLayer::Bidirectional(const Stream& stream) {
  return Merge(mechanism_->Bidirectional(Project(stream, nullptr), stream.mask));
}

}  // namespace cistern
