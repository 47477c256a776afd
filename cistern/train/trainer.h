#pragma once
// The training loop: steps, schedule, evaluation, checkpoints, logs. What it leaves in the run
// folder:
//   config.json, model.safetensors   the best model by the task's metric on the validation split;
//   with the task's assets a model folder experiment.json                  everything that was
//   asked for, defaults included metrics.jsonl, events.out.*      every logged step and evaluation,
//   for people and for TensorBoard checkpoint-<step>/               the newest complete checkpoint:
//   model, optimizer, trainer.json (written last)
#include <atomic>
#include <functional>
#include <string>

#include "cistern/data/prefetch.h"
#include "cistern/tasks/task.h"
#include "cistern/train/optimizer.h"
#include "cistern/train/schedule.h"

namespace cistern {

struct TrainOptions {
  int64_t steps = 0;   // updates; 0 with seconds = 0: 1,000
  double seconds = 0;  // a budget of training time (evaluation not counted), turned into steps
                       // after a short calibration
  int64_t batch = 8, accumulate = 1;
  double lr = 4e-3, min_lr = 0,
         warmup = 0.05;  // warm-up: steps when >= 1, a share of the run below 1
  std::string schedule = "cosine";
  AdamWOptions adamw;
  double clip = 1.0, label_smoothing = 0;
  int64_t eval_every = 0;        // steps; 0: ten times a run
  int64_t eval_tokens = 0;       // of the validation split at each evaluation; 0: all rows
  int64_t checkpoint_every = 0;  // steps; 0: at each evaluation
  int64_t log_every = 20;        // steps
  int64_t patience = 0;          // evaluations without a better metric before stopping; 0: never
  bool final_test = true;        // evaluates the best model on the test split at the end
  Fields Describe();
};

struct TrainResult {
  int64_t steps = 0, parameters = 0;
  double seconds = 0,
         tokens_per_second = 0;  // training alone, evaluations left out; median over logged windows
  Json valid, test;              // metrics of the best model
  int64_t peak_bytes = 0;        // of the process's memory during training
  double cpu_share = 1;          // base/cpu_share.h, while training
  bool interrupted = false;
};

// The flag that Ctrl-C sets (main installs the handler; a second Ctrl-C ends the process).
std::atomic<bool>& Interrupted();
void InstallInterruptHandler();

class Trainer {
 public:
  // resume: goes on from the newest checkpoint in `folder`; otherwise the folder must not hold a
  // run.
  Trainer(std::shared_ptr<Model> model, const Task& task, const TrainOptions& options,
          uint64_t seed, const std::string& folder, const Json& experiment, bool bfloat16);
  void Resume();
  TrainResult Run();

 private:
  struct StepOutcome {
    double loss, grad_norm, lr;
    int64_t tokens;
  };
  StepOutcome Step();
  void Estimate(double step_seconds);  // total_steps_ from the time that is left
  ScheduleOptions Schedule() const;
  Json Measure(Split split, int64_t max_tokens);  // metrics; null: interrupted
  void Evaluate();
  void SaveCheckpoint();
  [[noreturn]] void FailNonFinite(const char* what, double value);

  std::shared_ptr<Model> model_;
  const Task& task_;
  TrainOptions options_;
  uint64_t seed_;
  std::string folder_;
  Json experiment_;
  bool bfloat16_;
  AdamW optimizer_;
  int64_t step_ = 0, total_steps_ = 0, warmup_steps_ = 0, evals_without_better_ = 0;
  double trained_seconds_ = 0, best_ = 0;
  bool has_best_ = false;
  Json best_metrics_;
  std::function<void(const Json&)> log_;
  std::unique_ptr<Prefetcher<Batch>> batches_;  // made on a thread of their own, a few ahead
};

// Bytes a training step will need at most, estimated from the configuration, and what the machine
// has to give. `source`: tokens of each source of an encoder_decoder, where `length` is that of the
// targets; 0: as many.
int64_t EstimateTrainingBytes(const ModelConfig& config, int64_t rows, int64_t length,
                              int64_t source = 0);
int64_t AvailableBytes();
// UsageError with the estimate when it does not fit.
void CheckMemory(const ModelConfig& config, int64_t rows, int64_t length);

// Resident memory of this process, now and at its highest since ResetPeakMemory.
int64_t ResidentBytes();
int64_t PeakBytes();
void ResetPeakMemory();

}  // namespace cistern
