#pragma once
// A sequence-to-sequence model: a bidirectional encoder reads the source once, and a causal
// decoder, whose blocks also attend to what the encoder made of it, writes the target (Vaswani et
// al. 2017). The mechanisms of encoder, decoder and cross attention are chosen apart.
#include "cistern/models/language_model.h"

namespace cistern {

class EncoderDecoder : public LanguageModel {
 public:
  struct Options {
    bool share_embeddings = true;  // of source and target
  };
  static Fields Describe(Options& options);
  static void Check(const ModelConfig& config);
  explicit EncoderDecoder(const ModelConfig& config);
  // The state before the first target token: an empty state of each decoder block's self
  // attention, then the source's tokens in the cross attention of each, to be read as often as one
  // likes.
  ModelState Encode(const at::Tensor& source, const ops::Mask& mask) override;
  std::string SourceSeesPadding() const override { return encoder_->SeesPadding(); }
  // Packed rows are an Error, because each document would have a source of its own.
  at::Tensor Hidden(const at::Tensor& target, ModelState& state,
                    const ops::Mask& mask = {}) override;
  at::Tensor Logits(const at::Tensor& hidden) const override { return output_->Logits(hidden); }
  at::Tensor Loss(const at::Tensor& hidden, const at::Tensor& targets,
                  double label_smoothing = 0) const override {
    return output_->Loss(hidden, targets, label_smoothing);
  }
  const Block& decoder_block(size_t layer) const { return *decoder_->blocks()[layer]; }

 private:
  at::Tensor source_embedding_, target_embedding_;  // [V,D]
  std::unique_ptr<Trunk> encoder_, decoder_;
  std::shared_ptr<LayerNorm> memory_norm_;  // of the encoder's memory, where the decoder goes on
                                            // with it; null: none
  std::unique_ptr<OutputLayer> output_;
};

}  // namespace cistern
