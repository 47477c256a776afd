#include "cistern/train/shared_run.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string_view>
#include <vector>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/file_lock.h"
#include "cistern/train/run_state.h"

namespace cistern {
namespace fs = std::filesystem;

namespace {

// What goes on with a run needs: not the lock, nor TensorBoard's files, which are only added to.
std::vector<std::string> FilesOf(const std::string& folder) {
  std::vector<std::string> files;
  std::error_code ignored;
  for (const auto& entry : fs::recursive_directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    if (!entry.is_regular_file(ignored) || name == "lock" || name.starts_with("events.out."))
      continue;
    files.push_back(fs::relative(entry.path(), folder).string());
  }
  std::sort(files.begin(), files.end());
  return files;
}

// Processes of another machine that has the same temporary folder are not dead where this one does
// not know their numbers.
std::string HostName() {
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  return host;
}

}  // namespace

RunCopy::RunCopy(const Processes& processes, const std::string& folder, bool filled)
    : path_(folder) {
  if (processes.alone()) return;
  if (!processes.first()) {
    const std::string name = "cistern-run-" + HostName();
    std::error_code ignored;
    RemoveLeftovers(fs::temp_directory_path(ignored).string(), name);
    scratch_ = std::make_unique<ScratchFolder>(name);
    path_ = scratch_->path();
  }
  if (!filled) return;
  std::vector<std::string> files;
  if (processes.first()) files = FilesOf(folder);
  files.emplace_back();  // the end
  for (size_t i = 0;; ++i) {
    const std::string name = processes.OfFirst(processes.first() ? files[i] : "");
    if (name.empty()) return;
    const std::string path = path_ + "/" + name,
                      bytes = processes.OfFirst(processes.first() ? ReadFile(path) : "");
    if (processes.first()) continue;
    EnsureDirectory(fs::path(path).parent_path().string());
    WriteFileAtomically(path, bytes);
  }
}

void RequireSameRun(const Processes& processes, const Json& experiment, const Batch& batch) {
  Json mine = experiment;
  // The first process's weights are taken; notes name places, and what a cache went through.
  for (const char* key : {"environment", "from"}) mine.erase(key);
  if (mine.contains("data") && mine["data"].is_object()) mine["data"].erase("notes");
  // How rows are shared out follows from the threads.
  for (const char* key : {"threads", "threads_take"})
    mine[key] = experiment.value("environment", Json::object()).value(key, Json());
  for (const NamedTensor& t : batch.tensors.all()) {
    const at::Tensor dense = t.value.cpu().contiguous();
    const std::string_view bytes(static_cast<const char*>(dense.const_data_ptr()), dense.nbytes());
    mine["first batch"][t.name] = HexText(XxHash64(bytes));
  }
  const Json theirs = Json::parse(processes.OfFirst(mine.dump())).flatten(), own = mine.flatten();
  std::string differs;
  for (const Json* all : {&own, &theirs}) {
    for (const auto& [key, value] : all->items()) {
      const std::string name = key.substr(1);  // "task/lm/text"
      if (differs.empty() && !IsPlaceOfData(name) &&
          own.value(key, Json()) != theirs.value(key, Json()))
        differs = name;
    }
  }
  const std::vector<std::string> of_all = processes.Gather(differs);
  for (size_t r = 0; r < of_all.size(); ++r) {
    if (!of_all[r].empty())
      FailUsage("process ", r, " trains another run than process 0: they differ in ", of_all[r],
                "; give all processes the same arguments, --threads among them, and the same data");
  }
}

}  // namespace cistern
