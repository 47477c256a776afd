#include "cistern/kernels/dropout.h"

#include <algorithm>
#include <type_traits>

#include "cistern/base/parallel.h"
#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/dropout.cc"
#include "hwy/foreach_target.h"  // must come before highway.h

#include "cistern/kernels/bfloat16-inl.h"
#include "cistern/kernels/philox-inl.h"
#include "hwy/highway.h"

#ifndef CISTERN_KERNELS_DROPOUT_CC_
#define CISTERN_KERNELS_DROPOUT_CC_
namespace cistern {
namespace dropout {

// Values whose bits are drawn at once.
constexpr size_t kGroup = 128;

// Values begin .. end - 1 of rows of `width`, counted from the first row's first.
struct Span {
  int64_t width, begin, end;

  // Groups of all rows, one row's after another's; the last one of a row may be shorter.
  int64_t GroupsOfRow() const { return (width + int64_t{kGroup} - 1) / int64_t{kGroup}; }
  int64_t GroupOf(int64_t value) const {
    return value / width * GroupsOfRow() + value % width / int64_t{kGroup};
  }
  int64_t FirstGroup() const { return begin < end ? GroupOf(begin) : 0; }
  int64_t EndGroup() const { return begin < end ? GroupOf(end - 1) + 1 : 0; }
};

// What loses values: y = what is kept of x, and `beside` in place, unless it is null; of the span.
template <class T>
struct Values {
  const T* x;
  T *y, *beside;
};

}  // namespace dropout
}  // namespace cistern
#endif  // CISTERN_KERNELS_DROPOUT_CC_

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

using dropout::kGroup;

// Bit i of words 0 and 1: whether value 128 group + i, and 64 + i more, of a row is kept.
struct Kept {
  uint64_t words[2];
};

class GroupDraw {
 public:
#if HWY_TARGET == HWY_SCALAR
  explicit GroupDraw(const DropoutDraw& draw) : draw_(draw) {}
  Kept Of(uint64_t row, uint64_t group) const {
    Kept kept = {};
    for (uint64_t i = 0; i < kGroup; ++i)
      kept.words[i / 64] |= uint64_t{draw_.KeepsValue(row, kGroup * group + i)} << i % 64;
    return kept;
  }

 private:
  const DropoutDraw& draw_;
#else
  explicit GroupDraw(const DropoutDraw& draw)
      : keys_(draw.seed), threshold_(draw.ValueThreshold()) {}
  HWY_INLINE Kept Of(uint64_t row, uint64_t group) const {
    const Tag<uint64_t> d;
    const Tag<uint32_t> words;
    constexpr size_t kN = kLanes<uint64_t>, kBoth = 2 * kN;
    static_assert(kBoth <= 16);
    if (threshold_ == 0) return {~uint64_t{0}, ~uint64_t{0}};
    const Vec<uint32_t> largest = hn::Set(words, threshold_ - 1),  // that is dropped
        low_half = hn::Set(words, 0xffffu);
    Kept kept = {};
    for (size_t i = 0; i < 16; i += kBoth) {
      const Vec<uint64_t> block = hn::Iota(d, group * 16 + i),
                          next = hn::Add(block, hn::Set(d, uint64_t{kN}));
      Vec<uint64_t> low[4] = {block, hn::ShiftRight<32>(block), hn::Set(d, row),
                              hn::Set(d, row >> 32)};
      Vec<uint64_t> high[4] = {next, hn::ShiftRight<32>(next), low[2], low[3]};
      PhiloxLanes(keys_, low);
      PhiloxLanes(keys_, high);
#pragma GCC unroll 4
      for (size_t w = 0; w < 4; ++w) {
        const Vec<uint32_t> word =
            hn::ConcatEven(words, hn::BitCast(words, high[w]), hn::BitCast(words, low[w]));
        const uint64_t both = Bits(hn::Gt(hn::And(word, low_half), largest)) |
                              Bits(hn::Gt(hn::ShiftRight<16>(word), largest)) << 16;
        kept.words[w / 2] |= both << (w % 2 * 32 + i);
      }
    }
    return kept;
  }

 private:
  template <class Mask>
  static HWY_INLINE uint64_t Bits(Mask mask) {
    uint8_t bytes[8] = {};
    hn::StoreMaskBits(Tag<uint32_t>(), mask, bytes);
    return uint64_t{bytes[0]} | uint64_t{bytes[1]} << 8;
  }

  PhiloxKeys keys_;
  uint32_t threshold_;
#endif
};

// y = x * factor where the bit is set, else x * 0; values of a group.
template <class T>
HWY_INLINE void Scale(const Kept& kept, ComputeType<T> factor, const T* x, T* y) {
  using C = ComputeType<T>;
  const Tag<C> d;
  const Vec<C> factors = hn::Set(d, factor);
  for (size_t i = 0; i < kGroup; i += kLanes<C>) {
    const uint64_t bits = kept.words[i / 64] >> i % 64;
    const auto keep = hn::LoadMaskBits(d, reinterpret_cast<const uint8_t*>(&bits));
    const Vec<C> times = hn::IfThenElseZero(keep, factors);
    if constexpr (std::is_same_v<T, double>) {
      hn::StoreU(hn::Mul(hn::LoadU(d, x + i), times), d, y + i);
    } else {
      StoreFloats(hn::Mul(LoadFloats(x + i), times), y + i);
    }
  }
}

// The same of `count` values of a group, from its value `offset` on.
template <class T>
HWY_INLINE void ScalePart(const Kept& kept, ComputeType<T> factor, int64_t offset, int64_t count,
                          const T* x, T* y) {
  if (count == int64_t{kGroup}) return Scale(kept, factor, x, y);
  T group[kGroup] = {};
  std::copy_n(x, count, group + offset);
  Scale(kept, factor, group, group);
  std::copy_n(group + offset, count, y);
}

// Groups begin .. end - 1 of those of the span.
template <class T>
void DropoutGroups(const DropoutDraw& draw, const dropout::Span& span, const int64_t* numbers,
                   const dropout::Values<T>& of, int64_t begin, int64_t end) {
  const GroupDraw bits(draw);
  const auto factor = static_cast<ComputeType<T>>(draw.KeptValueFactor());
  const int64_t groups = span.GroupsOfRow();
  for (int64_t i = begin; i < end; ++i) {
    const int64_t r = i / groups, group = i % groups, in_row = group * int64_t{kGroup},
                  start = r * span.width + in_row, first = std::max(start, span.begin),
                  last = std::min(start + std::min(int64_t{kGroup}, span.width - in_row), span.end),
                  at = first - span.begin;
    const Kept kept =
        bits.Of(uint64_t(draw.first_row + (numbers == nullptr ? r : numbers[r])), uint64_t(group));
    ScalePart(kept, factor, first - start, last - first, of.x + at, of.y + at);
    if (of.beside != nullptr)
      ScalePart(kept, factor, first - start, last - first, of.beside + at, of.beside + at);
  }
}

#define CISTERN_DROPOUT(T, Name)                                                                 \
  void Dropout##Name(const DropoutDraw& draw, const dropout::Span& span, const int64_t* numbers, \
                     const dropout::Values<T>& of, int64_t begin, int64_t end) {                 \
    DropoutGroups(draw, span, numbers, of, begin, end);                                          \
  }
CISTERN_DROPOUT(float, Float)
CISTERN_DROPOUT(double, Double)
CISTERN_DROPOUT(BFloat16, BFloat16)
#undef CISTERN_DROPOUT

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {
namespace {

constexpr int64_t kGrain = 128;  // groups of a thread at least

}  // namespace

HWY_EXPORT(DropoutFloat);
HWY_EXPORT(DropoutDouble);
HWY_EXPORT(DropoutBFloat16);

#define CISTERN_DROPOUT(T, Name)                                                             \
  template <>                                                                                \
  void Dropout(const DropoutDraw& draw, int64_t rows, int64_t width, const int64_t* numbers, \
               const T* x, T* y) {                                                           \
    const dropout::Span span = {width, 0, rows * width};                                     \
    const dropout::Values<T> of = {x, y, nullptr};                                           \
    ParallelFor(span.EndGroup(), kGrain, [&](int64_t begin, int64_t end) {                   \
      CISTERN_DISPATCH(Dropout##Name)(draw, span, numbers, of, begin, end);                  \
    });                                                                                      \
  }
CISTERN_DROPOUT(float, Float)
CISTERN_DROPOUT(double, Double)
CISTERN_DROPOUT(BFloat16, BFloat16)
#undef CISTERN_DROPOUT

void DropoutOfPart(const DropoutDraw& draw, int64_t width, int64_t begin, int64_t count, float* x,
                   float* beside) {
  const dropout::Span span = {width, begin, begin + count};
  const dropout::Values<float> of = {x, x, beside};
  const int64_t first = span.FirstGroup();
  ParallelFor(span.EndGroup() - first, kGrain, [&](int64_t from, int64_t to) {
    CISTERN_DISPATCH(DropoutFloat)(draw, span, nullptr, of, first + from, first + to);
  });
}

}  // namespace cistern
#endif  // HWY_ONCE
