#pragma once
// trainer.json of a checkpoint: where a run is, besides its weights and moments. All that a resumed
// run needs to end as one that was never interrupted, its log included.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cistern/io/fields.h"

namespace cistern {

struct RunState {
  int64_t step = 0, total_steps = 0;  // total_steps 0: not known yet (a budget of time)
  double trained_seconds = 0;
  bool has_best = false;
  double best = 0;  // the metric of the best model, and all of its metrics
  Json best_metrics;
  std::string best_file;  // XXH64 of its model.safetensors; empty: its metrics are not known
  int64_t evals_without_better = 0;
  bool evaluation_due = false;  // it was interrupted: this step's evaluation comes first
  int64_t measured_step = -1;   // of the last evaluation; -1: none, or not known
  int64_t peak_bytes = 0;       // the most that a process of this run has had while it trained
  // What has been counted since the last logged line.
  double window_loss = 0, window_seconds = 0;
  int64_t window_tokens = 0, window_steps = 0;
  int64_t log_bytes = 0;  // of metrics.jsonl at this moment
  std::string log_xxh64;  // of those bytes; empty: unknown
  int64_t seed = 0;
  Json experiment;  // everything that was asked for, and what the data are: never changed silently

  Fields Describe();
};

// JSON with a checksum of its contents.
std::string RunStateText(RunState state);
// Error naming `name` and the key: broken, damaged, or numbers that no run has.
RunState ParseRunState(std::string_view text, const std::string& name);

// Whether a key of an experiment or of its record, such as task.lm.text, says where the data lie.
// What they are is compared by its hash.
bool IsPlaceOfData(std::string_view key);

// What is asked for against what a run was begun with, both as `experiment` above. Lengths,
// learning rate, evaluation, checkpoints, log, threads and the places of files may change: returned
// as "train.steps=700 (it was 3000)". Anything else is a UsageError that names the key and both
// values: it would be another run under the same name. `defaults`, in the same form, says what a
// key means that one of the two does not have: options that are not written while they are unset,
// and those of a later program. Without a default there, it must be in both.
std::vector<std::string> CompareRuns(const Json& asked, const Json& begun, const Json& defaults,
                                     const std::string& run);

}  // namespace cistern
