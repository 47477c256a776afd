#pragma once
// Models that extend a state, and their states.
#include "cistern/models/model.h"

namespace cistern {

// The state of a whole model for a batch of sequences: a value. A checkpoint is a Clone, rolling
// back is continuing from it; each costs a copy of Bytes(), for bounded mechanisms the same however
// long the text. Copies by `=` share memory, and Extend may write into it. States of a model do not
// merge, though those of a core may (Mechanism::Merge): what the second layer writes for a later
// segment depends on what its first layer read from the earlier one. Pass the state on from segment
// to segment instead.
struct ModelState {
  std::vector<State> layers;  // as StatefulModel::state_layers
  at::Tensor positions;       // [B] int64: tokens each row has seen since its document began

  int64_t Bytes() const;
  ModelState Clone() const;
  ModelState Detach() const;
  ModelState Reorder(const at::Tensor& rows) const;
};

// DecoderLm, EncoderDecoder, Forecaster.
class StatefulModel : public Model {
 public:
  using Model::Model;
  // The state before the first token. Error where it is that of a source (LanguageModel::Encode).
  virtual ModelState EmptyState(int64_t batch) const { return EmptyStates(batch); }
  // The next tokens of each row, ids [B,T] int64 or values [B,T,inputs] -> what the model says
  // after each of them: logits [B,T,V], or predictions [B,T,outputs]. Writes the tokens into the
  // state. Padding (mask.lengths) is never seen.
  virtual at::Tensor Extend(const at::Tensor& tokens, ModelState& state,
                            const ops::Mask& mask = {}) = 0;
  // Whose states a ModelState holds: self attention of every block, then cross attention of every
  // block that has it.
  const std::vector<const AttentionLayer*>& state_layers() const { return state_layers_; }
  // Bytes of the state after `tokens` tokens in each of `batch` rows, before any run:
  // Compact(state).Bytes() (Mechanism::StateBytes). `source`: tokens that cross attention sees in
  // each row, without padding.
  int64_t StateBytes(int64_t batch, int64_t tokens, int64_t source = 0) const;
  // Without spare room in caches; shares memory.
  ModelState Compact(const ModelState& state) const;
  // The state as it was after the first `count` tokens; what cross attention sees stays. O(1).
  // Error, and nothing is changed, where a layer cannot (it says which and why) and where the rows
  // do not hold the same number of tokens, of one document each.
  void Truncate(ModelState& state, int64_t count) const;

 protected:
  // Once all blocks are there.
  void SetStateLayers(const std::vector<std::shared_ptr<Block>>& blocks);
  ModelState EmptyStates(int64_t batch) const;
  void CheckLayers(const ModelState& state) const;
  // Error where the state is not one of this model, a piece [batch, length] not one of its rows, or
  // the mask not one of the piece.
  void CheckPiece(const ModelState& state, int64_t batch, int64_t length,
                  const ops::Mask& mask) const;

 private:
  std::vector<const AttentionLayer*> state_layers_;
  size_t self_ = 0;  // of them are self attention
};

// What the model says of tokens [B,T,...] extended piece by piece from the empty state; cuts begin
// with 0 and end with T. last: the state after, if wanted.
at::Tensor ExtendInPieces(StatefulModel& model, const at::Tensor& tokens,
                          const std::vector<int64_t>& cuts, const ops::Mask& mask = {},
                          ModelState* last = nullptr);
// The same from the state `begin`, such as that of a source.
at::Tensor ExtendInPieces(StatefulModel& model, ModelState begin, const at::Tensor& tokens,
                          const std::vector<int64_t>& cuts, const ops::Mask& mask = {},
                          ModelState* last = nullptr);

}  // namespace cistern
