#include "cistern/train/recent_weights.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>

#include "cistern/base/error.h"

namespace cistern {
namespace {

constexpr std::string_view kStart = "recent-", kEnd = ".safetensors";

}  // namespace

std::string RecentWeights::Path(int64_t step) const {
  return StrCat(folder_, "/", kStart, step, kEnd);
}

std::vector<int64_t> RecentWeights::Steps() const {
  std::vector<int64_t> steps;
  std::error_code error;
  std::filesystem::directory_iterator entry(folder_, error), end;
  for (; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (!name.starts_with(kStart) || !name.ends_with(kEnd)) continue;
    const char *first = name.data() + kStart.size(),
               *last = name.data() + name.size() - kEnd.size();
    int64_t step = -1;
    const auto [after, failed] = std::from_chars(first, last, step);
    if (failed == std::errc() && after == last && step >= 0) steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

void RecentWeights::Save(const Model& model, int64_t step) const {
  if (count_ == 0) return;
  TensorFile file;
  for (const auto& p : model.named_parameters()) file.tensors.push_back({p.key(), p.value()});
  SaveTensors(Path(step), file);
  const std::vector<int64_t> steps = Steps();
  std::error_code ignored;
  for (size_t i = 0; i + size_t(count_) < steps.size(); ++i)
    std::filesystem::remove(Path(steps[i]), ignored);
}

void RecentWeights::Forget(int64_t step) const {
  std::error_code ignored;
  for (const int64_t s : Steps()) {
    if (s > step) std::filesystem::remove(Path(s), ignored);
  }
}

int64_t RecentWeights::Average(Model& model) const {
  if (count_ == 0) return 0;
  std::map<std::string, at::Tensor> sums;
  const std::vector<int64_t> steps = Steps();
  const at::NoGradGuard guard;
  for (const int64_t step : steps) {
    for (const NamedTensor& t : LoadTensors(Path(step)).tensors) {
      at::Tensor& sum = sums[t.name];
      sum = sum.defined() ? sum + t.value : t.value.to(at::kDouble);
    }
  }
  if (steps.empty()) return 0;
  for (const auto& p : model.named_parameters()) {
    const auto found = sums.find(p.key());
    CISTERN_CHECK(found != sums.end() && found->second.sizes() == p.value().sizes(), folder_,
                  ": the files ", kStart, "N", kEnd, " do not hold '", p.key(),
                  "' of this model; they are of another run");
    at::Tensor(p.value()).copy_(found->second / double(steps.size()));
  }
  return int64_t(steps.size());
}

}  // namespace cistern
