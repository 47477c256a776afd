#include "cistern/cli/run_folder.h"

#include <algorithm>
#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/base/terminal.h"
#include "cistern/cli/experiment.h"
#include "cistern/decode/lm_folder.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/checked_json.h"
#include "cistern/train/run_state.h"

namespace cistern::cli {
namespace {

// What experiment.json says, or trainer.json of a checkpoint; null where there is neither. `path`:
// the one that was read.
Json RecordOf(const std::string& folder, std::string* path) {
  *path = folder + "/experiment.json";
  if (std::filesystem::exists(*path))
    return ReadCheckedJson(*path, "the data may be read otherwise");
  *path = folder + "/trainer.json";
  if (std::filesystem::exists(*path)) return ParseRunState(ReadFile(*path), *path).experiment;
  return nullptr;
}

}  // namespace

RunFolder OpenRun(const std::string& folder, bool skip_bad_rows,
                  const std::vector<std::string>& set) {
  RunFolder run;
  run.folder = folder;
  run.config = ReadFolderConfig(folder);
  std::string path;
  const Json experiment = RecordOf(folder, &path);
  run.recorded = !experiment.is_null();
  if (run.recorded) {
    CISTERN_CHECK(experiment.is_object() && experiment.contains("task") &&
                      experiment["task"].is_object() && experiment["task"].contains("kind") &&
                      experiment["task"]["kind"].is_string(),
                  path, " has no \"task\" with a \"kind\"");
    const std::string kind = FindTask(experiment["task"]["kind"].get<std::string>()).name;
    run.options.Describe().Read(TaskOptions::Recorded(experiment["task"], kind), path + ": task");
    run.data = experiment.value("data", Json::object());
  } else {
    run.options.kind.clear();
    for (const char* task : {"mlm", "lm"}) {
      const std::vector<std::string>& models = FindTask(task).models;
      if (std::find(models.begin(), models.end(), run.config.kind) != models.end())
        run.options.kind = task;
    }
    CISTERN_CHECK(!run.options.kind.empty(), folder,
                  " has no experiment.json, which says how the rows of its task are read: copy "
                  "that of its run there, too");
  }
  if (skip_bad_rows) run.options.SkipBadRows();
  for (const std::string& assignment : set) run.options.SetOfUse(PlainAssignment(assignment));
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
