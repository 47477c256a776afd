#pragma once
// What a task hands to a model: named tensors with one row for each example.
#include <string>
#include <utility>
#include <vector>

#include "cistern/tensors/named_tensors.h"

namespace cistern {

// Tensors by name, such as ids [B,T] int64, targets, lengths [B] int64 (left out: nothing is
// padded); those that the model reads are its ModelInfo::inputs. Copies share memory.
struct Batch {
  NamedTensors tensors;
  int64_t rows = 0;    // examples
  int64_t tokens = 0;  // real tokens among them, without padding: what rates count
  // Tensors [B,T,...] whose tokens behind a row's length are padding that the task asks nothing of,
  // so that it may be left out, each with the name of the lengths.
  struct Padded {
    std::string tensor, lengths;
  };
  std::vector<Padded> padded = {};

  // Error with the nearest name where there is none of this name.
  const at::Tensor& operator[](const std::string& name) const { return tensors[name]; }
  void Add(const std::string& name, const at::Tensor& value) { tensors.Set(name, value); }
  Batch To(at::Device device) const { return {tensors.To(device), rows, tokens, padded}; }
  // Rows begin .. end-1 of all tensors, which share memory with these.
  Batch Rows(int64_t begin, int64_t end) const;
  // Row order[i] of all tensors as row i, copied; order [rows] int64.
  Batch InOrder(const at::Tensor& order) const;
  // The padded tensors as far as their longest rows go, at least one token; memory is shared.
  Batch WithoutPadding() const;
  // [rows] int64: the tokens of each row, of all lengths that `padded` names.
  at::Tensor TokensOfRows() const;
};

}  // namespace cistern
