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
  const bool pre = options.norm == "pre", tokens = options.attention.tokens_out;
  auto norm = [&](const std::string& name) { return register_module(name, std::make_shared<LayerNorm>(dim, options.norm_eps)); };
  if (tokens) {
    ffn_ = register_module("ffn", std::make_shared<FeedForward>(dim, options.ffn_dim > 0 ? options.ffn_dim : 4 * dim, options.activation,
                                                                options.ffn_bias, options.attention.init_std, options.attention.out_std));
  }
  memory_ = attention_->mechanism().info().memory;
  if (tokens || pre) attention_norm_ = norm("attention_norm");
  if (tokens) ffn_norm_ = norm("ffn_norm");
  if (memory_ == MemoryUse::kStream && (options.memory_out || pre)) memory_norm_ = norm("memory_norm");
  if (memory_ == MemoryUse::kLatents && pre) source_norm_ = norm("source_norm");
}

template <class Attend>
Stream Block::Run(Stream stream, Attend&& attend) {
  auto drop = [&](const at::Tensor& y) { return is_training() && options_.dropout > 0 ? at::dropout(y, options_.dropout, true) : y; };
  const bool pre = options_.norm == "pre";
  const at::Tensor x = stream.x;
  if (attention_->mechanism().info().HandsOnMemory() && !stream.memory.defined()) stream.memory = attention_->mechanism().InitialMemory();
  const at::Tensor memory = stream.memory;
  if (pre) {
    stream.x = attention_norm_->Forward(x);
    if (memory_ == MemoryUse::kStream) stream.memory = memory_norm_->Forward(memory);
  }
  const AttentionLayer::Attended attended = attend(stream);
  stream.memory = memory_ == MemoryUse::kReplaced ? attended.packed : memory;
  if (memory_ == MemoryUse::kStream && options_.memory_out) {
    stream.memory = memory + drop(attended.packed);
    if (!pre) stream.memory = memory_norm_->Forward(stream.memory);
  }
  if (!ffn_) {
    stream.x = at::Tensor();
    return stream;
  }
  if (pre) {
    const at::Tensor a = x + drop(attended.tokens);
    stream.x = a + drop(ffn_->Forward(ffn_norm_->Forward(a)));
  } else {
    const at::Tensor a = attention_norm_->Forward(x + drop(attended.tokens));
    stream.x = ffn_norm_->Forward(a + drop(ffn_->Forward(a)));
  }
  return stream;
}

Stream Block::Extend(Stream stream, State& state) {
  return Run(std::move(stream), [&](const Stream& s) { return AttentionLayer::Attended{attention_->Extend(s, state), {}}; });
}

Stream Block::Bidirectional(Stream stream) {
  if (memory_ == MemoryUse::kLatents) return ToLatents(std::move(stream));
  return Run(std::move(stream), [&](const Stream& s) { return attention_->Bidirectional(s); });
}

Stream Block::ToLatents(Stream stream) {
  const std::string& name = attention_->mechanism().info().name;
  if (stream.mask.starts) FailUsage("[", name, "] has one set of latents for each row: give each document a row");
  if (!stream.source) {
    Stream latents;
    latents.x = attention_->mechanism().InitialMemory().expand({stream.x.size(0), -1, -1});
    latents.positions = at::arange(latents.x.size(1), stream.x.options().dtype(at::kLong).requires_grad(false)).unsqueeze(0);
    latents.memory = stream.memory;
    latents.source = std::make_shared<const Stream>(std::move(stream));
    stream = std::move(latents);
  }
  Stream source = *stream.source;
  if (source_norm_) source.x = source_norm_->Forward(source.x);
  return Run(std::move(stream), [&](const Stream& s) {
    State state = attention_->EmptyState(source.x.size(0), source.x.options().requires_grad(false));
    attention_->Write(source, state);
    return AttentionLayer::Attended{attention_->Read(s, state), {}};
  });
}

}  // namespace cistern
