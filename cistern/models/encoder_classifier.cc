#include "cistern/models/encoder_classifier.h"

#include <ATen/ATen.h>

#include "cistern/base/error.h"
#include "cistern/models/decoder_lm.h"
#include "cistern/nn/positions.h"

namespace cistern {

EncoderClassifier::EncoderClassifier(const ModelConfig& config) : Model(config) {
  if (config.vocab_size < 1 || config.classes < 1) {
    FailUsage("an encoder_classifier needs vocab_size >= 1 and classes >= 1, got ",
              config.vocab_size, " and ", config.classes);
  }
  embedding_ =
      register_module("embed_tokens", std::make_shared<Embedding>(config.vocab_size, config.dim,
                                                                  config.EmbeddingStd()))
          ->weight;
  if (config.pooling == "cls")
    cls_ = register_parameter("cls_token", at::zeros({1, 1, config.dim}));
  positions_ = register_module(
      "embed_positions",
      std::make_shared<PositionEmbedding>(config.positions, config.dim,
                                          config.max_length + (config.pooling == "cls" ? 1 : 0),
                                          config.PositionStd()));
  if (config.embedding_norm)
    embedding_norm_ =
        register_module("embed_norm", std::make_shared<LayerNorm>(config.dim, config.norm_eps));
  auto layers = register_module("layers", std::make_shared<Container>());
  blocks_ = AddBlocks(*layers, config, Form::kBidirectional);
  if (config.final_norm)
    norm_ = register_module("norm", std::make_shared<LayerNorm>(config.dim, config.norm_eps));
  const int64_t width = config.ffn_dim > 0 ? config.ffn_dim : 4 * config.dim;
  auto classifier = register_module("classifier", std::make_shared<Container>());
  const bool linear = config.head == "linear";
  if (!linear)
    hidden_ = classifier->Add("dense", std::make_shared<Linear>(config.dim, width, true));
  head_ = classifier->Add(
      "out_proj", std::make_shared<Linear>(linear ? config.dim : width, config.classes, true));
}

at::Tensor EncoderClassifier::Forward(const at::Tensor& ids, const at::Tensor& lengths) {
  CISTERN_CHECK(ids.dim() == 2 && lengths.dim() == 1 && lengths.size(0) == ids.size(0),
                "[encoder_classifier] expected ids of shape [B,T] and lengths of shape [B]");
  Stream stream;
  stream.x = at::embedding(embedding_, ids);
  const bool cls = cls_.defined();
  if (cls) stream.x = at::cat({cls_.expand({ids.size(0), 1, -1}), stream.x}, 1);
  stream.mask.lengths = lengths + (cls ? 1 : 0);
  stream.positions = PiecePositions(at::zeros({1}, lengths.options()), stream.x.size(1), {});
  stream.x = positions_->Forward(stream.x, stream.positions);
  if (embedding_norm_) stream.x = embedding_norm_->Forward(stream.x);
  if (is_training() && config_.dropout > 0) stream.x = at::dropout(stream.x, config_.dropout, true);
  for (const auto& block : blocks_) stream = block->Bidirectional(std::move(stream));
  const bool memory = config_.pooling == "memory";
  at::Tensor pooled = memory ? stream.memory : stream.x;
  if (norm_ && !config_.norm_pooled) pooled = norm_->Forward(pooled);
  if (memory || stream.source) {  // slots or latents: no padding among them
    pooled = pooled.mean(1);
  } else if (cls) {
    pooled = pooled.select(1, 0);
  } else {
    const at::Tensor pad =
        (at::arange(pooled.size(1), lengths.options()).unsqueeze(0) >= lengths.unsqueeze(1))
            .unsqueeze(-1);
    pooled = pooled.masked_fill(pad, 0.0).sum(1) /
             lengths.clamp_min(1).unsqueeze(1).to(pooled.scalar_type());
  }
  if (norm_ && config_.norm_pooled) pooled = norm_->Forward(pooled);
  if (!hidden_) return head_->Forward(pooled);
  at::Tensor h = hidden_->Forward(pooled);
  h = config_.head == "gelu" ? at::gelu(h) : at::relu(h);
  if (is_training() && config_.dropout > 0) h = at::dropout(h, config_.dropout, true);
  return head_->Forward(h);
}

}  // namespace cistern
