#pragma once
// Optimizers by name. What all share: the global gradient norm and its clipping, parameters without
// a gradient (neither updated nor decayed), state by name for checkpoints. Updates are torch's own
// fused ones where libtorch has them.
//
//   adamw      Loshchilov & Hutter 2019; weight decay decoupled: w -= lr decay w
//   adam       Kingma & Ba 2015; weight decay is L2: g += decay w
//   sgd        b = momentum b + g, w -= lr b; L2 as adam
//   nag        Nesterov's momentum as fairseq's NAG: its buffer is scaled with the learning rate,
//              so that a new rate changes it at once; decay decoupled
//   adafactor  Shazeer & Stern 2018, as T5: second moments of a matrix as their row and column
//              means, updates clipped, the rate relative to the weights' size; decay decoupled
//   muon       Jordan et al. 2024: the maps of the blocks (..._proj.weight) move by their Nesterov
//              momentum made orthogonal, times 0.2 sqrt(max(rows, columns)), so that an update is
//              as large as AdamW's and one rate serves both (Liu et al. 2025); all other
//              parameters by adamw; decay decoupled. Its products are bfloat16 in a BFloat16Scope
#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "cistern/attention/state.h"
#include "cistern/models/model.h"

namespace cistern {

enum class OptimizerKind { kAdamW, kAdam, kSgd, kNag, kAdafactor, kMuon };
const EnumNames<OptimizerKind>& OptimizerKinds();
// kMatrices: norms, biases, a mechanism's own vectors and the class token are left alone.
enum class DecayOf { kMatrices, kAll };
const EnumNames<DecayOf>& DecayOfNames();

struct AdafactorOptions {
  double decay_power = 0.8;  // second moments: decay 1 - t^-power at update t
  double update_clip = 1;    // largest root mean square of an update
  bool relative = true;      // times the root mean square of the weights, but min_scale
  double min_scale = 1e-3, eps = 1e-30;

  Fields Describe();
};

struct MuonOptions {
  double momentum = 0.95;
  int64_t iterations = 5;  // of Newton and Schulz, towards the nearest orthogonal matrix

  Fields Describe();
};

struct OptimizerOptions {
  OptimizerKind kind = OptimizerKind::kAdamW;
  double beta1 = 0.9, beta2 = 0.98, eps = 1e-8;  // adamw, adam, muon's others
  double momentum = 0.9;                         // sgd, nag
  double weight_decay = 0.01;
  DecayOf decay = DecayOf::kMatrices;
  AdafactorOptions adafactor;
  MuonOptions muon;

  void AddTo(Fields& fields);
  // UsageError where an option is given that the optimizer does not have.
  void Validate() const;
};

class Optimizer {
 public:
  Optimizer(const Model& model, const OptimizerOptions& options);
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Clips the global gradient norm to `clip` (0: not), updates with rate lr, clears the gradients.
  // Returns the norm before clipping. A norm that is not finite changes nothing: the caller
  // decides. With gradients set aside, these are added first.
  double Step(double lr, double clip);
  // Takes the gradients away, clipped to `clip` by their own norm, until Step: gradients of single
  // batches, of which one update is made (optax's chain(clip_by_global_norm, MultiSteps)). Returns
  // the norm; where it is not finite nothing is taken.
  double SetAside(double clip);
  // The first parameter whose value, or whose gradient, is not finite; empty when all are.
  std::string FirstNonFinite(bool gradients) const;
  // The same of its state.
  std::string FirstNonFiniteMoment() const;

  const std::string& name() const { return NameOf(options_.kind, OptimizerKinds()); }
  // "exp_avg.layers.0...", parameter by parameter, then what belongs to none.
  std::vector<NamedTensor> Save() const;
  void Load(const std::vector<NamedTensor>& tensors, const std::string& where);

 protected:
  using Tensors = std::vector<at::Tensor>;
  // A kind of state: a tensor for each parameter, undefined where it has none.
  struct Moment {
    std::string name;
    Tensors of;
  };
  // `initial(i)` makes that of parameter i.
  template <class F>
  size_t AddMoment(const std::string& name, F&& initial) {
    Moment m{name, {}};
    for (size_t i = 0; i < parameters_.size(); ++i) m.of.push_back(initial(i));
    moments_.push_back(std::move(m));
    return moments_.size() - 1;
  }
  // Parameters `chosen` have gradients.
  virtual void Update(const std::vector<size_t>& chosen, double lr) = 0;
  Tensors Of(const Tensors& all, const std::vector<size_t>& chosen) const;
  Tensors Gradients(const std::vector<size_t>& chosen) const;  // contiguous
  double Decay(size_t i) const;                                // of parameter i
  // Those of `chosen` that are decayed, or that are not.
  std::vector<size_t> Decayed(const std::vector<size_t>& chosen, bool decayed) const;
  at::Tensor Zeros(size_t i) const;  // as parameter i

  OptimizerOptions options_;
  std::vector<std::string> names_;
  Tensors parameters_;
  std::vector<Moment> moments_;
  std::vector<NamedTensor> beside_;  // state of no parameter

 private:
  double Norm() const;  // of all gradients; -1: there are none
  Tensors aside_;       // as parameters; empty: none
};

std::unique_ptr<Optimizer> MakeOptimizer(const Model& model, const OptimizerOptions& options);

}  // namespace cistern
