#include "cistern/tasks/listops_task.h"

#include <ATen/ATen.h>

#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/base/progress.h"
#include "cistern/models/heads.h"
#include "cistern/tasks/cache.h"
#include "cistern/tasks/class_measure.h"

namespace cistern {
namespace {

constexpr int64_t kClasses = 10, kEvalRows = 16;

Batch MakeBatch(const ListOpsSet& set, const RowPadding& padding,
                const std::vector<int64_t>& rows) {
  std::vector<std::span<const uint8_t>> tokens;
  std::vector<int64_t> targets;
  for (const int64_t i : rows) {
    tokens.push_back(set.Row(i));
    targets.push_back(set.labels[size_t(i)]);
  }
  Batch batch;
  AddIds(tokens, padding, &batch);
  AddNumbers("targets", targets, &batch);
  return batch;
}

// Rows of `set` in their order; `keep` keeps it alive.
std::unique_ptr<BatchReader> ReaderOf(const ListOpsSet& set, const RowPadding& padding,
                                      const ReadOptions& options,
                                      std::shared_ptr<const ListOpsSet> keep = nullptr) {
  return ReadInOrder(set.size(), options, kEvalRows,
                     [&set, padding, keep](const std::vector<int64_t>& rows) {
                       return MakeBatch(set, padding, rows);
                     });
}

}  // namespace

Fields ListOpsTask::Describe(Options& o) {
  Fields f;
  f.Add("data", &o.data, "folder with basic_{train,val,test}.tsv; empty: generated");
  f.Add("length", &o.length, "longer examples are cut", {2, int64_t{1} << 30});
  f.Add("pad_to", &o.pad_to, kPadToHelp, PadTos());
  f.Add("group_by_length", &o.group_by_length,
        "form training batches from examples of similar length: less padding, so faster");
  f.Add("data_seed", &o.data_seed, "seed of the generator", {0, int64_t{1} << 62});
  f.Add("train_examples", &o.train_examples, "generated training examples", {1, 1 << 28});
  f.Add("valid_examples", &o.valid_examples, "generated validation examples", {1, 1 << 28});
  f.Add("test_examples", &o.test_examples, "generated test examples", {1, 1 << 28});
  return f;
}

const TaskInfo& listops_task() {
  static const TaskInfo info = [] {
    TaskInfo t;
    t.name = "listops";
    t.summary =
        "ListOps of Long Range Arena: the value of nested lists of digits, 500 to 2,000 tokens";
    t.models = {"encoder_classifier"};
    t.metrics = {{"accuracy", "accuracy, %", "of whole examples, in percent; higher is better"}};
    t.data = "data";
    t.claims = [](const std::string& path) {
      std::error_code ignored;
      return std::filesystem::exists(path + "/basic_train.tsv", ignored);
    };
    t.defaults = {"model.layers=1",        "model.dim=64",        "model.ffn_dim=128",
                  "model.norm=post",       "model.bias=true",     "model.positions=sinusoidal",
                  "model.embedding_std=1", "model.init_std=0.12", "task.group_by_length=true",
                  "train.batch=16",        "train.lr=1.5e-3"};
    t.mechanisms = {"softmax", "latte", "luna", "conv_luna"};
    BindTask<ListOpsTask>(t);
    return t;
  }();
  return info;
}

ListOpsTask::ListOpsTask(const Options& options, const std::string& cache)
    : options_(options), cache_(cache) {
  const Options unset;
  if (!options.data.empty() &&
      (options.data_seed != unset.data_seed || options.train_examples != unset.train_examples ||
       options.valid_examples != unset.valid_examples ||
       options.test_examples != unset.test_examples))
    FailUsage(
        "task.listops: data_seed, train_examples, valid_examples and test_examples are of "
        "generated examples; omit them, or omit data");
}

const Metric& ListOpsTask::metric() const { return listops_task().metrics[0]; }

void ListOpsTask::Prepare() {
  std::string folder = options_.data;
  if (folder.empty()) {
    folder =
        StrCat(CacheFolder(cache_), "/listops-", options_.train_examples, "-",
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
  for (const Split split : {Split::kTrain, Split::kValid, Split::kTest}) {
    CISTERN_CHECK(Set(split).size() > 0, folder, ": the ", SplitName(split), " split is empty");
  }
  guesses_.emplace(data_.train);
  if (!options_.group_by_length) {
    order_ = std::make_unique<ShuffledOrder>(data_.train.size());
    return;
  }
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < data_.train.size(); ++i)
    lengths.push_back(int64_t(data_.train.Row(i).size()));
  order_ = std::make_unique<ShuffledOrder>(std::move(lengths));
}

const ListOpsSet& ListOpsTask::Set(Split split) const {
  return split == Split::kTrain ? data_.train : split == Split::kValid ? data_.valid : data_.test;
}

void ListOpsTask::Complete(ModelConfig& config) const {
  config.vocab_size = kListOpsVocab;
  config.classes = kClasses;
  config.max_length = std::max(config.max_length, options_.length);
  CheckPadding(config, options_.pad_to);
}

Json ListOpsTask::DataSummary() const {
  return {{"train", data_.train.size()},
          {"valid", data_.valid.size()},
          {"test", data_.test.size()},
          {"xxh64", HexText(HashListOps(data_))},
          {"ids", "listops"},
          {"notes", notes_}};
}

Batch ListOpsTask::TrainBatch(uint64_t seed, int64_t step, int64_t rows) const {
  return MakeBatch(data_.train, padding(), PickRows(*order_, seed, step, rows));
}

at::Tensor ListOpsTask::Loss(Model& model, const Batch& batch, double label_smoothing) const {
  return model.TrainingLoss(model.ReadOf(batch.tensors), label_smoothing);
}

std::unique_ptr<BatchReader> ListOpsTask::Read(Split split, const ReadOptions& options) const {
  return ReaderOf(Set(split), padding(), options);
}

std::unique_ptr<BatchReader> ListOpsTask::ReadFile(const std::string& path, bool labelled,
                                                   const ReadOptions& options) const {
  auto set = std::make_shared<const ListOpsSet>(
      ReadListOps(path, {.max_length = options_.length, .check = false, .labelled = labelled}));
  return ReaderOf(*set, padding(), options, set);
}

Score ListOpsTask::Measure(Model& model, const Batch& batch) const {
  const at::Tensor logits = ClassifierLogits(model, batch), targets = batch["targets"];
  Score score;
  score.Add("examples", double(batch.rows));
  score.Add("nats", NextTokenLoss(logits, targets).item<double>() * double(batch.rows));
  score.Add("correct", (logits.argmax(1) == targets).sum().item<double>());
  if (!guesses_) return score;
  const at::Tensor ids = batch["ids"].cpu(), labels = targets.cpu();
  for (int64_t r = 0; r < batch.rows; ++r) {
    const auto root = uint8_t(ids.const_data_ptr<int64_t>()[r * ids.size(1)]),
               label = uint8_t(labels.const_data_ptr<int64_t>()[r]);
    score.Add("majority", label == guesses_->majority());
    score.Add("root_operator", label == guesses_->OfRoot(root));
    score.Add("root_operator_nats", guesses_->Nats(root, label));
  }
  return score;
}

Json ListOpsTask::Metrics(const Score& score) const {
  const double n = std::max(score["examples"], 1.0);
  Json out = {{"accuracy", 100.0 * score["correct"] / n},
              {"loss", score["nats"] / n},
              {"examples", int64_t(score["examples"])}};
  if (score.Has("majority")) {
    out["majority"] = 100.0 * score["majority"] / n;
    out["root_operator"] = 100.0 * score["root_operator"] / n;
    out["root_operator_loss"] = score["root_operator_nats"] / n;
  }
  return out;
}

std::vector<Json> ListOpsTask::Predict(Model& model, const Batch& batch) const {
  const at::Tensor p =
      at::softmax(ClassifierLogits(model, batch), 1).to(at::kCPU, at::kDouble).contiguous();
  std::vector<Json> out;
  for (int64_t r = 0; r < batch.rows; ++r) {
    const double* row = p.const_data_ptr<double>() + r * kClasses;
    Json probabilities = Json::object();
    for (int64_t c = 0; c < kClasses; ++c) probabilities[std::to_string(c)] = row[c];
    out.push_back({{"label", std::to_string(std::max_element(row, row + kClasses) - row)},
                   {"probabilities", probabilities}});
  }
  return out;
}

}  // namespace cistern
