#pragma once
// An experiment: task, model and training in one typed tree, from a TOML file, --set key=value and
// defaults.
#include <string>
#include <vector>

#include "cistern/cli/published.h"
#include "cistern/models/config.h"
#include "cistern/tasks/task.h"
#include "cistern/train/pretrain.h"

namespace cistern::cli {

struct Experiment {
  Experiment() { model.kind.clear(); }  // the task's choice, unless told

  TaskOptions task;
  ModelConfig model;
  TrainOptions train;
  PretrainOptions pretrain;
  int64_t seed = 1;
  // auto: what ChooseDtype says when a run begins, whose record then names it.
  std::string dtype = "auto";
  // A folder whose weights the run starts from; its settings are the defaults of [model]
  // (TakeWeights).
  std::string from;
  bool new_head = false, swap_attention = false;
  Published published;

  Fields Describe();
  Json Write();  // as Describe().Write(), with only the chosen task
};

// Reads `file` (TOML, or JSON by its name; empty: none), then applies the assignments in order.
// A file with `extends = "base.toml"` (a path from its own folder) is read on top of that one: its
// keys replace those of the base, tables are merged. Of a list of files, each is read on top of
// those before it. UsageError on anything unknown or wrong.
void ReadExperiment(Experiment& experiment, const std::string& file,
                    const std::vector<std::string>& assignments);

// The task that a file names (empty: no file), or an assignment, which goes before the file; empty
// where neither does. UsageError: there is no such task.
std::string NamedTask(const std::string& file, const std::vector<std::string>& assignments);

// The key and the value of KEY=VALUE, without blanks around them.
std::string AssignedKey(const std::string& assignment);
std::string AssignedValue(const std::string& assignment);
// The same with AssignedKey in place of the key.
std::string PlainAssignment(const std::string& assignment);
// "train.lr" of the JSON pointer "/train/lr".
std::string DottedKey(std::string pointer);

// What --task and --data say, as assignments: the task, by the look of the data unless it is given,
// and its option that names the data. Nothing where both are empty.
std::vector<std::string> DataAssignments(const std::string& task, const std::string& data);
// The same of the run in a folder: what its newest checkpoint says it was begun with, or its
// experiment.json where there is no checkpoint yet.
void ReadRunExperiment(Experiment& experiment, const std::string& folder,
                       const std::vector<std::string>& assignments);

// TOML text of everything, ready to be edited and passed back.
std::string ExperimentToml(Experiment& experiment);

// Models that are made while it lives have shapes alone, and no memory for their weights.
class ShapesOnly {
 public:
  ShapesOnly();
  ~ShapesOnly();
  ShapesOnly(const ShapesOnly&) = delete;
  ShapesOnly& operator=(const ShapesOnly&) = delete;

 private:
  at::Device before_;
};

// float32 or bfloat16 for the linear maps of a run that leaves it open, and why. bfloat16 where
// this machine's matrix products of the model's sizes are faster in it (measured, 0.3 s), so that
// the same experiment may be trained in another dtype on another machine.
struct DtypeChoice {
  std::string dtype, why;
};
DtypeChoice ChooseDtype(const Experiment& experiment, const Task& task);

// Where the record and the tokenizer of the weights in the folder `from` are: there, or, of a
// checkpoint, in its run. UsageError: the run of a checkpoint is not there.
std::string FolderOfRecord(const std::string& from);

// Prepares the data, completes and checks the model's configuration, predicts the memory, trains
// into `folder`.
struct Trained {
  TrainResult result;
  std::unique_ptr<Task> task;
  std::shared_ptr<Model> model;  // the best one
  ModelConfig config;
  // What training on the inputs came to (Pretrained::Summary); null: there was none, or it was
  // interrupted.
  Json pretrained;
};
// `folder`: of this process (train/shared_run.h).
Trained TrainExperiment(Experiment experiment, const std::string& folder, bool resume,
                        const std::shared_ptr<Processes>& processes);

}  // namespace cistern::cli
