#pragma once
// A mechanism: a way to attend. It is a core (a function of projected tensors) plus the projections it declares; the attention layer
// (nn/attention_layer.h) owns the projections, the short convolution, the positions and the output projection.
//
// Three verbs: write (tokens into a state), read (queries against a state) and extend (causal: each token is written, then reads), for a
// piece of any length. Bidirectional = write all, read all. Cross = write once, read often. Decoding = extend by one token.
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cistern/attention/state.h"
#include "cistern/io/fields.h"
#include "cistern/ops/slot_memory.h"

namespace cistern {

enum class Form { kBidirectional, kCausal, kCross };
std::string FormName(Form form);

enum class Side { kQuery, kKey };  // which stream a projection is made from; the same one in self attention

struct Projection {
  std::string name;  // "q" gives the weight q_proj.weight
  Side side;
  int64_t width;        // over its heads
  bool rotary = false;  // rotary positions turn it
  int64_t heads = 0;    // it is split into; 0: as many as the layer has. 1: shared by all heads
  bool tied = false;    // the layers of one model with this mechanism share the map
};

struct AttentionDims {
  int64_t dim = 0;         // D, the width of the model
  int64_t heads = 0;       // H; d = D/H
  int64_t max_length = 0;  // of the model, for mechanisms of fixed length
  int64_t layer = 0;
  double dropout = 0;                      // attention dropout
  const class Mechanism* first = nullptr;  // of an earlier layer, same model and options: owns what is tied across layers
};

// A tensor that the core itself owns, by its name in a model file below "core.": "map.weight".
struct CoreWeight {
  enum class Kind { kTrained, kDrawn, kRedrawn };  // a parameter; a buffer; a buffer that calls in training change
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
  bool bounded = true;                         // the state does not grow with the sequence
  bool causal_is_prefix = true;                // causal at t = the last row of bidirectional over 0..t
  std::vector<std::string> positions;          // kinds that fit: none, learned, sinusoidal, rotary
  std::string time, state;                     // cost in words: "O(T n d)", "2 n (d + 1)"
  std::vector<Json> cases = {Json::object()};  // options the conformance suite runs: every variant once, sizes of a few
  double tolerance = 1e-6;                     // of the conformance suite in float, relative RMS; say why where it is wider
  bool merges = false;                         // has Merge
  bool truncates = false;                      // has Truncate
  std::function<Fields()> options;             // its typed options with their defaults
  std::function<std::shared_ptr<class Mechanism>(const Json& options, const AttentionDims& dims)> make;
  bool Supports(Form form) const;
};

class Mechanism : public torch::nn::Module {
 public:
  Mechanism(const MechanismInfo& info, const AttentionDims& dims) : info_(info), dims_(dims) {}
  const MechanismInfo& info() const { return info_; }
  const AttentionDims& dims() const { return dims_; }

  virtual std::vector<Projection> Projections() const = 0;
  const std::vector<CoreWeight>& weights() const { return weights_; }

  // Everything below: tensors in declared order, each [B,H,T,width/H]; those of the other side are undefined where not needed.
  virtual State EmptyState(int64_t batch, const at::TensorOptions& options) const = 0;
  virtual at::Tensor Extend(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) = 0;  // -> [B,H,T,d]
  virtual void Write(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) = 0;
  virtual at::Tensor Read(const std::vector<at::Tensor>& x, const State& state) = 0;
  // The whole sequence, every token sees every valid token. Rows with several documents are taken apart first.
  at::Tensor Bidirectional(const std::vector<at::Tensor>& x, const ops::Mask& mask);

  // What the paper says, in plain double-precision code that shares nothing with the above (definition.h helps): rows without padding, x in
  // declared order; query-side tensors come from `queries`, which is x but for cross attention. As in evaluation: no dropout. -> [B,H,T,d]
  virtual at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries, const std::vector<at::Tensor>& x) const = 0;

  // The state after two adjacent pieces of one sequence, each begun empty (info().merges), and the state as it was after the first `count`
  // tokens (info().truncates: nothing written is ever forgotten). Error where the mechanism has none.
  virtual State Merge(const State& first, const State& second) const;
  virtual void Truncate(State& state, int64_t count) const;

  // Bytes of the state after `tokens` tokens in each of `batch` rows, without running anything: Compact(state).Bytes(). By default those of
  // the empty state, which a bounded mechanism keeps. A cache may hold up to as much again as room to grow into (State::Bytes counts it),
  // and rows that were padded or packed add what tells their tokens apart.
  virtual int64_t StateBytes(int64_t batch, int64_t tokens, const at::TensorOptions& options) const;
  // The state without spare room: what a file of it holds. By default the state itself. Shares memory.
  virtual State Compact(const State& state) const;
  // For a compact state that was read from a file, whose tensors have the names, types and shapes of EmptyState (a size of 0 there may be
  // any other): Error where the tensors do not fit each other.
  virtual void CheckState(const State& state) const;

 protected:
  // Bidirectional for rows of one document each; padding reads anything. By default: write all, read all.
  virtual at::Tensor BidirectionalRows(const std::vector<at::Tensor>& x, const ops::Mask& mask);

  // Registers a tensor of the core and sets `member` to it. A dot in the name puts it into a module of its own: "map.weight".
  void AddWeight(const std::string& name, at::Tensor& member, const at::Tensor& initial, CoreWeight::Kind kind);
  // The weights of a mechanism that this one holds, with "name." before theirs.
  void AddWeightsOf(const std::string& name, const Mechanism& held);

 private:
  const MechanismInfo& info_;
  AttentionDims dims_;
  std::vector<CoreWeight> weights_;
};

// All mechanisms, in the order of mechanisms.def.
const std::vector<const MechanismInfo*>& Mechanisms();
// A name of mechanisms.def, or head groups such as "window:2+latte:2" (head_groups.h). UsageError with the nearest name.
const MechanismInfo& FindMechanism(const std::string& name);

// UsageError with the reason and what works instead, unless the mechanism has the form.
void RequireForm(const MechanismInfo& info, Form form);

// Fills in `options` and `make` of an info from M::Options, M::Describe(Options&) -> Fields and M(info, options, dims).
template <class M>
void BindMechanism(MechanismInfo& info) {
  info.options = [] {
    static typename M::Options defaults;
    return M::Describe(defaults);
  };
  info.make = [&info](const Json& json, const AttentionDims& dims) -> std::shared_ptr<Mechanism> {
    typename M::Options options;
    M::Describe(options).Read(json, "options of " + info.name);
    return std::make_shared<M>(info, options, dims);
  };
}

}  // namespace cistern
