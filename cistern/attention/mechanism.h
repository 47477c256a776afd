#pragma once
// A mechanism: a way to attend. It is a core (a function of projected tensors) plus the projections
// it declares; the attention layer (nn/attention_layer.h) owns the projections, the short
// convolution, the positions and the output projection.
//
// Three verbs: write (tokens into a state), read (queries against a state) and extend (causal: each
// token is written, then reads), for a piece of any length. Bidirectional = write all, read all.
// Cross = write once, read often. Decoding = extend by one token.
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cistern/attention/decoding_state.h"
#include "cistern/attention/handles.h"
#include "cistern/attention/position_kind.h"
#include "cistern/attention/state.h"
#include "cistern/io/fields.h"
#include "cistern/ops/mask.h"

namespace cistern {

enum class Form { kBidirectional, kCausal, kCross };
std::string FormName(Form form);

// Which stream a projection is made from. Query and key side are the same one in self attention.
// Mechanisms with a memory stream (memory_mechanism.h) also project the memory and what was packed
// into it.
enum class Side { kQuery, kKey, kMemory, kPacked };
std::string SideName(Side side);  // query, key, memory, packed

struct Projection {
  std::string name;  // "q" gives the weight q_proj.weight
  Side side;
  int64_t width;        // over its heads
  bool rotary = false;  // rotary positions turn it
  int64_t heads = 0;    // it is split into; 0: as many as the layer has. 1: shared by all heads
  bool tied = false;    // the layers of one model with this mechanism share the map
  std::string map =
      {};  // of the projection whose map it uses, where it has none of its own; empty: its own
  bool identity = false;          // no map at all: the stream itself, split into heads
  std::optional<bool> bias = {};  // of its map; unset: as the layer's other maps
  bool normalised = false;        // its map is given x / |x|; all of a layer's tokens, or none
  bool OfTokens() const { return side == Side::kQuery || side == Side::kKey; }
};

// The place of a projection's tensor among those that a verb is given: of a projection of the
// tokens or the memory in x, of one of what was packed in `packed` (memory_mechanism.h). x[q] is
// the tensor of the projection q. Undeclared until Mechanism::AddProjection gives it.
class ProjectionId {
 public:
  ProjectionId() = default;
  explicit ProjectionId(size_t index) : index_(index) {}
  bool declared() const { return index_ != kUndeclared; }
  operator size_t() const { return declared() ? index_ : Undeclared(); }

 private:
  static constexpr size_t kUndeclared = size_t(-1);
  [[noreturn]] static size_t Undeclared();

  size_t index_ = kUndeclared;
};

// What a mechanism does with a memory stream beside the tokens: it has none; every layer gets the
// same learned one; each layer hands on the memory plus what it packed (a residual and a norm
// around it); each layer makes the next memory itself. Or a layer turns the stream of tokens into
// one of latents (perceiver.h).
enum class MemoryUse { kNone, kFixed, kStream, kReplaced, kLatents };
std::string MemoryUseName(MemoryUse use);  // none, fixed, stream, replaced, latents

struct AttentionDims {
  int64_t dim = 0;         // width of all heads together: the model's D, unless `model` says
                           // otherwise
  int64_t heads = 0;       // H; d = dim/H
  int64_t max_length = 0;  // of the model, for mechanisms of fixed length
  int64_t layer = 0;
  double dropout = 0;  // attention dropout
  const class Mechanism* first =
      nullptr;  // of an earlier layer, same model and options: owns what is tied across layers
  bool cross = false;  // the layer attends to another sequence: what it draws is not what self
                       // attention draws
  int64_t copied =
      kAlone;  // heads whose scores are taken over from the layer before (handles.h, reuse.h)
  int64_t copied_on = 0;  // heads of this layer whose scores the layer after takes over
  int64_t model = 0;  // D, the width of the model; 0: dim. Only what is as wide as a token, such
                      // as latents, depends on it
  bool relative = false;       // relative positions: a learned bias of the scores
                               // (relative_positions.h)
  double relative_std = 0.02;  // of that bias at first
  bool memory_given = false;   // the memory comes from outside, with the rows: the layer owns none
                               // (memory_mechanism.h)

  int64_t Model() const { return model > 0 ? model : dim; }

  static constexpr int64_t kAlone =
      -1;  // no layer of a model: a mechanism that copies is given the scores as inputs
  static constexpr int64_t kSkipped = -2;  // a layer of a model that has no attention
};

// A tensor that the core itself owns, by its name in a model file below "core.": "map.weight".
struct CoreWeight {
  enum class Kind {
    kTrained,
    kDrawn,
    kRedrawn
  };  // a parameter; a buffer; a buffer that calls in training change
  std::string name;
  at::Tensor* value;  // the member that the verbs use: another tensor put there takes its place
  Kind kind;
};

// What a mechanism is and can do, for errors, help, docs, verification and benchmarks.
struct MechanismInfo {
  std::string name, title, source, summary;
  std::string definition;  // in one line, for the docs; the code of it is Mechanism::Definition
  std::vector<Form> forms;
  std::vector<std::string> refusals;  // for each form not listed: "cross: why; use X instead"
  bool verbs = true;                  // offers write, read and extend
  bool exact = false;                 // equals softmax attention
  bool stochastic = false;
  bool bounded = true;  // the state does not grow with the sequence
  MemoryUse memory = MemoryUse::kNone;
  bool causal_is_prefix = true;         // causal at t = the last row of bidirectional over 0..t
  std::vector<PositionKind> positions;  // kinds that fit
  std::string time, state;              // cost in words: "O(T n d)", "2 n (d + 1)"
  std::vector<Json> cases = {
      Json::object()};  // options the conformance suite runs: every variant once, sizes of a few
  double tolerance =
      1e-6;  // of the conformance suite in float, relative RMS; say why where it is wider
  bool merges = false;         // has Merge
  bool truncates = false;      // has Truncate
  bool fixed_length = false;   // has weights for each position up to the model's max_length
  bool leaves_scores = false;  // the next layer may take over the scores of its heads
  bool copies_scores = false;  // takes over scores of the layer before
  bool slots = false;          // its state has slots: key_memory and value_memory, [B,H,n,d]
  // Whether options make it one of fixed_length, which others do not.
  std::function<bool(const Json& options)> fixes_length;
  // Why padding cannot read what its tokens wrote as they do (Stream::padding_reads), though it has
  // the cross form; empty: it can.
  std::string padding_refusal;
  // AttentionDims::copied of each of `layers` layers by the mechanism's options, where it
  // copies_scores; UsageError where they do not fit.
  std::function<std::vector<int64_t>(const Json& options, int64_t heads, int64_t layers)> copy_plan;
  std::function<Fields()> options;  // its typed options with their defaults
  // What Make calls, with this info. It lives as long as the mechanisms that are made of it.
  std::function<std::shared_ptr<class Mechanism>(const MechanismInfo& info, const Json& options,
                                                 const AttentionDims& dims)>
      construct;
  // UsageError unless there are heads, they divide dim, and the options fit.
  std::shared_ptr<class Mechanism> Make(const Json& options, const AttentionDims& dims) const;
  bool Supports(Form form) const;
  bool Fits(PositionKind kind) const;
  std::vector<std::string> PositionNames() const;  // of the kinds that fit
  bool MakesLatents() const { return memory == MemoryUse::kLatents; }
  bool HandsOnMemory() const {
    return memory == MemoryUse::kStream || memory == MemoryUse::kReplaced;
  }
};

class Mechanism : public torch::nn::Module {
 public:
  Mechanism(const MechanismInfo& info, const AttentionDims& dims) : info_(info), dims_(dims) {}
  const MechanismInfo& info() const { return info_; }
  const AttentionDims& dims() const { return dims_; }

  // What its constructor declares: projections, those of tokens first, then those of the memory,
  // then those of what was packed; names of state tensors; tensors of its own.
  const std::vector<Projection>& Projections() const { return projections_; }
  const std::vector<std::string>& StateNames() const { return state_names_; }
  State UndefinedState() const;  // every state tensor by its name, none of them defined
  const std::vector<CoreWeight>& weights() const { return weights_; }

  // Everything below: tensors in declared order, each [B,H,T,width/H]; those of the other side are
  // undefined where not needed. Those of a memory stream are left away but by the attention layer
  // (memory_mechanism.h). Without verbs there is no state: EmptyState gives one of no tensors, and
  // the verbs are Errors. What padding holds, NaN too, is put to zero before a mechanism sees it.
  // With masked tokens (mask.valid) the result is that of the others alone, and 0 at them; a
  // mechanism's own verbs are given lengths and starts in their place. Tensors of other shapes than
  // the projections declare, and a mask or a state of other rows than the tokens, are an error.
  virtual State EmptyState(int64_t batch, const at::TensorOptions& options) const;
  at::Tensor Extend(const std::vector<at::Tensor>& x, State& state,
                    const ops::Mask& mask);  // -> [B,H,T,d]
  void Write(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask);
  virtual at::Tensor Read(const std::vector<at::Tensor>& x, const State& state);
  // The whole sequence, every token sees every valid token. Rows with several documents are taken
  // apart first. As Extend, it makes floats of tokens in half precision that the mechanism does not
  // take (TakesBFloat16), and gives what they read in their type.
  at::Tensor Bidirectional(const std::vector<at::Tensor>& x, const ops::Mask& mask);

  // One of the three as a layer of a model runs it: Extend (causal), Bidirectional (no state) or
  // Read (cross; the mask is that of the queries). `handles` come from the layer before and leave
  // for the next: the scores that a mechanism copies and those that may be copied from it; most
  // know of none.
  at::Tensor Attend(Form form, const std::vector<at::Tensor>& x, State* state,
                    const ops::Mask& mask, Handles& handles);

  // Where the tokens of a mask with `valid` move to, so that lengths say which are real. UsageError
  // where the mechanism sees padding, so that no token can be masked.
  ops::TokenMap RealTokensFirst(const ops::Mask& mask) const;
  void RequireMaskable() const;

  // The learned memory before the first block, [1,M,D]; undefined where there is none.
  virtual at::Tensor InitialMemory() const { return {}; }
  // This mechanism, where it has a memory stream (memory_mechanism.h) and where it begins with
  // linear maps that can be folded into its projections (folding.h); null: it has not.
  virtual class MemoryMechanism* memory_mechanism() { return nullptr; }
  virtual const class FoldingMechanism* folding() const { return nullptr; }
  // Why a layer of it cannot have the parameters of another layer, to follow its name; empty: it
  // can.
  virtual std::string TieRefusal() const;
  // Why its options leave it without a form that its info lists, and what works instead, to follow
  // "has no "; empty: it has the form.
  virtual std::string FormRefusal(Form) const { return ""; }
  // What its options may ask for because a source has it: padding takes part like any token, so
  // that the verbs are given it as it is, and what it reads is left as it is (conv_luna's
  // mask=none); the rows of a batch change each other (nystrom's start=batch); a
  // source is written at once, by one Write (abc_compressive's length=row).
  virtual bool SeesPadding() const { return false; }
  virtual bool SeesBatch() const { return false; }
  virtual bool WritesAtOnce() const { return false; }
  // Whether a form, causal or bidirectional, takes its tokens in bfloat16 as well, and then gives
  // what they read in it. Slots, sums and the softmax are in float or wider all the same.
  virtual bool TakesBFloat16(Form) const { return false; }
  // Dropout of what a layer gives, after its output projection, while it is trained.
  virtual double OutputDropout(Form) const { return 0; }

  // What the paper says, in plain double-precision code that shares nothing with the above
  // (definition.h helps): rows without padding, x in declared order; query-side tensors come from
  // `queries`, which is x but for cross attention. As in evaluation: no dropout. -> [B,H,T,d]
  virtual at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                                const std::vector<at::Tensor>& x) const = 0;

  // The state after two adjacent pieces of one sequence, each begun empty (info().merges), and the
  // state as it was after the first `count` tokens (info().truncates: nothing written is ever
  // forgotten). Error where the mechanism has none.
  virtual State Merge(const State& first, const State& second) const;
  virtual void Truncate(State& state, int64_t count) const;

  // Bytes of the state after `tokens` tokens in each of `batch` rows, without running anything:
  // Compact(state).Bytes(). By default those of the empty state, which a bounded mechanism keeps;
  // where decoding has a form of its own (Settled), the bytes of that, unless the state is written
  // once and only read then (`decodes` false, as in cross attention). A cache may hold up to as
  // much again as room to grow into (State::Bytes counts it), and rows that were padded or packed
  // add what tells their tokens apart.
  virtual int64_t StateBytes(int64_t batch, int64_t tokens, const at::TensorOptions& options,
                             bool decodes) const;
  // The state without spare room: what a file of it holds. By default the state itself. Shares
  // memory.
  virtual State Compact(const State& state) const;
  // The state in the tensors that EmptyState has: one that decodes may have others in their place
  // (decoding_). Shares memory.
  virtual State Settled(const State& state) const;
  // The names, types and shapes of a state that has the tensors of which `has` is true: those of
  // EmptyState, or those of a state that decodes (decoding_).
  virtual State StateForm(int64_t batch, const at::TensorOptions& options,
                          const std::function<bool(const std::string&)>& has) const;
  // For a compact state that was read from a file, whose tensors have the names, types and shapes
  // of StateForm (a size of 0 there may be any other): Error where the tensors do not fit each
  // other.
  virtual void CheckState(const State& state) const;

 protected:
  // The form that states have while they decode: undeclared where writes are never put off. And
  // whether they are put off as things are now, in training or not.
  DecodingState decoding_;
  virtual bool PutsOffWrites() const { return true; }

  // The verbs of a mechanism; padding holds zeros, or what LeavesPaddingOut allows.
  virtual at::Tensor DoExtend(const std::vector<at::Tensor>& x, State& state,
                              const ops::Mask& mask);
  virtual void DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask);
  // Bidirectional for rows of one document each; padding reads anything. By default: write all,
  // read all.
  virtual at::Tensor BidirectionalRows(const std::vector<at::Tensor>& x, const ops::Mask& mask);
  virtual at::Tensor DoAttend(Form form, const std::vector<at::Tensor>& x, State* state,
                              const ops::Mask& mask, Handles& handles);
  // The tokens' tensors of one side, or of both, with zeros at padding; the others as they are, and
  // so are those whose padding is harmless where the form leaves it out.
  std::vector<at::Tensor> WithoutPadding(const std::vector<at::Tensor>& x, const ops::Mask& mask,
                                         Form form, std::optional<Side> side = {}) const;
  // Whether every operation of the form takes the mask, so that what padding holds has no part in
  // any bit, as long as it is finite and moderate: a copy of all tokens is then saved.
  virtual bool LeavesPaddingOut(Form) const { return false; }

  // Declare a projection and a state tensor, in the order of the lists above.
  ProjectionId AddProjection(const Projection& projection);
  StateId AddState(const std::string& name);

  // Registers a tensor of the core and sets `member` to it. A dot in the name puts it into a module
  // of its own: "map.weight".
  void AddWeight(const std::string& name, at::Tensor& member, const at::Tensor& initial,
                 CoreWeight::Kind kind);
  // The weights of a mechanism that this one holds, with "name." before theirs.
  void AddWeightsOf(const std::string& name, const Mechanism& held);

  // Error unless the tensors of tokens, of one side or of both, are there, of one type and of the
  // shapes that their projections declare, and the mask and the state (null: none) are of these
  // tokens.
  void CheckTokens(const std::vector<at::Tensor>& x, std::optional<Side> side,
                   const ops::Mask& mask, const State* state) const;

 private:
  at::Tensor EachDocument(const std::vector<at::Tensor>& x, const ops::Mask& mask);
  // Those of x that belong to tokens, of one side or of both, changed; the others as they are.
  template <class Change>
  std::vector<at::Tensor> OfTokens(const std::vector<at::Tensor>& x, std::optional<Side> side,
                                   Change&& change) const;
  std::vector<at::Tensor> Moved(const std::vector<at::Tensor>& x, const ops::TokenMap& map) const;
  // The type of x if it is one that the form has to compute in floats.
  std::optional<at::ScalarType> HalfType(Form form, const std::vector<at::Tensor>& x) const;

  const MechanismInfo& info_;
  AttentionDims dims_;
  std::vector<Projection> projections_;
  std::vector<std::string> state_names_;
  std::vector<CoreWeight> weights_;
};

// All mechanisms, in the order of mechanisms.def.
const std::vector<const MechanismInfo*>& Mechanisms();
// A name of mechanisms.def, or head groups such as "window:2+latte:2" (head_groups.h). UsageError
// with the nearest name, of these and of what else the caller would take.
const MechanismInfo& FindMechanism(const std::string& name,
                                   const std::vector<std::string>& beside = {});

// y [B,H,T,d] with zeros at padding and masked tokens.
at::Tensor ZeroPadding(const at::Tensor& y, const ops::Mask& mask);

// Error, which begins with `where`, unless the mask is one of [batch, length] tokens.
void CheckMask(const std::string& where, const ops::Mask& mask, int64_t batch, int64_t length);

// UsageError with the reason and what works instead, unless the mechanism has the form.
void RequireForm(const MechanismInfo& info, Form form);

// What a mechanism's declaration begins with: its name, its options (M::Options and
// M::Describe(Options&) -> Fields) and how it is made of them (M(info, options, dims)).
template <class M>
MechanismInfo InfoOf(const std::string& name) {
  MechanismInfo info;
  info.name = name;
  info.options = [] {
    static typename M::Options defaults;
    return M::Describe(defaults);
  };
  info.construct = [](const MechanismInfo& self, const Json& json, const AttentionDims& dims) {
    typename M::Options options;
    M::Describe(options).Read(json, "options of " + self.name);
    return std::make_shared<M>(self, options, dims);
  };
  return info;
}

}  // namespace cistern
