#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include "cistern/models/model.h"

namespace cistern {

// Runs a model without gradients and dropout within a scope, then restores its mode.
class EvalScope {
 public:
  explicit EvalScope(Model& model) : model_(model), training_(model.is_training()) {
    model_.eval();
  }
  ~EvalScope() { model_.train(training_); }
  EvalScope(const EvalScope&) = delete;
  EvalScope& operator=(const EvalScope&) = delete;

 private:
  at::NoGradGuard no_grad_;
  Model& model_;
  bool training_;
};

// The same for decoding: one token costs many small operations, and without the dispatch keys of
// autograd each of them keeps nothing for a gradient that nobody asks for.
class DecodeScope {
 public:
  explicit DecodeScope(Model& model) : eval_(model) {}

 private:
  EvalScope eval_;
  at::AutoDispatchBelowADInplaceOrView plain_;
};

}  // namespace cistern
