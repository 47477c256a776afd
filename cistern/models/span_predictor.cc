#include "cistern/models/span_predictor.h"

#include <ATen/ATen.h>

#include <limits>

#include "cistern/base/error.h"

namespace cistern {

const ModelInfo& span_predictor_model() {
  static const ModelInfo info = [] {
    ModelInfo i;
    i.name = "span_predictor";
    i.summary = "A bidirectional encoder that finds a span of each row, such as an answer.";
    i.forms = {Form::kBidirectional};
    i.inputs = {"ids", "lengths?", "valid?"};
    i.tables = [](const ModelConfig& c) {
      const StackOptions o = c.Stack(Form::kBidirectional).options();
      return double(o.dim) * (double(c.vocab_size) + 2 +
                              (o.positions == PositionKind::kLearned ? double(o.max_length) : 0));
    };
    BindModel<SpanPredictor>(i);
    return i;
  }();
  return info;
}

SpanPredictor::SpanPredictor(const ModelConfig& config)
    : TokenPredictor(config),
      embedding_(AddEmbedding(*this, "embed_tokens", config, config.vocab_size,
                              config.Stack(Form::kBidirectional).dim())),
      trunk_(*this, config, Form::kBidirectional),
      span_head_(register_module(
          "span_head", std::make_shared<Linear>(config.Stack(Form::kBidirectional).dim(), 2, false,
                                                config.init_std))) {}

at::Tensor SpanPredictor::Hidden(const at::Tensor& ids, const ops::Mask& mask) {
  CheckInputs(ids, mask);
  if (mask.valid) {
    const ops::TokenMap front = trunk_.RealTokensFirst(mask);
    return front.Back(Hidden(front.Move(ids, 1), front.mask()), 1);
  }
  const Stream stream =
      trunk_.Enter(EmbedIds(embedding_, ids), mask, RowPositions(ids.size(1), ids));
  return trunk_.Norm(trunk_.Bidirectional(stream).x);
}

at::Tensor SpanPredictor::Logits(const at::Tensor& hidden) const {
  return span_head_->Forward(hidden);
}

at::Tensor SpanPredictor::SpanLogits(const NamedTensors& inputs) {
  RequireKnown(inputs);
  const ops::Mask mask = MaskOf(inputs);
  const at::Tensor& ids = inputs["ids"];
  const at::Tensor logits = Logits(Hidden(ids, mask));
  at::Tensor absent = at::zeros_like(ids, at::kBool);
  if (mask.lengths) absent = RowPositions(ids.size(1), ids).ge(mask.lengths->unsqueeze(1));
  if (mask.valid) absent = absent.logical_or(mask.valid->logical_not());
  const at::ScalarType wide = logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return logits.to(wide).masked_fill(absent.unsqueeze(-1),
                                     -std::numeric_limits<double>::infinity());
}

at::Tensor SpanPredictor::DoTrainingLoss(const NamedTensors& batch, double label_smoothing) {
  if (label_smoothing > 0) FailUsage("train.label_smoothing ", WhyNoSmoothing());
  const at::Tensor& targets = batch["targets"];
  const at::Tensor log_p = at::log_softmax(SpanLogits(batch), 1);
  CISTERN_CHECK(targets.dim() == 2 && targets.size(0) == log_p.size(0) && targets.size(1) == 2,
                "[span_predictor] expected targets of shape [", log_p.size(0), ",2], got ",
                targets.sizes());
  const at::Tensor outside =
      targets.masked_select(targets.lt(0).logical_or(targets.ge(log_p.size(1))));
  CISTERN_CHECK(outside.numel() == 0, "[span_predictor] target ", outside[0].item<int64_t>(),
                " is not within the rows; their tokens are 0 to ", log_p.size(1) - 1);
  return -log_p.gather(1, targets.unsqueeze(1)).mean();
}

}  // namespace cistern
