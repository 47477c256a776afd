#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/io/atomic_file.h"
#include "cistern/tasks/cache.h"
#include "cistern/tasks/task.h"

namespace cistern {

#define CISTERN_TASK(name) const TaskInfo& name##_task();
#include "cistern/tasks/tasks.def"
#undef CISTERN_TASK

namespace {

std::vector<std::string> Names() {
  std::vector<std::string> names;
  for (const TaskInfo* info : Tasks()) names.push_back(info->name);
  return names;
}

// Options of a task, by name.
std::vector<std::string> OptionsOf(const TaskInfo& info) {
  return info.config()->Describe().Names();
}

bool Contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

const char* SplitName(Split split) {
  return split == Split::kTrain ? "train" : split == Split::kValid ? "valid" : "test";
}

std::unique_ptr<BatchReader> Task::ReadFile(const std::string&, bool, const ReadOptions&) const {
  FailUsage("this task reads no other files; measure it on its own data: cistern eval MODEL");
}

std::vector<Json> Task::Predict(Model&, const Batch&) const {
  FailUsage("this task has no predictions row by row; cistern eval measures it");
}

const std::vector<const TaskInfo*>& Tasks() {
  static const std::vector<const TaskInfo*> all = {
#define CISTERN_TASK(name) &name##_task(),
#include "cistern/tasks/tasks.def"
#undef CISTERN_TASK
  };
  return all;
}

const Metric& FindMetric(const TaskInfo& task, const std::string& name) {
  for (const Metric& m : task.metrics) {
    if (m.name == name) return m;
  }
  Fail("[", task.name, "] no metric ", name);
}

const TaskInfo& FindTask(const std::string& name) {
  for (const TaskInfo* info : Tasks()) {
    if (info->name == name) return *info;
  }
  throw UsageError(UnknownName("task", name, Names()) + " (cistern info --tasks lists them)");
}

const TaskInfo* TaskClaiming(const std::string& path) {
  for (const TaskInfo* info : Tasks()) {
    if (info->claims && info->claims(path)) return info;
  }
  return nullptr;
}

const TaskInfo& TaskOfData(const std::string& path) {
  if (const TaskInfo* info = TaskClaiming(path)) return *info;
  std::error_code error;
  if (!std::filesystem::exists(path, error)) FailUsage(path, ": no such file or folder");
  std::string text;
  for (const TaskInfo* info : Tasks()) text += (text.empty() ? "" : ", ") + info->name;
  FailUsage(path, ": its name does not determine the task; name the task: --task ", text,
            " (cistern info --tasks says what each reads)");
}

std::string CacheFolder(const std::string& asked) {
  std::string folder = asked;
  const char *xdg = std::getenv("XDG_CACHE_HOME"), *home = std::getenv("HOME");
  if (folder.empty()) {
    folder = xdg && *xdg ? std::string(xdg) + "/cistern"
                         : StrCat(home && *home ? home : "/tmp", "/.cache/cistern");
  }
  try {
    EnsureDirectory(folder);
    CISTERN_CHECK(::faccessat(AT_FDCWD, folder.c_str(), W_OK, AT_EACCESS) == 0, "cannot write in ",
                  folder, ": ", std::strerror(errno));
  } catch (const Error& e) {
    Fail("no cache for tokens and generated data: ", e.what(),
         "; --set task.cache=FOLDER or XDG_CACHE_HOME names another place");
  }
  return folder;
}

TaskOptions::TaskOptions() {
  for (const TaskInfo* info : Tasks()) configs_.push_back(info->config());
}

TaskOptions::TaskOptions(const TaskOptions& other) : kind(other.kind), cache(other.cache) {
  for (const auto& config : other.configs_) configs_.push_back(config->Clone());
}

TaskOptions& TaskOptions::operator=(const TaskOptions& other) {
  TaskOptions copy(other);
  std::swap(kind, copy.kind);
  std::swap(cache, copy.cache);
  std::swap(configs_, copy.configs_);
  return *this;
}

Fields TaskOptions::Describe() {
  Fields f;
  f.Add("kind", &kind, "what the model learns (cistern info --tasks)", Names());
  f.Add("cache", &cache, "folder for tokens and generated data; empty: ~/.cache/cistern");
  for (size_t i = 0; i < configs_.size(); ++i) f.Group(Tasks()[i]->name, configs_[i]->Describe());
  return f;
}

std::string TaskOptions::SkipBadRows() {
  const std::string option = "skip_bad_rows";
  if (!Contains(OptionsOf(info()), option)) {
    std::string others;
    for (const TaskInfo* other : Tasks()) {
      if (Contains(OptionsOf(*other), option)) others += (others.empty() ? "" : ", ") + other->name;
    }
    FailUsage("--skip-bad-rows is of tasks that read rows (", others, "); the task ", kind,
              " reads none");
  }
  const std::string assignment = StrCat(kind, ".", option, "=true");
  Describe().Set(assignment);
  return "task." + assignment;
}

void TaskOptions::SetOfUse(const std::string& assignment) {
  const std::vector<std::string>& of_use = info().of_use;
  const std::string full = Grouped(assignment, kind), prefix = StrCat("task.", kind, ".");
  const std::string key = full.substr(0, full.find('='));
  if (!key.starts_with(prefix) || !Contains(of_use, key.substr(prefix.size()))) {
    std::string all;
    for (const std::string& name : of_use) all += (all.empty() ? "task." : ", task.") + name;
    FailUsage("--set ", assignment, ": the model was trained with its settings; ",
              of_use.empty() ? StrCat("the task ", kind, " has none that can be changed")
                             : StrCat("what can be changed is ", all));
  }
  Fields fields;
  fields.Group("task", Describe());
  fields.Set(full);
}

Json TaskOptions::Write() {
  Json all = Describe().Write();
  for (const TaskInfo* info : Tasks()) {
    if (info->name != kind) all.erase(info->name);
  }
  return all;
}

std::unique_ptr<Task> TaskOptions::Make() const {
  const TaskInfo& chosen = info();
  for (size_t i = 0; i < configs_.size(); ++i) {
    if (Tasks()[i] == &chosen) return configs_[i]->Make(cache);
  }
  Fail("[tasks] ", kind, " is not registered");
}

Json TaskOptions::Grouped(Json task, const std::string& kind, bool drop_others) {
  if (!task.is_object()) return task;  // the reader says what is wrong
  const std::vector<std::string> own = OptionsOf(FindTask(kind));
  Json out = Json::object();
  for (const auto& [key, value] : task.items()) {
    if (key != "kind" && key != "cache" && !Contains(Names(), key)) {
      if (Contains(own, key)) {
        if (out[kind].is_null()) out[kind] = task.value(kind, Json::object());
        if (!out[kind].contains(key)) out[kind][key] = value;
        continue;
      }
      const std::string& name = key;  // clang 14 cannot capture what a binding names
      const bool known = std::any_of(Tasks().begin(), Tasks().end(), [&](const TaskInfo* info) {
        return Contains(OptionsOf(*info), name);
      });
      if (drop_others && known) continue;
    }
    if (!out.contains(key)) out[key] = value;
  }
  return out;
}

Json TaskOptions::Recorded(Json task, const std::string& kind) {
  Json out = Grouped(std::move(task), kind, true);
  if (!out.is_object()) return out;
  Json& group = out[kind];
  if (group.is_null()) group = Json::object();
  for (const std::string& former : FindTask(kind).former) {
    const size_t equals = former.find('=');
    const std::string key = former.substr(0, equals);
    if (group.is_object() && !group.contains(key)) group[key] = former.substr(equals + 1);
  }
  return out;
}

std::string TaskOptions::Grouped(const std::string& assignment, const std::string& kind) {
  constexpr std::string_view kTable = "task.";
  if (!assignment.starts_with(kTable)) return assignment;
  const std::string rest = assignment.substr(kTable.size());
  const std::string key = rest.substr(0, rest.find_first_of(".="));
  if (key != kind && Contains(Names(), key) && rest.size() > key.size() && rest[key.size()] == '.')
    FailUsage(assignment, ": the task is ", kind, "; options of ", key, " have no effect on it");
  // What is misspelt goes there as well: the error then names the nearest of the task's own
  // options.
  const bool elsewhere = key == "kind" || key == "cache" || Contains(Names(), key);
  return elsewhere ? assignment : StrCat(kTable, kind, ".", rest);
}

}  // namespace cistern
