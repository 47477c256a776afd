#include "cistern/tasks/mlm_task.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/base/random.h"
#include "cistern/tasks/lm_blocks.h"
#include "cistern/tasks/masked_lines.h"
#include "cistern/tasks/masking.h"
#include "cistern/tasks/row_batch.h"
#include "cistern/text/utf8.h"

namespace cistern {
namespace {

constexpr uint64_t kMeasured = 0x6d6c6d;  // seed of the choice that measurements share
constexpr int64_t kCandidates = 5;        // of each mask in a prediction

MaskedLm& Of(Model& model) { return dynamic_cast<MaskedLm&>(model); }

}  // namespace

Fields MlmTask::Describe(Options& o) {
  Fields f = TextTask::Describe(o);
  f.Add("mask_share", &o.mask_share, "of the tokens of a row: chosen to be predicted", {0.001, 1});
  f.Add("hidden_share", &o.hidden_share, "of the chosen tokens: hidden by the mask", {0.0, 1.0});
  f.Add("random_share", &o.random_share,
        "of the chosen tokens: replaced by a random one; the rest stays as it is", {0.0, 1.0});
  return f;
}

const TaskInfo& mlm_task() {
  static const TaskInfo info = [] {
    TaskInfo t;
    t.name = "mlm";
    t.summary = "masked language modelling: tokens of any text that are hidden from the model";
    t.models = {"masked_lm"};
    t.metrics = {{"perplexity", "perplexity", "of the masked tokens; lower is better", true}};
    t.data = "text";
    t.defaults = TextTask::HiddenTokenDefaults();
    t.mechanisms = {"softmax", "window:2+latte:2", "window:2+abc_mlp:2"};
    t.former = {"split=tail"};
    BindTask<MlmTask>(t);
    return t;
  }();
  return info;
}

MlmTask::MlmTask(const Options& options, const std::string& cache)
    : TextTask("mlm", options, cache), options_(options) {
  if (options.hidden_share + options.random_share > 1) {
    FailUsage("task.mlm: hidden_share=", options.hidden_share,
              " and random_share=", options.random_share, " are more than 1 together");
  }
}

const Metric& MlmTask::metric() const { return mlm_task().metrics[0]; }

void MlmTask::Prepare() {
  TextTask::Prepare();
  const TokenFile& train = tokens(Split::kTrain);
  std::vector<double> counts(size_t(tokenizer().vocab_size()), 1);
  std::vector<int64_t> piece;
  const int64_t read = options_.random_ids ? 0 : train.size();  // draws have no frequencies
  for (int64_t begin = 0; begin < read; begin += int64_t(piece.size())) {
    piece.resize(size_t(std::min<int64_t>(read - begin, 1 << 16)));
    train.Copy(begin, int64_t(piece.size()), piece.data());
    for (const int64_t id : piece) ++counts[size_t(id)];
  }
  most_frequent_ = std::max_element(counts.begin(), counts.end()) - counts.begin();
  const double total = std::accumulate(counts.begin(), counts.end(), 0.0);
  unigram_nats_.clear();
  for (const double n : counts) unigram_nats_.push_back(-std::log(n / total));
}

Batch MlmTask::Masked(const at::Tensor& tokens, uint64_t seed,
                      const std::vector<uint64_t>& streams) const {
  const int64_t rows = tokens.size(0), length = tokens.size(1), vocab = tokenizer().vocab_size();
  Batch batch;
  batch.rows = rows;
  batch.tokens = rows * length;
  const at::Tensor ids = tokens.clone(), targets = at::full({rows, length}, -100, at::kLong);
  std::vector<int64_t> places;
  for (int64_t r = 0; r < rows; ++r) {
    Random random(seed, streams[size_t(r)]);
    int64_t* const id = ids.mutable_data_ptr<int64_t>() + r * length;
    int64_t* const target = targets.mutable_data_ptr<int64_t>() + r * length;
    places.clear();
    for (int64_t t = 0; t < length; ++t) {
      if (token_bytes()[size_t(id[t])] > 0) places.push_back(t);  // none that stands between texts
    }
    if (places.empty()) places.push_back(0);
    MaskTokens({options_.mask_share, options_.hidden_share, options_.random_share}, vocab, random,
               places, id, target);
  }
  batch.Add("ids", ids);
  batch.Add("targets", targets);
  return batch;
}

Batch MlmTask::TrainBatch(uint64_t seed, int64_t step, int64_t rows) const {
  std::vector<uint64_t> streams(static_cast<size_t>(rows));
  std::iota(streams.begin(), streams.end(), uint64_t(step * rows));
  return Masked(TrainBlocks(seed, step, rows).narrow(1, 0, options().length), seed, streams);
}

at::Tensor MlmTask::Loss(Model& model, const Batch& batch, double label_smoothing) const {
  return model.TrainingLoss(model.ReadOf(batch.tensors), label_smoothing);
}

double MlmTask::Terms(const Batch& batch) const {
  return double(batch["targets"].ne(-100).sum().item<int64_t>());
}

// Lines with gaps, each of which is a mask.
class MlmTask::Lines : public BatchReader {
 public:
  Lines(const MlmTask& task, const std::string& path, int64_t rows)
      : mask_(int32_t(task.tokenizer().vocab_size())),
        lines_(path, task.tokenizer()),
        rows_(rows > 0 ? rows : 16) {}

  std::optional<Batch> Next() override {
    std::vector<std::vector<int32_t>> rows;
    std::vector<int64_t> numbers;
    for (const MaskedLine& line : lines_.Next(rows_)) {
      std::vector<int32_t>& row = rows.emplace_back(line.parts[0]);
      for (size_t i = 1; i < line.parts.size(); ++i) {
        row.push_back(mask_);
        row.insert(row.end(), line.parts[i].begin(), line.parts[i].end());
      }
      numbers.push_back(line.number);
    }
    if (rows.empty()) return std::nullopt;
    Batch batch;
    AddIds(std::vector<std::span<const int32_t>>(rows.begin(), rows.end()), RowPadding(), &batch);
    AddNumbers("lines", numbers, &batch);
    return batch;
  }
  int64_t total() const override { return lines_.bytes_total(); }
  int64_t done() const override { return lines_.bytes_read(); }
  const char* unit() const override { return "bytes"; }

 private:
  int32_t mask_;
  MaskedLines lines_;
  int64_t rows_;
};

std::unique_ptr<BatchReader> MlmTask::RowsOf(const TokenText& text, const ReadOptions& o,
                                             std::shared_ptr<void> keep) const {
  return ReadTextRows(
      text, o, options().length,
      [this](const at::Tensor& tokens, const std::vector<int64_t>& begins) {
        return Masked(tokens, kMeasured, {begins.begin(), begins.end()});
      },
      std::move(keep));
}

std::unique_ptr<BatchReader> MlmTask::Read(Split split, const ReadOptions& o) const {
  return RowsOf(TextTask::Of(split), o);
}

std::unique_ptr<BatchReader> MlmTask::ReadFile(const std::string& path, bool labelled,
                                               const ReadOptions& o) const {
  if (!labelled) return std::make_unique<Lines>(*this, path, o.rows);
  const std::shared_ptr<TokenFile> file = Tokenize(path);
  return RowsOf(TextTask::Of(*file), o, file);
}

Score MlmTask::Measure(Model& model, const Batch& batch) const {
  MaskedLm& lm = cistern::Of(model);
  const at::Tensor &ids = batch["ids"], targets = batch["targets"].reshape({-1});
  lm.config().CheckPositions(Form::kBidirectional, ids.size(1), "a row");
  const at::Tensor hidden = lm.Hidden(ids), chosen = TargetPositions(targets);
  const at::Tensor wanted = targets.index_select(0, chosen);
  Score score;
  MeasureTokens([&](const at::Tensor& rows) { return lm.Logits(rows); },
                hidden.reshape({-1, hidden.size(-1)}).index_select(0, chosen), wanted,
                token_bytes(), score);
  if (most_frequent_ < 0) return score;  // without the training text
  const at::Tensor on_cpu = wanted.cpu();
  for (int64_t i = 0; i < on_cpu.numel(); ++i) {
    const int64_t id = on_cpu.const_data_ptr<int64_t>()[i];
    score.Add("unigram_nats", unigram_nats_[size_t(id)]);
    score.Add("majority", id == most_frequent_);
  }
  return score;
}

Json MlmTask::Metrics(const Score& score) const {
  const double tokens = score["tokens"];
  Json out = {{"perplexity", std::exp(score["nats"] / tokens)},
              {"nats_per_token", score["nats"] / tokens},
              {"accuracy", 100 * score["correct"] / tokens},
              {"tokens", int64_t(tokens)}};
  if (score.Has("unigram_nats")) {
    out["unigram_perplexity"] = std::exp(score["unigram_nats"] / tokens);
    out["majority"] = 100 * score["majority"] / tokens;
  }
  return out;
}

std::vector<Json> MlmTask::Predict(Model& model, const Batch& batch) const {
  MaskedLm& lm = cistern::Of(model);
  if (batch.rows > 1 && !lm.SeesPadding().empty())
    return PredictApart(batch, [&](const Batch& row) { return Predict(model, row); });
  const at::Tensor ids = batch["ids"].cpu(), lengths = batch["lengths"].cpu(),
                   lines = batch["lines"].cpu();
  lm.config().CheckPositions(Form::kBidirectional, ids.size(1), "a row");
  const at::Tensor hidden = lm.Hidden(batch["ids"], MaskOf(batch.tensors));
  const auto text_of = [&](int64_t id) { return ValidUtf8(tokenizer().Bytes(int32_t(id))); };
  std::vector<Json> out;
  for (int64_t r = 0; r < batch.rows; ++r) {
    Json masks = Json::array();
    std::vector<int32_t> filled;
    for (int64_t t = 0; t < lengths.const_data_ptr<int64_t>()[r]; ++t) {
      int64_t id = ids.const_data_ptr<int64_t>()[r * ids.size(1) + t];
      if (id == lm.mask_id()) {
        const at::Tensor p = at::softmax(lm.Logits(hidden[r][t]).to(at::kDouble), -1).cpu();
        const auto [values, best] = p.topk(std::min(kCandidates, p.numel()));
        Json candidates = Json::array();
        for (int64_t i = 0; i < best.numel(); ++i) {
          candidates.push_back({{"token", text_of(best.const_data_ptr<int64_t>()[i])},
                                {"probability", values.const_data_ptr<double>()[i]}});
        }
        masks.push_back(std::move(candidates));
        id = best.const_data_ptr<int64_t>()[0];
      }
      filled.push_back(int32_t(id));
    }
    out.push_back({{"line", lines.const_data_ptr<int64_t>()[r]},
                   {"text", ValidUtf8(tokenizer().Decode(filled))},
                   {"masks", std::move(masks)}});
  }
  return out;
}

}  // namespace cistern
