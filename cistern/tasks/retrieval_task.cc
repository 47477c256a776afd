#include "cistern/tasks/retrieval_task.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/tasks/idle_keys.h"

namespace cistern {
namespace {

constexpr char kRetrievalAssets[] = "/retrieval.json";
constexpr int64_t kByteVocab = 257;     // 0 pads
constexpr int64_t kBytesRead = 10'000;  // of a text, before it is cut to `length` (spec 3.3)
constexpr double kDocumentShare = 0.1;
constexpr int64_t kRetrievalRows = 16;

}  // namespace

Fields RetrievalTask::Describe(Options& o) {
  Fields f;
  f.Add("data", &o.data,
        "a folder with new_aan_pairs.{train,eval,test}.tsv (lines of label, two ids, two texts "
        "between tabs), as Long Range Arena distributes AAN; or documents, a folder of text files "
        "or a table (.jsonl, .tsv, .csv, each also .gz or .xz): then the two halves of one "
        "document match, and the first half of one and the second half of another do not");
  f.Add("text_column", &o.text_column, "of a table of documents; empty: text, or the only one");
  f.Add("header", &o.header,
        "the first line of a table of documents: auto takes it for a header unless it holds a "
        "number",
        TableHeaders());
  f.Add("length", &o.length, "bytes of each text, from its beginning; what is longer is cut",
        {1, kBytesRead});
  f.Add("pad_to", &o.pad_to, kPadToHelp, PadTos());
  f.Add("skip_bad_rows", &o.skip_bad_rows,
        "pass over rows that cannot be read, and count them, instead of stopping");
  f.Add("valid_share", &o.valid_share, "of documents, for validation", {0.001, 0.9});
  f.Add("test_share", &o.test_share, "of documents, for the test", {0.001, 0.9});
  f.Add("split_seed", &o.split_seed, "of the split and the pairs of documents",
        {0, int64_t{1} << 62});
  return f;
}

const TaskInfo& retrieval_task() {
  static const TaskInfo info = [] {
    TaskInfo t;
    t.name = "retrieval";
    t.summary =
        "whether two texts belong together: Long Range Arena's Retrieval (AAN), or halves of your "
        "documents";
    t.models = {"two_tower"};
    t.metrics = AccuracyMetric();
    t.data = "data";
    t.claims = IsAanFolder;
    t.defaults = {"model.dim=64",
                  "model.layers=2",
                  "model.heads=4",
                  "model.ffn_dim=128",
                  "model.positions=sinusoidal",
                  "model.embedding_std=1",
                  "model.init_std=0.12",
                  "model.two_tower.match=nli",
                  "task.length=1000",
                  "train.batch=16",
                  "train.lr=1e-3",
                  "train.seconds=300"};
    t.mechanisms = {"softmax", "latte", "luna", "conv_luna"};
    BindTask<RetrievalTask>(t);
    return t;
  }();
  return info;
}

RetrievalTask::RetrievalTask(const Options& options, const std::string&) : options_(options) {
  if (options_.valid_share + options_.test_share >= 1)
    FailUsage("task.retrieval: valid_share + test_share leave nothing to train on");
}

const Metric& RetrievalTask::metric() const { return retrieval_task().metrics[0]; }

void RetrievalTask::RefuseIdleKeys() const {
  std::error_code ignored;
  RefuseIdle(!options_.text_column.empty() && !IsAanFolder(options_.data) &&
                 std::filesystem::is_directory(options_.data, ignored),
             "task.retrieval.text_column", options_.data + ", whose files are the documents");
  RefuseIdle(options_.header != Options().header && !MayHaveHeader(options_.data),
             "task.retrieval.header", options_.data + ", which is no table of .tsv or .csv");
}

void RetrievalTask::Prepare() {
  if (options_.data.empty())
    FailUsage(
        "task.retrieval.data is empty: name a folder with new_aan_pairs.train.tsv, or "
        "documents to make pairs of: a folder of text files or a table");
  if (classes_.empty()) RefuseIdleKeys();
  notes_.clear();
  int64_t skipped = 0;
  if (IsAanFolder(options_.data)) {
    if (options_.valid_share != kDocumentShare || options_.test_share != kDocumentShare ||
        !options_.text_column.empty())
      FailUsage(
          "task.retrieval: AAN has its own split and columns; omit valid_share, test_share "
          "and text_column");
    const char* parts[] = {"train", "eval", "test"};
    for (size_t i = 0; i < splits_.size(); ++i)
      splits_[i] =
          OpenPairFile(AanFile(options_.data, parts[i]), {.skip_bad = options_.skip_bad_rows});
  } else {
    skipped = PairDocuments();
  }
  for (const auto& split : splits_) skipped += split->skipped();
  if (skipped > 0) notes_.push_back(StrCat(skipped, " rows could not be read and were skipped"));
  if (classes_.empty()) {  // not LoadAssets
    const TextPairs& train = *splits_[0];
    std::vector<double> counts(2);
    for (int64_t i = 0; i < train.size(); ++i) ++counts[size_t(train.Label(i))];
    SetClasses({"0", "1"}, std::move(counts), options_.data);
  }
  order_ = std::make_unique<ShuffledOrder>(splits_[0]->size());
}

int64_t RetrievalTask::PairDocuments() {
  auto documents = std::make_shared<const Documents>(
      ReadDocuments(options_.data, {.limit = options_.length,
                                    .column = options_.text_column,
                                    .header = options_.header,
                                    .skip_bad = options_.skip_bad_rows}));
  const int64_t count = documents->size();
  const auto share = [&](double s) {
    return std::max<int64_t>(2, std::llround(s * double(count)));
  };
  const int64_t valid = share(options_.valid_share), test = share(options_.test_share);
  CISTERN_CHECK(count >= valid + test + 2, options_.data, ": ", count,
                " documents; at least two are needed for each of training, validation and test");
  const ShuffledOrder order(count);
  std::array<std::vector<int64_t>, 3> chosen;
  for (int64_t i = 0; i < count; ++i)
    chosen[i < valid          ? 1
           : i < valid + test ? 2
                              : 0]
        .push_back(order.At(uint64_t(options_.split_seed), i, 1));
  for (size_t i = 0; i < splits_.size(); ++i)
    splits_[i] = HalvesOf(documents, std::move(chosen[i]), uint64_t(options_.split_seed));
  notes_.push_back(
      StrCat("pairs of halves of ", count, " documents: those of one match, those of two do not"));
  notes_.insert(notes_.end(), documents->notes.begin(), documents->notes.end());
  if (documents->too_short + documents->repeated > 0)
    notes_.push_back(StrCat(documents->too_short, " documents of fewer than 64 bytes and ",
                            documents->repeated, " repeated ones were left out"));
  return documents->skipped;
}

Json RetrievalTask::DataSummary() const {
  uint64_t hash = 0;
  for (const auto& split : splits_) hash = hash * 31 + split->Hash();
  return {{"data", options_.data},
          {"xxh64", HexText(hash)},
          {"train", splits_[0]->size()},
          {"valid", splits_[1]->size()},
          {"test", splits_[2]->size()},
          {"classes", CountsByClass()},
          {"ids", "bytes+1"},
          {"notes", notes_}};
}

void RetrievalTask::SaveAssets(const std::string& folder) const {
  SaveClasses(folder + kRetrievalAssets);
}

void RetrievalTask::LoadAssets(const std::string& folder) {
  LoadClasses(folder + kRetrievalAssets);
  CISTERN_CHECK(classes_.size() == 2, folder, kRetrievalAssets, " is broken: ", classes_.size(),
                " classes; expected 2");
}

void RetrievalTask::Complete(ModelConfig& config) const {
  config.vocab_size = kByteVocab;
  config.classes = 2;
  config.max_length = std::max(config.max_length, options_.length);
  CheckPadding(config, options_.pad_to);
}

Batch RetrievalTask::MakeBatch(const TextPairs& pairs, const std::vector<int64_t>& rows) const {
  std::array<std::vector<std::string>, 2> texts;
  for (auto& side : texts) side.resize(rows.size());
  std::vector<int64_t> targets, lines;
  for (size_t r = 0; r < rows.size(); ++r) {
    pairs.Read(rows[r], options_.length, &texts[0][r], &texts[1][r]);
    targets.push_back(pairs.Label(rows[r]));
    lines.push_back(pairs.Line(rows[r]));
  }
  Batch batch;
  for (size_t side = 0; side < 2; ++side) {
    std::vector<std::span<const uint8_t>> bytes;
    for (const std::string& text : texts[side])
      bytes.emplace_back(reinterpret_cast<const uint8_t*>(text.data()), text.size());
    AddIds<uint8_t>(bytes, {options_.pad_to, options_.length}, &batch, 1,
                    side == 0 ? "" : "second_");
  }
  AddNumbers("targets", targets, &batch);
  AddNumbers("lines", lines, &batch);
  return batch;
}

Batch RetrievalTask::TrainBatch(uint64_t seed, int64_t step, int64_t rows) const {
  return MakeBatch(*splits_[0], PickRows(*order_, seed, step, rows));
}

std::unique_ptr<BatchReader> RetrievalTask::Read(Split split, const ReadOptions& options) const {
  const TextPairs& pairs = *splits_[size_t(split)];
  return ReadInOrder(
      pairs.size(), options, kRetrievalRows,
      [this, &pairs](const std::vector<int64_t>& rows) { return MakeBatch(pairs, rows); });
}

std::unique_ptr<BatchReader> RetrievalTask::ReadFile(const std::string& path, bool labelled,
                                                     const ReadOptions& options) const {
  const std::shared_ptr<TextPairs> pairs =
      OpenPairFile(path, {.labelled = labelled, .skip_bad = options_.skip_bad_rows});
  return ReadInOrder(
      pairs->size(), options, kRetrievalRows,
      [this, pairs](const std::vector<int64_t>& rows) { return MakeBatch(*pairs, rows); },
      pairs->skipped());
}

}  // namespace cistern
