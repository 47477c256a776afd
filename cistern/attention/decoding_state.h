#pragma once
// The state of a mechanism of slots or sums while it decodes with writes put off
// (ops/slot_decoding.h): one tensor `decoding` in place of its memories and z. A mechanism that
// declares one fills in Mechanism::decoding_, which all have.
#include <functional>

#include "cistern/attention/state.h"
#include "cistern/ops/slot_decoding.h"

namespace cistern {

// The name of that tensor, and whether a state's tensor is one: those of a head group have the
// group's name before theirs.
constexpr const char kDecodingName[] = "decoding";
inline bool IsDecodingName(const std::string& name) {
  return name == kDecodingName || name.ends_with("_decoding");
}

struct DecodingState {
  StateId keys, values, z;  // those that the mechanism has not are undeclared
  StateId decoding;         // undeclared: writes are never put off
  int64_t heads = 0, slots = 0, width = 0;

  bool declared() const { return decoding.index != StateId::kUndeclared; }
  ops::SlotHandles Of(State& state) const;
  // The state in double, for every other use of it.
  void End(State& state) const;
  State Settled(const State& state) const;  // Mechanism::Settled
  State Form(const State& empty,            // Mechanism::StateForm
             const std::function<bool(const std::string&)>& has) const;
  // Of the whole state while it decodes, `empty` being an empty one; 0: writes are not put off
  // there.
  int64_t Bytes(const State& empty, int64_t batch, const at::TensorOptions& options) const;

 private:
  void DropMemories(State* state) const;
};

}  // namespace cistern
