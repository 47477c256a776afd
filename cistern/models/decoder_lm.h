#pragma once
// A causal language model: embedding, blocks, output layer. One way to run it: extend, by any
// number of tokens.
#include "cistern/attention/token_positions.h"
#include "cistern/models/model_state.h"
#include "cistern/nn/positions.h"

namespace cistern {

class DecoderLm : public StatefulModel {
 public:
  explicit DecoderLm(const ModelConfig& config);
  ModelState EmptyState(int64_t batch) const { return EmptyStates(batch); }
  // ids [B,T] int64 -> logits [B,T,V]. Writes the tokens into the state.
  at::Tensor Extend(const at::Tensor& ids, ModelState& state, const ops::Mask& mask = {});
  // The same up to the output layer: [B,T,D].
  at::Tensor Hidden(const at::Tensor& ids, ModelState& state, const ops::Mask& mask = {});
  at::Tensor Logits(const at::Tensor& hidden) const;
  // NextTokenLoss(Logits(hidden), targets) without the logits in memory (nn/head_loss.h).
  at::Tensor Loss(const at::Tensor& hidden, const at::Tensor& targets,
                  double label_smoothing = 0) const;
  const Block& block(size_t layer) const { return *blocks_[layer]; }

 private:
  std::shared_ptr<torch::nn::Module> embed_;
  at::Tensor embedding_;  // [V,D]
  std::shared_ptr<PositionEmbedding> positions_;
  std::vector<std::shared_ptr<Block>> blocks_;
  std::shared_ptr<LayerNorm> embedding_norm_, norm_;  // null where not asked for
  std::shared_ptr<Linear> head_;
};

// Logits [B,T,V] of ids [B,T] extended piece by piece from the empty state; cuts begin with 0 and
// end with T. last: the state after, if wanted.
at::Tensor ExtendInPieces(DecoderLm& model, const at::Tensor& ids, const std::vector<int64_t>& cuts,
                          const ops::Mask& mask = {}, ModelState* last = nullptr);

// Mean next-token cross-entropy in nats over targets != -100. targets [B,T] int64.
at::Tensor NextTokenLoss(const at::Tensor& logits, const at::Tensor& targets,
                         double label_smoothing = 0);

}  // namespace cistern
