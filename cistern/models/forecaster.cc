#include "cistern/models/forecaster.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include "cistern/attention/token_positions.h"
#include "cistern/base/error.h"

namespace cistern {

const ModelInfo& forecaster_model() {
  static const ModelInfo info = [] {
    ModelInfo i;
    i.name = "forecaster";
    i.summary = "A causal model of real values: it predicts each step from those before it.";
    i.forms = {Form::kCausal};
    i.inputs = {"values", "lengths?", "valid?", "starts?"};
    i.tables = [](const ModelConfig& c) {
      const StackOptions o = c.Stack(Form::kCausal).options();
      const auto own = OwnOptions<Forecaster>(c);
      return double(o.dim) * (double(own.inputs) + double(own.outputs) + 1 +
                              (o.positions == PositionKind::kLearned ? double(o.max_length) : 0));
    };
    BindModel<Forecaster>(i);
    return i;
  }();
  return info;
}

Fields Forecaster::Describe(Options& options) {
  Fields f;
  f.Add("inputs", &options.inputs, "real numbers of a step; set by the task", {0, 1 << 20});
  f.Add("outputs", &options.outputs, "of them those that are predicted; set by the task",
        {0, 1 << 20});
  f.Add("residual", &options.residual,
        "the model gives the change from a step to the next, not the next step itself");
  return f;
}

namespace {

Forecaster::Options ForecasterOptions(const ModelConfig& config) {
  const auto o = OwnOptions<Forecaster>(config);
  if (o.inputs < 1 || o.outputs < 1 || o.outputs > o.inputs)
    FailUsage("forecaster.inputs and outputs are set by a task of series, such as forecast; got ",
              o.inputs, " and ", o.outputs);
  return o;
}

}  // namespace

Forecaster::Forecaster(const ModelConfig& config)
    : StatefulModel(config),
      options_(ForecasterOptions(config)),
      values_(register_module(
          "embed_values",
          std::make_shared<Linear>(options_.inputs, config.Stack(Form::kCausal).dim(), true))),
      trunk_(*this, config, Form::kCausal) {
  head_ = register_module("out_proj", std::make_shared<Linear>(config.Stack(Form::kCausal).dim(),
                                                               options_.outputs, true));
  SetStateLayers(trunk_.blocks());
}

at::Tensor Forecaster::Extend(const at::Tensor& values, ModelState& state, const ops::Mask& mask) {
  CISTERN_CHECK(values.dim() == 3 && values.size(2) == options_.inputs,
                "[forecaster] expected values of shape [B,T,", options_.inputs, "], got ",
                values.sizes());
  CheckPiece(state, values.size(0), values.size(1), mask);
  if (mask.valid) {
    const ops::TokenMap front = trunk_.RealTokensFirst(mask);
    return front.Back(Extend(front.Move(values, 1), state, front.mask()), 1);
  }
  const at::Tensor x = ZerosAtPadding(values, mask).to(values_->weight.scalar_type());
  const at::Tensor positions = TablePositions(state.positions, x.size(1), mask);
  const Stream stream = trunk_.Extend(trunk_.Enter(values_->Forward(x), mask, positions), state);
  state.positions = PositionsAfter(state.positions, positions, mask);
  const at::Tensor y = head_->Forward(trunk_.Norm(stream.x));
  return options_.residual ? y + x.narrow(2, 0, options_.outputs) : y;
}

at::Tensor Forecaster::Predict(const NamedTensors& inputs) {
  RequireKnown(inputs);
  ModelState state = EmptyState(inputs["values"].size(0));
  return Extend(inputs["values"], state, MaskOf(inputs));
}

at::Tensor Forecaster::DoTrainingLoss(const NamedTensors& batch, double label_smoothing) {
  if (label_smoothing > 0) FailUsage("train.label_smoothing ", WhyNoSmoothing());
  const at::Tensor& targets = batch["targets"];
  const at::Tensor y = Predict(batch), missing = targets.isnan();
  CISTERN_CHECK(y.sizes() == targets.sizes(), "[forecaster] expected targets of shape ", y.sizes(),
                ", got ", targets.sizes());
  const auto wide = at::toOpMathType(y.scalar_type());  // of bfloat16: float
  const at::Tensor error = (y.to(wide) - targets.to(wide)).masked_fill(missing, 0);
  return error.square().sum() / (targets.numel() - missing.sum()).clamp_min(1);
}

}  // namespace cistern
