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
      return double(stack.input_dim()) *
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
  return f;
}

void EncoderClassifier::Check(const ModelConfig& config) { Pooling::Check(config); }

namespace {

// The map of real values, which only models of values have.
std::shared_ptr<Linear> AddValues(torch::nn::Module& owner, const ModelConfig& config) {
  const auto o = OwnOptions<EncoderClassifier>(config);
  if (o.input == EncoderClassifier::Input::kTokens) {
    if (o.channels > 0 || config.init.values_std > 0 || config.init.values_bias_std > 0)
      FailUsage(
          "encoder_classifier.channels, init.values_std and init.values_bias_std are of real "
          "values, and this model reads tokens; leave them out, or take a task of values, such as "
          "image with task.input=values");
    return nullptr;
  }
  if (o.channels < 1)
    FailUsage(
        "encoder_classifier.input=values needs a task that gives real values, such as image "
        "with task.input=values");
  auto map = std::make_shared<Linear>(o.channels, config.Stack(Form::kBidirectional).input_dim(),
                                      true, config.init.values_std);
  if (config.init.values_bias_std > 0) {
    const at::NoGradGuard guard;
    map->bias.copy_(at::randn(map->bias.sizes()) * config.init.values_bias_std);
  }
  return owner.register_module("embed_values", std::move(map));
}

}  // namespace

EncoderClassifier::EncoderClassifier(const ModelConfig& config)
    : Classifier(config),
      embedding_(OwnOptions<EncoderClassifier>(config).input == Input::kTokens
                     ? AddEmbedding(*this, "embed_tokens", config, config.vocab_size,
                                    config.Stack(Form::kBidirectional).input_dim())
                     : at::Tensor()),
      values_(AddValues(*this, config)),
      rows_(*this, config) {
  const LayerStack stack = config.Stack(Form::kBidirectional);
  head_ = register_module("classifier",
                          std::make_shared<ClassifierHead>(config, stack.dim(), stack.ffn_dim()));
}

at::Tensor EncoderClassifier::Embedded(const at::Tensor& input) const {
  return values_ ? values_->Forward(input.to(values_->weight.scalar_type()))
                 : EmbedIds(embedding_, input, config_.init.pad_row());
}

at::Tensor EncoderClassifier::Forward(const at::Tensor& input, const ops::Mask& mask,
                                      const at::Tensor& positions) {
  CISTERN_CHECK(input.dim() == (values_ ? 3 : 2), "[encoder_classifier] expected ",
                values_ ? "values of shape [B,T,C]" : "ids of shape [B,T]", ", got ",
                input.sizes());
  at::Tensor x = input;
  if (values_ && config_.padding != PaddingKind::kSeen && config_.padding != PaddingKind::kReads) {
    CheckMask("[encoder_classifier]", mask, input.size(0), input.size(1));
    x = ZerosAtPadding(input, mask);
  }
  return head_->Forward(rows_.Forward(Embedded(x), mask, positions));
}

at::Tensor EncoderClassifier::Logits(const NamedTensors& inputs) {
  RequireKnown(inputs);
  return Forward(inputs[values_ ? "values" : "ids"], MaskOf(inputs), inputs.Find("positions"));
}

}  // namespace cistern
