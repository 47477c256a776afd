#pragma once
// A causal model of series of real values: from each step and those before it the next step's
// vector. One linear map turns a step's numbers into an embedding, another the hidden state into
// the prediction.
#include "cistern/models/model_state.h"
#include "cistern/models/trunk.h"
#include "cistern/nn/linear.h"

namespace cistern {

class Forecaster : public StatefulModel {
 public:
  struct Options {
    int64_t inputs = 0, outputs = 0;  // numbers of a step, and of them those that are predicted
    bool residual = true;
  };
  static Fields Describe(Options& options);
  static void Check(const ModelConfig&) {}
  explicit Forecaster(const ModelConfig& config);

  // values [B,T,inputs], the next steps of each row -> what follows each of them, [B,T,outputs].
  // With `residual`, that is the change from the step's own first `outputs` numbers. Writes the
  // steps into the state. Padding (mask.lengths) is never seen.
  at::Tensor Extend(const at::Tensor& values, ModelState& state,
                    const ops::Mask& mask = {}) override;
  // The same of whole rows.
  at::Tensor Predict(const NamedTensors& inputs);
  std::string WhyNoSmoothing() const override {
    return "is for classes; a forecaster predicts numbers";
  }

 private:
  // Mean squared error over the targets [B,T,outputs] that are not NaN.
  at::Tensor DoTrainingLoss(const NamedTensors& batch, double label_smoothing) override;

  Options options_;
  std::shared_ptr<Linear> values_, head_;
  Trunk trunk_;
};

}  // namespace cistern
