#include "cistern/models/decoder_lm.h"

#include "cistern/base/error.h"

namespace cistern {

const ModelInfo& decoder_lm_model() {
  static const ModelInfo info = [] {
    ModelInfo i;
    i.name = "decoder_lm";
    i.summary = "A causal language model: it predicts each token from those before it.";
    i.forms = {Form::kCausal};
    i.inputs = {"ids", "lengths?", "starts?", "valid?"};
    i.extends = i.predicts_tokens = true;
    i.tables = [](const ModelConfig& c) {
      const StackOptions o = c.Stack(Form::kCausal).options();
      const double positions =
          o.positions == PositionKind::kLearned ? double(o.max_length) * double(o.dim) : 0;
      const EmbeddingOptions own = OwnOptions<DecoderLm>(c);
      if (own.adaptive())
        return CountAdaptive(own, c.vocab_size, o.dim, c.tie_embeddings) + positions;
      return double(o.dim) * double(c.vocab_size) * (c.tie_embeddings ? 1 : 2) + positions;
    };
    BindModel<DecoderLm>(i);
    return i;
  }();
  return info;
}

void DecoderLm::Check(const ModelConfig& config) {
  OutputLayer::Check(config);
  OwnOptions<DecoderLm>(config).Check(config, config.Stack(Form::kCausal).dim());
}

at::Tensor DecoderLm::MakeEmbedding() {
  const int64_t dim = config_.Stack(Form::kCausal).dim();
  const EmbeddingOptions own = OwnOptions<DecoderLm>(config_);
  if (!own.adaptive()) return AddEmbedding(*this, "embed_tokens", config_, config_.vocab_size, dim);
  if (config_.vocab_size < 1)
    FailUsage("a model of kind ", config_.kind, " needs vocab_size of at least 1, got ",
              config_.vocab_size);
  bands_ = register_module("embed_tokens", std::make_shared<AdaptiveEmbedding>(own, config_, dim));
  return {};
}

DecoderLm::DecoderLm(const ModelConfig& config)
    : LanguageModel(config), embedding_(MakeEmbedding()), trunk_(*this, config, Form::kCausal) {
  if (bands_) {
    softmax_ = register_module(
        "lm_head", std::make_shared<AdaptiveSoftmax>(OwnOptions<DecoderLm>(config), config, bands_,
                                                     config.Stack(Form::kCausal).dim()));
  } else {
    output_.emplace(*this, config, embedding_);
  }
  SetStateLayers(trunk_.blocks());
}

at::Tensor DecoderLm::Hidden(const at::Tensor& ids, ModelState& state, const ops::Mask& mask) {
  if (!bands_) return Run(trunk_, embedding_, ids, state, mask);
  return Run(
      trunk_, [this](const at::Tensor& some) { return bands_->Forward(some); }, ids, state, mask);
}

}  // namespace cistern
