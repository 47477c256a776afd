#pragma once
// What a task hands to a model: named tensors with one row for each example.
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "cistern/attention/state.h"

namespace cistern {

// Tensors by name, such as ids [B,T] int64, targets, lengths [B] int64 (left out: nothing is
// padded). Copies share memory.
struct Batch {
  std::vector<NamedTensor> tensors;
  int64_t rows = 0;    // examples
  int64_t tokens = 0;  // real tokens among them, without padding: what rates count

  // Error that lists the names where there is none of this name.
  const at::Tensor& operator[](const std::string& name) const;
  // Undefined where there is none of this name.
  at::Tensor Find(const std::string& name) const;
  void Add(const std::string& name, at::Tensor value) {
    tensors.push_back({name, std::move(value)});
  }
  Batch To(at::Device device) const;
};

}  // namespace cistern
