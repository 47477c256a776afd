#include "cistern/tasks/generated_rows.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "cistern/base/error.h"
#include "cistern/models/language_model.h"
#include "cistern/models/masked_lm.h"
#include "cistern/tasks/row_batch.h"

namespace cistern {
namespace {

constexpr uint64_t kSizes = 0x73697a65;  // stream of the draws of sizes
constexpr int64_t kGeneratedRows = 32, kNone = -100;

}  // namespace

GeneratedRowsTask::GeneratedRowsTask(const std::string& what, const Options& options)
    : what_(what), options_(options) {
  if (options.sizes.empty()) FailUsage("sizes: at least one number of ", what, " is needed");
  largest_ = *std::max_element(options.sizes.begin(), options.sizes.end());
}

void GeneratedRowsTask::DescribeRows(Fields& f, Options& o, const std::string& sizes_help) {
  f.Add("sizes", &o.sizes, sizes_help, {1, 1 << 20});
  f.Add("distance", &o.distance, "blanks between what is to be remembered and the first question",
        {0, 1 << 24});
  f.Add("data_seed", &o.data_seed, "seed of the rows that are measured", {0, int64_t{1} << 62});
  f.Add("valid_examples", &o.valid_examples, "rows of validation, all sizes together",
        {1, 1 << 28});
  f.Add("test_examples", &o.test_examples, "rows of the test, all sizes together", {1, 1 << 28});
}

Metric GeneratedRowsTask::AccuracyMetric() {
  return {"accuracy", "accuracy, %",
          "of the tokens that are asked for, the mean over sizes, in percent; higher is better"};
}

std::vector<std::string> GeneratedRowsTask::MemoryDefaults() {
  return {"model.dim=64",
          "model.layers=2",
          "model.heads=2",
          "model.conv=4",
          "model.init_std=0.125",
          "model.embedding_std=0.1",
          "model.attention_options={\"abc_mlp\":{\"slots\":16},\"gated_slots\":{\"slots\":16},"
          "\"window\":{\"window\":16}}",
          "train.batch=32",
          "train.lr=4e-3"};
}

std::vector<std::string> GeneratedRowsTask::MemoryMechanisms() {
  return {"softmax", "window", "latte", "abc_mlp", "gated_slots", "linear"};
}

const Metric& GeneratedRowsTask::metric() const {
  static const Metric metric = AccuracyMetric();
  return metric;
}

Json GeneratedRowsTask::DataSummary() const {
  return {{"generated", what_},
          {"sizes", options_.sizes},
          {"distance", options_.distance},
          {"valid", options_.valid_examples},
          {"test", options_.test_examples}};
}

void GeneratedRowsTask::Complete(ModelConfig& config) const {
  config.vocab_size = Vocabulary();
  config.max_length = std::max(config.max_length, tokens_per_row());
}

// Rows by (stream, size).
Batch GeneratedRowsTask::MakeBatch(uint64_t seed,
                                   const std::vector<std::pair<uint64_t, int64_t>>& rows) const {
  int64_t longest = 0;
  for (const auto& row : rows) longest = std::max(longest, Length(row.second));
  Batch batch;
  batch.rows = int64_t(rows.size());
  const at::Tensor ids = at::zeros({batch.rows, longest}, at::kLong),
                   targets = at::full({batch.rows, longest}, kNone, at::kLong);
  std::vector<int64_t> lengths, sizes;
  for (size_t r = 0; r < rows.size(); ++r) {
    Random random(seed, rows[r].first);
    const GeneratedRow row = MakeRow(random, rows[r].second);
    const auto length = int64_t(row.ids.size());
    CISTERN_CHECK(length == Length(rows[r].second) && row.targets.size() == row.ids.size(),
                  "[tasks] a row of ", rows[r].second, " ", what_, " has ", length, " tokens and ",
                  row.targets.size(), " targets; expected ", Length(rows[r].second));
    std::copy(row.ids.begin(), row.ids.end(),
              ids.mutable_data_ptr<int64_t>() + int64_t(r) * longest);
    std::copy(row.targets.begin(), row.targets.end(),
              targets.mutable_data_ptr<int64_t>() + int64_t(r) * longest);
    lengths.push_back(length);
    sizes.push_back(rows[r].second);
    batch.tokens += length;
  }
  batch.Add("ids", ids);
  batch.Add("targets", targets);
  batch.Add("sizes", at::tensor(sizes, at::kLong));
  const bool padded =
      std::any_of(lengths.begin(), lengths.end(), [&](int64_t length) { return length < longest; });
  if (padded) batch.Add("lengths", at::tensor(lengths, at::kLong));
  return batch;
}

Batch GeneratedRowsTask::TrainBatch(uint64_t seed, int64_t step, int64_t rows) const {
  Random draw(seed ^ kSizes, uint64_t(step));
  const int64_t size = options_.sizes[size_t(draw.Below(int64_t(options_.sizes.size())))];
  std::vector<std::pair<uint64_t, int64_t>> all;
  for (int64_t r = 0; r < rows; ++r) all.emplace_back(uint64_t(step * rows + r), size);
  return MakeBatch(seed, all);
}

at::Tensor GeneratedRowsTask::Loss(Model& model, const Batch& batch, double label_smoothing) const {
  return model.TrainingLoss(model.ReadOf(batch.tensors), label_smoothing);
}

double GeneratedRowsTask::Terms(const Batch& batch) const {
  return double(batch["targets"].ne(kNone).sum().item<int64_t>());
}

std::unique_ptr<BatchReader> GeneratedRowsTask::Read(Split split, const ReadOptions& o) const {
  // Each split has a seed of its own, which no step of training has.
  const uint64_t seed =
      Philox(uint64_t(options_.data_seed), kSizes, uint64_t(split))[0] + (uint64_t(1) << 40);
  const int64_t count = split == Split::kTest ? options_.test_examples : options_.valid_examples;
  return ReadInOrder(count, o, kGeneratedRows,
                     [this, seed, count](const std::vector<int64_t>& picked) {
                       std::vector<std::pair<uint64_t, int64_t>> rows;
                       const auto kinds = int64_t(options_.sizes.size());
                       for (const int64_t i : picked)
                         rows.emplace_back(uint64_t(i), options_.sizes[size_t(i * kinds / count)]);
                       return MakeBatch(seed, rows);
                     });
}

Score GeneratedRowsTask::Measure(Model& model, const Batch& batch) const {
  auto& lm = dynamic_cast<LanguageModel&>(model);
  ModelState state = lm.EmptyState(batch.rows);
  const at::Tensor hidden = lm.Hidden(batch["ids"], state, MaskOf(batch.tensors)),
                   targets = batch["targets"];
  const at::Tensor asked = targets.ne(kNone), wanted = targets.masked_select(asked);
  const at::Tensor logits = lm.Logits(hidden.reshape({-1, hidden.size(-1)})
                                          .index_select(0, TargetPositions(targets.reshape({-1}))));
  const at::Tensor nats = at::logsumexp(logits, 1).to(at::kDouble) -
                          logits.gather(1, wanted.unsqueeze(1)).squeeze(1).to(at::kDouble);
  at::Tensor right = at::zeros_like(targets, targets.options().dtype(at::kBool));
  right.masked_scatter_(asked, logits.argmax(1).eq(wanted));
  // [B]: of each row.
  const at::Tensor correct = right.sum(1).cpu(), count = asked.sum(1).cpu(),
                   sizes = batch["sizes"].cpu();
  Score score;
  const double sum = nats.sum().item<double>();
  CISTERN_CHECK(std::isfinite(sum), "[eval] the model's loss is ", sum, "; its weights are broken");
  score.Add("nats", sum);
  for (int64_t r = 0; r < batch.rows; ++r) {
    const int64_t n = count.const_data_ptr<int64_t>()[r],
                  good = correct.const_data_ptr<int64_t>()[r],
                  size = sizes.const_data_ptr<int64_t>()[r];
    score.Add("rows", 1);
    score.Add("rows_right", good == n ? 1 : 0);
    score.Add("asked", size, double(n));
    score.Add("correct", size, double(good));
    score.Add("targets", double(n));
  }
  return score;
}

Json GeneratedRowsTask::Metrics(const Score& score) const {
  const double chance = 1 / double(Answers());
  double mean = 0, held = 0;
  Json points = Json::array();
  std::vector<int64_t> sizes = options_.sizes;
  std::sort(sizes.begin(), sizes.end());
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  for (const int64_t size : sizes) {
    const double asked = score.At("asked", size);
    if (asked == 0) continue;
    const double accuracy = score.At("correct", size) / asked;
    mean += accuracy;
    held = std::max(held, double(size) * (accuracy - chance) / (1 - chance));
    points.push_back({size, 100 * accuracy});
  }
  mean /= std::max<double>(1, double(points.size()));
  return {{"accuracy", 100 * mean},
          {"loss", score["nats"] / std::max(score["targets"], 1.0)},
          {"rows", 100 * score["rows_right"] / std::max(score["rows"], 1.0)},
          {"chance", 100 * chance},
          {"held", held},
          {"capacity", {{"x", what_}, {"points", points}}},
          {"examples", int64_t(score["rows"])}};
}

}  // namespace cistern
