#include "cistern/models/language_model.h"

#include <ATen/ATen.h>

#include "cistern/attention/token_positions.h"
#include "cistern/base/error.h"

namespace cistern {

ModelState LanguageModel::EmptyState(int64_t batch) const {
  CISTERN_CHECK(!info().encodes, "[", config_.kind,
                "] has a source to attend to; begin with Encode instead of EmptyState");
  return EmptyStates(batch);
}

ModelState LanguageModel::Encode(const at::Tensor&, const ops::Mask&) {
  Fail("[", config_.kind, "] has no source to attend to; begin with EmptyState");
}

at::Tensor LanguageModel::Extend(const at::Tensor& ids, ModelState& state, const ops::Mask& mask) {
  return Logits(Hidden(ids, state, mask));
}

at::Tensor LanguageModel::HiddenOfRows(const NamedTensors& batch) {
  RequireKnown(batch);
  const at::Tensor& ids = batch["ids"];
  ModelState state =
      info().encodes ? Encode(batch["source"], MaskOf(batch, "source_")) : EmptyState(ids.size(0));
  return Hidden(ids, state, MaskOf(batch));
}

at::Tensor LanguageModel::DoTrainingLoss(const NamedTensors& batch, double label_smoothing) {
  return Loss(HiddenOfRows(batch), batch["targets"], label_smoothing);
}

at::Tensor LanguageModel::Run(const Trunk& trunk, const at::Tensor& table, const at::Tensor& ids,
                              ModelState& state, const ops::Mask& mask) const {
  return Run(
      trunk, [&](const at::Tensor& some) { return EmbedIds(table, some); }, ids, state, mask);
}

at::Tensor LanguageModel::Run(const Trunk& trunk, const Embed& embed, const at::Tensor& ids,
                              ModelState& state, const ops::Mask& mask) const {
  CISTERN_CHECK(ids.dim() == 2, "[", config_.kind, "] expected ids of shape [B,T], got ", ids.dim(),
                " dimensions");
  CheckPiece(state, ids.size(0), ids.size(1), mask);
  if (mask.valid) {
    const ops::TokenMap front = trunk.RealTokensFirst(mask);
    return front.Back(Run(trunk, embed, front.Move(ids, 1), state, front.mask()), 1);
  }
  const at::Tensor positions = TablePositions(state.positions, ids.size(1), mask);
  const Stream stream = trunk.Extend(trunk.Enter(embed(ids), mask, positions), state);
  state.positions = PositionsAfter(state.positions, positions, mask);
  return trunk.Norm(stream.x);
}

}  // namespace cistern
