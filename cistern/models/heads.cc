#include "cistern/models/heads.h"

#include <ATen/ATen.h>

#include <cmath>

#include "cistern/base/error.h"
#include "cistern/nn/head_loss.h"
#include "cistern/ops/dropout.h"
#include "cistern/ops/linear_product.h"
#include "cistern/tensors/device.h"

namespace cistern {

OutputLayer::OutputLayer(torch::nn::Module& owner, const ModelConfig& config,
                         const at::Tensor& embedding)
    : weight_(embedding) {
  if (config.scale_logits) scale_ = 1 / std::sqrt(double(embedding.size(1)));
  if (!config.tie_embeddings) {
    const auto head = owner.register_module(
        "lm_head", std::make_shared<Linear>(embedding.size(1), embedding.size(0),
                                            config.bias || config.head_bias, config.init_std));
    weight_ = head->weight, bias_ = head->bias;
  } else if (config.head_bias) {
    bias_ = owner.register_module("lm_head", std::make_shared<Container>())
                ->register_parameter("bias", ToActiveDevice(at::zeros({embedding.size(0)})));
  }
}

void OutputLayer::Check(const ModelConfig& config) {
  if (config.scale_logits && !config.tie_embeddings)
    FailUsage(
        "scale_logits=true needs tie_embeddings=true: an output layer of its own learns its "
        "scale");
}

at::Tensor OutputLayer::Logits(const at::Tensor& hidden) const {
  return ops::LinearProduct(Scaled(hidden), weight_, bias_);
}

at::Tensor OutputLayer::Loss(const at::Tensor& hidden, const at::Tensor& targets,
                             double label_smoothing) const {
  return HeadLoss(Scaled(hidden).reshape({-1, hidden.size(-1)}), weight_, bias_,
                  targets.reshape({-1}), label_smoothing);
}

Pooling::Pooling(torch::nn::Module& owner, const ModelConfig& config)
    : kind_(config.pooling),
      norm_pooled_(config.norm_pooled),
      seen_(config.padding == PaddingKind::kSeen || config.padding == PaddingKind::kZeros) {
  if (config.pooling == PoolingKind::kCls) {
    cls_ = owner.register_parameter(
        "cls_token",
        ToActiveDevice(at::zeros({1, 1, config.Stack(Form::kBidirectional).input_dim()})));
  }
}

void Pooling::Check(const ModelConfig& config) {
  const LayerStack stack = config.Stack(Form::kBidirectional);
  const int64_t last = stack.layers() - 1;
  if (config.pooling == PoolingKind::kMemory && !stack.HandsOnMemory(last)) {
    FailUsage(
        "pooling=memory needs a last layer that passes on a memory, such as luna or conv_luna, "
        "not ",
        stack.Mechanism(last), "; use pooling=mean");
  }
  if (config.padding == PaddingKind::kReads &&
      *stack.options().positions == PositionKind::kRelative)
    FailUsage(
        "padding=reads does not go with positions=relative: padding has no place in the row; "
        "use padding=masked or seen");
  const bool of_tokens =
      config.pooling != PoolingKind::kMean && config.pooling != PoolingKind::kMemory;
  for (int64_t layer = 0; layer <= last; ++layer) {
    const MechanismInfo& info = FindMechanism(stack.Mechanism(layer));
    if (info.MakesLatents() && of_tokens) {
      FailUsage("pooling=", NameOf(config.pooling, PoolingKinds()), " sees ",
                config.pooling == PoolingKind::kCls || config.pooling == PoolingKind::kFirst
                    ? "a token"
                    : "tokens",
                ", but after ", info.name, " there are only latents; use pooling=mean");
    }
    // Of other mechanisms no source says what a token reads that is not there.
    if (config.padding == PaddingKind::kReads && !info.exact) {
      FailUsage("padding=reads is for exact softmax attention (softmax, reuse), not for ",
                info.name, "; use padding=masked or seen");
    }
  }
}

at::Tensor Pooling::With(const at::Tensor& embedded) const {
  return cls_.defined() ? at::cat({cls_.expand({embedded.size(0), 1, -1}), embedded}, 1) : embedded;
}

at::Tensor Pooling::Forward(const Trunk& trunk, const Stream& out,
                            const at::Tensor& lengths) const {
  const bool memory = kind_ == PoolingKind::kMemory;
  at::Tensor pooled = memory ? out.memory : out.x;
  if (!norm_pooled_) pooled = trunk.Norm(pooled);
  if (kind_ == PoolingKind::kCls || kind_ == PoolingKind::kFirst) {
    pooled = pooled.select(1, 0);
  } else if (memory || out.source ||  // slots or latents: no padding among them
             kind_ == PoolingKind::kMeanAll || (kind_ == PoolingKind::kMean && seen_)) {
    pooled = pooled.mean(1);
  } else {
    const at::Tensor pad = ops::Mask{lengths, {}}.Padding(pooled.size(1)).unsqueeze(-1);
    const at::Tensor sum = pooled.masked_fill(pad, 0.0).sum(1);
    pooled = kind_ == PoolingKind::kMeanZeros
                 ? sum / double(pooled.size(1))
                 : sum / lengths.clamp_min(1).unsqueeze(1).to(pooled.scalar_type());
  }
  return norm_pooled_ ? trunk.Norm(pooled) : pooled;
}

namespace {

// Widths of the hidden layers.
std::vector<int64_t> HiddenWidths(const ModelConfig& config, int64_t in, int64_t hidden) {
  if (config.head == HeadKind::kLinear) return {};
  if (!config.head_dims.empty()) return config.head_dims;
  return {config.head == HeadKind::kTanh ? in : hidden};
}

}  // namespace

ClassifierHead::ClassifierHead(const ModelConfig& config, int64_t in, int64_t hidden)
    : kind_(config.head),
      dropout_(config.head_dropout >= 0 ? config.head_dropout
                                        : config.Stack(Form::kBidirectional).options().dropout) {
  if (config.classes < 1)
    FailUsage("a model of kind ", config.kind, " needs classes >= 1, got ", config.classes);
  for (const int64_t width : HiddenWidths(config, in, hidden)) {
    const std::string number = hidden_.empty() ? "" : StrCat("_", hidden_.size() + 1);
    hidden_.push_back(register_module("dense" + number, std::make_shared<Linear>(in, width, true)));
    in = width;
  }
  head_ = register_module("out_proj", std::make_shared<Linear>(in, config.classes, true));
}

double ClassifierHead::Count(const ModelConfig& config, int64_t in, int64_t hidden) {
  double count = 0;
  for (const int64_t width : HiddenWidths(config, in, hidden)) {
    count += double(in) * double(width);
    in = width;
  }
  return count + double(in) * double(config.classes);
}

at::Tensor ClassifierHead::Forward(const at::Tensor& pooled) const {
  at::Tensor h = pooled;
  for (size_t i = 0; i < hidden_.size(); ++i) {
    h = hidden_[i]->Forward(h);
    h = kind_ == HeadKind::kGelu   ? at::gelu(h)
        : kind_ == HeadKind::kTanh ? at::tanh(h)
                                   : at::relu(h);
    const bool dropped = hidden_.size() == 1 || i + 1 < hidden_.size();
    if (dropped) h = ops::Dropout(h, dropout_, is_training());
  }
  return head_->Forward(h);
}

at::Tensor NextTokenLoss(const at::Tensor& logits, const at::Tensor& targets,
                         double label_smoothing) {
  const at::Tensor rows = logits.reshape({-1, logits.size(-1)}), of_rows = targets.reshape({-1});
  int64_t reduction = at::Reduction::Mean;
  if (!targets.is_meta()) {
    const at::Tensor counted = of_rows.masked_select(of_rows.ne(-100));
    const at::Tensor outside =
        counted.masked_select(counted.lt(0).logical_or(counted.ge(rows.size(1))));
    CISTERN_CHECK(outside.numel() == 0, "[loss] target ", outside[0].item<int64_t>(),
                  " is not one of ", rows.size(1), " classes; they are 0 to ", rows.size(1) - 1,
                  ", and -100 is left out");
    if (counted.numel() == 0) reduction = at::Reduction::Sum;  // of none: 0, not 0/0
  }
  return at::cross_entropy_loss(rows, of_rows, {}, reduction, -100, label_smoothing);
}

}  // namespace cistern
