#pragma once
// Tokens in chunks, for memories composed of plain ATen operations (slot_memory_composite.h,
// sum_memory_composite.h): many chunks are taken at a time, since a device waits for few
// operations.
#include <ATen/ATen.h>

#include <algorithm>

namespace cistern::ops {

// How many chunks at a time, where one of them forms so many numbers for its pairs of tokens.
inline int64_t ChunksAtATime(int64_t pairs_of_a_chunk) {
  constexpr int64_t kMost = 64, kPairs = int64_t{1} << 25;
  return std::clamp<int64_t>(kPairs / std::max<int64_t>(1, pairs_of_a_chunk), 1, kMost);
}

// [...,T,w] -> [...,C,c,w], with tokens of `value` behind the last.
inline at::Tensor InChunks(const at::Tensor& x, int64_t chunk, double value) {
  const int64_t behind = (chunk - x.size(-2) % chunk) % chunk;
  const at::Tensor whole = behind == 0 ? x : at::constant_pad_nd(x, {0, 0, 0, behind}, value);
  return whole.unflatten(-2, {-1, chunk});
}

// x [B,H,C,...] one chunk later, with `first` [B,H,...] in front: what stands before each chunk.
inline at::Tensor BeforeChunks(const at::Tensor& x, const at::Tensor& first) {
  return at::cat({first.unsqueeze(2), x.narrow(2, 0, x.size(2) - 1)}, 2);
}

}  // namespace cistern::ops
