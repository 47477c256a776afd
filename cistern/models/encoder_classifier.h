#pragma once
// A bidirectional encoder with a pooled classification head (Long Range Arena's shape; spec 1.3). A
// row is one input with one answer, so there are lengths, but no rows packed with several
// documents.
#include "cistern/models/classifier.h"

namespace cistern {

class EncoderClassifier : public Classifier {
 public:
  using Options = void;
  static void Check(const ModelConfig& config) { Pooling::Check(config); }
  explicit EncoderClassifier(const ModelConfig& config);
  // ids [B,T] int64, lengths [B] (padding on the right is never seen) -> logits [B,classes].
  // Which setting makes the amount of padding count; empty: none does.
  std::string SeesPadding() const {
    return pooling_.CountsPadding() ? "pooling over the batch's whole length"
                                    : trunk_.SeesPadding();
  }
  at::Tensor Forward(const at::Tensor& ids, const at::Tensor& lengths);
  at::Tensor Logits(const NamedTensors& inputs) override;

 private:
  at::Tensor embedding_;  // [V,D]
  Pooling pooling_;
  Trunk trunk_;
  std::shared_ptr<ClassifierHead> head_;
};

}  // namespace cistern
