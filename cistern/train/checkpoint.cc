#include "cistern/train/checkpoint.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <charconv>
#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/base/terminal.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/file_lock.h"

namespace cistern {
namespace fs = std::filesystem;
namespace {

constexpr char kPrefix[] = "checkpoint-", kStateFile[] = "trainer.json",
               kOptimizerFile[] = "optimizer.safetensors";

// The step in a folder's name, or -1.
int64_t StepOf(const fs::path& path) {
  const std::string name = path.filename().string();
  if (!name.starts_with(kPrefix)) return -1;
  const std::string digits = name.substr(sizeof kPrefix - 1);
  int64_t step = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  return error == std::errc() && end == digits.data() + digits.size() && digits[0] != '-' ? step
                                                                                          : -1;
}

// What another program has put at a checkpoint's place stays, under another name.
void MoveAside(const fs::path& folder) {
  if (!fs::exists(fs::symlink_status(folder)) || (fs::is_directory(folder) && fs::is_empty(folder)))
    return;
  std::string other = folder.string() + ".other";
  for (int n = 2; fs::exists(fs::symlink_status(other)); ++n)
    other = StrCat(folder.string(), ".other-", n);
  fs::rename(folder, other);
  Note(StrCat(folder.string(), " was no checkpoint of a run; it is ", other, " now"));
}

}  // namespace

void WriteCheckpoint(const std::string& run, const Model& model, const Optimizer& optimizer,
                     const RunState& state, const WeightAverage* average) {
  const fs::path folder = fs::path(run) / (kPrefix + std::to_string(state.step));
  if (fs::exists(folder / kStateFile)) {
    WriteFileAtomically((folder / kStateFile).string(), RunStateText(state));
  } else {
    const std::string fresh = TemporaryName(folder.string());
    std::error_code error;
    try {
      EnsureDirectory(fresh);
      SaveModel(model, fresh);
      TensorFile file{optimizer.Save(),
                      {{"step", std::to_string(state.step)}, {"optimizer", optimizer.name()}}};
      if (average) {
        for (NamedTensor& t : average->Save()) file.tensors.push_back(std::move(t));
      }
      SaveTensors(fresh + "/" + kOptimizerFile, file);
      WriteFileAtomically(fresh + "/" + kStateFile, RunStateText(state));
      MoveAside(folder);
      fs::rename(fresh, folder, error);
      CISTERN_CHECK(!error, "cannot write ", folder.string(), ": ", error.message());
    } catch (...) {
      fs::remove_all(fresh, error);
      throw;
    }
    SyncDirectory(run);
  }
  std::error_code error;
  fs::directory_iterator entry(run, error), end;
  for (; !error && entry != end; entry.increment(error)) {
    const int64_t other = StepOf(entry->path());
    std::error_code ignored, failed;
    if (other < 0 || other == state.step || !fs::exists(entry->path() / kStateFile, ignored))
      continue;
    // Renamed first: one that is removed in part would look like another program's.
    const std::string going = TemporaryName(entry->path().string());
    fs::rename(entry->path(), going, failed);
    if (!failed) fs::remove_all(going, ignored);
  }
}

std::optional<std::string> NewestCheckpoint(const std::string& run) {
  int64_t best = -1;
  std::error_code error;
  fs::directory_iterator entry(run, error), end;
  for (; !error && entry != end; entry.increment(error)) {
    std::error_code ignored;
    if (fs::exists(entry->path() / kStateFile, ignored))
      best = std::max(best, StepOf(entry->path()));
  }
  if (best < 0) return std::nullopt;
  return (fs::path(run) / (kPrefix + std::to_string(best))).string();
}

RunState ReadRunState(const std::string& folder) {
  const std::string path = folder + "/" + kStateFile;
  RunState state = ParseRunState(ReadFile(path), path);
  CISTERN_CHECK(StepOf(folder) == state.step, path, ": step ", state.step,
                " does not fit the folder's name");
  return state;
}

RunState ReadCheckpoint(const std::string& folder, Model& model, Optimizer& optimizer,
                        WeightAverage* average) {
  const RunState state = ReadRunState(folder);
  const std::string path = folder + "/" + kOptimizerFile;
  const TensorFile moments = LoadTensors(path);
  const auto said = [&](const std::string& key) -> std::string {
    const auto found = std::find_if(moments.metadata.begin(), moments.metadata.end(),
                                    [&](const auto& entry) { return entry.first == key; });
    return found == moments.metadata.end() ? "" : found->second;
  };
  CISTERN_CHECK(said("step") == std::to_string(state.step), path, " is not of step ", state.step);
  const std::string writer = said("optimizer").empty() ? "adamw" : said("optimizer");
  CISTERN_CHECK(writer == optimizer.name(), path, " is of the optimizer ", writer, ", not ",
                optimizer.name());
  LoadWeights(model, folder + "/model.safetensors");
  optimizer.Load(moments.tensors, path);
  if (average) average->Load(moments.tensors, path);
  return state;
}

std::string CheckpointProblem(const std::string& folder) {
  try {
    ReadRunState(folder);
    for (const char* name : {"model.safetensors", kOptimizerFile}) {
      const std::string path = folder + "/" + name;
      for (const NamedTensor& t : LoadTensors(path).tensors) {
        if (t.value.is_floating_point() && !at::isfinite(t.value).all().item<bool>())
          return StrCat(path, ": tensor '", t.name, "' holds numbers that are not finite");
      }
    }
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

std::string LogProblem(const std::string& run) {
  const auto newest = NewestCheckpoint(run);
  if (!newest) return "";
  const std::string path = run + "/metrics.jsonl";
  try {
    const RunState state = ReadRunState(*newest);
    std::error_code ignored;
    const std::string log = fs::exists(path, ignored) ? ReadFile(path) : "";
    if (int64_t(log.size()) < state.log_bytes)
      return path + " lacks lines from before the checkpoint";
    const std::string_view known = std::string_view(log).substr(0, size_t(state.log_bytes));
    if (!state.log_xxh64.empty() && HexText(XxHash64(known)) != state.log_xxh64)
      return path + " is not as the run wrote it, by its checksum; curves may be others";
  } catch (const Error& e) {
    return StrCat(path, " cannot be checked: ", e.what());
  }
  return "";
}

bool HoldsRun(const std::string& folder) {
  std::error_code ignored;
  return NewestCheckpoint(folder).has_value() ||
         fs::exists(fs::path(folder) / "model.safetensors", ignored);
}

void RefuseOtherFiles(const std::string& folder) {
  std::error_code error, ignored;
  if (fs::exists(fs::path(folder) / "experiment.json", ignored)) return;
  fs::directory_iterator entry(folder, error), end;
  for (; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name == "config.json" || name == "tokenizer.json" || name.starts_with(kPrefix) ||
        name.starts_with("metrics.") || name.starts_with("events."))
      FailUsage(folder, " has files of something else in it (", name,
                "), which a run would replace or remove; name a new folder");
  }
}

}  // namespace cistern
