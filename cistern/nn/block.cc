#include "cistern/nn/block.h"

#include <ATen/ATen.h>

#include "cistern/base/error.h"

namespace cistern {

FeedForward::FeedForward(int64_t dim, int64_t hidden, const std::string& activation, bool bias, double std, double out_std)
    : activation_(activation),
      up_(register_module("up_proj", std::make_shared<Linear>(dim, hidden, bias, std))),
      down_(register_module("down_proj", std::make_shared<Linear>(hidden, dim, bias, out_std))) {}

at::Tensor FeedForward::Forward(const at::Tensor& x) const {
  at::Tensor h = up_->Forward(x);
  h = activation_ == "relu" ? at::relu(h) : at::gelu(h, activation_ == "gelu_tanh" ? "tanh" : "none");
  return down_->Forward(h);
}

Block::Block(const BlockOptions& options)
    : options_(options), attention_(register_module("attention", std::make_shared<AttentionLayer>(options.attention))) {
  const int64_t dim = options.attention.dims.dim;
  ffn_ = register_module("ffn", std::make_shared<FeedForward>(dim, options.ffn_dim > 0 ? options.ffn_dim : 4 * dim, options.activation,
                                                              options.ffn_bias, options.attention.init_std, options.attention.out_std));
  if (attention_->attends()) attention_norm_ = register_module("attention_norm", std::make_shared<LayerNorm>(dim, options.norm_eps));
  ffn_norm_ = register_module("ffn_norm", std::make_shared<LayerNorm>(dim, options.norm_eps));
  if (!options.cross) return;
  cross_ = register_module("cross_attention", std::make_shared<AttentionLayer>(*options.cross));
  if (cross_->attends()) cross_norm_ = register_module("cross_attention_norm", std::make_shared<LayerNorm>(dim, options.norm_eps));
}

template <class F>
at::Tensor Block::Residual(const at::Tensor& x, const LayerNorm& norm, F&& f) const {
  const bool pre = options_.norm == "pre";
  const at::Tensor y = f(pre ? norm.Forward(x) : x);
  const at::Tensor sum = x + (is_training() && options_.dropout > 0 ? at::dropout(y, options_.dropout, true) : y);
  return pre ? sum : norm.Forward(sum);
}

template <class Attend>
Stream Block::Run(Stream stream, Attend&& attend, State* source) {
  CISTERN_CHECK(!cross_ == !source, "[block] cross attention and the state of a source go together");
  at::Tensor x = stream.x;
  const auto residual = [&](const std::shared_ptr<LayerNorm>& norm, auto&& f) {
    x = Residual(x, *norm, [&](const at::Tensor& y) {
      stream.x = y;
      return f(stream);
    });
  };
  if (attention_->attends()) residual(attention_norm_, attend);
  if (cross_ && cross_->attends()) residual(cross_norm_, [&](Stream& s) { return cross_->Read(s, *source, &s.cross_handles); });
  residual(ffn_norm_, [&](const Stream& s) { return ffn_->Forward(s.x); });
  stream.x = x;
  return stream;
}

Stream Block::Extend(Stream stream, State& state, State* source) {
  return Run(
      std::move(stream), [&](Stream& s) { return attention_->Extend(s, state, &s.handles); }, source);
}

Stream Block::Bidirectional(Stream stream) {
  return Run(
      std::move(stream), [&](Stream& s) { return attention_->Bidirectional(s, &s.handles); }, nullptr);
}

}  // namespace cistern
