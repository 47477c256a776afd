// Philox 4x32-10 (base/random.h) with one counter a lane; included once per Highway target. Not for
// HWY_SCALAR.
#if defined(CISTERN_KERNELS_PHILOX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_PHILOX_INL_H_
#undef CISTERN_KERNELS_PHILOX_INL_H_
#else
#define CISTERN_KERNELS_PHILOX_INL_H_
#endif

#include "cistern/kernels/gemm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR
struct PhiloxKeys {
  explicit PhiloxKeys(uint64_t seed) {
    uint32_t a = uint32_t(seed), b = uint32_t(seed >> 32);
    for (size_t round = 0; round < 10; ++round, a += 0x9E3779B9u, b += 0xBB67AE85u)
      of_0[round] = a, of_2[round] = b;
  }
  uint64_t of_0[10], of_2[10];
};

// x: the words of the counters; becomes what is drawn. The four words are the low halves of x; what
// stands in the high halves has no part in any product.
HWY_INLINE void PhiloxLanes(const PhiloxKeys& keys, Vec<uint64_t> (&x)[4]) {
  const Tag<uint64_t> d;
  const Tag<uint32_t> words;
  const Vec<uint32_t> m0 = hn::BitCast(words, hn::Set(d, uint64_t{0xD2511F53u})),
                      m1 = hn::BitCast(words, hn::Set(d, uint64_t{0xCD9E8D57u}));
#pragma GCC unroll 10
  for (size_t round = 0; round < 10; ++round) {
    const Vec<uint64_t> p0 = hn::MulEven(m0, hn::BitCast(words, x[0])),
                        p1 = hn::MulEven(m1, hn::BitCast(words, x[2]));
    x[0] = hn::Xor(hn::ShiftRight<32>(p1), hn::Xor(x[1], hn::Set(d, keys.of_0[round])));
    x[1] = p1;
    x[2] = hn::Xor(hn::ShiftRight<32>(p0), hn::Xor(x[3], hn::Set(d, keys.of_2[round])));
    x[3] = p0;
  }
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
