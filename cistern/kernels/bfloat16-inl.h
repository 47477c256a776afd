// Vectors of floats from and to memory that holds float or bfloat16; included once per Highway
// target.
#if defined(CISTERN_KERNELS_BFLOAT16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_BFLOAT16_INL_H_
#undef CISTERN_KERNELS_BFLOAT16_INL_H_
#else
#define CISTERN_KERNELS_BFLOAT16_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cistern/kernels/bfloat16.h"
#include "cistern/kernels/gemm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

HWY_INLINE Vec<float> LoadFloats(const float* from) { return hn::LoadU(Tag<float>(), from); }
HWY_INLINE void StoreFloats(Vec<float> x, float* to) { hn::StoreU(x, Tag<float>(), to); }

HWY_INLINE Vec<float> LoadFloats(const BFloat16* from) {
  const Tag<float> d;
  const hn::RebindToUnsigned<Tag<float>> du;
  const hn::Rebind<uint16_t, Tag<float>> half;
  const auto bits = hn::LoadU(half, reinterpret_cast<const uint16_t*>(from));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, bits)));
}
// A vector of T from a row of T, or of bfloat16.
template <class T, class S>
HWY_INLINE Vec<T> LoadAs(const S* from) {
  if constexpr (std::is_same_v<S, T>) {
    return hn::LoadU(Tag<T>(), from);
  } else {
    return LoadFloats(from);
  }
}
// Rounds as BFloat16(float) does.
HWY_INLINE void StoreFloats(Vec<float> x, BFloat16* to) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
  // The processor's instruction takes numbers below the normal ones for 0.
  if (__builtin_cpu_supports("avx512bf16") && _mm512_fpclass_ps_mask(x.raw, 0x20) == 0) {
    __m256i pairs;
    __asm__("vcvtneps2bf16 %1, %0" : "=v"(pairs) : "v"(x.raw));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), pairs);
    return;
  }
#endif
  const hn::RebindToUnsigned<Tag<float>> du;
  const hn::RebindToSigned<Tag<float>> di;
  const hn::Rebind<uint16_t, Tag<float>> half;
  const auto bits = hn::BitCast(du, x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fffu)));
  const auto nan = hn::Or(bits, hn::Set(du, 0x400000u));
  const auto kept = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(x)), nan, rounded);
  const auto upper = hn::BitCast(di, hn::ShiftRight<16>(kept));  // fits 16 bits: none is cut off
  hn::StoreU(hn::DemoteTo(half, upper), half, reinterpret_cast<uint16_t*>(to));
}

// The first `count` lanes of a vector, zeros in the others; and back.
template <class S>
HWY_INLINE Vec<float> LoadSomeFloats(const S* from, size_t count) {
  HWY_ALIGN S part[HWY_MAX_BYTES / sizeof(float)] = {};
  std::copy_n(from, count, part);
  return LoadFloats(part);
}
template <class S>
HWY_INLINE void StoreSomeFloats(Vec<float> x, S* to, size_t count) {
  HWY_ALIGN S part[HWY_MAX_BYTES / sizeof(float)];
  StoreFloats(x, part);
  std::copy_n(part, count, to);
}

// The same for any count up to a whole vector.
template <class S>
HWY_INLINE Vec<float> LoadUpTo(const S* from, size_t count) {
  return count == kLanes<float> ? LoadFloats(from) : LoadSomeFloats(from, count);
}
template <class S>
HWY_INLINE void StoreUpTo(Vec<float> x, S* to, size_t count) {
  count == kLanes<float> ? StoreFloats(x, to) : StoreSomeFloats(x, to, count);
}

// body(j, count) for each vector of n values, of which the last may be a part: values j ..
// j+count-1.
template <class Body>
HWY_INLINE void EachVector(size_t n, Body&& body) {
  size_t j = 0;
  for (; j + kLanes<float> <= n; j += kLanes<float>) body(j, kLanes<float>);
  if (j < n) body(j, n - j);
}

// to[0, n) = from[0, n)
template <class From, class To>
HWY_INLINE void ConvertRow(size_t n, const From* from, To* to) {
  EachVector(n, [&](size_t j, size_t count)
                    HWY_ATTR { StoreUpTo(LoadUpTo(from + j, count), to + j, count); });
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
