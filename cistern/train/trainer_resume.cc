// How a run begins in its folder, and how it goes on from a checkpoint.
#include <cmath>
#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/base/format.h"
#include "cistern/base/hash.h"
#include "cistern/base/terminal.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/safetensors.h"
#include "cistern/train/checkpoint.h"
#include "cistern/train/trainer.h"

namespace cistern {
namespace {

bool Same(const Json& a, const Json& b, const char* key) {
  const auto value = [key](const Json& experiment) {
    return experiment.value("train", Json::object()).value(key, Json());
  };
  return value(a) == value(b);
}

// Whether both evaluate on the same rows.
bool MeasuresAlike(const Json& a, const Json& b) { return Same(a, b, "eval_tokens"); }

}  // namespace

Json RunDefaults(const Json& experiment) {
  TaskOptions task;
  task.kind = experiment.value("task", Json::object()).value("kind", task.kind);
  Json written = task.Write();
  written.merge_patch(TaskOptions::Recorded({{"kind", task.kind}}, task.kind));
  return {{"task", written},
          {"model", ModelConfig().Describe().Write()},
          {"train", TrainOptions().Describe().Write()},
          {"environment", {{"processes", 1}}}};
}

void Trainer::Resume() {
  const auto newest = NewestCheckpoint(folder_);
  CISTERN_CHECK(newest, folder_, ": no complete checkpoint to resume from");
  RunState state = ReadRunState(*newest);
  Json defaults = RunDefaults(experiment_);
  ModelConfig unsaid = model_->config();  // by a run of an earlier version: its weights tell
  unsaid.attention_options = Json::object();
  KeepBiases(unsaid, SafetensorsFile(*newest + "/model.safetensors"));
  defaults["model"]["attention_options"] = unsaid.attention_options;
  const std::vector<std::string> changes =
      CompareRuns(experiment_, state.experiment, defaults, folder_);
  state = ReadCheckpoint(*newest, *model_, *optimizer_, &average_);
  recent_.Forget(state.step - (state.evaluation_due ? 1 : 0));
  const Json begun = state.experiment;
  state.experiment = experiment_;
  state_ = std::move(state);
  resumed_ = true;
  for (const std::string& change : changes) Note("resumed with " + change);
  TakeLengths(begun);
  settings_changed_ = !changes.empty();
  if (!state_.has_best) return;
  const std::string best = folder_ + "/model.safetensors";
  std::error_code ignored;
  CISTERN_CHECK(std::filesystem::exists(best, ignored), best, " is gone: it was the best model of ",
                "this run so far; put it back, or begin again with another --out");
  if (!MeasuresAlike(begun, experiment_)) state_.best_file.clear();
  if (state_.best_file.empty() || HexText(HashFile(best)) == state_.best_file) return;
  const SafetensorsFile loads(best);
  if (options_.average_last > 0) {  // the mean of a run that had ended, which comes anew
    state_.best_file = HexText(HashFile(best));
    return;
  }
  // A better one came after the checkpoint. It will come again where the same steps do.
  best_is_newer_ = changes.empty() && options_.seconds == 0;
  if (!best_is_newer_) state_.best_file.clear();
}

void Trainer::TakeLengths(const Json& begun) {
  if (Same(begun, experiment_, "steps") && Same(begun, experiment_, "seconds")) {
    // Earlier versions did not record it: a run that has ended was measured there.
    if (state_.measured_step < 0 && Spent() >= 1) state_.measured_step = state_.step;
    return;
  }
  if (options_.seconds > 0) {
    if (options_.seconds <= state_.trained_seconds)
      FailUsage(folder_, " has been trained for ", Significant(state_.trained_seconds, 4),
                " s already; give more than that in train.seconds");
    state_.total_steps = 0;
    return;
  }
  if (options_.steps < state_.step)
    FailUsage(folder_, " is at step ", state_.step, " already; give more in train.steps");
  state_.total_steps = options_.steps;
}

void Trainer::Begin() {
  if (HoldsRun(folder_))
    FailUsage(folder_, " already holds a run; give another --out, or --resume to continue it");
  RefuseOtherFiles(folder_);
  recent_.Forget(-1);  // of an aborted run
  std::error_code error;
  std::filesystem::directory_iterator entry(folder_, error), end;
  for (; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    std::error_code ignored;
    if (name == "metrics.jsonl" || name == "metrics.csv" ||
        name.starts_with("events.out.tfevents."))
      std::filesystem::remove(entry->path(), ignored);
  }
}

void Trainer::MeasureBest() {
  if (!processes_->Any(state_.has_best && state_.best_file.empty())) return;
  const std::string best = folder_ + "/model.safetensors";
  if (options_.average_last > 0) {  // the mean of a run that had ended, which comes anew
    const bool over = OutOfPatience() || Spent() >= 1;
    state_.has_best = over;
    if (over) state_.best_file = HexText(HashFile(best));
    return;
  }
  const at::NoGradGuard guard;
  std::vector<at::Tensor> tensors = model_->parameters(), kept;
  for (const at::Tensor& b : model_->buffers()) tensors.push_back(b);
  for (const at::Tensor& t : tensors) kept.push_back(t.clone());
  if (processes_->first()) LoadWeights(*model_, best);
  processes_->TakeFirst(tensors);
  const Json metrics = Measure(Split::kValid, options_.eval_tokens);
  if (!metrics.is_null()) {
    const double value = metrics.at(task_.metric().name).get<double>();
    if (processes_->first())
      Note(StrCat(best, " is measured again: ", task_.metric().name, " ", Significant(value, 4)));
    state_.has_best = std::isfinite(value);
    if (state_.has_best) TakeBest(metrics);
  }
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].copy_(kept[i]);
  interrupted_ = interrupted_ || metrics.is_null();  // --resume measures it again
}

}  // namespace cistern
