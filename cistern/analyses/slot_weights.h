#pragma once
// The slots of a layer at work: which tokens each holds, and which of them a query reads, exact up
// to rounding and of every mechanism whose state has a memory of values.
//
// The memory is linear in the values, so that the production verbs, run on slices of the identity
// in place of the values (identity_values.h), leave the write weights in it; and what is read is
// linear in the memory, so that Read, given slices of the identity in place of the memory of values
// and the state as it is beside it, gives the read weights:
//
//   M_t[l] = sum_{s<=t} write[l,s] v_s      y_t = sum_l read[l] M_t[l]
//
// Slots are ABC's and gated slots, Linformer's and Luna's, Latte's latents, and the features of
// kernel methods, whose weights may be negative and whose read weights hold the denominator. Memory
// streams (luna, conv_luna, ...) hold by packing and are read by unpacking.
#include "cistern/analyses/captured_layers.h"

namespace cistern {

struct SlotMoment {
  int64_t tokens = 0;  // that were written until then
  // write [G,n,tokens], in the type of the state or of packing, and read [H,Q,n], double. G: heads,
  // or those of packing. Q: the last of the tokens alone where attention is causal, else all
  // queries.
  at::Tensor write, read;
};

// The name of the memory of values in a mechanism's state; empty: it has no slots there.
std::string SlotMemoryName(const Mechanism& mechanism);

// One row after `times` tokens each (ascending, the last one all of the row's); where attention is
// not causal, after all of them. UsageError where the layer has no slots or the row several
// documents; Error where the weights do not give the layer's output.
// O(times n) memory for a moment and O(T / d) copies of the row.
std::vector<SlotMoment> WatchSlots(const CapturedLayer& layer, int64_t row,
                                   const std::vector<int64_t>& times);

}  // namespace cistern
