#pragma once
// A bidirectional encoder that predicts tokens which are hidden from it (masked language model:
// Devlin et al. 2019; RoBERTa, Liu et al. 2019). The mask is a vector of its own next to the
// embeddings, so that the vocabulary is the tokenizer's and the weights fit other kinds of model.
#include <memory>

#include "cistern/models/token_predictor.h"

namespace cistern {

class MaskedLm : public TokenPredictor {
 public:
  struct Options {
    bool transform = true;  // a linear map, gelu and a norm before the output layer (RoBERTa)
  };
  static Fields Describe(Options& options);
  static void Check(const ModelConfig& config);
  explicit MaskedLm(const ModelConfig& config);

  // The id that stands for the mask among `ids`: one beyond the vocabulary.
  int64_t mask_id() const { return config_.vocab_size; }
  // ids with mask_id where tokens are to be predicted.
  at::Tensor Hidden(const at::Tensor& ids, const ops::Mask& mask = {}) override;
  at::Tensor Logits(const at::Tensor& hidden) const override;  // [...,D] -> [...,V]
  std::string SeesPadding() const override { return trunk_.SeesPadding(); }

 private:
  // Over targets [B,T] != -100; at least one of them is.
  at::Tensor DoTrainingLoss(const NamedTensors& batch, double label_smoothing) override;
  at::Tensor Transformed(const at::Tensor& hidden) const;

  at::Tensor embedding_, mask_;  // [V,D], [D]
  Trunk trunk_;
  OutputLayer output_;
  std::shared_ptr<Linear> transform_;  // null without Options::transform
  std::shared_ptr<LayerNorm> transform_norm_;
};

// Where targets [B,T] != -100: indices into the flattened tokens, [N] int64.
at::Tensor TargetPositions(const at::Tensor& targets);

}  // namespace cistern
