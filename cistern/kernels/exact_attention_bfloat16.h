#pragma once
// Exact attention (exact_attention.h) of tokens in bfloat16, where the processor multiplies pairs
// of them (AVX512-BF16, twice the rate of float on Zen 4) or tiles of pairs (AMX, six to nine
// times the rate). Scores, softmax and sums are float; what enters a product is bfloat16: tokens as
// they are, weights and their gradients rounded once.
//
// What is promised of float holds here: what is not seen has no part in any bit, and bits do not
// depend on the number of threads. They do depend on the processor.
#include <cstddef>
#include <functional>

#include "cistern/kernels/bfloat16.h"
#include "cistern/kernels/exact_attention.h"

namespace cistern {

// Whether this processor and the instruction set in use (isa.h) can run the two below.
bool CanAttendBFloat16();

// Gives memory of so many bytes, aligned to 64, that stays until the call ends. Heap: from the C
// library, freed with the last copy of what is returned.
using CallMemory = std::function<std::byte*(size_t bytes)>;
CallMemory HeapMemory();

// As in exact_attention.h; stats is float.
void AttentionForward(const AttentionShape& shape, double scale, Rows<const BFloat16> q,
                      Rows<const BFloat16> k, Rows<const BFloat16> v, const AttentionMask& mask,
                      Rows<BFloat16> out, float* stats, const CallMemory& memory = HeapMemory());

// The gradients are sums over many keys or queries: they are summed in float and rounded once.
void AttentionBackward(const AttentionShape& shape, double scale, Rows<const BFloat16> q,
                       Rows<const BFloat16> k, Rows<const BFloat16> v, Rows<const BFloat16> out,
                       Rows<const BFloat16> d_out, const AttentionMask& mask, const float* stats,
                       Rows<BFloat16> dq, Rows<BFloat16> dk, Rows<BFloat16> dv,
                       const CallMemory& memory = HeapMemory());

}  // namespace cistern
