#pragma once
// A causal language model: embedding, blocks, output layer. One way to run it: extend, by any number of tokens.
#include "cistern/attention/token_positions.h"
#include "cistern/models/model.h"
#include "cistern/nn/positions.h"

namespace cistern {

// The state of a whole model for a batch of sequences: a value. A checkpoint is a Clone, rolling back is going on from it; each costs a
// copy of Bytes(), for bounded mechanisms the same however long the text. Copies by `=` share memory, and Extend may write into it. States
// of a model do not merge, though those of a core may (Mechanism::Merge): what the second layer writes for a later segment depends on what
// its first layer read from the earlier one. Pass the state on from segment to segment instead.
struct ModelState {
  std::vector<State> layers;
  at::Tensor positions;  // [B] int64: tokens each row has seen since its document began

  int64_t Bytes() const;
  ModelState Clone() const;
  ModelState Detach() const;
  ModelState Reorder(const at::Tensor& rows) const;
};

class DecoderLm : public Model {
 public:
  explicit DecoderLm(const ModelConfig& config);
  ModelState EmptyState(int64_t batch) const;
  // Bytes of the state after `tokens` tokens in each of `batch` rows, before any run: Compact(state).Bytes() (Mechanism::StateBytes).
  int64_t StateBytes(int64_t batch, int64_t tokens) const;
  // Without the spare room of caches; shares memory.
  ModelState Compact(const ModelState& state) const;
  // The state as it was after the first `count` tokens. O(1). Error, and nothing is changed, where a layer cannot (it says which and why)
  // and where the rows do not hold the same number of tokens, of one document each.
  void Truncate(ModelState& state, int64_t count) const;
  // ids [B,T] int64 -> logits [B,T,V]. Writes the tokens into the state.
  at::Tensor Extend(const at::Tensor& ids, ModelState& state, const ops::Mask& mask = {});
  // The same up to the output layer: [B,T,D].
  at::Tensor Hidden(const at::Tensor& ids, ModelState& state, const ops::Mask& mask = {});
  at::Tensor Logits(const at::Tensor& hidden) const;
  // NextTokenLoss(Logits(hidden), targets) without the logits in memory (nn/head_loss.h).
  at::Tensor Loss(const at::Tensor& hidden, const at::Tensor& targets, double label_smoothing = 0) const;
  const Block& block(size_t layer) const { return *blocks_[layer]; }

 private:
  void CheckLayers(const ModelState& state) const;

  std::shared_ptr<torch::nn::Module> embed_;
  at::Tensor embedding_;  // [V,D]
  std::shared_ptr<PositionEmbedding> positions_;
  std::vector<std::shared_ptr<Block>> blocks_;
  std::shared_ptr<LayerNorm> embedding_norm_, norm_;  // null where not asked for
  std::shared_ptr<Linear> head_;
};

// Mean next-token cross-entropy in nats over targets != -100. targets [B,T] int64.
at::Tensor NextTokenLoss(const at::Tensor& logits, const at::Tensor& targets, double label_smoothing = 0);

}  // namespace cistern
