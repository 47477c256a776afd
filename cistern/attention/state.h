#pragma once
// The state of one attention layer: everything needed to go on with a sequence.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cistern/tensors/named_tensors.h"

namespace cistern {

// The place of a tensor that a mechanism declares for its states (Mechanism::AddState).
struct StateId {
  static constexpr size_t kUndeclared = size_t(-1);
  std::string name = {};
  size_t index = kUndeclared;
};

// A value: tensors in the mechanism's declared order, first dimension B. Copies share memory;
// Extend may write into it in place when no gradient is recorded, so keep a Clone() of a state that
// must survive.
struct State {
  std::vector<NamedTensor> tensors;

  const at::Tensor& operator[](const std::string& name) const;
  at::Tensor& operator[](const std::string& name);
  bool Has(const std::string& name) const;  // and the tensor is defined
  // Without a search. Error where the state is another mechanism's.
  const at::Tensor& operator[](const StateId& id) const;
  at::Tensor& operator[](const StateId& id);
  int64_t Bytes() const;
  State Clone() const;
  State Detach() const;
  State Reorder(const at::Tensor& rows)
      const;  // rows [B'] int64: row i of the result is row rows[i] of this one (beam search)
};

// What a tensor adds up to over two states, for Mechanism::Merge. Error where its shapes differ.
at::Tensor SumOf(const StateId& id, const State& first, const State& second);

}  // namespace cistern
