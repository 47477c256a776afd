// Which pairs of a tile dropout keeps, as bits drawn for many queries at once; included once per
// Highway target.
#if defined(CISTERN_KERNELS_ATTENTION_DROPOUT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_ATTENTION_DROPOUT_INL_H_
#undef CISTERN_KERNELS_ATTENTION_DROPOUT_INL_H_
#else
#define CISTERN_KERNELS_ATTENTION_DROPOUT_INL_H_
#endif

#include <cstring>

#include "cistern/kernels/attention_dropout.h"
#include "cistern/kernels/gemm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Bit i of kept[j]: whether the pair of query + i step and key + j step is kept; up to 64 queries,
// rounded up to whole vectors.
#if HWY_TARGET == HWY_SCALAR
inline HWY_NOINLINE void DrawKept(const AttentionDropout& dropout, uint64_t head, uint64_t query,
                                  uint64_t key, uint64_t step, size_t queries, size_t keys,
                                  uint64_t* kept) {
  for (size_t j = 0; j < keys; ++j) {
    kept[j] = 0;
    for (size_t i = 0; i < queries; ++i)
      kept[j] |= uint64_t{dropout.Keeps(head, query + i * step, key + j * step)} << i;
  }
}
#else
// Philox 4x32-10 (base/random.h) with one counter a lane. The four words are the low halves of x;
// what stands in the high halves has no part in any product.
struct PhiloxKeys {
  explicit PhiloxKeys(uint64_t seed) {
    uint32_t a = uint32_t(seed), b = uint32_t(seed >> 32);
    for (size_t round = 0; round < 10; ++round, a += 0x9E3779B9u, b += 0xBB67AE85u)
      of_0[round] = a, of_2[round] = b;
  }
  uint64_t of_0[10], of_2[10];
};

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

inline HWY_NOINLINE void DrawKept(const AttentionDropout& dropout, uint64_t head, uint64_t query,
                                  uint64_t key, uint64_t step, size_t queries, size_t keys,
                                  uint64_t* kept) {
  const Tag<uint64_t> d;
  const Tag<uint32_t> words;
  constexpr size_t kN = kLanes<uint64_t>, kBoth = 2 * kN;
  const uint64_t threshold = dropout.Threshold();
  if (threshold == 0 || threshold >> 32 != 0) {
    std::memset(kept, threshold == 0 ? 0xff : 0, keys * sizeof(uint64_t));
    return;
  }
  const PhiloxKeys round_keys(dropout.seed);
  const Vec<uint32_t> largest = hn::Set(words, uint32_t(threshold - 1));  // that is dropped
  const Vec<uint64_t> head_low = hn::Set(d, head & 0xffffffffu), head_high = hn::Set(d, head >> 32);
  HWY_ALIGN uint64_t position[64 + kBoth];
  for (size_t i = 0; i < RoundUp(queries, kBoth); ++i) position[i] = query + i * step;
  for (size_t j = 0; j < keys;) {
    const uint64_t block = (key + j * step) / 4;
    uint64_t bits[4] = {};
    uint8_t* const bytes = reinterpret_cast<uint8_t*>(bits);
    for (size_t i = 0; i < queries; i += kBoth) {
      Vec<uint64_t> low[4] = {hn::Set(d, block), hn::Load(d, position + i), head_low, head_high};
      Vec<uint64_t> high[4] = {low[0], hn::Load(d, position + i + kN), head_low, head_high};
      PhiloxLanes(round_keys, low);
      PhiloxLanes(round_keys, high);
#pragma GCC unroll 4
      for (size_t w = 0; w < 4; ++w) {
        const Vec<uint32_t> word =
            hn::ConcatEven(words, hn::BitCast(words, high[w]), hn::BitCast(words, low[w]));
        const auto keep = hn::Gt(word, largest);
        uint8_t part[8] = {};
        hn::StoreMaskBits(words, keep, part);
        if constexpr (kBoth < 8) {
          bytes[8 * w + i / 8] |= uint8_t(part[0] << (i % 8));
        } else {
          std::memcpy(bytes + 8 * w + i / 8, part, kBoth / 8);
        }
      }
    }
    for (; j < keys && (key + j * step) / 4 == block; ++j) kept[j] = bits[(key + j * step) % 4];
  }
}

#endif

// X[keys, queries] = 0 where a pair is not kept.
template <class T>
HWY_NOINLINE void DropPairs(const uint64_t* kept, size_t keys, size_t vectors, size_t ld, T* X) {
  const Tag<T> d;
  constexpr size_t kN = kLanes<T>;
  for (size_t j = 0; j < keys; ++j, X += ld) {
    for (size_t i = 0; i < vectors * kN; i += kN) {
      const uint64_t bits = kept[j] >> i;
      const auto keep = hn::LoadMaskBits(d, reinterpret_cast<const uint8_t*>(&bits));
      hn::Store(hn::IfThenElseZero(keep, hn::Load(d, X + i)), d, X + i);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
