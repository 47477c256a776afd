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
    i.inputs = {"ids?", "values?", "lengths", "valid?", "positions?"};
    i.classifies = i.pad_row = true;
    i.tables = [](const ModelConfig& c) {
      const LayerStack stack = c.Stack(Form::kBidirectional);
      const StackOptions& o = stack.options();
      const auto own = OwnOptions<EncoderClassifier>(c);
      const double inputs = own.input == EncoderClassifier::Input::kTokens
                                ? double(c.vocab_size)
                                : double(own.channels) + 1;
      return double(o.dim) *
                 (inputs + (o.positions == PositionKind::kLearned ? double(o.max_length) : 0)) +
             ClassifierHead::Count(c, o.dim, stack.ffn_dim());
    };
    BindModel<EncoderClassifier>(i);
    return i;
  }();
  return info;
}

Fields EncoderClassifier::Describe(Options& options) {
  Fields f;
  f.Add("input", &options.input,
        "tokens: ids; values: a vector of real numbers for each token, through a linear map; set "
        "by the task",
        {{Input::kTokens, "tokens"}, {Input::kValues, "values"}});
  f.Add("channels", &options.channels, "real numbers of a token; set by the task", {0, 1 << 20});
  f.Add("values_std", &options.values_std,
        "of input=values: standard deviation of the map's first weights, 1 for x w + b of P000's "
        "code; 0: 1/sqrt(3 channels), that of torch's Linear (P002)",
        {0.0, 10.0});
  f.Add("values_bias_std", &options.values_bias_std,
        "of input=values: the same of its biases, 0.1 for P000's code", {0.0, 10.0});
  return f;
}

void EncoderClassifier::Check(const ModelConfig& config) { Pooling::Check(config); }

namespace {

// The map of real values, which only models of values have.
std::shared_ptr<Linear> AddValues(torch::nn::Module& owner, const ModelConfig& config) {
  const auto o = OwnOptions<EncoderClassifier>(config);
  if (o.input == EncoderClassifier::Input::kTokens) {
    if (o.channels > 0 || o.values_std > 0 || o.values_bias_std > 0)
      FailUsage(
          "encoder_classifier: channels, values_std and values_bias_std are of real values, and "
          "this model reads tokens; leave them out, or take a task of values, such as image with "
          "task.input=values");
    return nullptr;
  }
  if (o.channels < 1)
    FailUsage(
        "encoder_classifier.input=values needs a task that gives real values, such as image "
        "with task.input=values");
  auto map = std::make_shared<Linear>(o.channels, config.Stack(Form::kBidirectional).dim(), true,
                                      o.values_std);
  if (o.values_bias_std > 0) {
    const at::NoGradGuard guard;
    map->bias.copy_(at::randn(map->bias.sizes()) * o.values_bias_std);
  }
  return owner.register_module("embed_values", std::move(map));
}

}  // namespace

EncoderClassifier::EncoderClassifier(const ModelConfig& config)
    : Classifier(config),
      embedding_(OwnOptions<EncoderClassifier>(config).input == Input::kTokens
                     ? AddEmbedding(*this, "embed_tokens", config, config.vocab_size,
                                    config.Stack(Form::kBidirectional).dim())
                     : at::Tensor()),
      values_(AddValues(*this, config)),
      pooling_(*this, config),
      trunk_(*this, config, Form::kBidirectional, pooling_.extra()) {
  const LayerStack stack = config.Stack(Form::kBidirectional);
  head_ = register_module("classifier",
                          std::make_shared<ClassifierHead>(config, stack.dim(), stack.ffn_dim()));
}

at::Tensor EncoderClassifier::Embedded(const at::Tensor& input) const {
  return values_ ? values_->Forward(input.to(values_->weight.scalar_type()))
                 : at::embedding(embedding_, input, config_.init.pad_row());
}

at::Tensor EncoderClassifier::Forward(const at::Tensor& input, const at::Tensor& lengths,
                                      const at::Tensor& positions) {
  CISTERN_CHECK(
      input.dim() == (values_ ? 3 : 2) && lengths.dim() == 1 && lengths.size(0) == input.size(0),
      "[encoder_classifier] expected ", values_ ? "values of shape [B,T,C]" : "ids of shape [B,T]",
      " and lengths of shape [B]");
  const at::Tensor x = pooling_.With(Embedded(input));
  at::Tensor places = positions;
  if (!places.defined()) {
    places = RowPositions(x.size(1), lengths);
  } else {
    CISTERN_CHECK(places.sizes() == input.sizes().slice(0, 2),
                  "[encoder_classifier] expected positions of shape [B,T], got ", places.sizes());
    if (pooling_.extra() > 0)  // the learned token comes first
      places = at::cat({at::zeros_like(places.narrow(1, 0, 1)), places + pooling_.extra()}, 1);
  }
  const Stream stream = trunk_.Enter(x, {lengths + pooling_.extra(), {}}, places);
  return head_->Forward(pooling_.Forward(trunk_, trunk_.Bidirectional(stream), lengths));
}

at::Tensor EncoderClassifier::Logits(const NamedTensors& inputs) {
  const at::Tensor& input = inputs[values_ ? "values" : "ids"];
  const at::Tensor positions = inputs.Find("positions");
  if (!inputs.Has("valid")) return Forward(input, inputs["lengths"], positions);
  const ops::TokenMap front =
      trunk_.RealTokensFirst({inputs["lengths"], std::nullopt, inputs["valid"]});
  return Forward(front.Move(input, 1), *front.mask().lengths, front.Move(positions, 1));
}

}  // namespace cistern
