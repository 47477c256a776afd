#pragma once
// A model folder with the task that its model was trained for.
#include <memory>
#include <string>
#include <vector>

#include "cistern/tasks/task.h"

namespace cistern::cli {

struct RunFolder {
  std::string folder;
  ModelConfig config;
  TaskOptions options;
  bool recorded = false;       // experiment.json says what it was trained on
  Json data;                   // what experiment.json says of its data
  std::shared_ptr<Task> task;  // with the model's own assets; not prepared

  // Reads the task's own data. UsageError where they are others than the model was trained on:
  // their parts would be others too, and a test row may be one that was trained on.
  void Prepare() const;
};

// Errors name the missing file. Without experiment.json (a model from elsewhere) a language model
// has the task lm or mlm and can measure files, but has no data of its own; other models are
// refused, as nothing says how their rows are read.
// skip_bad_rows: also where the model was not trained so. set: options of the task that may be
// others now (TaskOptions::SetOfUse).
RunFolder OpenRun(const std::string& folder, bool skip_bad_rows = false,
                  const std::vector<std::string>& set = {});

// What a record of a run's data says otherwise than the data of now, by their hashes, such as
// "their XXH64 is ... now and was ..."; empty: they are the same, or it has none.
std::string OtherData(const Json& recorded, const Json& now);

// Says how many rows of `data` were passed over, if any were.
void NoteSkipped(const BatchReader& reader, const std::string& data);

// The model, in evaluation mode, as --dtype asks: float32 or float64, else a UsageError.
std::shared_ptr<Model> LoadRunModel(const RunFolder& run, const std::string& dtype);

}  // namespace cistern::cli
