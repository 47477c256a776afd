#include "cistern/models/decoder_lm.h"

#include <ATen/ATen.h>

#include "cistern/base/error.h"
#include "cistern/nn/head_loss.h"
#include "cistern/nn/positions.h"

namespace cistern {
namespace {

template <class F>
ModelState MapState(const ModelState& state, F&& f) {
  ModelState out;
  for (const State& layer : state.layers) out.layers.push_back(f(layer));
  return out;
}

}  // namespace

int64_t ModelState::Bytes() const {
  int64_t bytes = positions.defined() ? positions.numel() * positions.element_size() : 0;
  for (const State& layer : layers) bytes += layer.Bytes();
  return bytes;
}
ModelState ModelState::Clone() const {
  ModelState out = MapState(*this, [](const State& s) { return s.Clone(); });
  out.positions = positions.clone();
  return out;
}
ModelState ModelState::Detach() const {
  ModelState out = MapState(*this, [](const State& s) { return s.Detach(); });
  out.positions = positions;
  return out;
}
ModelState ModelState::Reorder(const at::Tensor& rows) const {
  ModelState out = MapState(*this, [&](const State& s) { return s.Reorder(rows); });
  out.positions = positions.index_select(0, rows);
  return out;
}

DecoderLm::DecoderLm(const ModelConfig& config) : Model(config) {
  if (config.vocab_size < 1) FailUsage("a decoder_lm needs vocab_size of at least 1, got ", config.vocab_size);
  auto embed = std::make_shared<Embedding>(config.vocab_size, config.dim, config.EmbeddingStd());
  embedding_ = embed->weight;
  embed_ = register_module("embed_tokens", embed);
  positions_ = register_module("embed_positions",
                               std::make_shared<PositionEmbedding>(config.positions, config.dim, config.max_length, config.PositionStd()));
  if (config.embedding_norm) embedding_norm_ = register_module("embed_norm", std::make_shared<LayerNorm>(config.dim, config.norm_eps));
  auto layers = register_module("layers", std::make_shared<Container>());
  blocks_ = AddBlocks(*layers, config, Form::kCausal);
  if (config.final_norm) norm_ = register_module("norm", std::make_shared<LayerNorm>(config.dim, config.norm_eps));
  if (!config.tie_embeddings) {
    head_ = register_module("lm_head",
                            std::make_shared<Linear>(config.dim, config.vocab_size, config.bias || config.head_bias, config.init_std));
  }
}

ModelState DecoderLm::EmptyState(int64_t batch) const {
  ModelState state;
  for (const auto& block : blocks_) state.layers.push_back(block->EmptyState(batch, options()));
  state.positions = at::zeros({batch}, options().dtype(at::kLong));
  return state;
}

int64_t DecoderLm::StateBytes(int64_t batch, int64_t tokens) const {
  int64_t bytes = batch * int64_t(sizeof(int64_t));  // positions
  for (const auto& block : blocks_) bytes += block->attention().StateBytes(batch, tokens, options());
  return bytes;
}

ModelState DecoderLm::Compact(const ModelState& state) const {
  CheckLayers(state);
  ModelState out = state;
  for (size_t i = 0; i < blocks_.size(); ++i) out.layers[i] = blocks_[i]->attention().mechanism().Compact(state.layers[i]);
  return out;
}

void DecoderLm::Truncate(ModelState& state, int64_t count) const {
  CheckLayers(state);
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const std::string refusal = blocks_[i]->attention().TruncateRefusal();
    CISTERN_CHECK(refusal.empty(), "[decoder_lm] the state cannot be cut back: layer ", i, ": ", refusal,
                  "; keep a Clone of the state of before instead");
  }
  const int64_t batch = state.positions.size(0);
  if (batch == 0) return;
  const int64_t tokens = state.positions[0].item<int64_t>();
  // Padding and earlier documents stand in a cache beside the tokens of a row, so its size tells of them.
  CISTERN_CHECK((state.positions == tokens).all().item<bool>() && Compact(state).Bytes() == StateBytes(batch, tokens),
                "[decoder_lm] a state of rows that were padded or packed cannot be cut back; keep a Clone of the state of before instead");
  CISTERN_CHECK(count >= 0 && count <= tokens, "[decoder_lm] cannot cut a state of ", tokens, " tokens back to ", count);
  for (size_t i = 0; i < blocks_.size(); ++i) blocks_[i]->attention().mechanism().Truncate(state.layers[i], count);
  state.positions = at::full_like(state.positions, count);
}

void DecoderLm::CheckLayers(const ModelState& state) const {
  CISTERN_CHECK(state.layers.size() == blocks_.size(), "[decoder_lm] the state has ", state.layers.size(), " layers, the model ",
                blocks_.size());
}

at::Tensor DecoderLm::Hidden(const at::Tensor& ids, ModelState& state, const ops::Mask& mask) {
  CISTERN_CHECK(ids.dim() == 2, "[decoder_lm] expected ids of shape [B,T], got ", ids.dim(), " dimensions");
  CheckLayers(state);
  Stream stream;
  stream.mask = mask;
  stream.positions = PiecePositions(state.positions, ids.size(1), mask);
  stream.x = positions_->Forward(at::embedding(embedding_, ids), stream.positions);
  if (embedding_norm_) stream.x = embedding_norm_->Forward(stream.x);
  if (is_training() && config_.dropout > 0) stream.x = at::dropout(stream.x, config_.dropout, true);
  for (size_t i = 0; i < blocks_.size(); ++i) stream = blocks_[i]->Extend(std::move(stream), state.layers[i]);
  state.positions = PositionsAfter(state.positions, stream.positions, mask);
  return norm_ ? norm_->Forward(stream.x) : stream.x;
}

at::Tensor DecoderLm::Logits(const at::Tensor& hidden) const { return head_ ? head_->Forward(hidden) : at::linear(hidden, embedding_); }

at::Tensor DecoderLm::Loss(const at::Tensor& hidden, const at::Tensor& targets, double label_smoothing) const {
  return HeadLoss(hidden.reshape({-1, hidden.size(-1)}), head_ ? head_->weight : embedding_, head_ ? head_->bias : at::Tensor(),
                  targets.reshape({-1}), label_smoothing);
}

at::Tensor DecoderLm::Extend(const at::Tensor& ids, ModelState& state, const ops::Mask& mask) { return Logits(Hidden(ids, state, mask)); }

at::Tensor NextTokenLoss(const at::Tensor& logits, const at::Tensor& targets, double label_smoothing) {
  return at::cross_entropy_loss(logits.reshape({-1, logits.size(-1)}), targets.reshape({-1}), {}, at::Reduction::Mean, -100,
                                label_smoothing);
}

}  // namespace cistern
