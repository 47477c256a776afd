#pragma once
// What all kinds of models are made of: positions, the norm of embeddings, dropout, blocks and the
// final norm. It is not a module of its own: its parts belong to the model, or to a part of it,
// under the names of the model file.
//
// Padding of a classifier (`padding` of the config):
//   masked  is never seen and reads zeros
//   reads   is not seen, but reads what the tokens wrote as they do: Long Range Arena
//   seen    no mask at all: it is its id's embedding, and seen and reading like any token
//   zeros   the same with a zero embedding, to which positions are added: P000's code
#include <memory>
#include <vector>

#include "cistern/models/config.h"
#include "cistern/models/model_state.h"
#include "cistern/nn/positions.h"

namespace cistern {

// A table of embeddings [vocab,D], registered in `owner`. UsageError where vocab < 1.
at::Tensor AddEmbedding(torch::nn::Module& owner, const std::string& name,
                        const ModelConfig& config, int64_t vocab, int64_t dim);

class Trunk {
 public:
  // Registers embed_positions, embed_norm and norm (where the config has them) and layers in
  // `owner`, which has to outlive the trunk. `extra`: vectors that stand before the tokens'
  // embeddings; they have positions beyond max_length (cls_place=before) or none, and are not
  // scaled.
  Trunk(torch::nn::Module& owner, const ModelConfig& config, Form form, int64_t extra = 0);

  // For a mask of masked tokens (mask.valid): where they move to, for all that follows. UsageError
  // if the mechanism of a block sees padding.
  ops::TokenMap RealTokensFirst(const ops::Mask& mask) const;
  // For tokens that have positions of their own: UsageError where a mechanism counts the tokens
  // instead.
  void RequireGivenPositions() const;
  // Embeddings [B,T,D] with positions [1 or B,T] -> the input of the first block.
  Stream Enter(const at::Tensor& embedded, const ops::Mask& mask,
               const at::Tensor& positions) const;
  // Through all blocks; the final norm is left to Norm.
  Stream Bidirectional(Stream stream) const;
  // Causal: a piece that continues from `state`, whose layers are those of the blocks, followed by
  // those of their cross attention (StatefulModel). Its positions are not touched. Error, before
  // anything is written, where a token has a position that a mechanism has no weights for.
  Stream Extend(Stream stream, ModelState& state) const;
  // Which blocks a pass leaves out (config.layer_drop; in training alone), each decided by a key
  // that is drawn once a pass and the block's number: as dropout, a function of (seed, step).
  std::vector<bool> LeftOut() const;
  at::Tensor Norm(const at::Tensor& x) const { return norm_ ? norm_->Forward(x) : x; }
  // Which setting makes the numbers of padding count; empty: none does.
  std::string SeesPadding() const;
  const std::vector<std::shared_ptr<Block>>& blocks() const { return blocks_; }

 private:
  // The embeddings as they are to be: scaled, zero at padding where it is that.
  at::Tensor Embeddings(const at::Tensor& embedded, const ops::Mask& mask) const;
  void CheckReach(const at::Tensor& positions) const;

  const torch::nn::Module* owner_;
  double dropout_, layer_drop_, scale_ = 1;
  int64_t extra_, length_limit_;
  PaddingKind padding_;
  ClsPlace cls_place_;
  std::shared_ptr<PositionEmbedding> positions_;
  std::vector<std::shared_ptr<Block>> blocks_;        // of a tied layer: its owner's again
  std::shared_ptr<LayerNorm> embedding_norm_, norm_;  // null where not asked for
};

// The mask of a batch's tokens: what it has of `lengths`, `starts` and `valid`, each name after the
// prefix.
ops::Mask MaskOf(const NamedTensors& batch, const std::string& prefix = "");

// x [B,T,...] with zeros at padding and masked tokens.
at::Tensor ZerosAtPadding(const at::Tensor& x, const ops::Mask& mask);

// The rows of a table [V,D]: ids [...] int64 -> [...,D]; pad_row: one without a gradient. An id
// outside of the table is an Error that names it. (On other devices than the CPU, where looking
// would mean to wait, it is torch's.)
at::Tensor EmbedIds(const at::Tensor& table, const at::Tensor& ids, int64_t pad_row = -1);

// The positions of a whole row of T tokens, [1,T], on the device of `like`.
at::Tensor RowPositions(int64_t length, const at::Tensor& like);

}  // namespace cistern
