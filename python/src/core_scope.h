#pragma once
// The mechanisms that calls from Python run on. Python holds the weights and passes them with every
// call; a mechanism itself is made once for each thread and specification, and takes the weights of
// the call for as long as the call lasts.
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <string>
#include <vector>

#include "cistern/attention/memory_mechanism.h"

namespace cistern::python {

// As the thread has them, but without the modes of Python (fake tensors, tracing) and the shapes
// alone (the Meta backend) that fake tensors ask for.
c10::impl::LocalDispatchKeySet WithoutModes();

// While a mechanism is made: no mode of Python sees it, and the user's random numbers are left
// alone.
class Undisturbed {
 public:
  Undisturbed();
  ~Undisturbed();
  Undisturbed(const Undisturbed&) = delete;
  Undisturbed& operator=(const Undisturbed&) = delete;

 private:
  c10::impl::ForceDispatchKeyGuard no_modes_;
  at::Generator generator_;
  at::Tensor before_;
};

// A specification is JSON: {"mechanism": "latte", "options": {}, "dim": 128, "heads": 4,
// "max_length": 0, "layer": 0, "dropout": 0}, and where they differ from that "model", the width of
// the model, and "relative", whether positions are, with "relative_std".
struct CoreSpec {
  std::string mechanism;
  Json options = Json::object();
  AttentionDims dims;
};
CoreSpec ParseSpec(const std::string& spec);  // UsageError on what is no specification

// As FindMechanism(spec.mechanism).make, but UsageError for what Python cannot use: tensors
// registered without AddWeight.
std::shared_ptr<Mechanism> MakeCore(const CoreSpec& spec);

// A state as Python sees it: without the tensor that it has while it decodes with writes put off,
// which no call from here leaves behind.
State Visible(const State& state);

struct Core {
  std::shared_ptr<Mechanism> mechanism;
  std::vector<Projection> projections;
  std::vector<at::Tensor> own;  // the weights it was made with, which tell the shapes
  State form;  // of one row, on the meta device: names, types and shapes of a state (Visible)
  MemoryMechanism* memory =
      nullptr;  // the same mechanism, where it has a memory stream, of `slots` slots
  int64_t slots = 0;
};

// A mechanism with the given weights in place of its own, in evaluation or training. The weights go
// when the scope ends; what autograd keeps of them stays. Error where their shapes do not fit. The
// form tells cross attention from the others: what it draws is not what self attention draws.
class CoreScope {
 public:
  CoreScope(const std::string& spec, at::TensorList weights, bool training, Form form);
  explicit CoreScope(const std::string& spec);  // to ask, not to run
  ~CoreScope();
  CoreScope(const CoreScope&) = delete;
  CoreScope& operator=(const CoreScope&) = delete;

  Mechanism& operator*() const { return *core_.mechanism; }
  Mechanism* operator->() const { return core_.mechanism.get(); }
  const std::vector<Projection>& projections() const { return core_.projections; }
  const State& form() const { return core_.form; }
  MemoryMechanism* memory() const { return core_.memory; }
  int64_t slots() const { return core_.slots; }

 private:
  const Core& core_;
};

}  // namespace cistern::python
