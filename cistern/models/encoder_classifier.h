#pragma once
// A bidirectional encoder with a pooled classification head (Long Range Arena's shape; spec 1.3),
// of token ids or of vectors of real values, which one linear map turns into embeddings (spec 1.2).
// A row is one input with one answer, so there are lengths, but no rows packed with several
// documents.
#include "cistern/models/classifier.h"
#include "cistern/models/row_encoder.h"

namespace cistern {

class EncoderClassifier : public Classifier {
 public:
  enum class Input { kTokens, kValues };
  struct Options {
    Input input = Input::kTokens;
    int64_t channels = 0;  // of values: set by the task
  };
  static Fields Describe(Options& options);
  static void Check(const ModelConfig& config);
  explicit EncoderClassifier(const ModelConfig& config);
  std::string SeesPadding() const override { return rows_.SeesPadding(); }
  // ids [B,T] int64, or values [B,T,C] where the input is values -> logits [B,classes]. mask,
  // positions: as in RowEncoder::Forward.
  at::Tensor Forward(const at::Tensor& input, const ops::Mask& mask,
                     const at::Tensor& positions = {});
  // The same with padding on the right alone: lengths [B].
  at::Tensor Forward(const at::Tensor& input, const at::Tensor& lengths,
                     const at::Tensor& positions = {}) {
    return Forward(input, ops::Mask{lengths, {}}, positions);
  }
  at::Tensor Logits(const NamedTensors& inputs) override;

 private:
  at::Tensor Embedded(const at::Tensor& input) const;  // [B,T,D]

  at::Tensor embedding_;            // [V,D]; undefined where the input is values
  std::shared_ptr<Linear> values_;  // null where it is tokens
  RowEncoder rows_;
  std::shared_ptr<ClassifierHead> head_;
};

}  // namespace cistern
