#pragma once
// A causal language model, whatever its kind: it extends a state by any number of tokens.
// Generation, beams and evaluation take any of them.
#include <functional>

#include "cistern/models/heads.h"
#include "cistern/models/model_state.h"

namespace cistern {

class LanguageModel : public StatefulModel {
 public:
  using StatefulModel::StatefulModel;
  // Token ids that it predicts: of the target, where the source has others.
  int64_t vocab_size() const { return config_.TargetVocabSize(); }
  // Error where info().encodes: Encode makes the state then, and is an Error elsewhere.
  ModelState EmptyState(int64_t batch) const override;
  // source [B,S] int64. What the mask calls padding or masked is never seen. Without starts.
  virtual ModelState Encode(const at::Tensor& source, const ops::Mask& mask);
  // Which setting makes the padding of a source count (Trunk::SeesPadding); empty: none does.
  virtual std::string SourceSeesPadding() const { return ""; }
  // ids [B,T] int64, the next tokens of each row -> hidden states [B,T,D]. Writes the tokens into
  // the state. Padding (mask.lengths) is never seen.
  virtual at::Tensor Hidden(const at::Tensor& ids, ModelState& state,
                            const ops::Mask& mask = {}) = 0;
  virtual at::Tensor Logits(const at::Tensor& hidden) const = 0;  // [...,D] -> [...,V]
  // NextTokenLoss(Logits(hidden), targets) without the logits in memory.
  virtual at::Tensor Loss(const at::Tensor& hidden, const at::Tensor& targets,
                          double label_smoothing = 0) const = 0;
  // Logits(Hidden(...)): [B,T,V].
  at::Tensor Extend(const at::Tensor& ids, ModelState& state, const ops::Mask& mask = {}) override;
  // Hidden of a batch's rows from their first token on: ids [B,T], lengths, valid and starts where
  // rows are padded, masked or packed; source, source_lengths and source_valid where
  // info().encodes.
  at::Tensor HiddenOfRows(const NamedTensors& batch);

 protected:
  // Loss of the same by targets [B,T].
  at::Tensor DoTrainingLoss(const NamedTensors& batch, double label_smoothing) override;
  using Embed = std::function<at::Tensor(const at::Tensor& ids)>;  // [B,T] -> [B,T,D]
  // Hidden by a causal trunk, from the embeddings on.
  at::Tensor Run(const Trunk& trunk, const Embed& embed, const at::Tensor& ids, ModelState& state,
                 const ops::Mask& mask) const;
  // The same with one table of embeddings [V,D].
  at::Tensor Run(const Trunk& trunk, const at::Tensor& table, const at::Tensor& ids,
                 ModelState& state, const ops::Mask& mask) const;
};

}  // namespace cistern
