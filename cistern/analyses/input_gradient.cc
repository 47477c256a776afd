#include "cistern/analyses/input_gradient.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "cistern/base/error.h"
#include "cistern/base/random.h"
#include "cistern/models/classifier.h"
#include "cistern/models/language_model.h"
#include "cistern/models/masked_lm.h"

namespace cistern {
namespace {

constexpr char kTable[] = "embed_tokens.weight";

// The table of embeddings has a row for each token of a text, while this lives.
class OwnEmbeddings {
 public:
  OwnEmbeddings(Model& model, const at::Tensor& ids) {
    for (const auto& p : model.named_parameters()) {
      if (p.key() == kTable) table_ = p.value();
    }
    CISTERN_CHECK(table_.defined(), "[analyze] a model of kind ", model.config().kind,
                  " has no table of embeddings ", kTable);
    before_ = table_.detach();
    grad_ = table_.requires_grad();
    // Places that mean something else: the mask of a masked_lm, padding without a gradient.
    const bool masks = dynamic_cast<MaskedLm*>(&model) != nullptr;
    const int64_t mask = masks ? model.config().vocab_size : -1,
                  pad = model.config().init.pad_row(), length = ids.size(1);
    const at::Tensor on_cpu = ids[0].cpu().contiguous();
    std::vector<int64_t> place, token;
    for (int64_t t = 0, next = 0; t < length; ++t) {
      const int64_t id = on_cpu.const_data_ptr<int64_t>()[t];
      if (id == mask) {
        place.push_back(mask);
        continue;
      }
      while (next == mask || next == pad) ++next, token.push_back(0);
      real_.push_back(t);
      places_.push_back(next);
      place.push_back(next++);
      token.push_back(id);
    }
    if (token.empty()) token.push_back(0);
    const auto index = at::TensorOptions().dtype(at::kLong);
    ids_ = at::tensor(place, index).unsqueeze(0).to(ids.device());
    table_.set_data(before_.index_select(0, at::tensor(token, index).to(ids.device())));
    table_.requires_grad_(true);
  }
  ~OwnEmbeddings() {
    table_.set_data(before_);
    table_.requires_grad_(grad_);
  }
  OwnEmbeddings(const OwnEmbeddings&) = delete;
  OwnEmbeddings& operator=(const OwnEmbeddings&) = delete;

  const at::Tensor& ids() const { return ids_; }
  const at::Tensor& table() const { return table_; }
  // A gradient of the table [rows,D] as one of the tokens [T,D]; masks have none.
  at::Tensor OfTokens(const at::Tensor& gradient) const {
    const at::Tensor out = at::zeros({ids_.size(1), gradient.size(1)}, gradient.options());
    const auto index = at::TensorOptions().dtype(at::kLong);
    out.index_copy_(0, at::tensor(real_, index).to(out.device()),
                    gradient.index_select(0, at::tensor(places_, index).to(out.device())));
    return out;
  }

 private:
  at::Tensor table_, before_, ids_;
  bool grad_ = false;
  std::vector<int64_t> real_, places_;
};

}  // namespace

std::string InputGradientRefusal(const ModelConfig& config) {
  if (config.kind != "decoder_lm" && config.kind != "masked_lm" &&
      config.kind != "encoder_classifier")
    return "a model of kind " + config.kind +
           " has no single text that its output depends on; decoder_lm, masked_lm and "
           "encoder_classifier do";
  const Json own = config.Own();
  if (own.value("input", std::string("tokens")) != "tokens")
    return "its inputs are real values (input=values), not tokens with embeddings";
  if (own.value("embedding", std::string("table")) == "adaptive")
    return "its embeddings are bands of several tables (embedding=adaptive); a single table is "
           "needed";
  return "";
}

at::Tensor OutputsOf(Model& model, const at::Tensor& ids) {
  if (auto* classifier = dynamic_cast<Classifier*>(&model)) {
    NamedTensors inputs;
    inputs.Set("ids", ids);
    inputs.Set("lengths", at::full({1}, ids.size(1), ids.options()));
    return classifier->Logits(inputs).unsqueeze(1);
  }
  if (auto* masked = dynamic_cast<MaskedLm*>(&model)) return masked->Hidden(ids);
  auto& lm = dynamic_cast<LanguageModel&>(model);
  ModelState state = lm.EmptyState(1);
  return lm.Hidden(ids, state);
}

at::Tensor InputGradients(Model& model, const at::Tensor& ids, const std::vector<int64_t>& queries,
                          int64_t probes, uint64_t seed) {
  const at::AutoGradMode with_gradients(true);
  const OwnEmbeddings own(model, ids);
  const at::Tensor y = OutputsOf(model, own.ids())[0];  // [Q,D]
  const int64_t channels = y.size(1), directions = probes > 0 ? probes : channels;
  std::vector<at::Tensor> rows;
  for (const int64_t query : queries) {
    CISTERN_CHECK(query >= 0 && query < y.size(0), "[analyze] query ", query, " of ", y.size(0));
    at::Tensor sum;
    for (int64_t i = 0; i < directions; ++i) {
      at::Tensor direction = at::zeros({channels}, at::kDouble);
      double* const u = direction.mutable_data_ptr<double>();
      if (probes > 0) {
        Random random(seed, uint64_t(query) * uint64_t(directions) + uint64_t(i));
        for (int64_t c = 0; c < channels; ++c) u[c] = random.Below(2) == 0 ? -1 : 1;
      } else {
        u[i] = 1;
      }
      const at::Tensor gradient = torch::autograd::grad(
          {(y[query] * direction.to(y.options())).sum()}, {own.table()}, {}, true, false, true)[0];
      const at::Tensor square =
          gradient.defined()
              ? own.OfTokens(gradient).to(at::kDouble).square().sum(1)
              : at::zeros({ids.size(1)}, y.options().dtype(at::kDouble).requires_grad(false));
      sum = sum.defined() ? sum + square : square;
    }
    rows.push_back((probes > 0 ? sum / double(probes) : sum).sqrt());
  }
  return at::stack(rows).detach();
}

at::Tensor Predictions(Model& model, const at::Tensor& ids) {
  const at::NoGradGuard no_grad;
  const at::Tensor y = OutputsOf(model, ids)[0];
  at::Tensor logits = y;
  if (auto* masked = dynamic_cast<MaskedLm*>(&model)) logits = masked->Logits(y);
  if (auto* lm = dynamic_cast<LanguageModel*>(&model)) logits = lm->Logits(y);
  return at::softmax(logits, -1);
}

at::Tensor PredictionChange(Model& model, const at::Tensor& ids, const at::Tensor& probabilities,
                            int64_t changed, uint64_t seed) {
  const int64_t vocab = model.config().vocab_size;
  CISTERN_CHECK(vocab > 1, "[analyze] a vocabulary of one token has no other to put in its place");
  const at::Tensor other = ids.clone();
  const int64_t was = ids[0][changed].item<int64_t>();
  int64_t now = Random(seed, uint64_t(changed)).Below(vocab - 1);
  if (now >= was) ++now;
  other[0][changed] = std::min(now, vocab - 1);
  return 0.5 * (Predictions(model, other) - probabilities).abs().to(at::kDouble).sum(-1);
}

}  // namespace cistern
