#include "cistern/models/encoder_decoder.h"

#include <ATen/ATen.h>

#include "cistern/base/error.h"
#include "cistern/nn/head_loss.h"

namespace cistern {

EncoderDecoder::EncoderDecoder(const ModelConfig& config) : StatefulModel(config) {
  if (config.vocab_size < 1)
    FailUsage("an encoder_decoder needs vocab_size of at least 1, got ", config.vocab_size);
  const auto table = [&](const std::string& name, int64_t vocab) {
    return register_module(name,
                           std::make_shared<Embedding>(vocab, config.dim, config.EmbeddingStd()))
        ->weight;
  };
  target_embedding_ = table("embed_tokens", config.TargetVocabSize());
  source_embedding_ =
      config.share_embeddings ? target_embedding_ : table("source_embed_tokens", config.vocab_size);
  const auto half = [&](const std::string& name, Form form, auto& positions, auto& blocks,
                        auto& norm) {
    auto part = register_module(name, std::make_shared<Container>());
    positions = part->Add("embed_positions", std::make_shared<PositionEmbedding>(
                                                 config.positions, config.dim, config.max_length,
                                                 config.PositionStd()));
    blocks = AddBlocks(*part->Add("layers", std::make_shared<Container>()), config, form);
    if (config.final_norm)
      norm = part->Add("norm", std::make_shared<LayerNorm>(config.dim, config.norm_eps));
  };
  half("encoder", Form::kBidirectional, source_positions_, encoder_, encoder_norm_);
  half("decoder", Form::kCausal, target_positions_, decoder_, decoder_norm_);
  SetStateLayers(decoder_);
  if (!config.tie_embeddings) {
    head_ = register_module(
        "lm_head", std::make_shared<Linear>(config.dim, config.TargetVocabSize(),
                                            config.bias || config.head_bias, config.init_std));
  }
}

at::Tensor EncoderDecoder::Embed(const at::Tensor& table, const PositionEmbedding& where,
                                 const at::Tensor& ids, const at::Tensor& positions) const {
  const at::Tensor x = where.Forward(at::embedding(table, ids), positions);
  return is_training() && config_.dropout > 0 ? at::dropout(x, config_.dropout, true) : x;
}

ModelState EncoderDecoder::Encode(const at::Tensor& source, const at::Tensor& lengths) {
  CISTERN_CHECK(
      source.dim() == 2 && lengths.dim() == 1 && lengths.size(0) == source.size(0),
      "[encoder_decoder] expected source ids of shape [B,S] and lengths of shape [B], got ",
      source.sizes(), " and ", lengths.sizes());
  Stream stream;
  // Without padding there is no mask to be kept and applied at every token. (Where the lengths are
  // elsewhere, looking would mean to wait.)
  if (!lengths.is_cpu() || !(lengths == source.size(1)).all().item<bool>())
    stream.mask.lengths = lengths;
  stream.positions = PiecePositions(at::zeros({1}, lengths.options()), source.size(1), {});
  stream.x = Embed(source_embedding_, *source_positions_, source, stream.positions);
  for (const auto& block : encoder_) stream = block->Bidirectional(std::move(stream));
  if (encoder_norm_) stream.x = encoder_norm_->Forward(stream.x);
  ModelState state = EmptyStates(source.size(0));
  for (size_t i = 0; i < decoder_.size(); ++i) {
    AttentionLayer& cross = decoder_[i]->cross();
    if (cross.attends()) cross.Write(stream, state.layers[decoder_.size() + i]);
  }
  return state;
}

at::Tensor EncoderDecoder::Hidden(const at::Tensor& target, ModelState& state,
                                  const ops::Mask& mask) {
  CISTERN_CHECK(target.dim() == 2, "[encoder_decoder] expected target ids of shape [B,T], got ",
                target.dim(), " dimensions");
  CISTERN_CHECK(!mask.starts,
                "[encoder_decoder] several documents in a row would need a source each; give every "
                "document a row");
  CheckLayers(state);
  const size_t count = decoder_.size();
  Stream stream;
  stream.mask = mask;
  stream.positions = PiecePositions(state.positions, target.size(1), mask);
  stream.x = Embed(target_embedding_, *target_positions_, target, stream.positions);
  for (size_t i = 0; i < count; ++i)
    stream = decoder_[i]->Extend(std::move(stream), state.layers[i], &state.layers[count + i]);
  state.positions = PositionsAfter(state.positions, stream.positions, mask);
  return decoder_norm_ ? decoder_norm_->Forward(stream.x) : stream.x;
}

at::Tensor EncoderDecoder::Logits(const at::Tensor& hidden) const {
  return head_ ? head_->Forward(hidden) : at::linear(hidden, target_embedding_);
}

at::Tensor EncoderDecoder::Loss(const at::Tensor& hidden, const at::Tensor& targets,
                                double label_smoothing) const {
  return HeadLoss(hidden.reshape({-1, hidden.size(-1)}), head_ ? head_->weight : target_embedding_,
                  head_ ? head_->bias : at::Tensor(), targets.reshape({-1}), label_smoothing);
}

at::Tensor EncoderDecoder::Extend(const at::Tensor& target, ModelState& state,
                                  const ops::Mask& mask) {
  return Logits(Hidden(target, state, mask));
}

}  // namespace cistern
