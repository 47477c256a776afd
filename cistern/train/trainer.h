#pragma once
// The training loop: steps, schedule, evaluation, checkpoints, logs. What it leaves in the run
// folder:
//   config.json, model.safetensors  the best model by the task's metric on the validation split;
//                                   with the task's assets a model folder
//   experiment.json                 everything that was asked for, defaults included
//   metrics.jsonl, events.out.*     every logged step and evaluation, for people and TensorBoard
//   metrics.csv                     the same as a table, written when the run ends or is interrupted
//   checkpoint-<step>/              the newest complete checkpoint: model, optimizer, and
//                                   trainer.json, which is written last
//   recent-<step>.safetensors       with average_last: the weights of the last evaluations
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cistern/data/prefetch.h"
#include "cistern/io/file_lock.h"
#include "cistern/io/jsonl.h"
#include "cistern/tasks/task.h"
#include "cistern/train/optimizer.h"
#include "cistern/train/processes.h"
#include "cistern/train/recent_weights.h"
#include "cistern/train/row_parts.h"
#include "cistern/train/run_state.h"
#include "cistern/train/schedule.h"
#include "cistern/train/weight_average.h"

namespace cistern {

// The order of training batches, of tasks whose training data are rows.
enum class BatchOrder {
  kEndless,        // an epoch's last batch takes its missing rows from the next epoch
  kDropLast,       // it is left out where rows are missing; every epoch has an order of its own
  kReplay,         // every epoch has the batches of the first one in their order, the last smaller
  kReplayDropLast  // the same without that one
};
const EnumNames<BatchOrder>& BatchOrders();  // endless, drop_last, ...

struct TrainOptions {
  int64_t steps = 0;   // updates; 0 with seconds = 0: 1,000
  double seconds = 0;  // a budget of training time, evaluation not counted
  int64_t batch = 8, accumulate = 1;
  double lr = 4e-3, min_lr = 0,
         warmup = 0.05;  // warm-up: steps when >= 1, a share of the run below 1
  ScheduleKind schedule = ScheduleKind::kCosine;
  double warmup_init = 0, schedule_power = 1, schedule_growth = 1, schedule_shrink = 1;
  int64_t schedule_from = 1, schedule_steps = 0, schedule_every = 0, schedule_period = 0;
  BatchOrder order = BatchOrder::kEndless;
  ThreadsTake parallel = ThreadsTake::kAuto;  // train/row_parts.h
  OptimizerOptions optimizer;
  double clip = 1.0, label_smoothing = 0;
  bool clip_each = false;           // the gradients of each of the accumulated batches
  double ema = 0;                   // decay of the weights' moving average; 0: none
  int64_t average_last = 0;         // evaluations whose weights' mean is the final model; 0: none
  int64_t eval_every = 0;           // steps; 0: ten times a run
  int64_t eval_tokens = 0;          // of the validation split at each evaluation; 0: all rows
  bool eval_drop_last = false;      // evaluates in whole batches of `batch` rows alone
  int64_t checkpoint_every = 0;     // steps; 0: at each evaluation
  double checkpoint_seconds = 600;  // between checkpoints at most; 0: by steps alone
  int64_t log_every = 20;           // steps
  int64_t patience = 0;             // evaluations without a better metric before stopping; 0: never
  bool final_test = true;           // evaluates the best model on the test split at the end
  bool log_memory = false;          // logs what an observer says of the memory (Trainer::Observe)
  // What single fields cannot say; UsageError names the keys. Call after reading.
  void Validate() const;
  Fields Describe();
  // Of the weights, gradients and what the optimizer keeps: how many numbers for each parameter.
  int64_t NumbersPerParameter() const;

 private:
  void ValidateSchedule() const;
};

// UsageError where the options do not fit the task's data or the model.
void CheckSuits(const TrainOptions& options, const Task& task, const Model& model);

struct TrainResult {
  int64_t steps = 0, parameters = 0;
  double seconds = 0,
         tokens_per_second = 0;  // training alone, evaluations left out; median over logged windows
  Json valid, test;              // metrics of the best model
  int64_t peak_bytes = 0;        // of the process's memory during training
  double cpu_share = 1;          // base/cpu_share.h, while training
  double input_share = 0;        // processor time of making batches over the time of the steps
  bool interrupted = false;
  bool had_ended = false;  // resumed, and nothing was left to train
  bool out_of_patience = false;
};

class Trainer {
 public:
  // Locks the folder for as long as the trainer lives: an Error where another process has it.
  // Several processes each have a trainer of their own with a folder of its own
  // (train/shared_run.h), and all call the same functions of it. They decide as one: by the first
  // one's clock, by all rows of a split, and all end where one is interrupted. The first one's
  // folder has the checkpoints.
  Trainer(std::shared_ptr<Model> model, const Task& task, const TrainOptions& options,
          uint64_t seed, const std::string& folder, const Json& experiment, bool bfloat16,
          std::shared_ptr<Processes> processes = std::make_shared<Processes>());
  // Goes on from the newest checkpoint in the folder; without it the folder must not hold a run.
  // UsageError where the experiment is another than the one that the run was begun with
  // (CompareRuns); what may change is taken, with a note.
  void Resume();
  // What is logged with the metrics of each evaluation, numbers by name; it may run the model, but
  // not change it.
  void Observe(std::function<Json(Model& model)> observer) { observer_ = std::move(observer); }
  // Error, naming the place, where numbers are no longer finite, a file cannot be written, or the
  // folder is gone; what was saved before stays.
  TrainResult Run();

 private:
  struct StepOutcome {
    double loss, grad_norm, lr;
    int64_t tokens;
    double input_seconds;
  };
  struct MadeBatch {
    Batch batch;
    double seconds;  // of processor time
  };
  StepOutcome Step();
  Batch TrainBatch(int64_t index) const;  // by options.order
  double Rate() const;                    // of the next update
  double Width() const;                   // of the model
  double Spent() const;      // the share of the budget that is spent, of steps or of time
  int64_t Expected() const;  // steps of the whole run at the speed so far; 0: not known
  Json Measure(Split split, int64_t max_tokens);  // metrics; null: interrupted
  std::string RunFolder() const;                  // empty: it is another process's
  // With the other processes: on the time so far, which the first one measures, and whether to end.
  void Agree();
  void TakeLengths(const Json& begun);  // of a resumed run, where others are asked for now
  void Begin();                         // a folder without a run: what an aborted one left goes
  void Evaluate();
  void SaveCheckpoint();
  // Of the best model of a resumed run, where its metrics are those of other rows or of another
  // model: before the first step, or at the end where what should have come again did not.
  void MeasureBest();
  void TakeBest(const Json& metrics);  // the model, as it is now, is the best
  void SaveBest();
  // The steps since the last logged line. Null: they were taken before the run was resumed.
  void LogStep(const StepOutcome* last);
  void TakeRates();  // of a resumed run, from its log
  bool OutOfPatience() const;
  void AverageLast();  // the final model, where it is a mean (average_last)
  void FinalTest(TrainResult* result);
  [[noreturn]] void FailNonFinite(const char* what, double value);

  std::shared_ptr<Model> model_;
  const Task& task_;
  TrainOptions options_;
  uint64_t seed_;
  std::string folder_;
  Json experiment_;
  bool bfloat16_, resumed_ = false, settings_changed_ = false;  // since the checkpoint
  std::shared_ptr<Processes> processes_;
  bool interrupted_ = false;    // this process or another
  bool best_is_newer_ = false;  // than the checkpoint; it has not come again yet
  int64_t parts_;               // of this process's rows of a batch (train/row_parts.h)
  std::unique_ptr<Optimizer> optimizer_;
  WeightAverage average_;
  RecentWeights recent_;
  RunState state_;
  std::unique_ptr<FileLock> lock_;
  std::unique_ptr<JsonlWriter> lines_;
  std::vector<double> rates_;  // tokens per second of each logged window
  double last_save_ = 0;       // by the clock
  int64_t saves_ = 0, first_step_ = 0;
  std::function<void(const Json&)> log_;
  std::function<Json(Model& model)> observer_;  // null: none
  // Made on a thread of their own, a few ahead.
  std::unique_ptr<Prefetcher<MadeBatch>> batches_;
  double input_seconds_ = 0, step_seconds_ = 0;   // of this process
  double window_input_ = 0, window_seconds_ = 0;  // since the last logged line
};

// What the keys of such a record mean where it does not hold them (CompareRuns).
Json RunDefaults(const Json& experiment);

// Bytes a training step will need at most, estimated from the configuration. `source`: tokens of
// each source of an encoder_decoder, where `length` is that of the targets; 0: as many. `bytes`: of
// a number, 8 in float64. `copies`: TrainOptions::NumbersPerParameter.
int64_t EstimateTrainingBytes(const ModelConfig& config, int64_t rows, int64_t length,
                              int64_t source = 0, int64_t bytes = 4, int64_t copies = 4);
// The same of a run with these options, and with the threads of this process: those that take rows
// (train/row_parts.h) have gradients of their own, but for one. `processes` share the rows: of one
// of them.
int64_t EstimateRunBytes(const ModelConfig& config, int64_t rows, int64_t length, int64_t bytes,
                         const TrainOptions& options, int64_t source = 0, int64_t processes = 1);
// UsageError with this estimate when it does not fit what is available (base/memory.h): that of one
// process what is left to it alone, that of all processes on this machine what they share. Called
// by all of them.
void CheckMemory(const ModelConfig& config, int64_t rows, int64_t length, int64_t bytes = 4,
                 const TrainOptions& options = {}, int64_t source = 0,
                 const Processes& processes = {});

}  // namespace cistern
