#include "cistern/tasks/question_answering_task.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/base/format.h"
#include "cistern/base/hash.h"
#include "cistern/base/progress.h"
#include "cistern/io/checked_json.h"
#include "cistern/tasks/idle_keys.h"
#include "cistern/tasks/row_batch.h"
#include "cistern/tasks/token_ids.h"

namespace cistern {
namespace {

constexpr char kQuestions[] = "/questions.json";
constexpr int64_t kBatch = 8;  // questions that are measured at a time, each with its windows
constexpr std::string_view kSeparator = "\x1e";  // in no text, in every tokenizer

}  // namespace

Fields QuestionAnsweringTask::Describe(Options& o) {
  Fields f;
  f.Add("data", &o.data,
        "questions on texts whose answers are spans of them: SQuAD's JSON (1.1 or 2.0), or a table "
        "(.tsv, .csv, .jsonl) of texts, questions and answers; each also .gz or .xz");
  f.Add("valid", &o.valid, "the same for validation; empty: a share of data");
  f.Add("test", &o.test, "the same for the test; empty: a share of data");
  f.Add("context_column", &o.context_column, "of a table: the text");
  f.Add("question_column", &o.question_column, "of a table");
  f.Add("answer_column", &o.answer_column,
        "of a table: a span of the text, empty where it has no answer (a column answer_start says "
        "at which character; else where it stands first)");
  f.Add("header", &o.header, "the first line of a .tsv or .csv, which names the columns",
        TableHeaders());
  f.Add("tokenizer", &o.tokenizer, "byte-level BPE learned from texts and questions, or bytes",
        TokenizerKinds());
  f.Add("vocab_size", &o.vocab_size, "tokens that BPE learns", {256, 1 << 20});
  f.Add("length", &o.length, "tokens of a row: a question and a window of its text", {8, 1 << 24});
  f.Add("stride", &o.stride, "tokens from one window of a long text to the next", {1, 1 << 24});
  f.Add("question_length", &o.question_length, "tokens of a question; what is longer is cut",
        {1, 1 << 20});
  f.Add("answer_length", &o.answer_length, "most tokens of a predicted answer", {1, 1 << 20});
  f.Add("n_best", &o.n_best, "candidates that a prediction lists", {1, 1000});
  f.Add(
      "no_answer_threshold", &o.no_answer_threshold,
      "where training had questions without an answer: none is given where its score is above the "
      "best span's by more than this",
      {-1e9, 1e9});
  f.Add("group_by_length", &o.group_by_length,
        "training batches of windows of about one length: less padding, so faster");
  f.Add("skip_bad_rows", &o.skip_bad_rows,
        "pass over questions that cannot be read, and count them, instead of stopping");
  f.Add("metric", &o.metric, "that decides which model is best", {"f1", "exact_match"});
  f.Add("valid_share", &o.valid_share, "of the texts, where valid is empty", {0.0001, 0.9});
  f.Add("test_share", &o.test_share, "of the texts, where test is empty", {0.0001, 0.9});
  f.Add("split_seed", &o.split_seed, "of the split, which keeps all questions on a text together",
        {0, int64_t{1} << 62});
  return f;
}

const TaskInfo& question_answering_task() {
  static const TaskInfo info = [] {
    TaskInfo t;
    t.name = "question_answering";
    t.summary = "which span of a text answers a question (SQuAD)";
    t.models = {"span_predictor"};
    t.metrics = {{"f1", "F1, %", "of the answers' words, as SQuAD has it; higher is better"},
                 {"exact_match", "exact match, %", "of the answers; higher is better"}};
    t.data = "data";
    t.claims = IsSquadFile;
    t.of_use = {"answer_length",  "n_best",          "no_answer_threshold",
                "context_column", "question_column", "answer_column",
                "header"};
    t.defaults = {"model.dim=128",           "model.layers=2",
                  "model.heads=4",           "model.attention=window:2+latte:2",
                  "model.positions=rotary",  "model.init_std=0.0884",
                  "model.embedding_std=0.1", "model.dropout=0.1",
                  "train.batch=16",          "train.optimizer=muon",
                  "train.weight_decay=0.1",  "train.schedule=linear",
                  "train.lr=7e-3",           "train.eval_tokens=400000",
                  "train.seconds=300"};
    t.mechanisms = {"softmax", "window:2+latte:2", "window:2+abc_mlp:2"};
    BindTask<QuestionAnsweringTask>(t);
    return t;
  }();
  return info;
}

QuestionAnsweringTask::QuestionAnsweringTask(const Options& options, const std::string&)
    : options_(options) {
  RefuseWords("question_answering", options_.tokenizer);
  if (options_.valid_share + options_.test_share >= 1)
    FailUsage("task.question_answering: valid_share + test_share leave nothing to train on");
  const int64_t room = options_.length - options_.question_length - 2;
  if (room < options_.stride)
    FailUsage("task.question_answering: length=", options_.length, " leaves a window of ",
              std::max<int64_t>(room, 0),
              " tokens beside question_length=", options_.question_length,
              " and two separators, so that stride=", options_.stride,
              " would pass over some of a text; lower question_length or stride");
}

const Metric& QuestionAnsweringTask::metric() const {
  return FindMetric(question_answering_task(), options_.metric);
}

TableOptions QuestionAnsweringTask::table_options() const {
  return {options_.header, options_.skip_bad_rows};
}

QuestionSet QuestionAnsweringTask::ReadSet(const std::string& path, bool labelled) const {
  return ReadQuestions(path,
                       {options_.context_column, options_.question_column, options_.answer_column},
                       table_options(), labelled);
}

void QuestionAnsweringTask::LearnTokenizer(const QuestionSet& train) {
  if (options_.tokenizer == TokenizerKind::kBytes) {
    tokenizer_ = MakeByteTokenizer();
    return;
  }
  ProgressBar bar({0, "learn BPE", "merges"});
  size_t next = 0;
  tokenizer_ = TrainBpe(
      [&]() -> std::string_view {
        const size_t i = next++;
        if (i < train.contexts.size()) return train.contexts[i];
        const size_t q = i - train.contexts.size();
        return q < train.questions.size() ? std::string_view(train.questions[q].text)
                                          : std::string_view();
      },
      options_.vocab_size, [&](int64_t done, int64_t) { bar.Update(done); }, TextPieces::kTexts);
}

namespace {

// Questions apart by their texts: training, validation, test.
std::vector<QuestionSet> Parts(QuestionSet all, double valid, double test, uint64_t seed) {
  std::vector<QuestionSet> parts(3);
  std::vector<size_t> part, number;
  for (std::string& text : all.contexts) {
    const double place = double(XxHash64(text, seed)) * std::exp2(-64);
    part.push_back(place < valid ? 1 : place < valid + test ? 2 : 0);
    QuestionSet& to = parts[part.back()];
    number.push_back(to.contexts.size());
    to.contexts.push_back(std::move(text));
  }
  for (Question& q : all.questions) {
    QuestionSet& to = parts[part[q.context]];
    q.context = number[q.context];
    to.questions.push_back(std::move(q));
  }
  return parts;
}

}  // namespace

void QuestionAnsweringTask::RefuseIdleKeys() const {
  const std::string task = "task.question_answering";
  RefuseIdleShares(task, options_);
  RefuseIdleVocabulary("question_answering", options_);
  bool tables = false, headers = false;
  for (const std::string* path : {&options_.data, &options_.valid, &options_.test}) {
    tables = tables || !(path->empty() || IsSquadFile(*path));
    headers = headers || MayHaveHeader(*path);
  }
  const Options unset;
  const std::string squad = options_.data + ", which is SQuAD's JSON";
  RefuseIdle(!tables && options_.context_column != unset.context_column, task + ".context_column",
             squad);
  RefuseIdle(!tables && options_.question_column != unset.question_column,
             task + ".question_column", squad);
  RefuseIdle(!tables && options_.answer_column != unset.answer_column, task + ".answer_column",
             squad);
  RefuseIdle(!headers && options_.header != unset.header, task + ".header",
             options_.data + ", which is no table of .tsv or .csv");
}

void QuestionAnsweringTask::Prepare() {
  if (options_.data.empty())
    FailUsage(
        "task.question_answering.data is empty: name SQuAD's JSON or a table with the columns "
        "context, question and answers");
  if (!loaded_) RefuseIdleKeys();
  QuestionSet all = ReadSet(options_.data, true), valid, test;
  if (!options_.valid.empty()) valid = ReadSet(options_.valid, true);
  if (!options_.test.empty()) test = ReadSet(options_.test, true);
  const int64_t moved = all.moved + valid.moved + test.moved,
                skipped = all.skipped + valid.skipped + test.skipped;
  std::vector<QuestionSet> parts =
      Parts(std::move(all), options_.valid.empty() ? options_.valid_share : 0,
            options_.test.empty() ? options_.test_share : 0, uint64_t(options_.split_seed));
  if (!tokenizer_) LearnTokenizer(parts[0]);
  train_ = Encoded(std::move(parts[0]));
  valid_ = Encoded(options_.valid.empty() ? std::move(parts[1]) : std::move(valid));
  test_ = Encoded(options_.test.empty() ? std::move(parts[2]) : std::move(test));
  for (const Split split : {Split::kTrain, Split::kValid, Split::kTest}) {
    CISTERN_CHECK(Set(split).size() > 0, options_.data, ": no questions are left for the ",
                  SplitName(split),
                  " split, which has whole texts; more texts, or other shares, are needed");
  }
  const auto& questions = train_.set.questions;
  no_answers_ = std::any_of(questions.begin(), questions.end(),
                            [](const Question& q) { return q.answers.empty(); });
  std::vector<int64_t> lengths;
  int64_t cut = 0, spans = 0;
  for (const Window& w : train_.windows) {
    lengths.push_back(int64_t(train_.questions[w.question].size()) + w.count);
    spans += w.last > 0;
  }
  for (size_t q = 0; q < questions.size(); ++q)
    cut += int64_t(train_.questions[q].size()) == options_.question_length;
  CISTERN_CHECK(spans > 0, options_.data, ": no answer lies whole in a window of the text");
  order_ = options_.group_by_length ? std::make_unique<ShuffledOrder>(std::move(lengths))
                                    : std::make_unique<ShuffledOrder>(train_rows());
  notes_.clear();
  if (moved > 0)
    notes_.push_back(StrCat(moved,
                            " answers lie elsewhere in their text than answer_start says; "
                            "the nearest place is used"));
  if (cut > 0)
    notes_.push_back(StrCat(cut, " training questions have task.question_length=",
                            options_.question_length, " tokens or more, and are cut there"));
  if (skipped > 0)
    notes_.push_back(StrCat(skipped, " questions could not be read, and were skipped"));
}

const QuestionAnsweringTask::Examples& QuestionAnsweringTask::Set(Split split) const {
  return split == Split::kTrain ? train_ : split == Split::kValid ? valid_ : test_;
}

Json QuestionAnsweringTask::DataSummary() const {
  // answers: what is measured, of which a window has the first one alone.
  uint64_t hash = 0, answers = 0;
  for (const Examples* e : {&train_, &valid_, &test_}) {
    for (const Question& q : e->set.questions) {
      answers = XxHash64(std::to_string(q.answers.size()), answers);
      for (const Answer& a : q.answers) answers = XxHash64(a.text, answers);
    }
    for (const auto* texts : {&e->contexts, &e->questions}) {
      for (const std::vector<int32_t>& t : *texts) {
        hash = XxHash64({reinterpret_cast<const char*>(t.data()), t.size() * sizeof(t[0])}, hash);
      }
    }
    for (const Window& w : e->windows) hash = XxHash64(StrCat(w.first, " ", w.last), hash);
  }
  return {{"data", options_.data},
          {"xxh64", HexText(hash)},
          {"xxh64_exact", HexText(XxHash64(std::to_string(hash), answers))},
          {"train", train_.size()},
          {"valid", valid_.size()},
          {"test", test_.size()},
          {"train_windows", train_.windows.size()},
          {"without_answer", no_answers_},
          {"ids", IdsOf(*tokenizer_)},
          {"notes", notes_}};
}

void QuestionAnsweringTask::SaveAssets(const std::string& folder) const {
  tokenizer_->Save(folder + "/tokenizer.json");
  WriteCheckedJson(folder + kQuestions, {{"without_answer", no_answers_}});
}

void QuestionAnsweringTask::LoadAssets(const std::string& folder) {
  loaded_ = true;
  tokenizer_ = LoadTokenizer(folder + "/tokenizer.json");
  const Json json = ReadCheckedJson(folder + kQuestions, "predictions may be others");
  CISTERN_CHECK(json.contains("without_answer") && json["without_answer"].is_boolean(),
                folder + kQuestions, ": expected {\"without_answer\": true or false}");
  no_answers_ = json["without_answer"].get<bool>();
}

bool QuestionAnsweringTask::TakeTokenizer(std::shared_ptr<const Tokenizer> tokenizer) {
  RefuseTakenWords("question_answering", tokenizer->kind());
  tokenizer_ = std::move(tokenizer);
  return true;
}

void QuestionAnsweringTask::Complete(ModelConfig& config) const {
  config.vocab_size = tokenizer_->vocab_size();
  config.max_length = std::max(config.max_length, options_.length);
  CheckPadding(config);
}

// Windows begin every `stride` tokens until one reaches the end of the text.
void QuestionAnsweringTask::AddWindows(size_t question, Examples* out) const {
  const Question& q = out->set.questions[question];
  const std::vector<int32_t>& text = out->contexts[q.context];
  const int64_t before = 2 + int64_t(out->questions[question].size()),
                room = options_.length - before, length = int64_t(text.size());
  int64_t first = -1, last = -1;  // of the answer, in tokens of the text
  if (!q.answers.empty()) {
    const int64_t begin = q.answers[0].begin, end = begin + int64_t(q.answers[0].text.size());
    int64_t at = 0;
    for (int64_t t = 0; t < length && at < end; ++t) {
      at += int64_t(tokenizer_->Bytes(text[size_t(t)]).size());
      if (first < 0 && at > begin) first = t;
      last = t;
    }
  }
  for (int64_t begin = 0;; begin += options_.stride) {
    const int64_t count = std::min(room, length - begin);
    const bool inside = first >= begin && last < begin + count;
    out->windows.push_back({question, begin, count, inside ? before + first - begin : 0,
                            inside ? before + last - begin : 0});
    if (begin + count >= length) break;
  }
  out->windows_of.push_back(out->windows.size());
}

QuestionAnsweringTask::Examples QuestionAnsweringTask::Encoded(QuestionSet set) const {
  Examples out;
  out.set = std::move(set);
  for (const std::string& text : out.set.contexts) out.contexts.push_back(tokenizer_->Encode(text));
  for (size_t q = 0; q < out.set.questions.size(); ++q) {
    std::vector<int32_t>& ids =
        out.questions.emplace_back(tokenizer_->Encode(out.set.questions[q].text));
    ids.resize(std::min(ids.size(), size_t(options_.question_length)));
    AddWindows(q, &out);
  }
  return out;
}

Batch QuestionAnsweringTask::MakeBatch(const Examples& set,
                                       const std::vector<int64_t>& windows) const {
  const std::vector<int32_t> separator = tokenizer_->Encode(kSeparator);
  CISTERN_CHECK(separator.size() == 1,
                "[question_answering] the tokenizer has no id for the byte "
                "0x1e, which parts a question from its text");
  std::vector<std::vector<int32_t>> rows;
  std::vector<int64_t> targets;
  for (const int64_t i : windows) {
    const Window& w = set.windows[size_t(i)];
    const std::vector<int32_t>&question = set.questions[w.question],
          &text = set.contexts[set.set.questions[w.question].context];
    std::vector<int32_t>& row = rows.emplace_back(separator);
    row.insert(row.end(), question.begin(), question.end());
    row.push_back(separator[0]);
    row.insert(row.end(), text.begin() + w.begin, text.begin() + w.begin + w.count);
    targets.insert(targets.end(), {w.first, w.last});
  }
  Batch batch;
  AddIds(std::vector<std::span<const int32_t>>(rows.begin(), rows.end()), RowPadding(), &batch);
  batch.Add("targets", at::tensor(targets, at::kLong).view({-1, 2}));
  return batch;
}

Batch QuestionAnsweringTask::TrainBatch(uint64_t seed, int64_t step, int64_t rows) const {
  return MakeBatch(train_, PickRows(*order_, seed, step, rows));
}

at::Tensor QuestionAnsweringTask::Loss(Model& model, const Batch& batch,
                                       double label_smoothing) const {
  return model.TrainingLoss(model.ReadOf(batch.tensors), label_smoothing);
}

std::unique_ptr<BatchReader> QuestionAnsweringTask::Read(Split split,
                                                         const ReadOptions& options) const {
  const Examples& set = Set(split);
  return ReadInOrder(set.size(), options, kBatch,
                     [this, &set](const std::vector<int64_t>& questions) {
                       return QuestionBatch(set, questions);
                     });
}

std::unique_ptr<BatchReader> QuestionAnsweringTask::ReadFile(const std::string& path, bool labelled,
                                                             const ReadOptions& options) const {
  const auto set = std::make_shared<const Examples>(Encoded(ReadSet(path, labelled)));
  return ReadInOrder(
      set->size(), options, kBatch,
      [this, set](const std::vector<int64_t>& questions) { return QuestionBatch(*set, questions); },
      set->set.skipped);
}

}  // namespace cistern
