#include "cistern/cli/run_folder.h"

#include <algorithm>
#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/base/terminal.h"
#include "cistern/decode/lm_folder.h"
#include "cistern/io/checked_json.h"

namespace cistern::cli {

RunFolder OpenRun(const std::string& folder, bool skip_bad_rows,
                  const std::vector<std::string>& set) {
  RunFolder run;
  run.folder = folder;
  run.config = ReadFolderConfig(folder);
  const std::string path = folder + "/experiment.json";
  run.recorded = std::filesystem::exists(path);
  if (run.recorded) {
    const Json experiment = ReadCheckedJson(path, "the data may be read otherwise");
    CISTERN_CHECK(experiment.is_object() && experiment.contains("task") &&
                      experiment["task"].is_object() && experiment["task"].contains("kind") &&
                      experiment["task"]["kind"].is_string(),
                  path, " has no \"task\" with a \"kind\"");
    const std::string kind = FindTask(experiment["task"]["kind"].get<std::string>()).name;
    run.options.Describe().Read(TaskOptions::Recorded(experiment["task"], kind), path + ": task");
    run.data = experiment.value("data", Json::object());
  } else {
    const auto fits = [&](const TaskInfo* t) {
      return std::find(t->models.begin(), t->models.end(), run.config.kind) != t->models.end();
    };
    const auto task = std::find_if(Tasks().begin(), Tasks().end(), fits);
    CISTERN_CHECK(task != Tasks().end(), folder, " holds a model of kind ", run.config.kind,
                  ", for which there is no task");
    run.options.kind = (*task)->name;
  }
  if (skip_bad_rows) run.options.SkipBadRows();
  for (const std::string& assignment : set) run.options.SetOfUse(assignment);
  run.task = run.options.Make();
  run.task->LoadAssets(folder);
  return run;
}

std::string OtherData(const Json& recorded, const Json& now) {
  if (!recorded.is_object()) return "";
  for (const char* key : {"xxh64", "xxh64_exact"}) {
    const Json was = recorded.value(key, Json()), is = now.value(key, was);
    if (was.is_string() && was != is)
      return StrCat("their XXH64 is ", is.get<std::string>(), " now and was ",
                    was.get<std::string>());
  }
  return "";
}

void RunFolder::Prepare() const {
  task->Prepare();
  const std::string other = OtherData(data, task->DataSummary());
  if (other.empty()) return;
  FailUsage(folder, " was trained on other data: ", other,
            ", so that rows of their test may have been trained on; put the data back as they "
            "were, leave out a --set that reads them otherwise, or give the file to measure");
}

void NoteSkipped(const BatchReader& reader, const std::string& data) {
  if (const int64_t n = reader.skipped(); n > 0)
    Note(StrCat(data, ": ", n, n == 1 ? " row" : " rows", " could not be read and ",
                n == 1 ? "was" : "were", " passed over"));
}

std::shared_ptr<Model> LoadRunModel(const RunFolder& run, const std::string& dtype) {
  if (dtype == "bfloat16")
    FailUsage(
        "this command runs a model in float32 or float64; bfloat16 is for training and `cistern "
        "generate`");
  auto model = LoadModel(run.folder);
  if (dtype == "float64") model->to(at::kDouble);
  return model;
}

}  // namespace cistern::cli
