#include "cistern/nn/folded_map.h"

#include <ATen/ops/detach.h>

namespace cistern {
namespace {

int64_t VersionOf(const at::Tensor& x) {
  return !x.defined() ? 0 : x.is_inference() ? -1 : x._version();
}

}  // namespace

bool FoldedMap::Fresh(const std::vector<at::Tensor>& sources) const {
  if (!map_.weight.defined() || sources.size() != sources_.size()) return false;
  for (size_t i = 0; i < sources.size(); ++i) {
    const Source& kept = sources_[i];
    if (!sources[i].is_same(kept.tensor)) return false;
    if (!sources[i].defined()) continue;
    if (kept.version < 0 || VersionOf(sources[i]) != kept.version ||
        sources[i].const_data_ptr() != kept.memory.const_data_ptr())
      return false;
  }
  return true;
}

FoldedMap::Map FoldedMap::Get(const std::vector<at::Tensor>& sources,
                              const std::function<Map()>& make) {
  const std::lock_guard lock(mutex_);
  if (!Fresh(sources)) {
    sources_.clear();
    for (const at::Tensor& x : sources)
      sources_.push_back({x, x.defined() ? x.detach() : x, VersionOf(x)});
    map_ = make();
  }
  return map_;
}

void FoldedMap::Clear() {
  const std::lock_guard lock(mutex_);
  map_ = {};
  sources_.clear();
}

}  // namespace cistern
