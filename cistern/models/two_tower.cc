#include "cistern/models/two_tower.h"

#include <ATen/ATen.h>

#include "cistern/base/error.h"
#include "cistern/ops/dropout.h"

namespace cistern {
namespace {

bool HasProducts(MatchKind kind) { return kind != MatchKind::kLra && kind != MatchKind::kConvLuna; }

// Widths of the layers between the features and the classes.
std::vector<int64_t> HiddenWidths(MatchKind kind, int64_t dim, int64_t hidden) {
  if (kind == MatchKind::kLuna) return {};
  if (kind == MatchKind::kLatte) return {dim};
  if (kind == MatchKind::kNystrom) return {hidden};
  return {hidden, hidden / 2};
}

}  // namespace

const EnumNames<MatchKind>& MatchKinds() {
  static const EnumNames<MatchKind> names = {
      {MatchKind::kLra, "lra"},     {MatchKind::kNli, "nli"},   {MatchKind::kConvLuna, "conv_luna"},
      {MatchKind::kLatte, "latte"}, {MatchKind::kLuna, "luna"}, {MatchKind::kNystrom, "nystrom"}};
  return names;
}

MatchHead::MatchHead(const ModelConfig& config, MatchKind kind)
    : kind_(kind),
      dropout_(config.head_dropout >= 0 ? config.head_dropout
                                        : config.Stack(Form::kBidirectional).options().dropout) {
  if (config.classes < 1)
    FailUsage("a model of kind ", config.kind, " needs classes >= 1, got ", config.classes);
  const LayerStack stack = config.Stack(Form::kBidirectional);
  int64_t width = stack.dim() * (HasProducts(kind) ? 4 : 2);
  const std::vector<int64_t> hidden = HiddenWidths(kind, stack.dim(), stack.ffn_dim());
  const auto add = [&](const char* name, int64_t out, bool bias) {
    auto map = register_module(name, std::make_shared<Linear>(width, out, bias));
    width = out;
    return map;
  };
  if (!hidden.empty()) dense_ = add("dense", hidden[0], true);
  if (hidden.size() > 1) second_ = add("dense_2", hidden[1], true);
  out_ = add("out_proj", config.classes, kind != MatchKind::kLuna);
}

double MatchHead::Numbers(MatchKind kind, int64_t dim, int64_t hidden, int64_t classes) {
  double numbers = 0, width = double(dim) * (HasProducts(kind) ? 4 : 2);
  for (const int64_t next : HiddenWidths(kind, dim, hidden)) {
    numbers += width * double(next);
    width = double(next);
  }
  return numbers + width * double(classes);
}

at::Tensor MatchHead::Forward(const at::Tensor& a, const at::Tensor& b) const {
  at::Tensor x;
  if (!HasProducts(kind_)) {
    x = at::cat({a, b}, 1);
  } else if (kind_ == MatchKind::kLatte) {
    x = at::cat({a, b, a - b, a * b}, 1);
  } else {
    x = at::cat({a, b, a * b, a - b}, 1);
  }
  if (kind_ == MatchKind::kLuna) x = ops::Dropout(x, dropout_, is_training());
  const auto activation = [this](const at::Tensor& h) {
    if (kind_ == MatchKind::kLatte) return at::gelu(h, "tanh");
    return kind_ == MatchKind::kConvLuna ? at::gelu(h) : at::relu(h);
  };
  if (dense_) x = activation(dense_->Forward(x));
  if (second_) x = activation(second_->Forward(x));
  return out_->Forward(x);
}

const ModelInfo& two_tower_model() {
  static const ModelInfo info = [] {
    ModelInfo i;
    i.name = "two_tower";
    i.summary = "One bidirectional encoder for two texts, and a head that compares them.";
    i.forms = {Form::kBidirectional};
    i.inputs = {"ids", "lengths", "valid?", "second_ids", "second_lengths", "second_valid?"};
    i.classifies = i.pad_row = true;
    i.tables = [](const ModelConfig& c) {
      const LayerStack stack = c.Stack(Form::kBidirectional);
      const StackOptions& o = stack.options();
      return double(stack.input_dim()) *
                 (double(c.vocab_size) +
                  (o.positions == PositionKind::kLearned ? double(o.max_length) : 0)) +
             MatchHead::Numbers(OwnOptions<TwoTower>(c).match, o.dim, stack.ffn_dim(), c.classes);
    };
    BindModel<TwoTower>(i);
    return i;
  }();
  return info;
}

Fields TwoTower::Describe(Options& options) {
  Fields f;
  f.Add("match", &options.match,
        "the head, of the texts' vectors a and b: lra [a;b] through two layers of ffn_dim and "
        "half of it with relu; nli the same of [a;b;a*b;a-b]; conv_luna (P000) as lra with gelu; "
        "latte [a;b;a-b;a*b] through one layer of dim; luna [a;b;a*b;a-b], after "
        "head_dropout, by one map without bias; nystrom [a;b;a*b;a-b] through one layer of ffn_dim "
        "with relu",
        MatchKinds());
  return f;
}

void TwoTower::Check(const ModelConfig& config) {
  Pooling::Check(config);
  if (config.head != HeadKind::kRelu)
    FailUsage("head=", NameOf(config.head, HeadKinds()),
              " is of an encoder_classifier; the head of two_tower is two_tower.match: leave out "
              "head, or set head=relu where a file that is extended says it");
  if (!config.head_dims.empty())
    FailUsage(
        "head_dims is of an encoder_classifier; the layers of two_tower.match are of ffn_dim "
        "or dim: leave out head_dims, or set head_dims=[] where a file that is extended says it");
  const MatchKind match = OwnOptions<TwoTower>(config).match;
  if (config.head_dropout > 0 && match != MatchKind::kLuna)
    FailUsage("head_dropout=", config.head_dropout,
              " has no effect: two_tower.match=", NameOf(match, MatchKinds()),
              " drops nothing; leave out head_dropout, or use luna");
  if (match != MatchKind::kLatte && match != MatchKind::kLuna && match != MatchKind::kNystrom &&
      config.Stack(Form::kBidirectional).ffn_dim() < 2)
    FailUsage("two_tower.match=", NameOf(match, MatchKinds()), " needs ffn_dim of at least 2");
}

TwoTower::TwoTower(const ModelConfig& config)
    : Classifier(config),
      embedding_(AddEmbedding(*this, "embed_tokens", config, config.vocab_size,
                              config.Stack(Form::kBidirectional).input_dim())),
      rows_(*this, config),
      head_(register_module(
          "classifier", std::make_shared<MatchHead>(config, OwnOptions<TwoTower>(config).match))) {}

at::Tensor TwoTower::Encode(const at::Tensor& ids, const ops::Mask& mask) {
  CISTERN_CHECK(ids.dim() == 2, "[two_tower] expected ids of shape [B,T], got ", ids.sizes());
  return rows_.Forward(EmbedIds(embedding_, ids, config_.init.pad_row()), mask);
}

at::Tensor TwoTower::Logits(const NamedTensors& inputs) {
  RequireKnown(inputs);
  const at::Tensor a = Encode(inputs["ids"], MaskOf(inputs)),
                   b = Encode(inputs["second_ids"], MaskOf(inputs, "second_"));
  CISTERN_CHECK(a.size(0) == b.size(0), "[two_tower] ", a.size(0), " first texts and ", b.size(0),
                " second ones");
  return head_->Forward(a, b);
}

}  // namespace cistern
