#include "cistern/models/decoder_lm.h"

#include <ATen/ATen.h>

#include "cistern/base/error.h"
#include "cistern/nn/head_loss.h"
#include "cistern/nn/positions.h"

namespace cistern {

DecoderLm::DecoderLm(const ModelConfig& config) : StatefulModel(config) {
  if (config.vocab_size < 1)
    FailUsage("a decoder_lm needs vocab_size of at least 1, got ", config.vocab_size);
  auto embed = std::make_shared<Embedding>(config.vocab_size, config.dim, config.EmbeddingStd());
  embedding_ = embed->weight;
  embed_ = register_module("embed_tokens", embed);
  positions_ = register_module("embed_positions", std::make_shared<PositionEmbedding>(
                                                      config.positions, config.dim,
                                                      config.max_length, config.PositionStd()));
  if (config.embedding_norm)
    embedding_norm_ =
        register_module("embed_norm", std::make_shared<LayerNorm>(config.dim, config.norm_eps));
  auto layers = register_module("layers", std::make_shared<Container>());
  blocks_ = AddBlocks(*layers, config, Form::kCausal);
  SetStateLayers(blocks_);
  if (config.final_norm)
    norm_ = register_module("norm", std::make_shared<LayerNorm>(config.dim, config.norm_eps));
  if (!config.tie_embeddings) {
    head_ = register_module(
        "lm_head", std::make_shared<Linear>(config.dim, config.vocab_size,
                                            config.bias || config.head_bias, config.init_std));
  }
}

at::Tensor DecoderLm::Hidden(const at::Tensor& ids, ModelState& state, const ops::Mask& mask) {
  CISTERN_CHECK(ids.dim() == 2, "[decoder_lm] expected ids of shape [B,T], got ", ids.dim(),
                " dimensions");
  CheckLayers(state);
  Stream stream;
  stream.mask = mask;
  stream.positions = PiecePositions(state.positions, ids.size(1), mask);
  stream.x = positions_->Forward(at::embedding(embedding_, ids), stream.positions);
  if (embedding_norm_) stream.x = embedding_norm_->Forward(stream.x);
  if (is_training() && config_.dropout > 0) stream.x = at::dropout(stream.x, config_.dropout, true);
  for (size_t i = 0; i < blocks_.size(); ++i)
    stream = blocks_[i]->Extend(std::move(stream), state.layers[i]);
  state.positions = PositionsAfter(state.positions, stream.positions, mask);
  return norm_ ? norm_->Forward(stream.x) : stream.x;
}

at::Tensor DecoderLm::Logits(const at::Tensor& hidden) const {
  return head_ ? head_->Forward(hidden) : at::linear(hidden, embedding_);
}

at::Tensor DecoderLm::Loss(const at::Tensor& hidden, const at::Tensor& targets,
                           double label_smoothing) const {
  return HeadLoss(hidden.reshape({-1, hidden.size(-1)}), head_ ? head_->weight : embedding_,
                  head_ ? head_->bias : at::Tensor(), targets.reshape({-1}), label_smoothing);
}

at::Tensor DecoderLm::Extend(const at::Tensor& ids, ModelState& state, const ops::Mask& mask) {
  return Logits(Hidden(ids, state, mask));
}

at::Tensor ExtendInPieces(DecoderLm& model, const at::Tensor& ids, const std::vector<int64_t>& cuts,
                          const ops::Mask& mask, ModelState* last) {
  ModelState state = model.EmptyState(ids.size(0));
  std::vector<at::Tensor> outs;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    const int64_t begin = cuts[i], count = cuts[i + 1] - begin;
    ops::Mask piece;
    if (mask.lengths) piece.lengths = (*mask.lengths - begin).clamp(0, count);
    if (mask.starts) piece.starts = mask.starts->narrow(1, begin, count);
    outs.push_back(model.Extend(ids.narrow(1, begin, count), state, piece));
  }
  if (last) *last = state;
  return at::cat(outs, 1);
}

at::Tensor NextTokenLoss(const at::Tensor& logits, const at::Tensor& targets,
                         double label_smoothing) {
  return at::cross_entropy_loss(logits.reshape({-1, logits.size(-1)}), targets.reshape({-1}), {},
                                at::Reduction::Mean, -100, label_smoothing);
}

}  // namespace cistern
