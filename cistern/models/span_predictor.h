#pragma once
// A bidirectional encoder that finds a span of each row, such as the answer to a question within a
// text (Devlin et al. 2019, section 4.2; P001 Table 1): of each token a logit of being the span's
// first, and one of being its last. (Without a bias, which would change no softmax over places.)
#include <memory>

#include "cistern/models/token_predictor.h"

namespace cistern {

class SpanPredictor : public TokenPredictor {
 public:
  using Options = void;
  static void Check(const ModelConfig& config) { CheckTokens(config); }
  explicit SpanPredictor(const ModelConfig& config);

  at::Tensor Hidden(const at::Tensor& ids, const ops::Mask& mask = {}) override;
  at::Tensor Logits(const at::Tensor& hidden) const override;  // [...,D] -> [...,2]: first, last
  std::string SeesPadding() const override { return trunk_.SeesPadding(); }
  // The tensors that info().inputs names -> Logits [B,T,2], in float or double: -inf at padding and
  // masked tokens.
  at::Tensor SpanLogits(const NamedTensors& inputs);
  std::string WhyNoSmoothing() const override {
    return "is for classes; a span_predictor predicts places of a row";
  }

 private:
  // targets [B,2] int64, the places of a span's first and last token. The mean over rows and over
  // both. Error with label_smoothing: a place is no class.
  at::Tensor DoTrainingLoss(const NamedTensors& batch, double label_smoothing) override;

  at::Tensor embedding_;  // [V,D]
  Trunk trunk_;
  std::shared_ptr<Linear> span_head_;
};

}  // namespace cistern
