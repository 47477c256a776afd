#pragma once
// A bidirectional encoder with a pooled classification head (Long Range Arena's shape; spec 1.3). A
// row is one input with one answer, so there are lengths, but no rows packed with several
// documents.
#include "cistern/models/model.h"
#include "cistern/nn/positions.h"

namespace cistern {

class EncoderClassifier : public Model {
 public:
  explicit EncoderClassifier(const ModelConfig& config);
  // ids [B,T] int64, lengths [B] (padding on the right is never seen) -> logits [B, classes].
  // pooling "mean": over the real tokens; "cls": a learned vector put before the tokens (before
  // positions are added); "memory": over the slots of the memory stream after the last block
  // (P000). After a perceiver layer the mean is that of the latents.
  at::Tensor Forward(const at::Tensor& ids, const at::Tensor& lengths);

 private:
  at::Tensor embedding_, cls_;
  std::shared_ptr<PositionEmbedding> positions_;
  std::vector<std::shared_ptr<Block>> blocks_;
  std::shared_ptr<LayerNorm> embedding_norm_, norm_;  // null where not asked for
  std::shared_ptr<Linear> hidden_, head_;             // hidden_: null where the head is one map
};

}  // namespace cistern
