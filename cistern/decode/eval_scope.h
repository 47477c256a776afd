#pragma once
// For as long as a model is measured or decodes.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include "cistern/models/model.h"
#include "cistern/ops/kept_weights.h"
#include "cistern/tensors/device.h"

namespace cistern {

// Runs a model without gradients and dropout within a scope, then restores its mode. In threads
// that share a model, it has to be in evaluation mode already, which is left as it is.
class EvalScope {
 public:
  explicit EvalScope(Model& model) : model_(model), training_(model.is_training()) {
    if (training_) model_.eval();
  }
  ~EvalScope() {
    if (training_) model_.train();
  }
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

// Decodes in bfloat16 while it lives: linear maps multiply weights that are kept in bfloat16, which
// come from memory in half the time; few rows, as a token has them, stay in float. The weights must
// not change meanwhile. States are as in float32.
class BFloat16Decoding {
 public:
  BFloat16Decoding(bool on, const Model& model)
      : autocast_(on, model.options().device()), kept_(on) {}

 private:
  BFloat16Scope autocast_;
  ops::KeptWeightsScope kept_;
};

}  // namespace cistern
