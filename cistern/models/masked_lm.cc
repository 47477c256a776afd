#include "cistern/models/masked_lm.h"

#include <ATen/ATen.h>

#include "cistern/base/error.h"
#include "cistern/tensors/device.h"

namespace cistern {

const ModelInfo& masked_lm_model() {
  static const ModelInfo info = [] {
    ModelInfo i;
    i.name = "masked_lm";
    i.summary = "A bidirectional encoder that predicts the tokens that are hidden from it.";
    i.forms = {Form::kBidirectional};
    i.inputs = {"ids", "lengths?", "valid?"};
    i.predicts_tokens = true;
    i.tables = [](const ModelConfig& c) {
      const StackOptions o = c.Stack(Form::kBidirectional).options();
      const bool transform = OwnOptions<MaskedLm>(c).transform;
      return double(o.dim) * (double(c.vocab_size) * (c.tie_embeddings ? 1 : 2) + 1 +
                              (o.positions == PositionKind::kLearned ? double(o.max_length) : 0) +
                              (transform ? double(o.dim) : 0));
    };
    BindModel<MaskedLm>(i);
    return i;
  }();
  return info;
}

Fields MaskedLm::Describe(Options& options) {
  Fields f;
  f.Add("transform", &options.transform,
        "a linear map, gelu and a norm before the output layer, as in RoBERTa");
  return f;
}

void MaskedLm::Check(const ModelConfig& config) {
  OutputLayer::Check(config);
  CheckTokens(config);
}

MaskedLm::MaskedLm(const ModelConfig& config)
    : TokenPredictor(config),
      embedding_(AddEmbedding(*this, "embed_tokens", config, config.vocab_size,
                              config.Stack(Form::kBidirectional).dim())),
      mask_(register_parameter(
          "mask_token", ToActiveDevice(at::randn({config.Stack(Form::kBidirectional).dim()}) *
                                       config.EmbeddingStd()))),
      trunk_(*this, config, Form::kBidirectional),
      output_(*this, config, embedding_) {
  if (!OwnOptions<MaskedLm>(config).transform) return;
  const int64_t dim = embedding_.size(1);
  transform_ =
      register_module("transform", std::make_shared<Linear>(dim, dim, true, config.init_std));
  transform_norm_ = register_module(
      "transform_norm", std::make_shared<LayerNorm>(dim, config.norm_eps, config.norm_kind));
}

at::Tensor MaskedLm::Hidden(const at::Tensor& ids, const ops::Mask& mask) {
  CheckInputs(ids, mask);
  if (mask.valid) {
    const ops::TokenMap front = trunk_.RealTokensFirst(mask);
    return front.Back(Hidden(front.Move(ids, 1), front.mask()), 1);
  }
  const at::Tensor masked = ids.eq(mask_id());
  const at::Tensor x =
      at::where(masked.unsqueeze(-1), mask_, EmbedIds(embedding_, ids.masked_fill(masked, 0)));
  const Stream stream = trunk_.Enter(x, mask, RowPositions(ids.size(1), ids));
  return trunk_.Norm(trunk_.Bidirectional(stream).x);
}

at::Tensor MaskedLm::Transformed(const at::Tensor& hidden) const {
  return transform_ ? transform_norm_->Forward(at::gelu(transform_->Forward(hidden))) : hidden;
}

at::Tensor MaskedLm::Logits(const at::Tensor& hidden) const {
  return output_.Logits(Transformed(hidden));
}

at::Tensor TargetPositions(const at::Tensor& targets) {
  return targets.reshape({-1}).ne(-100).nonzero().squeeze(1);
}

at::Tensor MaskedLm::DoTrainingLoss(const NamedTensors& batch, double label_smoothing) {
  const at::Tensor hidden = Hidden(batch["ids"], MaskOf(batch));
  const at::Tensor& targets = batch["targets"];
  const at::Tensor chosen = TargetPositions(targets);
  CISTERN_CHECK(chosen.numel() > 0, "[masked_lm] no target is other than -100");
  return output_.Loss(Transformed(hidden.reshape({-1, hidden.size(-1)}).index_select(0, chosen)),
                      targets.reshape({-1}).index_select(0, chosen), label_smoothing);
}

}  // namespace cistern
