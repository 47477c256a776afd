#include "cistern/models/heads.h"

#include <ATen/ATen.h>

#include "cistern/base/error.h"
#include "cistern/nn/head_loss.h"
#include "cistern/tensors/device.h"

namespace cistern {

OutputLayer::OutputLayer(torch::nn::Module& owner, const ModelConfig& config,
                         const at::Tensor& embedding)
    : embedding_(embedding) {
  if (config.tie_embeddings) return;
  head_ = owner.register_module(
      "lm_head", std::make_shared<Linear>(embedding.size(1), embedding.size(0),
                                          config.bias || config.head_bias, config.init_std));
}

void OutputLayer::Check(const ModelConfig& config) {
  if (config.head_bias && config.tie_embeddings)
    FailUsage("head_bias=true needs tie_embeddings=false: a tied output layer has no bias");
}

at::Tensor OutputLayer::Logits(const at::Tensor& hidden) const {
  return head_ ? head_->Forward(hidden) : at::linear(hidden, embedding_);
}

at::Tensor OutputLayer::Loss(const at::Tensor& hidden, const at::Tensor& targets,
                             double label_smoothing) const {
  return HeadLoss(hidden.reshape({-1, hidden.size(-1)}), head_ ? head_->weight : embedding_,
                  head_ ? head_->bias : at::Tensor(), targets.reshape({-1}), label_smoothing);
}

Pooling::Pooling(torch::nn::Module& owner, const ModelConfig& config)
    : memory_(config.pooling == "memory"), norm_pooled_(config.norm_pooled) {
  if (config.pooling == "cls") {
    cls_ = owner.register_parameter(
        "cls_token", ToActiveDevice(at::zeros({1, 1, config.Stack(Form::kBidirectional).dim()})));
  }
}

void Pooling::Check(const ModelConfig& config) {
  const LayerStack stack = config.Stack(Form::kBidirectional);
  const int64_t last = stack.layers() - 1;
  if (config.pooling == "memory" && !stack.HandsOnMemory(last)) {
    FailUsage(
        "pooling=memory needs a last layer that passes on a memory, such as luna or conv_luna, "
        "not ",
        stack.Mechanism(last), "; use pooling=mean");
  }
  for (int64_t layer = 0; layer <= last && config.pooling == "cls"; ++layer) {
    if (FindMechanism(stack.Mechanism(layer)).MakesLatents()) {
      FailUsage("pooling=cls sees a token, but after ", stack.Mechanism(layer),
                " there are only latents; use pooling=mean");
    }
  }
}

at::Tensor Pooling::With(const at::Tensor& embedded) const {
  return cls_.defined() ? at::cat({cls_.expand({embedded.size(0), 1, -1}), embedded}, 1) : embedded;
}

at::Tensor Pooling::Forward(const Trunk& trunk, const Stream& out,
                            const at::Tensor& lengths) const {
  at::Tensor pooled = memory_ ? out.memory : out.x;
  if (!norm_pooled_) pooled = trunk.Norm(pooled);
  if (memory_ || out.source) {  // slots or latents: no padding among them
    pooled = pooled.mean(1);
  } else if (cls_.defined()) {
    pooled = pooled.select(1, 0);
  } else {
    const at::Tensor pad = ops::Mask{lengths, {}}.Padding(pooled.size(1)).unsqueeze(-1);
    pooled = pooled.masked_fill(pad, 0.0).sum(1) /
             lengths.clamp_min(1).unsqueeze(1).to(pooled.scalar_type());
  }
  return norm_pooled_ ? trunk.Norm(pooled) : pooled;
}

ClassifierHead::ClassifierHead(const ModelConfig& config, int64_t in, int64_t hidden)
    : gelu_(config.head == "gelu"), dropout_(config.Stack(Form::kBidirectional).options().dropout) {
  if (config.classes < 1)
    FailUsage("a model of kind ", config.kind, " needs classes >= 1, got ", config.classes);
  const bool linear = config.head == "linear";
  if (!linear) hidden_ = register_module("dense", std::make_shared<Linear>(in, hidden, true));
  head_ = register_module("out_proj",
                          std::make_shared<Linear>(linear ? in : hidden, config.classes, true));
}

at::Tensor ClassifierHead::Forward(const at::Tensor& pooled) const {
  if (!hidden_) return head_->Forward(pooled);
  at::Tensor h = hidden_->Forward(pooled);
  h = gelu_ ? at::gelu(h) : at::relu(h);
  if (is_training() && dropout_ > 0) h = at::dropout(h, dropout_, true);
  return head_->Forward(h);
}

at::Tensor NextTokenLoss(const at::Tensor& logits, const at::Tensor& targets,
                         double label_smoothing) {
  return at::cross_entropy_loss(logits.reshape({-1, logits.size(-1)}), targets.reshape({-1}), {},
                                at::Reduction::Mean, -100, label_smoothing);
}

}  // namespace cistern
