#pragma once
// Self-pretraining (arXiv 2310.02980): a run on a task's own inputs before the run on its labels
// (tasks/self_task.h). It is a run of its own in FOLDER/pretrain, with its own log, checkpoints and
// seconds; the task's model then takes its weights by name.
#include <string>

#include "cistern/tasks/self_task.h"
#include "cistern/train/trainer.h"

namespace cistern {

struct PretrainOptions {
  SelfObjective objective = SelfObjective::kNone;
  int64_t steps = 0;   // 0 with seconds = 0: as long as the task's own training
  double seconds = 0;  // a budget of training time
  double lr = 0;       // peak of the cosine schedule; 0: train.lr
  double mask_share = 0.15;
  Fields Describe();
  // UsageError where keys are set that have no effect, or contradict each other.
  void Validate(const TrainOptions& train) const;
};

// The model of the same layers that predicts tokens: a masked_lm or a decoder_lm. Padding is masked
// in it, and what belongs to the head of a classifier is left out.
ModelConfig PretrainingConfig(const ModelConfig& config, SelfObjective objective);

struct Pretrained {
  TrainResult run;                              // interrupted: to be continued
  bool kept = false;                            // it had ended before
  Json Summary(SelfObjective objective) const;  // objective, steps, seconds, tokens_per_s, valid
};

// Trains, or goes on, or takes the run that FOLDER/pretrain holds, and copies its weights into
// `model`, a classifier of `task`. UsageError before any training where the task has no tokens, a
// mechanism has no such form, or the weights would not fit. `record`: of the whole run.
Pretrained Pretrain(const Task& task, Model& model, const TrainOptions& train,
                    const PretrainOptions& options, uint64_t seed, const std::string& dtype,
                    const std::string& folder, const Json& record,
                    std::shared_ptr<Processes> processes);

// Whether FOLDER/pretrain holds a run.
bool HoldsPretraining(const std::string& folder);

}  // namespace cistern
