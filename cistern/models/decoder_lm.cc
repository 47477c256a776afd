#include "cistern/models/decoder_lm.h"

namespace cistern {

const ModelInfo& decoder_lm_model() {
  static const ModelInfo info = [] {
    ModelInfo i;
    i.name = "decoder_lm";
    i.summary = "A causal language model: it predicts each token from those before it.";
    i.forms = {Form::kCausal};
    i.inputs = {"ids", "lengths?", "starts?", "valid?"};
    i.extends = true;
    i.tables = [](const ModelConfig& c) {
      const StackOptions o = c.Stack(Form::kCausal).options();
      return double(o.dim) * (double(c.vocab_size) * (c.tie_embeddings ? 1 : 2) +
                              (o.positions == PositionKind::kLearned ? double(o.max_length) : 0));
    };
    BindModel<DecoderLm>(i);
    return i;
  }();
  return info;
}

DecoderLm::DecoderLm(const ModelConfig& config)
    : LanguageModel(config),
      embedding_(AddEmbedding(*this, "embed_tokens", config, config.vocab_size,
                              config.Stack(Form::kCausal).dim())),
      trunk_(*this, config, Form::kCausal),
      output_(*this, config, embedding_) {
  SetStateLayers(trunk_.blocks());
}

at::Tensor DecoderLm::Hidden(const at::Tensor& ids, ModelState& state, const ops::Mask& mask) {
  return Run(trunk_, embedding_, ids, state, mask);
}

}  // namespace cistern
