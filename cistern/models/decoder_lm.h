#pragma once
// A causal language model: embedding, blocks, output layer. One way to run it: extend, by any
// number of tokens.
#include "cistern/models/language_model.h"

namespace cistern {

class DecoderLm : public LanguageModel {
 public:
  using Options = void;
  static void Check(const ModelConfig& config) { OutputLayer::Check(config); }
  explicit DecoderLm(const ModelConfig& config);
  at::Tensor Hidden(const at::Tensor& ids, ModelState& state, const ops::Mask& mask = {}) override;
  at::Tensor Logits(const at::Tensor& hidden) const override { return output_.Logits(hidden); }
  at::Tensor Loss(const at::Tensor& hidden, const at::Tensor& targets,
                  double label_smoothing = 0) const override {
    return output_.Loss(hidden, targets, label_smoothing);
  }
  const Block& block(size_t layer) const { return *trunk_.blocks()[layer]; }

 private:
  at::Tensor embedding_;  // [V,D]
  Trunk trunk_;
  OutputLayer output_;
};

}  // namespace cistern
