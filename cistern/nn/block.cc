#include "cistern/nn/block.h"

#include <ATen/ATen.h>

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
  attention_norm_ = register_module("attention_norm", std::make_shared<LayerNorm>(dim, options.norm_eps));
  ffn_norm_ = register_module("ffn_norm", std::make_shared<LayerNorm>(dim, options.norm_eps));
}

template <class Attend>
Stream Block::Run(Stream stream, Attend&& attend) {
  auto drop = [&](const at::Tensor& y) { return is_training() && options_.dropout > 0 ? at::dropout(y, options_.dropout, true) : y; };
  const at::Tensor x = stream.x;
  if (options_.norm == "pre") {
    stream.x = attention_norm_->Forward(x);
    const at::Tensor a = x + drop(attend(stream));
    stream.x = a + drop(ffn_->Forward(ffn_norm_->Forward(a)));
  } else {
    const at::Tensor a = attention_norm_->Forward(x + drop(attend(stream)));
    stream.x = ffn_norm_->Forward(a + drop(ffn_->Forward(a)));
  }
  return stream;
}

Stream Block::Extend(Stream stream, State& state) {
  return Run(std::move(stream), [&](const Stream& s) { return attention_->Extend(s, state); });
}

Stream Block::Bidirectional(Stream stream) {
  return Run(std::move(stream), [&](const Stream& s) { return attention_->Bidirectional(s); });
}

}  // namespace cistern
