// Which pairs of a tile dropout keeps, as bits drawn for many queries at once; included once per
// Highway target.
#if defined(CISTERN_KERNELS_ATTENTION_DROPOUT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_ATTENTION_DROPOUT_INL_H_
#undef CISTERN_KERNELS_ATTENTION_DROPOUT_INL_H_
#else
#define CISTERN_KERNELS_ATTENTION_DROPOUT_INL_H_
#endif

#include <cstring>

#include "cistern/kernels/dropout.h"
#include "cistern/kernels/philox-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Bit i of kept[j]: whether the pair of query + i step and key + j step is kept; up to 64 queries,
// rounded up to whole vectors.
#if HWY_TARGET == HWY_SCALAR
inline HWY_NOINLINE void DrawKept(const DropoutDraw& dropout, uint64_t head, uint64_t query,
                                  uint64_t key, uint64_t step, size_t queries, size_t keys,
                                  uint64_t* kept) {
  for (size_t j = 0; j < keys; ++j) {
    kept[j] = 0;
    for (size_t i = 0; i < queries; ++i)
      kept[j] |= uint64_t{dropout.Keeps(head, query + i * step, key + j * step)} << i;
  }
}
#else
inline HWY_NOINLINE void DrawKept(const DropoutDraw& dropout, uint64_t head, uint64_t query,
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
