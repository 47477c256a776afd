#include "cistern/tasks/translation_task.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/base/progress.h"
#include "cistern/base/terminal.h"
#include "cistern/tasks/idle_keys.h"
#include "cistern/tasks/lm_blocks.h"
#include "cistern/tasks/row_batch.h"
#include "cistern/tasks/token_ids.h"
#include "cistern/text/translation_score.h"

namespace cistern {

Fields TranslationTask::Describe(Options& o) {
  Fields f;
  f.Add("data", &o.data,
        "a table of pairs (.tsv, .csv, .jsonl, each also .gz or .xz), or a text with a source on "
        "each line, whose targets are the lines of `target`");
  f.Add("target", &o.target, "a text with the target of each line of data; empty: in the table");
  f.Add("valid", &o.valid, "the same as data, for validation; empty: a share of data");
  f.Add("valid_target", &o.valid_target, "the same as target, for validation");
  f.Add("test", &o.test, "the same as data, for the test; empty: a share of data");
  f.Add("test_target", &o.test_target, "the same as target, for the test");
  f.Add("source_column", &o.source_column, "of a table; empty: its first column");
  f.Add("target_column", &o.target_column, "of a table; empty: its second column");
  f.Add("header", &o.header,
        "whether the first line of a .tsv or .csv names its columns; auto: unless it holds a "
        "number",
        TableHeaders());
  f.Add("tokenizer", &o.tokenizer, "byte-level BPE learned from both sides, or bytes",
        TokenizerKinds());
  f.Add("vocab_size", &o.vocab_size, "tokens that BPE learns", {256, 1 << 20});
  f.Add("length", &o.length,
        "most tokens of a source or a target; training leaves out pairs with more, and counts them",
        {1, 1 << 20});
  f.Add("group_by_length", &o.group_by_length,
        "training batches of pairs of about one length: less padding, so faster");
  f.Add("batch_tokens", &o.batch_tokens,
        "training batches of as many pairs of about one length as have so many tokens on their "
        "longer side, with padding and ends, in place of train.batch pairs; 0: train.batch pairs",
        {0, 1 << 24});
  f.Add("skip_bad_rows", &o.skip_bad_rows,
        "pass over rows that cannot be read, and count them, instead of stopping");
  f.Add("metric", &o.metric, "that decides which model is best",
        {"bleu", "chrf", "exact_match", "word_f1", "perplexity"});
  f.Add("beam", &o.beam, "hypotheses of each translation (1: greedy)", {1, 1 << 10});
  f.Add("length_penalty", &o.length_penalty,
        "of beams, which compare by log-probability / tokens^this; more: longer translations",
        {-10.0, 10.0});
  f.Add("valid_share", &o.valid_share, "of the data, where valid is empty", {0.0001, 0.9});
  f.Add("test_share", &o.test_share, "of the data, where test is empty", {0.0001, 0.9});
  f.Add("split_seed", &o.split_seed, "of the split, which keeps equal sources together",
        {0, int64_t{1} << 62});
  return f;
}

const TaskInfo& translation_task() {
  static const TaskInfo info = [] {
    TaskInfo t;
    t.name = "translation";
    t.summary = "one text from another: translation, and any pairs of a source and a target";
    t.models = {"encoder_decoder"};
    t.metrics = {
        {"bleu", "BLEU", "of the translations, as sacreBLEU has it; higher is better"},
        {"chrf", "chrF", "of the translations, as sacreBLEU has it; higher is better"},
        {"exact_match", "exact match, %",
         "of the translations, but for capitals, punctuation and articles (SQuAD's rule): "
         "where the targets are answers; higher is better"},
        {"word_f1", "word F1, %", "of the translations, as SQuAD has it; higher is better"},
        {"perplexity", "perplexity", "of the targets' tokens; lower is better", true}};
    t.data = "data";
    t.of_use = {"beam", "length_penalty", "source_column", "target_column", "header"};
    t.defaults = {"model.dim=128",
                  "model.layers=2",
                  "model.heads=4",
                  "model.positions=sinusoidal",
                  "model.init_std=0.0884",
                  "model.embedding_std=0.1",
                  "model.dropout=0.1",
                  "train.batch=64",
                  "train.optimizer=muon",
                  "train.weight_decay=0.1",
                  "train.schedule=linear",
                  "train.lr=1.2e-2",
                  "train.label_smoothing=0.1",
                  "train.seconds=300"};
    BindTask<TranslationTask>(t);
    return t;
  }();
  return info;
}

namespace {

void CheckTargets(const std::string& name, const std::string& source, const std::string& target) {
  if (source.empty() && !target.empty())
    FailUsage("task.translation: ", name, "_target=", target, " is of the lines of ", name,
              ", which is empty");
}

}  // namespace

TranslationTask::TranslationTask(const Options& options, const std::string&) : options_(options) {
  RefuseWords("translation", options_.tokenizer);
  if (options_.valid_share + options_.test_share >= 1)
    FailUsage("task.translation: valid_share + test_share leave nothing to train on");
  if (options_.batch_tokens > 0 && options_.batch_tokens <= options_.length)
    FailUsage("task.translation: batch_tokens=", options_.batch_tokens,
              " is less than a pair of length=", options_.length, " with its end");
  if (options_.batch_tokens > 0 && !options_.group_by_length)
    FailUsage(
        "task.translation: batches of batch_tokens are of pairs of about one length; leave "
        "out group_by_length=false");
  CheckTargets("valid", options_.valid, options_.valid_target);
  CheckTargets("test", options_.test, options_.test_target);
}

std::string TranslationTask::IdlePenalty() const {
  if (options_.beam > 1 || options_.length_penalty == Options().length_penalty) return "";
  return StrCat("task.length_penalty=", options_.length_penalty,
                " compares beams, and task.beam=1 has no others: it has no effect");
}

const Metric& TranslationTask::metric() const {
  return FindMetric(translation_task(), options_.metric);
}

TableOptions TranslationTask::table_options() const {
  return {options_.header, options_.skip_bad_rows};
}

PairFiles TranslationTask::Files(const std::string& source, const std::string& target) const {
  return {source, target, options_.source_column, options_.target_column};
}

std::vector<SentencePair> TranslationTask::ReadPairs(const PairFiles& files, const char* what) {
  const auto source = OpenPairs(files, table_options(), true);
  ProgressBar bar({source->total(), what, "bytes"});
  std::vector<SentencePair> pairs;
  for (SentencePair pair; source->Next(&pair);) {
    bar.Update(source->done());
    if (pair.source.empty() || pair.target.empty()) {
      ++empty_;
    } else {
      pairs.push_back(std::move(pair));
    }
  }
  skipped_ += source->skipped();
  CISTERN_CHECK(!pairs.empty(), files.source, " has no pairs");
  return pairs;
}

void TranslationTask::LearnTokenizer(const std::vector<SentencePair>& train) {
  if (options_.tokenizer == TokenizerKind::kBytes) {
    tokenizer_ = MakeByteTokenizer();
    return;
  }
  ProgressBar bar({0, "learn BPE", "merges"});
  size_t next = 0;
  tokenizer_ = TrainBpe(
      [&]() -> std::string_view {
        if (next == 2 * train.size()) return {};
        const SentencePair& pair = train[next / 2];
        return next++ % 2 == 0 ? pair.source : pair.target;
      },
      options_.vocab_size, [&](int64_t done, int64_t) { bar.Update(done); }, TextPieces::kTexts);
}

std::vector<int32_t> TranslationTask::Examples::Side(int64_t row, int side) const {
  const auto i = size_t(2 * row + side);
  return {tokens.begin() + offsets[i], tokens.begin() + offsets[i + 1]};
}

int64_t TranslationTask::Examples::Length(int64_t row, int side) const {
  const auto i = size_t(2 * row + side);
  return offsets[i + 1] - offsets[i];
}

TranslationTask::Examples TranslationTask::Encoded(const std::vector<SentencePair>& pairs) const {
  Examples out;
  for (const SentencePair& pair : pairs) {
    for (const std::string* side : {&pair.source, &pair.target}) {
      const std::vector<int32_t> ids = tokenizer_->Encode(*side);
      out.tokens.insert(out.tokens.end(), ids.begin(), ids.end());
      out.offsets.push_back(int64_t(out.tokens.size()));
    }
    out.lines.push_back(pair.line);
  }
  return out;
}

TranslationTask::Examples TranslationTask::WithoutLong(const Examples& all) {
  Examples kept;
  for (int64_t row = 0; row < all.size(); ++row) {
    if (std::max(all.Length(row, 0), all.Length(row, 1)) > options_.length) {
      ++too_long_;
      continue;
    }
    for (const int side : {0, 1}) {
      const std::vector<int32_t> ids = all.Side(row, side);
      kept.tokens.insert(kept.tokens.end(), ids.begin(), ids.end());
      kept.offsets.push_back(int64_t(kept.tokens.size()));
    }
    kept.lines.push_back(all.lines[size_t(row)]);
  }
  return kept;
}

void TranslationTask::RefuseIdleKeys() const {
  const std::string task = "task.translation";
  RefuseIdleShares(task, options_);
  RefuseIdleVocabulary("translation", options_);
  bool tables = false, headers = false;
  for (const auto& [source, target] : {std::pair{&options_.data, &options_.target},
                                       {&options_.valid, &options_.valid_target},
                                       {&options_.test, &options_.test_target}}) {
    tables = tables || (!source->empty() && target->empty());
    headers = headers || (target->empty() && MayHaveHeader(*source));
  }
  const std::string lines = options_.data + ", whose lines are the sources";
  RefuseIdle(!tables && !options_.source_column.empty(), task + ".source_column", lines);
  RefuseIdle(!tables && !options_.target_column.empty(), task + ".target_column", lines);
  RefuseIdle(!headers && options_.header != Options().header, task + ".header",
             options_.data + ", which is no table of .tsv or .csv");
}

void TranslationTask::Prepare() {
  if (options_.data.empty())
    FailUsage(
        "task.translation.data is empty: name a table of pairs, or a text of sources and with "
        "task.target the text of their targets");
  if (!loaded_) RefuseIdleKeys();
  skipped_ = empty_ = too_long_ = 0;
  const std::vector<SentencePair> all =
      ReadPairs(Files(options_.data, options_.target), "read data");
  std::vector<SentencePair> train, valid, test;
  if (!options_.valid.empty())
    valid = ReadPairs(Files(options_.valid, options_.valid_target), "read validation data");
  if (!options_.test.empty())
    test = ReadPairs(Files(options_.test, options_.test_target), "read test data");
  const double valid_share = options_.valid.empty() ? options_.valid_share : 0,
               test_share = options_.test.empty() ? options_.test_share : 0;
  for (const SentencePair& pair : all) {
    // Equal sources with different targets are common: together, so that none is known beforehand.
    const double place =
        double(XxHash64(pair.source, uint64_t(options_.split_seed))) * std::exp2(-64);
    (place < valid_share ? valid : place < valid_share + test_share ? test : train).push_back(pair);
  }
  if (!tokenizer_) LearnTokenizer(train);
  token_bytes_ = TokenBytes(*tokenizer_);
  token_bytes_.push_back(0);
  train_ = WithoutLong(Encoded(train));
  valid_ = Encoded(valid), test_ = Encoded(test);
  CISTERN_CHECK(train_.size() > 0, options_.data,
                ": no pair of at most task.length=", options_.length,
                " tokens a side is left for training");
  for (const Split split : {Split::kValid, Split::kTest}) {
    CISTERN_CHECK(Set(split).size() > 0, options_.data, ": no pairs are left for the ",
                  SplitName(split), " split; more pairs, or a larger task.", SplitName(split),
                  "_share, are needed");
  }
  std::vector<double> counts(token_bytes_.size(), 1);
  std::vector<int64_t> lengths, longer_sides;
  for (int64_t row = 0; row < train_.size(); ++row) {
    for (const int32_t id : train_.Side(row, 1)) ++counts[size_t(id)];
    ++counts[size_t(end())];
    const int64_t source = train_.Length(row, 0), target = train_.Length(row, 1);
    lengths.push_back(source + target);
    longer_sides.push_back(std::max(source, target) + 1);
  }
  longest_ = *std::max_element(lengths.begin(), lengths.end()) + 2;
  const double total = std::accumulate(counts.begin(), counts.end(), 0.0);
  unigram_nats_.clear();
  for (const double n : counts) unigram_nats_.push_back(-std::log(n / total));
  notes_.clear();
  if (const std::string idle = IdlePenalty(); !loaded_ && !idle.empty()) notes_.push_back(idle);
  if (too_long_ > 0)
    notes_.push_back(StrCat(too_long_, " training pairs with more than task.length=",
                            options_.length, " tokens on a side were left out"));
  if (empty_ > 0) notes_.push_back(StrCat(empty_, " pairs with an empty side were left out"));
  if (skipped_ > 0) notes_.push_back(StrCat(skipped_, " rows could not be read and were skipped"));
  const bool short_targets = std::none_of(valid.begin(), valid.end(), [](const SentencePair& p) {
    return Mteval13aTokens(p.target).size() >= BleuSums::kOrder;
  });
  if (options_.metric == "bleu" && short_targets)
    notes_.push_back(
        "BLEU is 0 for targets of fewer than four words, as all of the validation are: "
        "task.metric=exact_match or chrf tells models apart");
  if (options_.batch_tokens > 0) {
    token_batches_ = std::make_unique<TokenBatches>(std::move(longer_sides), options_.batch_tokens);
  } else {
    order_ = options_.group_by_length ? std::make_unique<ShuffledOrder>(std::move(lengths))
                                      : std::make_unique<ShuffledOrder>(train_.size());
  }
}

const TranslationTask::Examples& TranslationTask::Set(Split split) const {
  return split == Split::kTrain ? train_ : split == Split::kValid ? valid_ : test_;
}

Json TranslationTask::DataSummary() const {
  uint64_t hash = 0;
  for (const Examples* e : {&train_, &valid_, &test_}) {
    const auto bytes = [](const auto& x) {
      return std::string_view(reinterpret_cast<const char*>(x.data()), x.size() * sizeof(x[0]));
    };
    hash = XxHash64(bytes(e->tokens), hash);
    hash = XxHash64(bytes(e->offsets), hash);
  }
  return {{"data", options_.data},    {"xxh64", HexText(hash)},    {"train", train_.size()},
          {"valid", valid_.size()},   {"test", test_.size()},      {"left_out", too_long_ + empty_},
          {"skipped_rows", skipped_}, {"ids", IdsOf(*tokenizer_)}, {"notes", notes_}};
}

void TranslationTask::SaveAssets(const std::string& folder) const {
  tokenizer_->Save(folder + "/tokenizer.json");
}

void TranslationTask::LoadAssets(const std::string& folder) {
  loaded_ = true;
  if (const std::string idle = IdlePenalty(); !idle.empty()) Note(idle);
  tokenizer_ = LoadTokenizer(folder + "/tokenizer.json");
  token_bytes_ = TokenBytes(*tokenizer_);
  token_bytes_.push_back(0);
}

bool TranslationTask::TakeTokenizer(std::shared_ptr<const Tokenizer> tokenizer) {
  RefuseTakenWords("translation", tokenizer->kind());
  tokenizer_ = std::move(tokenizer);
  return true;
}

void TranslationTask::Complete(ModelConfig& config) const {
  config.vocab_size = int64_t(token_bytes_.size());
  config.max_length = std::max(config.max_length, tokens_per_sequence());
  // Measurements leave out no pair.
  const auto reach = [&](const Examples& set, const std::string& file, int side) {
    int64_t longest = 0;
    for (int64_t row = 1; row < set.size(); ++row) {
      if (set.Length(row, side) > set.Length(longest, side)) longest = row;
    }
    if (set.size() == 0) return;  // not prepared
    config.Reach(side == 0 ? Form::kBidirectional : Form::kCausal, set.Length(longest, side) + 1,
                 StrCat("the ", side == 0 ? "source" : "target", " of the pair at ",
                        file.empty() ? options_.data : file, ":", set.lines[size_t(longest)]));
  };
  for (const int side : {0, 1}) {
    reach(valid_, options_.valid, side);
    reach(test_, options_.test, side);
  }
  CheckPadding(config);
}

Batch TranslationTask::MakeBatch(const Examples& set, const std::vector<int64_t>& rows) const {
  std::vector<std::vector<int32_t>> sources, inputs;
  std::vector<int64_t> lines;
  int64_t longest = 0;
  for (const int64_t row : rows) {
    sources.push_back(set.Side(row, 0));
    sources.back().push_back(end());
    inputs.push_back(set.Side(row, 1));
    inputs.back().insert(inputs.back().begin(), end());
    longest = std::max(longest, int64_t(inputs.back().size()));
    lines.push_back(set.lines[size_t(row)]);
  }
  const auto ids = [](const std::vector<std::vector<int32_t>>& of) {
    Batch batch;
    AddIds(std::vector<std::span<const int32_t>>(of.begin(), of.end()), RowPadding(), &batch);
    return batch;
  };
  const Batch source = ids(sources);
  Batch batch = ids(inputs);
  batch.tokens += source.tokens;
  batch.Add("source", source["ids"]);
  batch.Add("source_lengths", source["lengths"]);
  const at::Tensor targets = at::full({batch.rows, longest}, -100, at::kLong);
  int64_t* to = targets.mutable_data_ptr<int64_t>();
  for (const std::vector<int32_t>& row : inputs) {
    std::copy(row.begin() + 1, row.end(), to);
    to[row.size() - 1] = end();
    to += longest;
  }
  batch.Add("targets", targets);
  AddNumbers("lines", lines, &batch);
  batch.padded = {{"ids", "lengths"}, {"targets", "lengths"}, {"source", "source_lengths"}};
  return batch;
}

Batch TranslationTask::TrainBatch(uint64_t seed, int64_t step, int64_t rows) const {
  return MakeBatch(train_, token_batches_ ? token_batches_->At(seed, step)
                                          : PickRows(*order_, seed, step, rows));
}

int64_t TranslationTask::rows_of_batch(int64_t rows) const {
  const int64_t tokens = options_.batch_tokens;
  return tokens > 0 ? std::max<int64_t>(1, tokens / tokens_per_sequence()) : rows;
}

std::unique_ptr<BatchReader> TranslationTask::Read(Split split, const ReadOptions& options) const {
  const Examples& set = Set(split);
  return ReadInOrder(set.size(), options, 64, [this, &set](const std::vector<int64_t>& rows) {
    return MakeBatch(set, rows);
  });
}

// Pairs of a file, a batch at a time; unlabelled ones have empty targets.
class TranslationTask::FileReader : public BatchReader {
 public:
  FileReader(const TranslationTask& task, const PairFiles& files, bool labelled, int64_t rows)
      : task_(task),
        path_(files.source),
        pairs_(OpenPairs(files, task.table_options(), labelled)),
        labelled_(labelled),
        rows_(rows > 0 ? rows : 64) {}
  std::optional<Batch> Next() override {
    std::vector<SentencePair> pairs;
    for (SentencePair pair; int64_t(pairs.size()) < rows_ && pairs_->Next(&pair);) {
      if (labelled_ && (pair.source.empty() || pair.target.empty())) {  // as training leaves out
        CISTERN_CHECK(task_.options_.skip_bad_rows, path_, ":", pair.line, ": the ",
                      pair.target.empty() ? "target" : "source", " is empty");
        ++empty_;
        continue;
      }
      pairs.push_back(std::move(pair));
    }
    if (pairs.empty()) return std::nullopt;
    std::vector<int64_t> all(pairs.size());
    std::iota(all.begin(), all.end(), 0);
    return task_.MakeBatch(task_.Encoded(pairs), all);
  }
  int64_t total() const override { return pairs_->total(); }
  int64_t done() const override { return pairs_->done(); }
  const char* unit() const override { return "bytes"; }
  int64_t skipped() const override { return pairs_->skipped() + empty_; }

 private:
  const TranslationTask& task_;
  std::string path_;
  std::unique_ptr<PairSource> pairs_;
  bool labelled_;
  int64_t rows_, empty_ = 0;
};

std::unique_ptr<BatchReader> TranslationTask::ReadFile(const std::string& path, bool labelled,
                                                       const ReadOptions& options) const {
  return std::make_unique<FileReader>(*this, Files(path, ""), labelled, options.rows);
}

}  // namespace cistern
