#include "cistern/nn/block.h"

#include <ATen/ATen.h>

#include "cistern/base/error.h"

namespace cistern {

FeedForward::FeedForward(int64_t dim, int64_t hidden, const std::string& activation, bool bias,
                         double std, double out_std, double dropout)
    : activation_(activation),
      dropout_(dropout),
      up_(register_module("up_proj", std::make_shared<Linear>(dim, hidden, bias, std))),
      down_(register_module("down_proj", std::make_shared<Linear>(hidden, dim, bias, out_std))) {}

at::Tensor FeedForward::Forward(const at::Tensor& x) const {
  at::Tensor h = up_->Forward(x);
  h = activation_ == "relu" ? at::relu(h)
                            : at::gelu(h, activation_ == "gelu_tanh" ? "tanh" : "none");
  return down_->Forward(is_training() && dropout_ > 0 ? at::dropout(h, dropout_, true) : h);
}

Block::Block(const BlockOptions& options)
    : options_(options),
      attention_(
          register_module("attention", std::make_shared<AttentionLayer>(options.attention))) {
  const int64_t dim = options.attention.dims.dim;
  const bool pre = options.norm == "pre", tokens = options.attention.tokens_out,
             attends = attention_->attends();
  auto norm = [&](const std::string& name) {
    return register_module(name, std::make_shared<LayerNorm>(dim, options.norm_eps));
  };
  if (tokens) {
    ffn_ =
        register_module("ffn", std::make_shared<FeedForward>(
                                   dim, options.ffn_dim > 0 ? options.ffn_dim : 4 * dim,
                                   options.activation, options.ffn_bias, options.attention.init_std,
                                   options.attention.out_std, options.ffn_dropout));
  }
  memory_ = attention_->mechanism().info().memory;
  if (attends && (tokens || pre)) attention_norm_ = norm("attention_norm");
  if (tokens) ffn_norm_ = norm("ffn_norm");
  if (memory_ == MemoryUse::kStream && (options.memory_out || pre))
    memory_norm_ = norm("memory_norm");
  if (memory_ == MemoryUse::kLatents && pre) source_norm_ = norm("source_norm");
  if (!options.cross) return;
  cross_ = register_module("cross_attention", std::make_shared<AttentionLayer>(*options.cross));
  if (cross_->attends()) cross_norm_ = norm("cross_attention_norm");
}

at::Tensor Block::Add(const at::Tensor& x, const at::Tensor& y, const LayerNorm* norm) const {
  const at::Tensor sum =
      x + (is_training() && options_.dropout > 0 ? at::dropout(y, options_.dropout, true) : y);
  return options_.norm == "pre" ? sum : norm->Forward(sum);
}

template <class Attend>
Stream Block::Run(Stream stream, Attend&& attend, State* source) {
  CISTERN_CHECK(!cross_ == !source,
                "[block] cross attention and the state of a source go together");
  const bool pre = options_.norm == "pre";
  at::Tensor x = stream.x;
  auto before = [&](const LayerNorm* norm) { return pre ? norm->Forward(x) : x; };
  if (attention_->mechanism().info().HandsOnMemory() && !stream.memory.defined())
    stream.memory = attention_->mechanism().InitialMemory();
  if (attention_->attends()) {
    const at::Tensor memory = stream.memory;
    stream.x = before(attention_norm_.get());
    if (pre && memory_ == MemoryUse::kStream) stream.memory = memory_norm_->Forward(memory);
    const AttentionLayer::Attended attended = attend(stream);
    stream.memory = memory_ == MemoryUse::kReplaced ? attended.packed : memory;
    if (memory_ == MemoryUse::kStream && options_.memory_out)
      stream.memory = Add(memory, attended.packed, memory_norm_.get());
    if (!ffn_) {
      stream.x = at::Tensor();
      return stream;
    }
    x = Add(x, attended.tokens, attention_norm_.get());
  }
  if (cross_ && cross_->attends()) {
    stream.x = before(cross_norm_.get());
    x = Add(x, cross_->Read(stream, *source, &stream.cross_handles), cross_norm_.get());
  }
  stream.x = Add(x, ffn_->Forward(before(ffn_norm_.get())), ffn_norm_.get());
  return stream;
}

Stream Block::Extend(Stream stream, State& state, State* source) {
  auto attend = [&](Stream& s) {
    return AttentionLayer::Attended{attention_->Extend(s, state, &s.handles), {}};
  };
  return Run(std::move(stream), attend, source);
}

Stream Block::Bidirectional(Stream stream) {
  if (memory_ == MemoryUse::kLatents) return ToLatents(std::move(stream));
  auto attend = [&](Stream& s) { return attention_->Bidirectional(s, &s.handles); };
  return Run(std::move(stream), attend, nullptr);
}

Stream Block::ToLatents(Stream stream) {
  const std::string& name = attention_->mechanism().info().name;
  if (stream.mask.starts) {
    FailUsage(
        "[", name,
        "] has one set of latents for each row, and a row of several documents would need one for "
        "each: give each document a row of "
        "its own, with lengths, or use a mechanism without latents of its own, such as latte");
  }
  if (!stream.source) {
    Stream latents;
    latents.x = attention_->mechanism().InitialMemory().expand({stream.x.size(0), -1, -1});
    latents.positions =
        at::arange(latents.x.size(1), stream.x.options().dtype(at::kLong).requires_grad(false))
            .unsqueeze(0);
    latents.memory = stream.memory;
    latents.source = std::make_shared<const Stream>(std::move(stream));
    stream = std::move(latents);
  }
  Stream source = *stream.source;
  if (source_norm_) source.x = source_norm_->Forward(source.x);
  auto attend = [&](Stream& s) {
    State state = attention_->EmptyState(source.x.size(0), source.x.options().requires_grad(false));
    attention_->Write(source, state);
    return AttentionLayer::Attended{attention_->Read(s, state), {}};
  };
  return Run(std::move(stream), attend, nullptr);
}

}  // namespace cistern
