#include "cistern/tasks/span_corruption_task.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cistern/base/error.h"
#include "cistern/decode/beam_search.h"
#include "cistern/decode/eval_scope.h"
#include "cistern/tasks/lm_blocks.h"
#include "cistern/tasks/masked_lines.h"
#include "cistern/tasks/row_batch.h"
#include "cistern/text/utf8.h"

namespace cistern {
namespace {

constexpr uint64_t kMeasured = 0x7370616e;  // seed of the spans that measurements share

LanguageModel& EncoderDecoderOf(Model& model) { return dynamic_cast<LanguageModel&>(model); }

}  // namespace

Fields SpanCorruptionTask::Describe(Options& o) {
  Fields f = TextTask::Describe(o);
  f.Add("hidden_share", &o.hidden_share, "of the tokens of a row: in spans that are hidden",
        {0.001, 0.9});
  f.Add("span_length", &o.span_length, "mean length of a hidden span", {1.0, 1000.0});
  f.Add("sentinels", &o.sentinels, "ids that stand for hidden spans; a row has no more spans",
        {1, 1 << 16});
  return f;
}

const TaskInfo& span_corruption_task() {
  static const TaskInfo info = [] {
    TaskInfo t;
    t.name = "span_corruption";
    t.summary = "T5's pretraining: spans of any text that are hidden from the encoder";
    t.models = {"encoder_decoder"};
    t.metrics = {
        {"perplexity", "perplexity", "of the hidden spans' tokens; lower is better", true}};
    t.data = "text";
    t.defaults = TextTask::HiddenTokenDefaults();
    t.mechanisms = {"softmax", "window:2+latte:2", "window:2+abc_mlp:2"};
    BindTask<SpanCorruptionTask>(t);
    return t;
  }();
  return info;
}

SpanCorruptionTask::SpanCorruptionTask(const Options& options, const std::string& cache)
    : TextTask("span_corruption", options, cache), options_(options) {
  const int64_t spans = CountSpans(options.length, shares()).spans;
  if (spans > options.sentinels) {
    FailUsage("task.span_corruption: a row of length=", options.length, " has ", spans,
              " hidden spans, and sentinels=", options.sentinels, "; take more, or shorter rows");
  }
}

const Metric& SpanCorruptionTask::metric() const { return span_corruption_task().metrics[0]; }

int64_t SpanCorruptionTask::tokens_per_row() const {
  const SpanCounts counts = CountSpans(options_.length, shares());
  return counts.SourceLength(options_.length) + counts.TargetLength();
}

int64_t SpanCorruptionTask::tokens_per_sequence() const {
  const SpanCounts counts = CountSpans(options_.length, shares());
  return std::max(counts.SourceLength(options_.length), counts.TargetLength());
}

void SpanCorruptionTask::Complete(ModelConfig& config) const {
  TextTask::Complete(config);
  config.vocab_size = Sentinel(options_.sentinels);
  config.max_length = std::max(config.max_length, tokens_per_sequence());
}

Batch SpanCorruptionTask::Corrupted(const at::Tensor& tokens, uint64_t seed,
                                    const std::vector<uint64_t>& streams) const {
  const int64_t rows = tokens.size(0), length = tokens.size(1);
  const SpanCounts counts = CountSpans(length, shares());
  const int64_t from = counts.SourceLength(length), to = counts.TargetLength();
  CISTERN_CHECK(counts.spans <= options_.sentinels, "[span corruption] a row of ", length,
                " tokens has ", counts.spans, " hidden spans, and the model ", options_.sentinels,
                " sentinels");
  const at::Tensor source = at::empty({rows, from}, at::kLong),
                   targets = at::empty({rows, to}, at::kLong),
                   ids = at::full({rows, to}, int64_t(end()), at::kLong);
  for (int64_t r = 0; r < rows; ++r) {
    Random random(seed, streams[size_t(r)]);
    const CorruptedRow row =
        CorruptSpans({tokens.const_data_ptr<int64_t>() + r * length, size_t(length)}, counts,
                     Sentinel(0), end(), random);
    std::copy(row.source.begin(), row.source.end(), source.mutable_data_ptr<int64_t>() + r * from);
    std::copy(row.target.begin(), row.target.end(), targets.mutable_data_ptr<int64_t>() + r * to);
    std::copy(row.target.begin(), row.target.end() - 1,
              ids.mutable_data_ptr<int64_t>() + r * to + 1);
  }
  Batch batch;
  batch.rows = rows;
  batch.tokens = rows * (from + to);
  batch.Add("source", source);
  batch.Add("ids", ids);
  batch.Add("targets", targets);
  return batch;
}

Batch SpanCorruptionTask::TrainBatch(uint64_t seed, int64_t step, int64_t rows) const {
  std::vector<uint64_t> streams(static_cast<size_t>(rows));
  std::iota(streams.begin(), streams.end(), uint64_t(step * rows));
  return Corrupted(TrainBlocks(seed, step, rows).narrow(1, 0, options().length).contiguous(), seed,
                   streams);
}

at::Tensor SpanCorruptionTask::Loss(Model& model, const Batch& batch,
                                    double label_smoothing) const {
  return model.TrainingLoss(model.ReadOf(batch.tensors), label_smoothing);
}

double SpanCorruptionTask::Terms(const Batch& batch) const {
  return double(batch["targets"].numel());
}

std::unique_ptr<BatchReader> SpanCorruptionTask::RowsOf(const TokenText& text, const ReadOptions& o,
                                                        std::shared_ptr<void> keep) const {
  return ReadTextRows(
      text, o, options().length,
      [this](const at::Tensor& tokens, const std::vector<int64_t>& begins) {
        return Corrupted(tokens, kMeasured, {begins.begin(), begins.end()});
      },
      std::move(keep));
}

std::unique_ptr<BatchReader> SpanCorruptionTask::Read(Split split, const ReadOptions& o) const {
  return RowsOf(TextTask::Of(split), o);
}

// Lines with gaps: sources, and beside them what stands around the gaps.
class SpanCorruptionTask::Lines : public BatchReader {
 public:
  Lines(const SpanCorruptionTask& task, const std::string& path, int64_t rows)
      : task_(task), path_(path), lines_(path, task.tokenizer()), rows_(rows > 0 ? rows : 16) {}

  std::optional<Batch> Next() override {
    std::vector<std::vector<int32_t>> rows;
    std::vector<int64_t> numbers;
    for (const MaskedLine& line : lines_.Next(rows_)) {
      const auto gaps = int64_t(line.parts.size()) - 1;
      CISTERN_CHECK(gaps <= task_.options_.sentinels, path_, ":", line.number, ": ", gaps,
                    " gaps, and the model was trained for ", task_.options_.sentinels);
      std::vector<int32_t>& row = rows.emplace_back(line.parts[0]);
      for (int64_t i = 0; i < gaps; ++i) {
        row.push_back(task_.Sentinel(i));
        const std::vector<int32_t>& part = line.parts[size_t(i) + 1];
        row.insert(row.end(), part.begin(), part.end());
      }
      row.push_back(task_.end());
      numbers.push_back(line.number);
    }
    if (rows.empty()) return std::nullopt;
    Batch batch;
    AddIds(std::vector<std::span<const int32_t>>(rows.begin(), rows.end()), RowPadding(), &batch);
    batch.Add("source", batch["ids"]);
    batch.Add("source_lengths", batch["lengths"]);
    batch.padded.push_back({"source", "source_lengths"});
    AddNumbers("lines", numbers, &batch);
    return batch;
  }
  int64_t total() const override { return lines_.bytes_total(); }
  int64_t done() const override { return lines_.bytes_read(); }
  const char* unit() const override { return "bytes"; }

 private:
  const SpanCorruptionTask& task_;
  std::string path_;
  MaskedLines lines_;
  int64_t rows_;
};

std::unique_ptr<BatchReader> SpanCorruptionTask::ReadFile(const std::string& path, bool labelled,
                                                          const ReadOptions& o) const {
  if (!labelled) return std::make_unique<Lines>(*this, path, o.rows);
  const std::shared_ptr<TokenFile> file = Tokenize(path);
  return RowsOf(TextTask::Of(*file), o, file);
}

Score SpanCorruptionTask::Measure(Model& model, const Batch& batch) const {
  LanguageModel& lm = EncoderDecoderOf(model);
  lm.config().CheckPositions(Form::kBidirectional, batch["source"].size(1), "a row");
  std::vector<int32_t> bytes = token_bytes();
  bytes.resize(size_t(Sentinel(options_.sentinels)));
  Score score;
  MeasureTokens(lm, lm.HiddenOfRows(model.ReadOf(batch.tensors)), batch["targets"], bytes, score);
  return score;
}

Json SpanCorruptionTask::Metrics(const Score& score) const {
  const double tokens = score["tokens"];
  return {{"perplexity", std::exp(score["nats"] / tokens)},
          {"nats_per_token", score["nats"] / tokens},
          {"accuracy", 100 * score["correct"] / tokens},
          {"tokens", int64_t(tokens)}};
}

std::vector<Json> SpanCorruptionTask::Predict(Model& model, const Batch& batch) const {
  constexpr int64_t kMostOfAGap = 12;  // tokens, on average
  LanguageModel& lm = EncoderDecoderOf(model);
  if (batch.rows > 1 && !lm.SourceSeesPadding().empty())
    return PredictApart(batch, [&](const Batch& row) { return Predict(model, row); });
  lm.config().CheckPositions(Form::kBidirectional, batch["source"].size(1), "a row");
  const at::Tensor source = batch["source"].cpu(), lengths = batch["source_lengths"].cpu(),
                   lines = batch["lines"].cpu();
  const auto row_of = [&](int64_t r) {
    const int64_t* const from = source.const_data_ptr<int64_t>() + r * source.size(1);
    return std::vector<int32_t>(from, from + lengths.const_data_ptr<int64_t>()[r] - 1);
  };
  const auto is_sentinel = [&](int32_t id) { return id > end(); };
  std::vector<int64_t> most;
  for (int64_t r = 0; r < batch.rows; ++r) {
    const std::vector<int32_t> row = row_of(r);
    most.push_back((kMostOfAGap + 1) * std::count_if(row.begin(), row.end(), is_sentinel));
    most.back() = std::min(most.back(), lm.config().LengthLimit(Form::kCausal));
  }
  const DecodeScope scope(model);
  ops::Mask mask;
  mask.lengths = batch["source_lengths"];
  const std::vector<Hypothesis> written =
      BeamSearch(lm, lm.Encode(batch["source"], mask), {1, 1, end(), end(), most});
  const auto text_of = [&](const std::vector<int32_t>& ids) {
    return ValidUtf8(tokenizer().Decode(ids));
  };
  std::vector<Json> out;
  for (int64_t r = 0; r < batch.rows; ++r) {
    // What the decoder wrote behind each sentinel.
    std::vector<std::vector<int32_t>> fills(size_t(options_.sentinels));
    int64_t gap = -1;
    for (const int32_t id : written[size_t(r)].tokens) {
      if (is_sentinel(id)) {
        gap = id - Sentinel(0);
      } else if (gap >= 0) {
        fills[size_t(gap)].push_back(id);
      }
    }
    std::vector<int32_t> filled;
    Json gaps = Json::array();
    for (const int32_t id : row_of(r)) {
      if (!is_sentinel(id)) {
        filled.push_back(id);
        continue;
      }
      const std::vector<int32_t>& fill = fills[size_t(id - Sentinel(0))];
      filled.insert(filled.end(), fill.begin(), fill.end());
      gaps.push_back(text_of(fill));
    }
    out.push_back({{"line", lines.const_data_ptr<int64_t>()[r]},
                   {"text", text_of(filled)},
                   {"gaps", std::move(gaps)}});
  }
  return out;
}

}  // namespace cistern
