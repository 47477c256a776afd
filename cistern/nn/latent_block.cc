#include "cistern/nn/latent_block.h"

#include <ATen/ATen.h>

#include "cistern/base/error.h"

namespace cistern {

namespace {

// Keys and values are made of the tokens, which may be of another width than the latents, and what
// stands beside them.
BlockOptions WithSourceWidth(BlockOptions options) {
  int64_t& width = options.attention.source_dim;
  if (width == 0) width = options.attention.dims.Model();
  width += FourierOf(options.attention.mechanism_options).Channels();
  return options;
}

}  // namespace

LatentBlock::LatentBlock(const BlockOptions& options)
    : Block(WithSourceWidth(options)), fourier_(FourierOf(options.attention.mechanism_options)) {
  if (!pre()) return;
  source_norm_ = register_module(
      "source_norm", std::make_shared<LayerNorm>(options_.attention.source_dim, options.norm_eps,
                                                 options.norm_kind));
}

at::Tensor LatentBlock::Source(const Stream& source) const {
  if (fourier_.bands == 0) return source.x;
  const at::Tensor features =
      FourierFeatures(source.positions, options_.attention.dims.max_length, fourier_)
          .to(source.x.scalar_type());
  return at::cat({source.x, features.expand({source.x.size(0), -1, -1})}, 2);
}

Stream LatentBlock::Bidirectional(Stream stream) {
  const Mechanism& mechanism = attention_->mechanism();
  if (stream.mask.starts) {
    FailUsage(
        "[", mechanism.info().name,
        "] has one set of latents for each row, and a row of several documents would need one for "
        "each: give each document a row of "
        "its own, with lengths, or use a mechanism without latents of its own, such as latte");
  }
  if (!stream.source) {
    Stream latents;
    latents.x = mechanism.InitialMemory().expand({stream.x.size(0), -1, -1});
    latents.positions =
        at::arange(latents.x.size(1), stream.x.options().dtype(at::kLong).requires_grad(false))
            .unsqueeze(0);
    latents.memory = stream.memory;
    latents.source = std::make_shared<const Stream>(std::move(stream));
    stream = std::move(latents);
  }
  Stream source = *stream.source;
  source.x = Source(source);
  if (source_norm_) source.x = source_norm_->Forward(source.x);
  auto attend = [&](Stream& s) {
    State state = attention_->EmptyState(source.x.size(0), source.x.options().requires_grad(false));
    attention_->Write(source, state);
    return attention_->Read(s, state);
  };
  return AttendAndRest(std::move(stream), nullptr, attend);
}

}  // namespace cistern
