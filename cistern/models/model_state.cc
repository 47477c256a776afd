#include "cistern/models/model_state.h"

#include <ATen/ATen.h>

#include "cistern/base/error.h"

namespace cistern {
namespace {

template <class F>
ModelState MapState(const ModelState& state, F&& f) {
  ModelState out;
  for (const State& layer : state.layers) out.layers.push_back(f(layer));
  return out;
}

}  // namespace

int64_t ModelState::Bytes() const {
  int64_t bytes = positions.defined() ? positions.numel() * positions.element_size() : 0;
  for (const State& layer : layers) bytes += layer.Bytes();
  return bytes;
}
ModelState ModelState::Clone() const {
  ModelState out = MapState(*this, [](const State& s) { return s.Clone(); });
  out.positions = positions.clone();
  return out;
}
ModelState ModelState::Detach() const {
  ModelState out = MapState(*this, [](const State& s) { return s.Detach(); });
  out.positions = positions;
  return out;
}
ModelState ModelState::Reorder(const at::Tensor& rows) const {
  ModelState out = MapState(*this, [&](const State& s) { return s.Reorder(rows); });
  out.positions = positions.index_select(0, rows);
  return out;
}

void StatefulModel::SetStateLayers(const std::vector<std::shared_ptr<Block>>& blocks) {
  for (const auto& block : blocks) state_layers_.push_back(&block->attention());
  self_ = blocks.size();
  for (const auto& block : blocks) {
    if (block->has_cross()) state_layers_.push_back(&block->cross());
  }
}

ModelState StatefulModel::EmptyStates(int64_t batch) const {
  ModelState state;
  for (const AttentionLayer* layer : state_layers_)
    state.layers.push_back(layer->EmptyState(batch, options()));
  state.positions = at::zeros({batch}, options().dtype(at::kLong));
  return state;
}

int64_t StatefulModel::StateBytes(int64_t batch, int64_t tokens, int64_t source) const {
  int64_t bytes = batch * int64_t(sizeof(int64_t));  // positions
  for (size_t i = 0; i < state_layers_.size(); ++i)
    bytes += state_layers_[i]->StateBytes(batch, i < self_ ? tokens : source, options(), i < self_);
  return bytes;
}

ModelState StatefulModel::Compact(const ModelState& state) const {
  CheckLayers(state);
  ModelState out = state;
  for (size_t i = 0; i < state_layers_.size(); ++i)
    out.layers[i] = state_layers_[i]->mechanism().Compact(state.layers[i]);
  return out;
}

void StatefulModel::Truncate(ModelState& state, int64_t count) const {
  CheckLayers(state);
  const std::string& kind = config_.kind;
  for (size_t i = 0; i < self_; ++i) {
    const std::string refusal = state_layers_[i]->TruncateRefusal();
    CISTERN_CHECK(refusal.empty(), "[", kind, "] the state cannot be cut back: layer ", i, ": ",
                  refusal, "; keep a Clone of the earlier state instead");
  }
  const int64_t batch = state.positions.size(0);
  if (batch == 0) return;
  const int64_t tokens = state.positions[0].item<int64_t>();
  bool plain = (state.positions == tokens).all().item<bool>();
  // Padding and earlier documents stand in a cache beside the tokens of a row, so its size tells of
  // them.
  for (size_t i = 0; i < self_; ++i) {
    const AttentionLayer& layer = *state_layers_[i];
    plain = plain && layer.mechanism().Compact(state.layers[i]).Bytes() ==
                         layer.StateBytes(batch, tokens, options(), true);
  }
  CISTERN_CHECK(plain, "[", kind,
                "] a state of rows that were padded or packed cannot be cut back; keep a Clone of "
                "the earlier state instead");
  CISTERN_CHECK(count >= 0 && count <= tokens, "[", kind, "] cannot cut a state of ", tokens,
                " tokens back to ", count);
  for (size_t i = 0; i < self_; ++i) state_layers_[i]->mechanism().Truncate(state.layers[i], count);
  state.positions = at::full_like(state.positions, count);
}

void StatefulModel::CheckLayers(const ModelState& state) const {
  CISTERN_CHECK(state.layers.size() == state_layers_.size(), "[", config_.kind, "] the state has ",
                state.layers.size(), " layers, the model ", state_layers_.size(), "; begin with ",
                self_ < state_layers_.size() ? "Encode" : "EmptyState");
}

void StatefulModel::CheckPiece(const ModelState& state, int64_t batch, int64_t length,
                               const ops::Mask& mask) const {
  CheckLayers(state);
  CISTERN_CHECK(state.positions.size(0) == batch, "[", config_.kind, "] the state has ",
                state.positions.size(0), " rows, the tokens have ", batch);
  if (mask) CheckMask(StrCat("[", config_.kind, "]"), mask, batch, length);
}

at::Tensor ExtendInPieces(StatefulModel& model, const at::Tensor& tokens,
                          const std::vector<int64_t>& cuts, const ops::Mask& mask,
                          ModelState* last) {
  return ExtendInPieces(model, model.EmptyState(tokens.size(0)), tokens, cuts, mask, last);
}

at::Tensor ExtendInPieces(StatefulModel& model, ModelState state, const at::Tensor& tokens,
                          const std::vector<int64_t>& cuts, const ops::Mask& mask,
                          ModelState* last) {
  std::vector<at::Tensor> outs;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    const int64_t begin = cuts[i], count = cuts[i + 1] - begin;
    outs.push_back(model.Extend(tokens.narrow(1, begin, count), state, mask.Narrow(begin, count)));
  }
  if (last) *last = state;
  return at::cat(outs, 1);
}

}  // namespace cistern
