#include "cistern/cli/experiment.h"

#include <cstdio>
#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/base/parallel.h"
#include "cistern/base/progress.h"
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

void ReadExperiment(Experiment& experiment, const std::string& file,
                    const std::vector<std::string>& assignments) {
  Fields fields = experiment.Describe();
  if (!file.empty()) {
    const bool json = file.ends_with(".json");
    Json tree;
    try {
      tree = json ? ReadJsonFile(file) : ReadTomlFile(file);
    } catch (const UsageError&) {
      throw;
    } catch (const Error& e) {
      throw UsageError(
          e.what());  // a configuration that cannot be read is wrong use, before any work
    }
    if (tree.is_object()) {
      for (const char* result : {"result", "data", "environment"})
        tree.erase(result);  // an experiment.json of a finished run
      if (tree.contains("model")) tree["model"] = ConvertModelConfig(tree["model"]);
    }
    fields.Read(tree, file);
  }
  for (const std::string& a : assignments) fields.Set(a);
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
  std::error_code
      ignored;  // a folder that cannot be looked into is refused when the run begins to write
  if (!resume && std::filesystem::exists(folder + "/experiment.json", ignored)) {
    FailUsage(folder, " already holds a run; give another --out, or --resume to go on with it");
  }
  Trained out;
  out.task = MakeTask(experiment.task);
  out.task->Prepare();
  const Json data = out.task->DataSummary();
  if (data.contains("notes") && !Quiet()) {
    for (const Json& note : data["notes"])
      std::fprintf(stderr, "note: %s\n", note.get<std::string>().c_str());
  }
  out.config = experiment.model;
  out.task->Complete(out.config);
  CheckMemory(out.config, experiment.train.batch, out.task->tokens_per_row());
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
