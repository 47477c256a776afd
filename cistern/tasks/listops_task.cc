#include "cistern/tasks/listops_task.h"

#include <ATen/ATen.h>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/base/progress.h"
#include "cistern/models/decoder_lm.h"
#include "cistern/models/encoder_classifier.h"
#include "cistern/tasks/cache.h"

namespace cistern {

void ListOpsTask::Prepare() {
  std::string folder = options_.data;
  if (folder.empty()) {
    folder =
        StrCat(CacheFolder(options_.cache), "/listops-", options_.train_examples, "-",
               options_.valid_examples, "-", options_.test_examples, "-seed", options_.data_seed);
    ListOpsOptions generate;
    generate.counts = {options_.train_examples, options_.valid_examples, options_.test_examples};
    ProgressBar bar({generate.counts[0] + generate.counts[1] + generate.counts[2],
                     "generate ListOps", "examples"});
    data_ = OpenListOps(generate, uint64_t(options_.data_seed), folder,
                        {.max_length = options_.length, .check = false}, &notes_,
                        [&](int64_t done, int64_t) { bar.Update(done); });
  } else {  // somebody's files: every label is checked
    data_ = ReadListOpsFolder(folder, {.max_length = options_.length, .check = true});
  }
  for (const Split split : {Split::kTrain, Split::kValid, Split::kTest})
    CISTERN_CHECK(Set(split).size() > 0, folder, ": an empty split");
  std::vector<int64_t> lengths;
  for (int64_t i = 0; options_.group_by_length && i < data_.train.size(); ++i)
    lengths.push_back(int64_t(data_.train.Row(i).size()));
  order_ = options_.group_by_length ? std::make_unique<ShuffledOrder>(std::move(lengths))
                                    : std::make_unique<ShuffledOrder>(data_.train.size());
}

const ListOpsSet& ListOpsTask::Set(Split split) const {
  return split == Split::kTrain ? data_.train : split == Split::kValid ? data_.valid : data_.test;
}

void ListOpsTask::Complete(ModelConfig& config) const {
  config.kind = "encoder_classifier";
  config.vocab_size = kListOpsVocab;
  config.classes = 10;
  config.max_length = std::max(config.max_length, options_.length);
}

Batch ListOpsTask::MakeBatch(const ListOpsSet& set, const std::vector<int64_t>& rows) const {
  const int64_t count = int64_t(rows.size());
  int64_t longest = 1;
  for (const int64_t i : rows) longest = std::max(longest, int64_t(set.Row(i).size()));
  Batch batch;
  batch.ids = at::zeros({count, longest}, at::kLong);
  batch.targets = at::empty({count}, at::kLong);
  batch.lengths = at::empty({count}, at::kLong);
  for (int64_t r = 0; r < count; ++r) {
    const auto row = set.Row(rows[size_t(r)]);
    std::copy(row.begin(), row.end(), batch.ids.mutable_data_ptr<int64_t>() + r * longest);
    batch.targets.mutable_data_ptr<int64_t>()[r] = set.labels[size_t(rows[size_t(r)])];
    batch.lengths.mutable_data_ptr<int64_t>()[r] = int64_t(row.size());
    batch.tokens += int64_t(row.size());
  }
  return batch;
}

Batch ListOpsTask::TrainBatch(uint64_t seed, int64_t step, int64_t rows) const {
  std::vector<int64_t> picked;
  for (int64_t r = 0; r < rows; ++r) picked.push_back(order_->At(seed, step * rows + r, rows));
  return MakeBatch(data_.train, picked);
}

at::Tensor ListOpsTask::Loss(Model& model, const Batch& batch, double label_smoothing) const {
  const at::Tensor logits =
      dynamic_cast<EncoderClassifier&>(model).Forward(batch.ids, batch.lengths);
  return NextTokenLoss(logits, batch.targets, label_smoothing);
}

Json ListOpsTask::Evaluate(Model& model, Split split, const EvalOptions& options) const {
  at::NoGradGuard guard;
  model.eval();
  const ListOpsSet& set = Set(split);
  int64_t seen = 0, right = 0, tokens = 0;
  double nats = 0;
  for (int64_t begin = 0; begin < set.size(); begin += 16) {
    if (options.interrupted && *options.interrupted) break;
    if (options.max_tokens > 0 && tokens >= options.max_tokens) break;
    std::vector<int64_t> rows;
    for (int64_t i = begin; i < std::min(set.size(), begin + 16); ++i) rows.push_back(i);
    const Batch batch = MakeBatch(set, rows);
    const at::Tensor logits =
        dynamic_cast<EncoderClassifier&>(model).Forward(batch.ids, batch.lengths);
    nats += NextTokenLoss(logits, batch.targets).item<double>() * double(rows.size());
    right += (logits.argmax(1) == batch.targets).sum().item<int64_t>();
    seen += int64_t(rows.size());
    tokens += batch.tokens;
  }
  const ListOpsBaselines baselines = MeasureListOpsBaselines(data_.train, set);
  const double n = double(std::max<int64_t>(seen, 1));
  return {{"accuracy", 100.0 * double(right) / n},
          {"loss", nats / n},
          {"examples", seen},
          {"majority", 100.0 * baselines.majority},
          {"root_operator", 100.0 * baselines.root_operator},
          {"root_operator_loss", baselines.root_operator_loss}};
}

Json ListOpsTask::DataSummary() const {
  return {{"train", data_.train.size()},
          {"valid", data_.valid.size()},
          {"test", data_.test.size()},
          {"xxh64", HexText(HashListOps(data_))},
          {"notes", notes_}};
}

}  // namespace cistern
