#include "cistern/nn/block.h"

#include <ATen/ATen.h>

#include "cistern/base/error.h"
#include "cistern/ops/dropout.h"
#include "cistern/ops/feed_forward.h"
#include "cistern/ops/gelu.h"
#include "cistern/ops/norm.h"

namespace cistern {

const EnumNames<NormPlace>& NormPlaces() {
  static const EnumNames<NormPlace> names = {{NormPlace::kPre, "pre"}, {NormPlace::kPost, "post"}};
  return names;
}

const EnumNames<NormKind>& NormKinds() {
  static const EnumNames<NormKind> names = {{NormKind::kLayer, "layer"}, {NormKind::kRms, "rms"}};
  return names;
}

const EnumNames<Activation>& Activations() {
  static const EnumNames<Activation> names = {{Activation::kGelu, "gelu"},
                                              {Activation::kGeluTanh, "gelu_tanh"},
                                              {Activation::kRelu, "relu"},
                                              {Activation::kGeglu, "geglu"}};
  return names;
}

FeedForward::FeedForward(int64_t dim, int64_t hidden, Activation activation, bool bias, double std,
                         double out_std, double dropout)
    : activation_(activation),
      dropout_(dropout),
      up_(register_module(
          "up_proj", std::make_shared<Linear>(
                         dim, activation == Activation::kGeglu ? 2 * hidden : hidden, bias, std))),
      down_(register_module("down_proj", std::make_shared<Linear>(hidden, dim, bias, out_std))) {}

at::Tensor FeedForward::Forward(const at::Tensor& x, const at::Tensor& residual,
                                double out_dropout) const {
  if (activation_ == Activation::kGelu) {
    const ops::FeedForwardDropout dropout = {is_training() ? dropout_ : 0,
                                             is_training() ? out_dropout : 0};
    return ops::GeluFeedForward(x, {up_->weight, up_->bias, down_->weight, down_->bias}, residual,
                                dropout);
  }
  at::Tensor h = up_->Forward(x);
  if (activation_ == Activation::kGeglu) {
    const std::vector<at::Tensor> halves = h.chunk(2, -1);
    h = halves[0] * ops::Gelu(halves[1]);
  } else {
    h = activation_ == Activation::kRelu ? at::relu(h) : at::gelu(h, "tanh");
  }
  const at::Tensor y = down_->Forward(ops::Dropout(h, dropout_, is_training()));
  return ops::AddResidual(residual, ops::Dropout(y, out_dropout, is_training()));
}

Block::Block(const BlockOptions& options)
    : options_(options),
      attention_(register_module("attention", MakeAttentionLayer(options.attention))) {
  const int64_t dim = options.attention.dims.Model();
  const bool tokens = options.attention.tokens_out;
  if (tokens) {
    ffn_ =
        register_module("ffn", std::make_shared<FeedForward>(
                                   dim, options.ffn_dim > 0 ? options.ffn_dim : 4 * dim,
                                   options.activation, options.ffn_bias, options.attention.init_std,
                                   options.attention.out_std, options.ffn_dropout));
  }
  if (attention_->attends() && (tokens || pre())) attention_norm_ = AddNorm("attention_norm");
  if (tokens) ffn_norm_ = AddNorm("ffn_norm");
  if (!options.cross) return;
  cross_ = register_module("cross_attention", MakeAttentionLayer(*options.cross));
  if (cross_->attends()) cross_norm_ = AddNorm("cross_attention_norm");
  if (options.source_memory && (options.memory_out || pre()))
    cross_memory_norm_ = AddNorm("cross_memory_norm");
}

std::shared_ptr<LayerNorm> Block::AddNorm(const std::string& name) {
  return register_module(name, std::make_shared<LayerNorm>(options_.attention.dims.Model(),
                                                           options_.norm_eps, options_.norm_kind));
}

Block::Residual Block::After(const at::Tensor& x, const at::Tensor& y,
                             const LayerNorm* norm) const {
  const at::Tensor added = ops::Dropout(y, options_.dropout, is_training());
  return pre() ? Residual{x, added} : Residual{norm->Add(x, added).norm, {}};
}

// The initial memory is one for all rows.
at::Tensor Block::Add(const at::Tensor& x, const at::Tensor& y, const LayerNorm* norm) const {
  const Residual r = After(x.expand_as(y), y, norm);
  return r.added.defined() ? ops::AddResidual(r.x, r.added) : r.x;
}

Stream Block::Rest(Stream stream, const at::Tensor& added, State* source) const {
  Residual r = {stream.x, {}};
  if (added.defined()) r = After(stream.x, added, attention_norm_.get());
  if (cross_ && cross_->attends()) {
    const ops::SumAndNorm in = Before(r, cross_norm_.get());
    stream.x = in.norm;
    r = After(in.sum, cross_->Read(stream, *source, &stream.cross_handles), cross_norm_.get());
  }
  const ops::SumAndNorm in = BeforeMaps(r, ffn_norm_.get());
  const double rate = options_.ffn_out_dropout < 0 ? options_.dropout : options_.ffn_out_dropout;
  stream.x = ffn_->Forward(in.norm, in.sum, rate);
  if (!pre()) stream.x = ffn_norm_->Forward(stream.x);
  return stream;
}

at::Tensor Block::WriteSource(Stream source, State& self, State& written) {
  const at::Tensor memory = options_.source_memory ? source.memory : at::Tensor();
  source.memory = memory.defined() ? Before({memory, {}}, cross_memory_norm_.get()).norm : memory;
  if (cross_->attends()) cross_->Write(source, written);
  if (!options_.source_memory) return {};
  if (attention_->mechanism().dims().memory_given)
    attention_->GiveMemory(memory, cross_->ReadableSlots(written), self);
  return options_.memory_out ? Add(memory, cross_->Packed(written), cross_memory_norm_.get())
                             : at::Tensor();
}

Stream Block::Extend(Stream stream, State& state, State* source) {
  CISTERN_CHECK(!cross_ == !source,
                "[block] cross attention and the state of a source go together");
  auto attend = [&](Stream& s) { return attention_->Extend(s, state, &s.handles); };
  return AttendAndRest(std::move(stream), source, attend);
}

Stream Block::Bidirectional(Stream stream) {
  CISTERN_CHECK(!cross_, "[block] cross attention belongs to a causal block");
  auto attend = [&](Stream& s) { return attention_->Bidirectional(s, &s.handles).tokens; };
  return AttendAndRest(std::move(stream), nullptr, attend);
}

}  // namespace cistern
