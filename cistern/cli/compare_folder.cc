#include "cistern/cli/compare_folder.h"

#include <algorithm>
#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/base/parallel.h"
#include "cistern/cli/child_run.h"
#include "cistern/io/checked_json.h"
#include "cistern/train/run_state.h"

namespace cistern::cli {
namespace {

bool Exists(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

// What a run's experiment.json says.
Json ReadRecord(const std::string& path) { return ReadCheckedJson(path, "the runs may be others"); }

// experiment.json of a run that was begun; empty: there is none.
std::string BegunRecord(const CompareArguments& a) {
  for (const std::string& mechanism : a.mechanisms) {
    for (const int64_t length : a.lengths) {
      for (int64_t i = 0; i < a.seeds; ++i) {
        const std::string path =
            RunPlace(a, mechanism, length, int64_t(a.common.seed) + i) + "/experiment.json";
        if (Exists(path)) return path;
      }
    }
  }
  return "";
}

}  // namespace

std::string FolderName(std::string mechanism) {
  std::erase(mechanism, ':');
  std::replace(mechanism.begin(), mechanism.end(), '+', '-');
  return mechanism;
}

std::string RunPlace(const CompareArguments& a, const std::string& mechanism, int64_t length,
                     int64_t seed) {
  const std::string alone = StrCat(a.out, "/", FolderName(mechanism),
                                   length > 0 ? StrCat("-", length) : ""),
                    of_several = StrCat(alone, "/seed-", seed), record = alone + "/experiment.json";
  const bool begun_alone = Exists(record);
  if (a.seeds == 1)
    return !begun_alone && Exists(of_several + "/experiment.json") ? of_several : alone;
  return begun_alone && ReadRecord(record).value("seed", Json()) == seed ? alone : of_several;
}

std::string BegunDtype(const CompareArguments& a) {
  if (const std::string path = a.out + "/settings.json"; Exists(path)) {
    const Json dtype = ReadCheckedJson(path).value("/dtype", Json());
    if (dtype.is_string()) return dtype.get<std::string>();
  }
  const std::string path = BegunRecord(a);
  if (path.empty()) return "";
  const Json dtype = ReadRecord(path).value("dtype", Json(""));
  CISTERN_CHECK(dtype.is_string(), path, ": dtype is no text");
  return dtype.get<std::string>();
}

std::vector<std::string> BegunTaskOptions(const CompareArguments& a, const TaskInfo& task) {
  std::vector<std::string> set;
  const std::string path = BegunRecord(a);
  if (path.empty()) return set;
  const Json group =
      TaskOptions::Recorded(ReadRecord(path).value("task", Json::object()), task.name)
          .value(task.name, Json::object());
  for (const std::string& former : task.former) {
    const std::string key = former.substr(0, former.find('='));
    CISTERN_CHECK(group.contains(key) && group[key].is_string(), path, ": task.", task.name,
                  " lacks ", key);
    set.push_back(StrCat("task.", task.name, ".", key, "=", group[key].get<std::string>()));
  }
  return set;
}

bool HoldsRuns(const std::string& out) {
  std::error_code error;
  std::filesystem::recursive_directory_iterator entry(out, error), end;
  for (; !error && entry != end; entry.increment(error)) {
    if (entry->path().filename() == "experiment.json") return true;
    if (entry.depth() >= 2) entry.disable_recursion_pending();
  }
  return false;
}

void KeepSettings(const std::string& out, Experiment experiment, const std::string& device) {
  const std::string path = out + "/settings.json";
  Experiment unset;
  unset.task.kind = experiment.task.kind;
  const auto flat = [](Experiment& e) {
    Json tree = e.Write();
    tree.at("model").erase("attention");
    tree.erase("published");
    return tree.flatten();
  };
  const Json defaults = flat(unset);
  Json now = flat(experiment);
  now["/threads"] = NumThreads(), now["/device"] = device;
  if (!Exists(path) || !HoldsRuns(out)) return WriteCheckedJson(path, now);
  const Json begun = ReadCheckedJson(path);
  for (const char* key : {"/threads", "/device"}) {  // an earlier version did not say them
    if (!begun.contains(key)) now.erase(key);
  }
  Json keys = begun;
  keys.update(now);
  for (const auto& [key, ignored] : keys.items()) {
    if (IsPlaceOfData(DottedKey(key))) continue;
    const Json unsaid = defaults.value(key, Json()), was = begun.value(key, unsaid),
               is = now.value(key, unsaid);
    if (was == is) continue;
    const auto said = [](const Json& value) {
      return value.is_null() ? std::string("unset") : JsonLine(value);
    };
    FailUsage(out, " was begun with ", DottedKey(key), "=", said(was), ", and ", said(is),
              " is asked for now: its runs could not be compared with the new ones; leave it as it "
              "was, or give another --out");
  }
}

void RequireSameData(const CompareArguments& a, Experiment experiment, int64_t length) {
  if (length > 0)
    experiment.Describe().Set(StrCat("task.", experiment.task.kind, ".length=", length));
  SameData data;
  for (const std::string& mechanism : a.mechanisms) {
    for (int64_t i = 0; i < a.seeds; ++i)
      data.Require(RunPlace(a, mechanism, length, int64_t(a.common.seed) + i), experiment.task);
  }
}

}  // namespace cistern::cli
