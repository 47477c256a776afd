#pragma once
// A task = data + loss + score + metrics. What a task is, is declared (TaskInfo); from that follow
// the program's options, help, errors, and which models fit. The walk of a batch: TrainBatch or a
// BatchReader -> Loss (training) or Measure (sums) -> Metrics (named numbers).
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cistern/io/fields.h"
#include "cistern/models/model.h"
#include "cistern/tasks/batch.h"
#include "cistern/tasks/score.h"
#include "cistern/text/tokenizer.h"

namespace cistern {

enum class Split { kTrain, kValid, kTest };
const char* SplitName(Split split);  // "train", "valid", "test"

struct Metric {
  std::string name;     // its key in what Metrics returns
  std::string label;    // on an axis or above a column: "bits per byte"
  std::string summary;  // one sentence: what it is, on what it is measured
  bool lower_is_better = false;
  double scatter = 0;  // differences below it rank nothing with one seed; 0: not known
};

struct ReadOptions {
  int64_t rows = 0;        // of a batch; 0: the task's choice
  int64_t max_tokens = 0;  // stops after that many; 0: all
  int64_t length = 0;    // tokens of a row, where the task cuts its data itself; 0: as in training
  int64_t context = -1;  // of them read and not measured, in a text; -1: as the task says
};

// The rows of a split or a file, once, in their order.
class BatchReader {
 public:
  virtual ~BatchReader() = default;
  virtual std::optional<Batch> Next() = 0;  // nullopt: the end
  virtual int64_t total() const = 0;        // what progress is counted in (`unit`); 0: unknown
  virtual int64_t done() const = 0;
  virtual const char* unit() const { return "rows"; }
  // Rows of a file so far that could not be read and were passed over (skip_bad_rows).
  virtual int64_t skipped() const { return 0; }
  // What its figures depend on besides the data, such as {"length": 256}; "part": which part of
  // the data they are of, in words, where max_tokens left some out.
  virtual Json Facts() const { return Json::object(); }
};

// A text as one row of tokens, for measurements that carry a state on through all of it. One of
// several pieces, such as blocks from everywhere in a text, is measured piece by piece: no context
// goes from one to the next.
struct TokenText {
  int64_t tokens = 0;
  std::function<void(int64_t begin, int64_t count, int64_t* out)> read;
  std::vector<int32_t> token_bytes;  // bytes of text that each token id stands for
  int64_t trained_length = 0;        // tokens of a training row; 0: not known
  std::vector<int64_t> ends = {};    // the first token behind each piece; empty: one piece
};

class Task {
 public:
  virtual ~Task() = default;

  // What was learned from the training data and belongs to a model (a tokenizer, names of classes):
  // saved with it, and taken from its folder in place of making it anew.
  virtual void SaveAssets(const std::string& folder) const = 0;
  virtual void LoadAssets(const std::string& folder) = 0;
  // Takes the tokenizer of another model in place of learning one (train --from); false where the
  // task has none. Before Prepare.
  virtual bool TakeTokenizer(std::shared_ptr<const Tokenizer>) { return false; }
  // Whether a model of the task of that name has, with the same tokenizer, the ids of this task and
  // others behind them, so that the first rows of its embedding are those of this task's.
  virtual bool HasFirstIdsOf(const std::string&) const { return false; }
  // Reads or makes the data; slow the first time (progress bar), then cached.
  virtual void Prepare() = 0;
  virtual Json DataSummary() const = 0;  // what was read: counts, hashes, notes. After Prepare

  // How training, validation and test were parted, in words, where the task can do it in several
  // ways: "20 blocks spread over the text"; before Prepare without the number. Else "".
  virtual std::string SplitSummary() const { return ""; }

  // Sets what the data decides: vocab_size, classes, max_length. After Prepare or LoadAssets.
  virtual void Complete(ModelConfig& config) const = 0;
  // Whether it does so before Prepare as well, so that a model that cannot be is refused first.
  virtual bool CompletesFirst() const { return false; }
  virtual int64_t tokens_per_row() const = 0;  // longest row, for the memory estimate
  // Of them in one sequence: what the model's max_length has to be.
  virtual int64_t tokens_per_sequence() const { return tokens_per_row(); }

  // How many of the longest rows make a training batch: `rows` (train.batch), unless the task
  // counts tokens.
  virtual int64_t rows_of_batch(int64_t rows) const { return rows; }

  // A pure function of (seed, step), so that training resumes exactly.
  virtual Batch TrainBatch(uint64_t seed, int64_t step, int64_t rows) const = 0;
  // Rows of an epoch of training, of which each seed has an order of its own; 0: there are no
  // epochs of rows. After Prepare.
  virtual int64_t train_rows() const { return 0; }
  virtual at::Tensor Loss(Model& model, const Batch& batch, double label_smoothing) const = 0;
  // Why Loss refuses label_smoothing: "is for ..."; "" where it does not. By default the model's.
  virtual std::string WhyNoSmoothing(const Model& model) const { return model.WhyNoSmoothing(); }
  // What Loss is a mean over, so that the losses of parts of a batch can be put together again:
  // the number of rows, of tokens, or the sum of their weights.
  virtual double Terms(const Batch& batch) const { return double(batch.rows); }

  virtual std::unique_ptr<BatchReader> Read(Split split, const ReadOptions& options) const = 0;
  // Rows of a file that the task did not train on. `labelled`: they carry what they are measured
  // by. After Prepare or LoadAssets. By default a UsageError that says what works instead.
  virtual std::unique_ptr<BatchReader> ReadFile(const std::string& path, bool labelled,
                                                const ReadOptions& options) const;
  // The sums of a batch: of the model's errors, and of the baselines that a metric is printed with.
  // The model is in evaluation (tasks/evaluate.h).
  virtual Score Measure(Model& model, const Batch& batch) const = 0;
  // Named numbers in the order they are printed in, the deciding metric among them.
  virtual Json Metrics(const Score& score) const = 0;
  virtual const Metric& metric() const = 0;  // which decides what model is best

  // One object for each row of a batch: what the model says of it. By default a UsageError.
  virtual std::vector<Json> Predict(Model& model, const Batch& batch) const;
  // The split, or a file, as one text; nullopt where the task has no such thing.
  virtual std::optional<TokenText> Text(Split) const { return std::nullopt; }
  virtual std::optional<TokenText> Text(const std::string&) const { return std::nullopt; }
};

// Options of one task, as read; makes the task. One for each task (BindTask).
class TaskConfig {
 public:
  virtual ~TaskConfig() = default;
  virtual Fields Describe() = 0;  // points into this
  virtual std::unique_ptr<TaskConfig> Clone() const = 0;
  virtual std::unique_ptr<Task> Make(const std::string& cache) const = 0;  // UsageError
};

struct TaskInfo {
  std::string name, summary;
  std::vector<std::string> models;  // kinds of model that fit; the first is taken unless told
  std::vector<Metric> metrics;  // those that can decide; the first does unless an option says so
  std::string data;             // the option that names the data: `train --data`, `compare DATA`
  std::vector<std::string> defaults;  // key=value that suit some minutes of training: `compare`
  std::vector<std::string> mechanisms = {"softmax", "latte", "abc_mlp"};  // that it compares
  // key=value of options that did not exist when older runs were recorded: what those runs did.
  std::vector<std::string> former = {};
  // Options that training does not depend on, which may be others when a model is used.
  std::vector<std::string> of_use = {};
  // Whether a path looks like data of this task (its name; for a folder, what is in it; for JSON,
  // how it begins).
  std::function<bool(const std::string& path)> claims = nullptr;
  std::function<std::unique_ptr<TaskConfig>()> config = nullptr;  // BindTask
};

// The metric of that name; Error where the task has none.
const Metric& FindMetric(const TaskInfo& task, const std::string& name);

// All tasks, in the order of tasks.def.
const std::vector<const TaskInfo*>& Tasks();
const TaskInfo& FindTask(const std::string& name);  // UsageError with the nearest name
// The first task whose data the path looks like; null where none says so.
const TaskInfo* TaskClaiming(const std::string& path);
// The same, or a UsageError that lists the tasks.
const TaskInfo& TaskOfData(const std::string& path);

// The [task] table: the kind, what all kinds share, and a group for each kind ([task.lm]).
class TaskOptions {
 public:
  TaskOptions();
  TaskOptions(const TaskOptions& other);
  TaskOptions& operator=(const TaskOptions& other);

  std::string kind = "lm";
  std::string cache;  // folder for tokens and generated data; empty: $XDG_CACHE_HOME/cistern

  Fields Describe();  // all groups
  Json Write();       // the kind's group alone
  std::unique_ptr<Task> Make() const;
  const TaskInfo& info() const { return FindTask(kind); }
  // Bad rows of the data are passed over and counted; returns the assignment that says so.
  // UsageError where the kind reads no rows.
  std::string SkipBadRows();

  // "task.beam=5" where a trained model is used; UsageError for options that are not of use.
  void SetOfUse(const std::string& assignment);

  // Options of the kind may stand in [task] itself (task.length for task.lm.length): moves them
  // into the group of `kind`. Options of other kinds are dropped where `dropped` is given (files of
  // version 0.1, which had all of them in one table). Unknown ones stay, for the reader's error.
  static Json Grouped(Json task, const std::string& kind, bool drop_others);
  // The same for the record of a run that was begun: an option that it lacks because it is of an
  // earlier version has the value of TaskInfo::former, whatever the default is now.
  static Json Recorded(Json task, const std::string& kind);
  // The same for "task.length=512".
  static std::string Grouped(const std::string& assignment, const std::string& kind);

 private:
  std::vector<std::unique_ptr<TaskConfig>> configs_;  // as Tasks()
};

// Fills in `config` of an info from T::Options, T::Describe(Options&) -> Fields and
// T(options, cache).
template <class T>
void BindTask(TaskInfo& info) {
  class Config : public TaskConfig {
   public:
    Fields Describe() override { return T::Describe(options_); }
    std::unique_ptr<TaskConfig> Clone() const override { return std::make_unique<Config>(*this); }
    std::unique_ptr<Task> Make(const std::string& cache) const override {
      return std::make_unique<T>(options_, cache);
    }

   private:
    typename T::Options options_;
  };
  info.config = [] { return std::make_unique<Config>(); };
}

}  // namespace cistern
