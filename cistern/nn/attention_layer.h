#pragma once
// An attention layer: declared projections, short convolution, rotary positions, a mechanism's
// core, the output projection. Self attention (bidirectional or causal) projects one stream; cross
// attention writes one, the source, into a state, and reads it with another. That of a mechanism
// with a memory stream is memory_attention.h. The heads together may be wider or narrower than the
// model (AttentionDims::model): the projections and the output projection lead from one to the
// other.
//
// In evaluation without gradients the projections' weights are kept as one matrix, and the map that
// a FoldingMechanism begins with is part of it: it is made at the first call and again whenever a
// weight has changed, by its at::Tensor::_version, or train() was called: after a change through
// variable_data(), which has no version, call train(). The weights stay as they are.
#include <memory>
#include <optional>
#include <vector>

#include "cistern/attention/folding.h"
#include "cistern/attention/memory_mechanism.h"
#include "cistern/nn/folded_map.h"
#include "cistern/nn/linear.h"
#include "cistern/nn/stream.h"

namespace cistern {

struct AttentionLayerOptions {
  std::string mechanism = "softmax";
  Json mechanism_options = Json::object();
  AttentionDims dims;
  int64_t source_dim = 0;  // cross, latents: width of the source; 0: as dims.dim
  Form form = Form::kCausal;
  PositionKind positions = PositionKind::kNone;  // kRotary turns the projections that allow it
  int64_t conv = 0;  // taps of the causal convolution on every projection; 0: none
  bool bias = false;
  double init_std = 0.02, out_std = 0.02;
  bool tokens_out = true;  // false: only the memory is asked for, and what the tokens alone would
                           // need is left out
  const class AttentionLayer* first =
      nullptr;  // of an earlier block, same mechanism: owns what is tied across layers
};

// The core alone, after all checks: UsageError where the mechanism does not have the form, the
// positions or the convolution, or the sizes do not fit.
std::shared_ptr<Mechanism> MakeMechanism(const AttentionLayerOptions& options);

// The layer that the options' mechanism asks for. UsageError as MakeMechanism.
std::shared_ptr<class AttentionLayer> MakeAttentionLayer(AttentionLayerOptions options);

class AttentionLayer : public torch::nn::Module {
 public:
  // The mechanism's state and, with a convolution, "conv" [B, taps-1, sum of widths].
  State EmptyState(int64_t batch, const at::TensorOptions& options) const;
  State StateForm(int64_t batch, const at::TensorOptions& options,
                  const std::function<bool(const std::string&)>& has) const;
  // As the mechanism's, the convolution's inputs included.
  int64_t StateBytes(int64_t batch, int64_t tokens, const at::TensorOptions& options,
                     bool decodes) const;
  // Why a state cannot be cut back to fewer tokens; empty where mechanism().Truncate does it.
  std::string TruncateRefusal() const;
  // Why no map of the mechanism is folded into the projections in evaluation; empty where it is.
  std::string FoldRefusal() const;
  void train(bool on = true) override;
  // [B,T,D]. `handles`: scores from the layer before, replaced by those for the next
  // (Mechanism::Attend); null: there is neither.
  at::Tensor Extend(const Stream& stream, State& state, Handles* handles = nullptr);  // causal
  struct Attended {
    at::Tensor tokens;  // [B,T,D]; undefined without options.tokens_out
    // [B,M,D], with a memory stream: what its slots found in the tokens, to be added to the memory,
    // or the next memory itself (MemoryUse::kReplaced).
    at::Tensor packed;
  };
  virtual Attended Bidirectional(const Stream& stream, Handles* handles = nullptr);
  // Cross: the source's tokens into the state, its padding left out, and queries of the target
  // against it.
  // A source with a memory is packed by that (Luna's static_context), else by the layer's own.
  void Write(const Stream& source, State& state);
  // AttentionDims::memory_given: the memory [1 or B,M,D] of the rows, into the empty state of a
  // causal layer (MemoryMechanism::GiveMemory), and what cross attention packed of a source that
  // was written, [B,M,D], after its map, and how many of its slots may be read
  // (MemoryMechanism::ReadableSlots). Error for mechanisms without.
  void GiveMemory(const at::Tensor& memory, const at::Tensor& readable, State& state);
  virtual at::Tensor Packed(const State& state) const;
  virtual at::Tensor ReadableSlots(const State& state) const;
  virtual at::Tensor Read(const Stream& target, State& state, Handles* handles = nullptr);
  // False for a layer of a model whose attention is left out (reuse.h): it has no parameters and no
  // state, and does not run.
  bool attends() const { return !tokens_.empty(); }
  const Mechanism& mechanism() const { return *mechanism_; }
  // The learned one, as MemoryMechanism::InitialMemoryOf has it; undefined where there is none.
  at::Tensor InitialMemory(int64_t rows) const;
  // Whether its tokens are read by linear maps alone, as they are given.
  bool ReadsByMaps() const;

 protected:
  AttentionLayer(const AttentionLayerOptions& options, std::shared_ptr<Mechanism> mechanism);

  struct Mapped {
    Projection projection;
    std::shared_ptr<Linear> map;  // null: the stream itself
    at::Tensor filter = {};       // [width, taps]; undefined without a convolution
    bool needed = true;           // false: its tensor is left undefined
    int64_t folded_width = 0;     // over its heads, after the mechanism's first map
  };
  // Those of tokens in declared order; with `side`, the others are undefined.
  std::vector<at::Tensor> Project(const Stream& stream, State* state,
                                  std::optional<Side> side = {}) const;
  // Appends projections of [B,M,D], each [B,H,M,w].
  void Project(const std::vector<Mapped>& maps, const at::Tensor& memory,
               std::vector<at::Tensor>* x) const;
  at::Tensor Attend(Form form, const std::vector<at::Tensor>& x, State* state,
                    const ops::Mask& mask, Handles* handles);
  at::Tensor Merge(const at::Tensor& heads) const;  // [B,H,T,d] -> [B,T,D]
  // Bidirectional of a stream whose padding reads (Stream::padding_reads).
  Attended WriteAndRead(const Stream& stream, Handles* handles);
  // Bidirectional of a stream with masked tokens (mask.valid).
  Attended MovedToFront(const Stream& stream, Handles* handles);

  AttentionLayerOptions options_;
  std::vector<Mapped> tokens_, memory_, packed_;
  std::shared_ptr<Linear> out_;  // null where the tokens are not asked for

 private:
  friend std::shared_ptr<AttentionLayer> MakeAttentionLayer(AttentionLayerOptions options);

  void AddProjection(Projection p);
  bool TakesBFloat16(Form form) const;
  std::shared_ptr<Linear> FindMap(const std::string& name) const;  // null: there is none
  bool Folds() const;
  Mechanism& Running() const { return Folds() ? *after_maps_ : *mechanism_; }
  // The maps as one: Join, or where it folds Fold, kept in evaluation without gradients.
  FoldedMap::Map Joined(const std::vector<const Mapped*>& mapped, FoldedMap& kept) const;
  FoldedMap::Map Join(
      const std::vector<const Mapped*>& mapped) const;  // weights and biases, one after the other
  FoldedMap::Map Fold(const std::vector<const Mapped*>& mapped)
      const;  // the same, each with the mechanism's first map
  at::Tensor EmptyConv(int64_t batch, const at::TensorOptions& options) const;
  static at::Tensor Split(const at::Tensor& y, int64_t heads);  // [B,T,width] -> [B,H,T,width/H]

  std::shared_ptr<Mechanism> mechanism_;
  StateId conv_;
  std::shared_ptr<Mechanism> after_maps_;  // null: nothing can be folded
  struct Joints {
    mutable FoldedMap maps, filters;
  };
  Joints joined_, joined_query_, joined_key_;  // of all projections, of one side
};

}  // namespace cistern
