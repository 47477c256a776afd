#pragma once
// A causal language model: embedding, blocks, output layer. One way to run it: extend, by any
// number of tokens.
#include <optional>

#include "cistern/models/adaptive.h"
#include "cistern/models/language_model.h"

namespace cistern {

class DecoderLm : public LanguageModel {
 public:
  using Options = EmbeddingOptions;
  static Fields Describe(Options& options) { return options.Describe(); }
  static void Check(const ModelConfig& config);
  explicit DecoderLm(const ModelConfig& config);
  at::Tensor Hidden(const at::Tensor& ids, ModelState& state, const ops::Mask& mask = {}) override;
  // With embedding=adaptive these are log-probabilities.
  at::Tensor Logits(const at::Tensor& hidden) const override {
    return output_ ? output_->Logits(hidden) : softmax_->LogProbabilities(hidden);
  }
  at::Tensor Loss(const at::Tensor& hidden, const at::Tensor& targets,
                  double label_smoothing = 0) const override {
    return output_ ? output_->Loss(hidden, targets, label_smoothing)
                   : softmax_->Loss(hidden, targets, label_smoothing);
  }
  std::string WhyNoSmoothing() const override {
    return softmax_ ? AdaptiveSoftmax::kWhyNoSmoothing : "";
  }
  const Block& block(size_t layer) const { return *trunk_.blocks()[layer]; }

 private:
  // Registers embed_tokens: [V,D], or undefined with embedding=adaptive.
  at::Tensor MakeEmbedding();

  std::shared_ptr<AdaptiveEmbedding> bands_;  // null with one table
  at::Tensor embedding_;
  Trunk trunk_;
  std::optional<OutputLayer> output_;         // with one table
  std::shared_ptr<AdaptiveSoftmax> softmax_;  // with bands
};

}  // namespace cistern
