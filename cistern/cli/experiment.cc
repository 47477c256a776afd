#include "cistern/cli/experiment.h"

#include <utility>

#include "cistern/base/error.h"
#include "cistern/base/parallel.h"
#include "cistern/base/terminal.h"
#include "cistern/train/checkpoint.h"

namespace cistern::cli {

Fields Experiment::Describe() {
  Fields f;
  f.Add("seed", &seed, "of the weights, the order of the data, dropout", {0, int64_t{1} << 62});
  f.Add("dtype", &dtype, "bfloat16: linear maps in bfloat16, everything else in float32",
        {"float32", "float64", "bfloat16"});
  f.Group("task", task.Describe());
  f.Group("model", model.Describe());
  f.Group("train", train.Describe());
  return f;
}

namespace {

void ReadTree(Experiment& experiment, Json tree, const std::string& where,
              const std::vector<std::string>& assignments) {
  Fields fields = experiment.Describe();
  if (tree.is_object()) {
    for (const char* result : {"result", "data", "environment"})
      tree.erase(result);  // an experiment.json of a finished run
  }
  if (!tree.is_null()) fields.Read(tree, where);
  for (const std::string& a : assignments) fields.Set(a);
}

}  // namespace

void ReadRunExperiment(Experiment& experiment, const std::string& folder,
                       const std::vector<std::string>& assignments) {
  const auto newest = NewestCheckpoint(folder);
  if (!newest) return ReadExperiment(experiment, folder + "/experiment.json", assignments);
  ReadTree(experiment, ReadRunState(*newest).experiment, *newest + "/trainer.json", assignments);
}

void ReadExperiment(Experiment& experiment, const std::string& file,
                    const std::vector<std::string>& assignments) {
  Json tree;
  if (!file.empty()) {
    const bool json = file.ends_with(".json");
    try {
      tree = json ? ReadJsonFile(file) : ReadTomlFile(file);
    } catch (const UsageError&) {
      throw;
    } catch (const Error& e) {
      throw UsageError(
          e.what());  // a configuration that cannot be read is wrong use, before any work
    }
  }
  ReadTree(experiment, std::move(tree), file, assignments);
}

namespace {

std::string TomlValue(const Json& value) {
  if (value.is_object()) {
    std::string inner;
    for (const auto& [key, v] : value.items())
      inner += (inner.empty() ? " " : ", ") + key + " = " + TomlValue(v);
    return "{" + inner + (inner.empty() ? "}" : " }");
  }
  if (value.is_array()) {
    std::string inner;
    for (const auto& v : value) inner += (inner.empty() ? "" : ", ") + TomlValue(v);
    return "[" + inner + "]";
  }
  return value.dump();
}

}  // namespace

std::string ExperimentToml(Experiment& experiment) {
  const Json tree = experiment.Describe().Write();
  std::string text;
  for (const auto& [key, value] : tree.items()) {
    if (!value.is_object()) text += key + " = " + TomlValue(value) + "\n";
  }
  for (const auto& [key, value] : tree.items()) {
    if (!value.is_object()) continue;
    text += "\n[" + key + "]\n";
    for (const auto& [name, v] : value.items()) text += name + " = " + TomlValue(v) + "\n";
  }
  return text;
}

Trained TrainExperiment(Experiment experiment, const std::string& folder, bool resume) {
  experiment.model.kind = experiment.task.ModelKind();
  experiment.model.Validate();
  experiment.train.Validate();
  if (!resume && HoldsRun(folder)) {
    FailUsage(folder, " already holds a run; give another --out, or --resume to go on with it");
  }
  if (resume && !HoldsRun(folder)) {
    Note(folder + " holds no checkpoint yet; the run begins again");
    resume = false;
  }
  Trained out;
  out.task = MakeTask(experiment.task);
  out.task->Prepare();
  const Json data = out.task->DataSummary();
  if (data.contains("notes")) {
    for (const Json& note : data["notes"]) Note(note.get<std::string>());
  }
  out.config = experiment.model;
  out.task->Complete(out.config);
  CheckMemory(out.config, experiment.train.batch, out.task->tokens_per_row(),
              experiment.dtype == "float64" ? 8 : 4);
  out.model = MakeModel(out.config, uint64_t(experiment.seed));
  if (experiment.dtype == "float64") out.model->to(at::kDouble);
  experiment.model = out.config;
  Json record = experiment.Describe().Write();
  record["data"] = data;
  record["environment"] = {{"threads", NumThreads()}};
  Trainer trainer(out.model, *out.task, experiment.train, uint64_t(experiment.seed), folder, record,
                  experiment.dtype == "bfloat16");
  if (resume) trainer.Resume();
  out.result = trainer.Run();
  return out;
}

}  // namespace cistern::cli
