#pragma once
// bfloat16 as kernels see it: storage for tokens, whose arithmetic is in float.
#include <cstdint>
#include <cstring>

namespace cistern {

// The upper half of a float.
struct BFloat16 {
  uint16_t bits = 0;

  BFloat16() = default;
  // Rounds to nearest, ties to even; NaN stays NaN.
  explicit BFloat16(float x) {
    uint32_t b;
    std::memcpy(&b, &x, sizeof b);
    const uint32_t rounded = b + 0x7fffu + ((b >> 16) & 1u);
    bits = static_cast<uint16_t>((x != x ? b | 0x400000u : rounded) >> 16);
  }
  explicit operator float() const {
    const uint32_t b = uint32_t{bits} << 16;
    float x;
    std::memcpy(&x, &b, sizeof x);
    return x;
  }
};
static_assert(sizeof(BFloat16) == 2);

// What kernels compute in, given tokens of S.
template <class S>
struct ComputedIn {
  using Type = S;
};
template <>
struct ComputedIn<BFloat16> {
  using Type = float;
};
template <class S>
using ComputeType = typename ComputedIn<S>::Type;

}  // namespace cistern
