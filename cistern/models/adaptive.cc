#include "cistern/models/adaptive.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "cistern/base/error.h"
#include "cistern/nn/head_loss.h"
#include "cistern/ops/dropout.h"
#include "cistern/ops/linear_product.h"

namespace cistern {
namespace {

constexpr int64_t kIgnore = -100;

const EnumNames<EmbeddingKind>& EmbeddingKinds() {
  static const EnumNames<EmbeddingKind> names = {{EmbeddingKind::kTable, "table"},
                                                 {EmbeddingKind::kAdaptive, "adaptive"}};
  return names;
}

std::string Listed(const std::vector<int64_t>& numbers) {
  std::string text;
  for (const int64_t n : numbers) text += (text.empty() ? "[" : ", ") + std::to_string(n);
  return text + "]";
}

at::Tensor InBand(const at::Tensor& ids, const TokenBand& band) {
  return ids.ge(band.begin).logical_and(ids.lt(band.end));
}

}  // namespace

Fields EmbeddingOptions::Describe() {
  Fields f;
  f.Add("embedding", &embedding,
        "one table of token embeddings; or adaptive: bands of ids (cutoffs), the rarer the "
        "narrower, in the embedding and in an adaptive softmax (Baevski & Auli). The first ids "
        "have to be the frequent tokens",
        EmbeddingKinds());
  f.Add("cutoffs", &cutoffs,
        "embedding=adaptive: the ids at which bands begin after the first: [20000, 60000]",
        {1, 1 << 24});
  f.Add("embedding_factor", &embedding_factor,
        "embedding=adaptive: each band is narrower than the one before it by this factor",
        {1, 1024});
  f.Add("tie_projections", &tie_projections,
        "embedding=adaptive: the output layer's maps to the widths of the bands are the "
        "embedding's; tie_embeddings says the same of the bands' tables");
  f.Add("adaptive_dropout", &adaptive_dropout,
        "embedding=adaptive: on the input of the output layer, and on what its maps to narrower "
        "bands make of it",
        {0.0, 0.95});
  return f;
}

void EmbeddingOptions::Check(const ModelConfig& config, int64_t dim) const {
  const EmbeddingOptions unset;
  if (!adaptive()) {
    const char* set = !cutoffs.empty()                             ? "cutoffs"
                      : embedding_factor != unset.embedding_factor ? "embedding_factor"
                      : tie_projections != unset.tie_projections   ? "tie_projections"
                      : adaptive_dropout != unset.adaptive_dropout ? "adaptive_dropout"
                                                                   : nullptr;
    if (set) FailUsage(config.kind, ".", set, " needs ", config.kind, ".embedding=adaptive");
    return;
  }
  const std::string key = config.kind + ".cutoffs";
  if (cutoffs.empty())
    FailUsage(config.kind, ".embedding=adaptive needs ", key,
              ", the ids at which bands begin after the first, such as [20000, 60000]");
  int64_t before = 0;
  for (const int64_t cutoff : cutoffs) {
    if (cutoff <= before) FailUsage(key, "=", Listed(cutoffs), " must ascend, without an id twice");
    before = cutoff;
  }
  if (config.vocab_size > 0 && before >= config.vocab_size)
    FailUsage(key, "=", Listed(cutoffs),
              " leaves the last band without ids: vocab_size=", config.vocab_size,
              "; take cutoffs below it");
  double width = double(dim);
  for (size_t band = 1; band <= cutoffs.size(); ++band) width /= double(embedding_factor);
  if (width < 1)
    FailUsage(config.kind, ".embedding_factor=", embedding_factor, " leaves the last of ",
              cutoffs.size() + 1, " bands without width (dim=", dim,
              "); take a lower factor or fewer cutoffs");
  if (config.head_bias)
    FailUsage("head_bias=true needs ", config.kind,
              ".embedding=table: the adaptive softmax has no biases");
  if (config.scale_logits)
    FailUsage("scale_logits=true needs ", config.kind,
              ".embedding=table: the adaptive softmax has no scale");
}

std::vector<TokenBand> TokenBands(const EmbeddingOptions& options, int64_t vocab, int64_t dim) {
  std::vector<TokenBand> bands;
  int64_t begin = 0, divisor = 1;
  for (size_t i = 0; i <= options.cutoffs.size(); ++i) {
    const int64_t end = i < options.cutoffs.size() ? options.cutoffs[i] : vocab;
    bands.push_back({begin, end, dim / divisor});
    begin = end;
    divisor *= options.embedding_factor;
  }
  return bands;
}

double CountAdaptive(const EmbeddingOptions& options, int64_t vocab, int64_t dim, bool tied) {
  double count = double(dim) * double(options.cutoffs.size());  // clusters
  bool first = true;
  for (const TokenBand& band : TokenBands(options, vocab, dim)) {
    count += double(band.size()) * double(band.width) * (tied ? 1 : 2);
    count += double(dim) * double(band.width) * (options.tie_projections || first ? 1 : 2);
    first = false;
  }
  return count;
}

AdaptiveEmbedding::AdaptiveEmbedding(const EmbeddingOptions& options, const ModelConfig& config,
                                     int64_t dim)
    : bands_(TokenBands(options, config.vocab_size, dim)) {
  const auto tables = register_module("bands", std::make_shared<Container>()),
             projections = register_module("projections", std::make_shared<Container>());
  for (size_t i = 0; i < bands_.size(); ++i) {
    const TokenBand& band = bands_[i];
    const std::string name = std::to_string(i);
    tables_.push_back(tables->Add(
        name, std::make_shared<Embedding>(band.size(), band.width, config.EmbeddingStd())));
    projections_.push_back(
        projections->Add(name, std::make_shared<Linear>(band.width, dim, false, config.init_std)));
  }
}

at::Tensor AdaptiveEmbedding::Forward(const at::Tensor& ids) const {
  if (!ids.is_meta() && ids.numel() > 0) {
    const int64_t vocabulary = bands_.back().end;
    const at::Tensor outside = ids.masked_select(ids.lt(0).logical_or(ids.ge(vocabulary)));
    CISTERN_CHECK(outside.numel() == 0, "[embedding] token id ", outside[0].item<int64_t>(),
                  " is not within the vocabulary of ", vocabulary, "; ids are 0 to ",
                  vocabulary - 1);
  }
  at::Tensor x;
  for (size_t i = 0; i < bands_.size(); ++i) {
    const TokenBand& band = bands_[i];
    const at::Tensor other = InBand(ids, band).logical_not_().unsqueeze(-1);
    const at::Tensor local = ids.clamp(band.begin, band.end - 1).sub(band.begin);
    const at::Tensor own = at::embedding(table(i), local).masked_fill(other, 0.0);
    const at::Tensor part = projections_[i]->Forward(own);
    x = x.defined() ? x + part : part;
  }
  return x;
}

AdaptiveSoftmax::AdaptiveSoftmax(const EmbeddingOptions& options, const ModelConfig& config,
                                 std::shared_ptr<AdaptiveEmbedding> input, int64_t dim)
    : bands_(TokenBands(options, config.vocab_size, dim)),
      dropout_(options.adaptive_dropout),
      input_(std::move(input)) {
  clusters_ = register_module("clusters", std::make_shared<Linear>(dim, int64_t(bands_.size()) - 1,
                                                                   false, config.init_std));
  if (!config.tie_embeddings) {
    const auto tables = register_module("bands", std::make_shared<Container>());
    for (size_t i = 0; i < bands_.size(); ++i)
      tables_.push_back(tables->Add(
          std::to_string(i),
          std::make_shared<Embedding>(bands_[i].size(), bands_[i].width, config.EmbeddingStd())));
  }
  if (!options.tie_projections) {
    const auto projections = register_module("projections", std::make_shared<Container>());
    for (size_t i = 1; i < bands_.size(); ++i)
      projections_.push_back(
          projections->Add(std::to_string(i),
                           std::make_shared<Linear>(dim, bands_[i].width, false, config.init_std)));
  }
}

const at::Tensor& AdaptiveSoftmax::Table(size_t band) const {
  return tables_.empty() ? input_->table(band) : tables_[band]->weight;
}

at::Tensor AdaptiveSoftmax::Head() const { return at::cat({Table(0), clusters_->weight}); }

at::Tensor AdaptiveSoftmax::Projected(const at::Tensor& hidden, size_t band) const {
  return projections_.empty() ? at::matmul(hidden, input_->projection(band))
                              : projections_[band - 1]->Forward(hidden);
}

at::Tensor AdaptiveSoftmax::LogProbabilities(const at::Tensor& hidden) const {
  const int64_t words = bands_[0].size();
  // Two products, not one with both matrices joined: decoding comes here at every token.
  const at::Tensor head = at::log_softmax(
      at::cat({ops::LinearProduct(hidden, Table(0)), clusters_->Forward(hidden)}, -1), -1);
  std::vector<at::Tensor> parts = {head.narrow(-1, 0, words)};
  for (size_t i = 1; i < bands_.size(); ++i) {
    const at::Tensor within =
        at::log_softmax(ops::LinearProduct(Projected(hidden, i), Table(i)), -1);
    parts.push_back(within + head.narrow(-1, words + int64_t(i) - 1, 1));
  }
  return at::cat(parts, -1);
}

at::Tensor AdaptiveSoftmax::Loss(const at::Tensor& hidden, const at::Tensor& targets,
                                 double label_smoothing) const {
  if (label_smoothing > 0)
    FailUsage("label_smoothing=", label_smoothing, " ", kWhyNoSmoothing, "; use label_smoothing=0");
  const at::Tensor h = ops::Dropout(hidden, dropout_, is_training()).reshape({-1, hidden.size(-1)}),
                   wanted = targets.reshape({-1});
  const int64_t rows = h.size(0), words = bands_[0].size(),
                tokens_per_row = hidden.dim() > 2 ? hidden.size(1) : 1;
  at::Tensor entries = wanted;  // of the first softmax
  for (size_t i = 1; i < bands_.size(); ++i)
    entries = entries.masked_fill(InBand(wanted, bands_[i]), words + int64_t(i) - 1);
  at::Tensor loss = HeadLoss(h, Head(), {}, entries);
  const bool meta = h.is_meta();
  const int64_t real = meta ? rows : wanted.ne(kIgnore).sum().item<int64_t>();
  for (size_t i = 1; i < bands_.size(); ++i) {
    const at::Tensor of_band =
        meta ? at::empty({rows}, wanted.options()) : InBand(wanted, bands_[i]).nonzero().squeeze(1);
    // Without a target of the band its loss is 0, and its parameters have gradients of zeros.
    const at::Tensor z = ops::DropoutOfTokens(Projected(h.index_select(0, of_band), i), of_band,
                                              tokens_per_row, dropout_, is_training());
    const at::Tensor part =
        HeadLoss(z, Table(i), {}, wanted.index_select(0, of_band).sub(bands_[i].begin));
    loss = loss + part * (double(of_band.numel()) / double(std::max<int64_t>(1, real)));
  }
  return loss;
}

}  // namespace cistern
