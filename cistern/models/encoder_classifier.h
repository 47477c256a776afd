#pragma once
// A bidirectional encoder with a pooled classification head (Long Range Arena's shape; spec 1.3),
// of token ids or of vectors of real values, which one linear map turns into embeddings (spec 1.2).
// A row is one input with one answer, so there are lengths, but no rows packed with several
// documents.
#include "cistern/models/classifier.h"

namespace cistern {

class EncoderClassifier : public Classifier {
 public:
  enum class Input { kTokens, kValues };
  struct Options {
    Input input = Input::kTokens;
    int64_t channels = 0;                        // of values: set by the task
    double values_std = 0, values_bias_std = 0;  // of the first map of values; 0: as torch, 0
  };
  static Fields Describe(Options& options);
  static void Check(const ModelConfig& config);
  explicit EncoderClassifier(const ModelConfig& config);
  // Which setting makes the amount of padding count; empty: none does.
  std::string SeesPadding() const {
    return pooling_.CountsPadding() ? "pooling over the batch's whole length"
                                    : trunk_.SeesPadding();
  }
  // ids [B,T] int64, or values [B,T,C] where the input is values; lengths [B] (padding on the right
  // is never seen); positions [B,T] int64 of the tokens, undefined: 0, 1, 2, ... -> logits
  // [B,classes].
  at::Tensor Forward(const at::Tensor& input, const at::Tensor& lengths,
                     const at::Tensor& positions = {});
  at::Tensor Logits(const NamedTensors& inputs) override;

 private:
  at::Tensor Embedded(const at::Tensor& input) const;  // [B,T,D]

  at::Tensor embedding_;            // [V,D]; undefined where the input is values
  std::shared_ptr<Linear> values_;  // null where it is tokens
  Pooling pooling_;
  Trunk trunk_;
  std::shared_ptr<ClassifierHead> head_;
};

}  // namespace cistern
