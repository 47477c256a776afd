#include "cistern/tasks/classify_task.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <map>
#include <numeric>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/base/progress.h"
#include "cistern/base/terminal.h"
#include "cistern/io/checked_json.h"
#include "cistern/tasks/idle_keys.h"
#include "cistern/tasks/token_ids.h"

namespace cistern {
namespace {

constexpr char kAssets[] = "/classify.json";

std::vector<Metric> ClassMetrics() {
  return {{"accuracy", "accuracy, %", "of the rows, in percent; higher is better"},
          {"macro_f1", "macro F1, %",
           "mean F1 of the classes that occur or are predicted, in percent; higher is better"},
          {"matthews", "Matthews", "Matthews' correlation coefficient, -1 to 1; higher is better"},
          {"log_loss", "log loss", "nats of the right class; lower is better", true},
          RmseMetric()};
}

}  // namespace

Fields ClassifyTask::Describe(Options& o) {
  Fields f;
  f.Add("data", &o.data,
        "a table (.tsv, .csv, .jsonl, each also .gz or .xz), a folder with a folder for each "
        "class, or a folder with two such folders, train and test (aclImdb)");
  f.Add("valid", &o.valid, "the same for validation; empty: a share of data");
  f.Add("test", &o.test, "the same for the test; empty: a share of data");
  f.Add("text_column", &o.text_column, "empty: the column with the longest cells");
  f.Add("second_column", &o.second_column,
        "a second text of each row, beside text_column: the model reads both, with a separator "
        "between them (whether a sentence follows from another, or two ask the same)");
  f.Add("label_column", &o.label_column,
        "empty: the column named label, class, target or category, or the only one left");
  f.Add("header", &o.header,
        "the first line of a table: auto takes it for a header unless it holds a number",
        TableHeaders());
  f.Add("input", &o.input,
        "text, or numbers: all other columns, one token for the quantile bin of each",
        {{Input::kText, "text"}, {Input::kNumbers, "numbers"}});
  f.Add("tokenizer", &o.tokenizer, "of text: bytes, or byte-level BPE learned from it",
        TokenizerKinds());
  f.Add("byte_ids", &o.byte_ids,
        "of tokenizer=bytes: plain, a byte's value; shifted, one more, and 0 for padding alone, as "
        "in Long Range Arena's Text",
        {{ByteIds::kPlain, "plain"}, {ByteIds::kShifted, "shifted"}});
  f.Add("vocab_size", &o.vocab_size, "tokens that BPE learns", {256, 1 << 20});
  f.Add("length", &o.length, "tokens of a row; what is longer is cut at the end", {1, 1 << 24});
  f.Add("pad_to", &o.pad_to,
        StrCat(kPadToHelp, "; the padding of `length` has a token id of its own"), PadTos());
  f.Add("bins", &o.bins, "of numbers: quantile bins of each column", {2, 4096});
  f.Add("regression", &o.regression, "the label is a number to be predicted, not a class");
  f.Add("group_by_length", &o.group_by_length,
        "training batches of rows of about one length: less padding, so faster");
  f.Add("skip_bad_rows", &o.skip_bad_rows,
        "pass over rows that cannot be read, and count them, instead of stopping");
  f.Add("class_weights", &o.class_weights,
        "balanced: the loss of a class is divided by its share of the training data",
        {{ClassWeights::kNone, "none"}, {ClassWeights::kBalanced, "balanced"}});
  f.Add("metric", &o.metric, "that decides which model is best (regression: always rmse)",
        {"accuracy", "macro_f1", "matthews", "log_loss"});
  f.Add("valid_from", &o.valid_from,
        "where valid is empty, validation on a share of data, or on the test data themselves, as "
        "Long Range Arena's Text has it: they then choose the best model, and are no honest test",
        {{ValidFrom::kShare, "share"}, {ValidFrom::kTest, "test"}});
  f.Add("valid_share", &o.valid_share, "of the data, where valid is empty", {0.001, 0.9});
  f.Add("test_share", &o.test_share, "of the data, where test is empty", {0.001, 0.9});
  f.Add("split_seed", &o.split_seed, "of the split, which keeps the shares of the classes",
        {0, int64_t{1} << 62});
  return f;
}

const TaskInfo& classify_task() {
  static const TaskInfo info = [] {
    TaskInfo t;
    t.name = "classify";
    t.summary = "your own data: a class, or a number, for each text or row of numbers";
    t.models = {"encoder_classifier"};
    t.metrics = ClassMetrics();
    t.data = "data";
    t.claims = IsRows;
    t.defaults = {"model.dim=64",         "model.layers=2",
                  "model.heads=4",        "model.positions=sinusoidal",
                  "model.init_std=0.125", "model.embedding_std=0.5",
                  "model.dropout=0.1",    "model.head=gelu",
                  "task.tokenizer=bpe",   "task.length=512",
                  "train.batch=16",       "train.lr=2e-3",
                  "train.seconds=180",    "train.weight_decay=0.05"};
    t.of_use = {"header"};
    BindTask<ClassifyTask>(t);
    return t;
  }();
  return info;
}

ClassifyTask::ClassifyTask(const Options& options, const std::string&) : options_(options) {
  RefuseWords("classify", options_.tokenizer);
  const Options unset;
  if (options_.valid_share + options_.test_share >= 1)
    FailUsage("task.classify: valid_share + test_share leave nothing to train on");
  if (options_.byte_ids == ByteIds::kShifted &&
      (options_.input != Input::kText || options_.tokenizer != TokenizerKind::kBytes))
    FailUsage(
        "task.classify: byte_ids=shifted is for texts in bytes; take input=text and "
        "tokenizer=bytes, or byte_ids=plain");
  if (!options_.second_column.empty()) {
    if (options_.input != Input::kText)
      FailUsage("task.classify: second_column is of texts; input=numbers reads all columns");
    if (options_.text_column.empty() || options_.text_column == options_.second_column)
      FailUsage("task.classify: second_column=", options_.second_column,
                " is of pairs of texts; name the other text's column too: text_column");
    for (const std::string* data : {&options_.data, &options_.valid, &options_.test}) {
      if (IsClassFolder(*data))
        FailUsage("task.classify: second_column is of tables, and ", *data,
                  " is a folder, whose files hold one text each");
    }
  }
  const bool texts = options_.input == Input::kText;
  if (options_.regression && options_.class_weights != ClassWeights::kNone)
    FailUsage("task.classify: class_weights=balanced is of classes; leave it out with regression");
  if (options_.bins != unset.bins && texts)
    FailUsage("task.classify: bins=", options_.bins, " is of input=numbers; leave it out");
  if (options_.vocab_size != unset.vocab_size &&
      !(texts && options_.tokenizer == TokenizerKind::kBpe))
    FailUsage("task.classify: vocab_size=", options_.vocab_size,
              " is of texts in BPE; leave it out, or take input=text and tokenizer=bpe");
  if (options_.valid_from == ValidFrom::kTest &&
      (!options_.valid.empty() || options_.valid_share != unset.valid_share))
    FailUsage(
        "task.classify: valid_from=test validates on the test data; omit valid and "
        "valid_share");
  if (!IsTrainTestFolder(options_.data)) return;
  if (!options_.test.empty())
    FailUsage("task.classify: ", options_.data, " has a test part of its own; omit test, or name ",
              options_.data, "/train as the data");
  options_.test = options_.data + "/test";
  options_.data += "/train";
}

const Metric& ClassifyTask::metric() const {
  return FindMetric(classify_task(), options_.regression ? "rmse" : options_.metric);
}

TableOptions ClassifyTask::table_options() const {
  return {options_.header, options_.skip_bad_rows};
}

std::vector<LabelledRow> ClassifyTask::ReadRows(const std::string& path, const char* what) {
  const auto source = OpenRows(path, columns_, table_options(), true);
  ProgressBar bar({source->total(), what, "bytes"});
  std::vector<LabelledRow> rows;
  for (LabelledRow row; NextRow(*source, path, true, &row, &skipped_);) {
    rows.push_back(std::move(row));
    bar.Update(source->done());
  }
  skipped_ += source->skipped();
  folder_notes_.insert(folder_notes_.end(), source->notes().begin(), source->notes().end());
  CISTERN_CHECK(!rows.empty(), path, " has no rows");
  return rows;
}

namespace {

// A label without what a person overlooks: white space at its ends, capitals, how a number is
// written.
std::string Plain(const std::string& label) {
  const size_t begin = label.find_first_not_of(" \t\r\n"), end = label.find_last_not_of(" \t\r\n");
  std::string plain = begin == std::string::npos ? "" : label.substr(begin, end + 1 - begin);
  double value = 0;
  const auto [rest, error] = std::from_chars(plain.data(), plain.data() + plain.size(), value);
  if (error == std::errc() && rest == plain.data() + plain.size()) return StrCat(value + 0.0);
  for (char& c : plain) c = c >= 'A' && c <= 'Z' ? char(c - 'A' + 'a') : c;
  return plain;
}

// A note on the first two classes that look alike, or nothing.
std::string AlikeClasses(const std::vector<std::string>& classes) {
  std::map<std::string, std::string> seen;
  for (const std::string& name : classes) {
    const auto [other, fresh] = seen.emplace(Plain(name), name);
    if (!fresh)
      return StrCat("the labels '", other->second, "' and '", name,
                    "' are two classes; if they mean the same, write them alike");
  }
  return "";
}

}  // namespace

void ClassifyTask::LearnLabels(const std::vector<LabelledRow>& rows) {
  if (options_.regression) return;
  for (const LabelledRow& row : rows) {
    if (!IsUtf8(row.label))
      FailUsage(options_.data, ":", row.line,
                ": the label is not valid UTF-8: ", JsonLine(row.label),
                "; convert the file, for example with iconv -t UTF-8");
    classes_.push_back(row.label);
  }
  std::sort(classes_.begin(), classes_.end());
  classes_.erase(std::unique(classes_.begin(), classes_.end()), classes_.end());
  CISTERN_CHECK(classes_.size() >= 2, options_.data, ": every row has the label '", classes_[0],
                "'; at least two classes are needed");
  const bool numbers = std::all_of(classes_.begin(), classes_.end(), [](const std::string& c) {
    return c.find_first_not_of("0123456789.-+eE") == std::string::npos;
  });
  constexpr size_t kMostClasses = 1000;  // their confusion matrix has a million cells
  const size_t rows_of_each = rows.size() / classes_.size();
  CISTERN_CHECK(rows_of_each >= 2, options_.data, ": ", classes_.size(), " different labels in ",
                rows.size(), " rows; ",
                numbers ? "if they are numbers to be predicted: --set task.regression=true"
                        : "is this the label's column? --set task.label_column=...");
  CISTERN_CHECK(classes_.size() <= kMostClasses, options_.data, ": ", classes_.size(), " classes; ",
                kMostClasses, " at most");
  if (numbers) {
    std::sort(classes_.begin(), classes_.end(), [](const std::string& a, const std::string& b) {
      return std::strtod(a.c_str(), nullptr) < std::strtod(b.c_str(), nullptr);
    });
  }
}

namespace {

// Rows of each part: of every class (regression: of all) the same share, at least one where there
// are three rows or more.
std::vector<int> PartOfRows(const std::vector<LabelledRow>& rows, bool by_label, double valid,
                            double test, uint64_t seed) {
  std::vector<int> part(rows.size(), 0);
  std::vector<size_t> order(rows.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const ShuffledOrder shuffled{int64_t(rows.size())};
  for (size_t i = 0; i < order.size(); ++i) order[i] = size_t(shuffled.At(seed, int64_t(i), 1));
  if (by_label) {
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return rows[a].label < rows[b].label; });
  }
  for (size_t begin = 0; begin < order.size();) {
    size_t end = begin + 1;
    while (end < order.size() && (!by_label || rows[order[end]].label == rows[order[begin]].label))
      ++end;
    const size_t n = end - begin;
    const auto share = [&](double s) {
      return s <= 0 || n < 3 ? size_t{0} : std::max<size_t>(1, size_t(std::llround(s * double(n))));
    };
    const size_t v = share(valid), t = share(test);
    for (size_t i = 0; i < n; ++i) part[order[begin + i]] = i < v ? 1 : i < v + t ? 2 : 0;
    begin = end;
  }
  return part;
}

}  // namespace

RowColumns ClassifyTask::NamedColumns() const {
  RowColumns named = {options_.label_column, {}, options_.input == Input::kNumbers};
  for (const std::string& column : {options_.text_column, options_.second_column}) {
    if (!column.empty()) named.inputs.push_back(column);
  }
  return named;
}

void ClassifyTask::RefuseIdleKeys() const {
  RefuseIdleShares("task.classify", options_);
  RefuseIdle(options_.valid_from == ValidFrom::kTest && !options_.test.empty() &&
                 options_.split_seed != Options().split_seed,
             "task.classify.split_seed", "valid_from=test and test=" + options_.test);
  bool folders = true, headers = false;
  for (const std::string* path : {&options_.data, &options_.valid, &options_.test}) {
    folders = folders && (path->empty() || IsClassFolder(*path));
    headers = headers || MayHaveHeader(*path);
  }
  RefuseIdle(IsClassFolder(options_.data) && !options_.text_column.empty(),
             "task.classify.text_column", options_.data + ", whose files are the texts");
  RefuseIdle(folders && !options_.label_column.empty(), "task.classify.label_column",
             options_.data + ", whose folders are the labels");
  RefuseIdle(!headers && options_.header != Options().header, "task.classify.header",
             options_.data + ", which is no table of .tsv or .csv");
}

void ClassifyTask::Prepare() {
  if (options_.data.empty())
    FailUsage("task.classify.data is empty: name a table or a folder with a folder for each class");
  const bool learn = columns_.inputs.empty();  // not LoadAssets
  if (learn) {
    RefuseIdleKeys();
    columns_ = FindColumns(options_.data, NamedColumns(), table_options());
  }
  if (const int64_t count = int64_t(columns_.inputs.size());
      options_.input == Input::kNumbers && count > options_.length)
    FailUsage(options_.data, ": ", count, " columns of numbers, and task.length=", options_.length,
              " would leave out the last ", count - options_.length, "; --set task.length=", count);
  std::vector<LabelledRow> rows = ReadRows(options_.data, "read data"), valid, test;
  if (learn) LearnLabels(rows);
  if (!options_.valid.empty()) valid = ReadRows(options_.valid, "read validation data");
  if (!options_.test.empty()) test = ReadRows(options_.test, "read test data");
  const std::vector<int> part = PartOfRows(
      rows, !options_.regression,
      options_.valid.empty() && options_.valid_from == ValidFrom::kShare ? options_.valid_share : 0,
      options_.test.empty() ? options_.test_share : 0, uint64_t(options_.split_seed));
  std::vector<LabelledRow> train;
  for (size_t i = 0; i < rows.size(); ++i)
    (part[i] == 0 ? train : part[i] == 1 ? valid : test).push_back(std::move(rows[i]));
  if (options_.valid_from == ValidFrom::kTest) valid = test;
  if (learn) LearnInputs(train);
  train_ = Encoded(train, options_.data);
  valid_ = Encoded(valid, !options_.valid.empty() ? options_.valid
                          : options_.valid_from == ValidFrom::kTest && !options_.test.empty()
                              ? options_.test
                              : options_.data);
  test_ = Encoded(test, options_.test.empty() ? options_.data : options_.test);
  for (const Split split : {Split::kTrain, Split::kValid, Split::kTest}) {
    CISTERN_CHECK(Set(split).size() > 0, options_.data, ": no rows are left for the ",
                  SplitName(split), " split; more rows are needed");
  }
  if (learn && options_.regression) {
    scale_ = NumberScale::Of(train_.targets, options_.data);
  } else if (learn) {
    class_counts_.assign(classes_.size(), 0);
    for (const double y : train_.targets) ++class_counts_[size_t(y)];
    for (size_t c = 0; c < classes_.size(); ++c) {
      CISTERN_CHECK(class_counts_[c] > 0, options_.data, ": no row of the class '", classes_[c],
                    "' is left for training; it has too few");
    }
  }
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < train_.size(); ++i)
    lengths.push_back(train_.offsets[size_t(i) + 1] - train_.offsets[size_t(i)]);
  const int64_t cut = std::count(lengths.begin(), lengths.end(), options_.length);
  empty_ = std::count(lengths.begin(), lengths.end(), 0);
  notes_ = {
      StrCat("label: column ", columns_.label.empty() ? "of folders" : columns_.label, "; input: ",
             columns_.inputs.size() == 1 ? "column " + columns_.inputs[0]
             : tokenizer_ ? StrCat("columns ", columns_.inputs[0], " and ", columns_.inputs[1])
                          : StrCat(columns_.inputs.size(), " columns"))};
  if (tokenizer_ && cut > 0)
    notes_.push_back(StrCat(cut, " training rows reach task.length=", options_.length,
                            " tokens; what is longer was cut"));
  if (options_.valid_from == ValidFrom::kTest)
    notes_.push_back(
        "valid_from=test: the test rows choose the best model; its test is not honest");
  if (std::string alike = AlikeClasses(classes_); !alike.empty())
    notes_.push_back(std::move(alike));
  if (empty_ > 0) notes_.push_back(StrCat(empty_, " training rows have an empty text"));
  notes_.insert(notes_.end(), folder_notes_.begin(), folder_notes_.end());
  if (skipped_ > 0) notes_.push_back(StrCat(skipped_, " rows could not be read and were skipped"));
  order_ = options_.group_by_length ? std::make_unique<ShuffledOrder>(std::move(lengths))
                                    : std::make_unique<ShuffledOrder>(train_.size());
}

const ClassifyTask::Examples& ClassifyTask::Set(Split split) const {
  return split == Split::kTrain ? train_ : split == Split::kValid ? valid_ : test_;
}

Json ClassifyTask::DataSummary() const {
  Json counts = Json::object();
  for (size_t c = 0; c < classes_.size() && c < 100; ++c) counts[classes_[c]] = class_counts_[c];
  uint64_t hash = 0;
  for (const Examples* e : {&train_, &valid_, &test_}) {
    const auto bytes = [](const auto& x) {
      return std::string_view(reinterpret_cast<const char*>(x.data()), x.size() * sizeof(x[0]));
    };
    hash = XxHash64(bytes(e->tokens), hash);
    hash = XxHash64(bytes(e->offsets), hash);
    hash = XxHash64(bytes(e->targets), hash);
  }
  const std::string ids = !tokenizer_ ? "bins" : IdsOf(*tokenizer_) + (shift() > 0 ? "+1" : "");
  return {{"data", options_.data},    {"xxh64", HexText(hash)},
          {"train", train_.size()},   {"valid", valid_.size()},
          {"test", test_.size()},     {"classes", counts},
          {"skipped_rows", skipped_}, {"ids", ids},
          {"notes", notes_}};
}

void ClassifyTask::SaveAssets(const std::string& folder) const {
  const Json json = {{"label_column", columns_.label},
                     {"inputs", columns_.inputs},
                     {"classes", classes_},
                     {"class_counts", class_counts_},
                     {"mean", scale_.mean},
                     {"deviation", scale_.deviation},
                     {"edges", edges_}};
  WriteCheckedJson(folder + kAssets, json);
  if (tokenizer_) tokenizer_->Save(folder + "/tokenizer.json");
}

void ClassifyTask::LoadAssets(const std::string& folder) {
  const std::string path = folder + kAssets;
  const Json json = ReadCheckedJson(path, "predictions may be others");
  try {
    columns_.label = json.at("label_column").get<std::string>();
    columns_.inputs = json.at("inputs").get<std::vector<std::string>>();
    columns_.numbers = options_.input == Input::kNumbers;
    classes_ = json.at("classes").get<std::vector<std::string>>();
    class_counts_ = json.at("class_counts").get<std::vector<double>>();
    scale_.mean = json.at("mean").get<double>();
    scale_.deviation = json.at("deviation").get<double>();
    edges_ = json.at("edges").get<std::vector<std::vector<double>>>();
  } catch (const nlohmann::json::exception& e) {
    Fail(path, " is broken: ", e.what());
  }
  CISTERN_CHECK(
      !columns_.inputs.empty() && class_counts_.size() == classes_.size() &&
          (options_.input != Input::kNumbers || edges_.size() == columns_.inputs.size()) &&
          scale_.Good() && (options_.regression || classes_.size() >= 2),
      path, " is broken: its parts do not fit each other");
  if (options_.input == Input::kText) tokenizer_ = LoadTokenizer(folder + "/tokenizer.json");
}

bool ClassifyTask::TakeTokenizer(std::shared_ptr<const Tokenizer> tokenizer) {
  if (options_.input != Input::kText) return false;
  RefuseTakenWords("classify", tokenizer->kind());
  if (shift() > 0 && tokenizer->vocab_size() != MakeByteTokenizer()->vocab_size())
    FailUsage("task.classify: byte_ids=shifted is for bytes, and the other model's tokenizer has ",
              tokenizer->vocab_size(), " tokens; take byte_ids=plain");
  tokenizer_ = std::move(tokenizer);
  return true;
}

int64_t ClassifyTask::TokenIds() const {
  return tokenizer_ ? tokenizer_->vocab_size()
                    : int64_t(columns_.inputs.size()) * (options_.bins + 1);
}

void ClassifyTask::Complete(ModelConfig& config) const {
  // One more: byte ids are shifted, or the padding of `length` has an id of its own.
  config.vocab_size = TokenIds() + (shift() > 0 || options_.pad_to == PadTo::kLength ? 1 : 0);
  config.classes = options_.regression ? 1 : int64_t(classes_.size());
  config.max_length = std::max(config.max_length, options_.length);
  CheckPadding(config, options_.pad_to);
}

Batch ClassifyTask::MakeBatch(const Examples& set, const std::vector<int64_t>& rows) const {
  std::vector<std::span<const int32_t>> tokens;
  std::vector<int64_t> classes, lines;
  std::vector<double> values;
  for (const int64_t row : rows) {
    const size_t i = size_t(row);
    const int64_t begin = set.offsets[i], n = set.offsets[i + 1] - begin;
    tokens.emplace_back(set.tokens.data() + begin, size_t(n));
    if (options_.regression) {
      values.push_back(scale_.Scaled(set.targets[i]));
    } else {
      classes.push_back(int64_t(set.targets[i]));
    }
    lines.push_back(set.lines[i]);
  }
  Batch batch;
  const int64_t padding = shift() > 0 ? 0 : TokenIds();
  AddIds(tokens, {options_.pad_to, options_.length, padding}, &batch, shift());
  if (options_.regression) {
    batch.Add("targets", at::tensor(values, at::kDouble));
  } else {
    AddNumbers("targets", classes, &batch);
  }
  AddNumbers("lines", lines, &batch);
  return batch;
}

Batch ClassifyTask::TrainBatch(uint64_t seed, int64_t step, int64_t rows) const {
  return MakeBatch(train_, PickRows(*order_, seed, step, rows));
}

std::unique_ptr<BatchReader> ClassifyTask::Read(Split split, const ReadOptions& options) const {
  const Examples& set = Set(split);
  return ReadInOrder(set.size(), options, 32, [this, &set](const std::vector<int64_t>& rows) {
    return MakeBatch(set, rows);
  });
}

// Rows of a file, a batch at a time.
class ClassifyTask::FileReader : public BatchReader {
 public:
  FileReader(const ClassifyTask& task, const std::string& path, bool labelled, int64_t rows)
      : task_(task),
        path_(path),
        source_(OpenRows(path, task.columns_, task.table_options(), labelled)),
        labelled_(labelled),
        rows_(rows > 0 ? rows : 32) {
    for (const std::string& note : source_->notes()) Note(note);
  }
  std::optional<Batch> Next() override {
    std::vector<LabelledRow> rows;
    for (LabelledRow row; int64_t(rows.size()) < rows_ &&
                          task_.NextRow(*source_, path_, labelled_, &row, &skipped_);)
      rows.push_back(std::move(row));
    if (rows.empty()) return std::nullopt;
    std::vector<int64_t> all(rows.size());
    std::iota(all.begin(), all.end(), 0);
    return task_.MakeBatch(task_.Encoded(rows, path_), all);
  }
  int64_t total() const override { return source_->total(); }
  int64_t done() const override { return source_->done(); }
  const char* unit() const override { return "bytes"; }
  int64_t skipped() const override { return source_->skipped() + skipped_; }

 private:
  const ClassifyTask& task_;
  std::string path_;
  std::unique_ptr<RowSource> source_;
  bool labelled_;
  int64_t rows_, skipped_ = 0;  // skipped_: what the source could read and the task could not
};

std::unique_ptr<BatchReader> ClassifyTask::ReadFile(const std::string& path, bool labelled,
                                                    const ReadOptions& options) const {
  return std::make_unique<FileReader>(*this, path, labelled, options.rows);
}

}  // namespace cistern
