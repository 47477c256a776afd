#pragma once
// What a task hands to a model: named tensors with one row for each example.
#include <string>
#include <utility>

#include "cistern/tensors/named_tensors.h"

namespace cistern {

// Tensors by name, such as ids [B,T] int64, targets, lengths [B] int64 (left out: nothing is
// padded); those that the model reads are its ModelInfo::inputs. Copies share memory.
struct Batch {
  NamedTensors tensors;
  int64_t rows = 0;    // examples
  int64_t tokens = 0;  // real tokens among them, without padding: what rates count

  // Error with the nearest name where there is none of this name.
  const at::Tensor& operator[](const std::string& name) const { return tensors[name]; }
  void Add(const std::string& name, const at::Tensor& value) { tensors.Set(name, value); }
  Batch To(at::Device device) const { return {tensors.To(device), rows, tokens}; }
  // Rows begin .. end-1 of all tensors, which share memory with these.
  Batch Rows(int64_t begin, int64_t end) const;
};

}  // namespace cistern
