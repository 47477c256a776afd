#include "cistern/models/encoder_classifier.h"

#include <ATen/ATen.h>

#include "cistern/base/error.h"

namespace cistern {

const ModelInfo& encoder_classifier_model() {
  static const ModelInfo info = [] {
    ModelInfo i;
    i.name = "encoder_classifier";
    i.summary = "A bidirectional encoder that assigns a class to each row.";
    i.forms = {Form::kBidirectional};
    i.inputs = {"ids", "lengths", "valid?"};
    i.classifies = true;
    i.tables = [](const ModelConfig& c) {
      const LayerStack stack = c.Stack(Form::kBidirectional);
      const StackOptions& o = stack.options();
      return double(o.dim) * (double(c.vocab_size) +
                              (o.positions == PositionKind::kLearned ? double(o.max_length) : 0)) +
             ClassifierHead::Count(c, o.dim, stack.ffn_dim());
    };
    BindModel<EncoderClassifier>(i);
    return i;
  }();
  return info;
}

EncoderClassifier::EncoderClassifier(const ModelConfig& config)
    : Classifier(config),
      embedding_(AddEmbedding(*this, "embed_tokens", config, config.vocab_size,
                              config.Stack(Form::kBidirectional).dim())),
      pooling_(*this, config),
      trunk_(*this, config, Form::kBidirectional, pooling_.extra()) {
  const LayerStack stack = config.Stack(Form::kBidirectional);
  head_ = register_module("classifier",
                          std::make_shared<ClassifierHead>(config, stack.dim(), stack.ffn_dim()));
}

at::Tensor EncoderClassifier::Forward(const at::Tensor& ids, const at::Tensor& lengths) {
  CISTERN_CHECK(ids.dim() == 2 && lengths.dim() == 1 && lengths.size(0) == ids.size(0),
                "[encoder_classifier] expected ids of shape [B,T] and lengths of shape [B]");
  const at::Tensor x = pooling_.With(at::embedding(embedding_, ids));
  const Stream stream =
      trunk_.Enter(x, {lengths + pooling_.extra(), {}}, RowPositions(x.size(1), lengths));
  return head_->Forward(pooling_.Forward(trunk_, trunk_.Bidirectional(stream), lengths));
}

at::Tensor EncoderClassifier::Logits(const NamedTensors& inputs) {
  if (!inputs.Has("valid")) return Forward(inputs["ids"], inputs["lengths"]);
  const ops::TokenMap front =
      trunk_.RealTokensFirst({inputs["lengths"], std::nullopt, inputs["valid"]});
  return Forward(front.Move(inputs["ids"], 1), *front.mask().lengths);
}

}  // namespace cistern
