#include "cistern/train/checkpoint.h"

#include <filesystem>

#include "cistern/base/error.h"
#include "cistern/io/atomic_file.h"

namespace cistern {
namespace fs = std::filesystem;
namespace {

constexpr char kPrefix[] = "checkpoint-";

// The step in a folder's name, or -1.
int64_t StepOf(const fs::path& path) {
  const std::string name = path.filename().string();
  if (!name.starts_with(kPrefix)) return -1;
  const std::string digits = name.substr(sizeof kPrefix - 1);
  if (digits.empty() || digits.find_first_not_of("0123456789") != std::string::npos) return -1;
  return std::stoll(digits);
}

}  // namespace

void WriteCheckpoint(const std::string& run, int64_t step, const Model& model,
                     const AdamW& optimizer, const Json& trainer) {
  const fs::path folder = fs::path(run) / (kPrefix + std::to_string(step));
  EnsureDirectory(folder.string());
  fs::remove(folder / "trainer.json");
  SaveModel(model, folder.string());
  SaveTensors((folder / "optimizer.safetensors").string(),
              {optimizer.Save(), {{"step", std::to_string(step)}}});
  WriteFileAtomically((folder / "trainer.json").string(), trainer.dump(2) + "\n");
  for (const auto& entry : fs::directory_iterator(run)) {
    const int64_t other = StepOf(entry.path());
    if (other >= 0 && other != step) fs::remove_all(entry.path());
  }
}

std::optional<std::string> NewestCheckpoint(const std::string& run) {
  int64_t best = -1;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(run, ignored)) {
    if (fs::exists(entry.path() / "trainer.json")) best = std::max(best, StepOf(entry.path()));
  }
  if (best < 0) return std::nullopt;
  return (fs::path(run) / (kPrefix + std::to_string(best))).string();
}

Json ReadCheckpoint(const std::string& folder, Model& model, AdamW& optimizer) {
  const Json trainer = ReadJsonFile(folder + "/trainer.json");
  const std::string path = folder + "/optimizer.safetensors";
  const TensorFile moments = LoadTensors(path);
  LoadWeights(model, folder + "/model.safetensors");
  optimizer.Load(moments.tensors, path);
  return trainer;
}

}  // namespace cistern
