#pragma once
// What comes after a trunk, as parts that a kind of model takes by name: the output layer of a
// language model, pooling and the head of a classifier (spec 1.3).
#include <memory>
#include <string>

#include "cistern/models/trunk.h"
#include "cistern/nn/linear.h"

namespace cistern {

// Hidden states to logits of tokens: with the embedding's own matrix (tie_embeddings) or with one
// of its own, `lm_head.weight`; either may have a bias, `lm_head.bias`.
class OutputLayer {
 public:
  // Registers what of lm_head it has in `owner`. embedding: [V,D].
  OutputLayer(torch::nn::Module& owner, const ModelConfig& config, const at::Tensor& embedding);
  at::Tensor Logits(const at::Tensor& hidden) const;  // [...,D] -> [...,V]
  // NextTokenLoss(Logits(hidden), targets) without the logits in memory (nn/head_loss.h).
  at::Tensor Loss(const at::Tensor& hidden, const at::Tensor& targets,
                  double label_smoothing = 0) const;

  static void Check(const ModelConfig& config);  // scale_logits

 private:
  // What the output layer is given: with scale_logits divided by sqrt(D).
  at::Tensor Scaled(const at::Tensor& hidden) const {
    return scale_ == 1 ? hidden : hidden * scale_;
  }

  at::Tensor weight_, bias_;  // [V,D], [V] or undefined
  double scale_ = 1;
};

// One vector [B,D] of what a bidirectional trunk made of each row. `pooling` of the config:
//   mean    of the row's tokens; of the latents where the trunk has turned the tokens into latents
//   cls     of the learned token that With put before the row's own (Long Range Arena)
//   memory  the mean of the memory's slots after the last block (P000)
//   first   of the row's own first token, where the data begins with one that stands for it (Luna)
//   mean_all    over the whole length of the batch, padding as the blocks left it (Long Range
//               Arena); mean_zeros: the same with zeros for padding (Nystromformer's). Both depend
//               on that length
// Where padding is seen (models/trunk.h), mean is over it, too.
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

  // Which setting makes the vector depend on how much padding a row has; empty: none does.
  std::string SeesPadding(const Trunk& trunk) const {
    return kind_ == PoolingKind::kMeanAll || kind_ == PoolingKind::kMeanZeros
               ? "pooling over the batch's whole length"
               : trunk.SeesPadding();
  }

  static void Check(const ModelConfig& config);  // UsageError where the layers leave nothing to see

 private:
  PoolingKind kind_;
  bool norm_pooled_, seen_;  // seen: padding is
  at::Tensor cls_;
};

// A pooled vector to logits of classes: through a hidden layer of `hidden` with relu (Long Range
// Arena) or gelu (P000), one of `in` with tanh (BERT's pooler), or by one linear map (`head` of the
// config). head_dims gives the widths of other hidden layers. Dropout follows the only hidden
// layer, of several each but the last, as in P000's image head.
class ClassifierHead : public torch::nn::Module {
 public:
  ClassifierHead(const ModelConfig& config, int64_t in, int64_t hidden);
  at::Tensor Forward(const at::Tensor& pooled) const;  // [B,in] -> [B,classes]
  // Numbers of its maps, without biases.
  static double Count(const ModelConfig& config, int64_t in, int64_t hidden);

 private:
  HeadKind kind_;
  double dropout_;
  std::vector<std::shared_ptr<Linear>> hidden_;  // none where the head is one map
  std::shared_ptr<Linear> head_;
};

// Mean cross-entropy in nats over targets != -100, 0 where there are none. logits [...,V], targets
// [...] int64; Error where one is not below V.
at::Tensor NextTokenLoss(const at::Tensor& logits, const at::Tensor& targets,
                         double label_smoothing = 0);

}  // namespace cistern
