#pragma once
// A sequence-to-sequence model: a bidirectional encoder reads the source once, and a causal
// decoder, whose blocks also attend to what the encoder made of it, writes the target (Vaswani et
// al. 2017). The mechanisms of encoder, decoder and cross attention are chosen apart.
#include "cistern/attention/token_positions.h"
#include "cistern/models/model_state.h"
#include "cistern/nn/positions.h"

namespace cistern {

class EncoderDecoder : public StatefulModel {
 public:
  explicit EncoderDecoder(const ModelConfig& config);
  // source [B,S] int64, lengths [B] (padding on the right is never seen) -> the state before the
  // first target token: an empty state of each decoder block's self attention, then the source's
  // tokens in the cross attention of each, to be read as often as one likes.
  ModelState Encode(const at::Tensor& source, const at::Tensor& lengths);
  // target [B,T] int64: the next tokens of each row -> logits [B,T,V]. Writes them into the state.
  // A row's padding (mask.lengths) is never seen; packed rows are an Error, because each document
  // would have a source of its own.
  at::Tensor Extend(const at::Tensor& target, ModelState& state, const ops::Mask& mask = {});
  // The same up to the output layer: [B,T,D].
  at::Tensor Hidden(const at::Tensor& target, ModelState& state, const ops::Mask& mask = {});
  at::Tensor Logits(const at::Tensor& hidden) const;
  // NextTokenLoss(Logits(hidden), targets) without the logits in memory (nn/head_loss.h).
  at::Tensor Loss(const at::Tensor& hidden, const at::Tensor& targets,
                  double label_smoothing = 0) const;
  const Block& decoder_block(size_t layer) const { return *decoder_[layer]; }

 private:
  at::Tensor Embed(const at::Tensor& table, const PositionEmbedding& where, const at::Tensor& ids,
                   const at::Tensor& positions) const;

  at::Tensor source_embedding_, target_embedding_;  // [V,D]
  std::shared_ptr<PositionEmbedding> source_positions_, target_positions_;
  std::vector<std::shared_ptr<Block>> encoder_, decoder_;
  std::shared_ptr<LayerNorm> encoder_norm_, decoder_norm_;
  std::shared_ptr<Linear> head_;
};

}  // namespace cistern
