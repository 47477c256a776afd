#pragma once
// A linear map that is made from weights and kept as long as these stay what they are.
#include <ATen/core/Tensor.h>

#include <functional>
#include <mutex>
#include <vector>

namespace cistern {

class FoldedMap {
 public:
  struct Map {
    at::Tensor weight, bias;  // [out,in], [out] or undefined
  };
  // What `make` returned, recomputed if `sources` (undefined ones are passed over) are not what
  // they were: another tensor, other memory, or written to since (at::Tensor::_version). Several
  // threads may ask at once. O(sources) where nothing changed.
  Map Get(const std::vector<at::Tensor>& sources, const std::function<Map()>& make);
  void Clear();

 private:
  struct Source {
    at::Tensor tensor,
        memory;       // the weight; its memory, kept so that its address means nothing else
    int64_t version;  // -1: the tensor counts none
  };
  bool Fresh(const std::vector<at::Tensor>& sources) const;

  std::mutex mutex_;
  std::vector<Source> sources_;
  Map map_;
};

}  // namespace cistern
