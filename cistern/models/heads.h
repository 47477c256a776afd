#pragma once
// What comes after a trunk, as parts that a kind of model takes by name: the output layer of a
// language model, pooling and the head of a classifier (spec 1.3).
#include <memory>
#include <string>

#include "cistern/models/trunk.h"
#include "cistern/nn/linear.h"

namespace cistern {

// Hidden states to logits of tokens: with the embedding's own matrix (tie_embeddings) or with a
// map of its own, `lm_head`, which may have a bias.
class OutputLayer {
 public:
  // Registers lm_head in `owner` where it has one. embedding: [V,D].
  OutputLayer(torch::nn::Module& owner, const ModelConfig& config, const at::Tensor& embedding);
  at::Tensor Logits(const at::Tensor& hidden) const;  // [...,D] -> [...,V]
  // NextTokenLoss(Logits(hidden), targets) without the logits in memory (nn/head_loss.h).
  at::Tensor Loss(const at::Tensor& hidden, const at::Tensor& targets,
                  double label_smoothing = 0) const;

  static void Check(const ModelConfig& config);  // head_bias

 private:
  at::Tensor embedding_;
  std::shared_ptr<Linear> head_;  // null where tied
};

// One vector [B,D] of what a bidirectional trunk made of each row. `pooling` of the config:
//   mean    of the row's tokens; of the latents where the trunk has turned the tokens into latents
//   cls     of the learned token that With put before the row's own (Long Range Arena)
//   memory  the mean of the memory's slots after the last block (P000)
// The trunk's final norm comes before, or after with norm_pooled.
class Pooling {
 public:
  // Registers cls_token in `owner` where it has one.
  Pooling(torch::nn::Module& owner, const ModelConfig& config);
  int64_t extra() const { return cls_.defined() ? 1 : 0; }  // tokens that With adds to each row
  // Embeddings [B,T,D] of the tokens -> [B,T + extra,D].
  at::Tensor With(const at::Tensor& embedded) const;
  // lengths [B]: of each row without the extra token.
  at::Tensor Forward(const Trunk& trunk, const Stream& out, const at::Tensor& lengths) const;

  static void Check(const ModelConfig& config);  // UsageError where the layers leave nothing to see

 private:
  bool memory_, norm_pooled_;
  at::Tensor cls_;
};

// A pooled vector to logits of classes: through a hidden layer of `hidden` with relu (Long Range
// Arena) or gelu (P000), or by one linear map (`head` of the config).
class ClassifierHead : public torch::nn::Module {
 public:
  ClassifierHead(const ModelConfig& config, int64_t in, int64_t hidden);
  at::Tensor Forward(const at::Tensor& pooled) const;  // [B,in] -> [B,classes]

 private:
  bool gelu_;
  double dropout_;
  std::shared_ptr<Linear> hidden_, head_;  // hidden_: null where the head is one map
};

// Mean cross-entropy in nats over targets != -100. logits [...,V], targets [...] int64.
at::Tensor NextTokenLoss(const at::Tensor& logits, const at::Tensor& targets,
                         double label_smoothing = 0);

}  // namespace cistern
