#include "cistern/kernels/rotary.h"

#include <algorithm>

#include "cistern/base/parallel.h"
#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/rotary.cc"
#include "hwy/foreach_target.h"  // must come before highway.h

#include "cistern/kernels/bfloat16-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// The pairs of one head; back: as -1, else 1.
template <class T>
HWY_INLINE void TurnHead(size_t half, const T* x, const T* cos, const T* sin, T back, T* y) {
  const Tag<T> d;
  const Vec<T> sign = hn::Set(d, back);
  size_t j = 0;
  for (; j + kLanes<T> <= half; j += kLanes<T>) {
    const Vec<T> first = hn::LoadU(d, x + j), second = hn::LoadU(d, x + half + j),
                 c = hn::LoadU(d, cos + j), s = hn::Mul(sign, hn::LoadU(d, sin + j));
    hn::StoreU(hn::NegMulAdd(second, s, hn::Mul(first, c)), d, y + j);
    hn::StoreU(hn::MulAdd(first, s, hn::Mul(second, c)), d, y + half + j);
  }
  for (; j < half; ++j) {
    const T first = x[j], second = x[half + j], s = back * sin[j];
    y[j] = first * cos[j] - second * s;
    y[half + j] = second * cos[j] + first * s;
  }
}

HWY_INLINE void TurnHead(size_t half, const BFloat16* x, const float* cos, const float* sin,
                         float back, BFloat16* y) {
  const Vec<float> sign = hn::Set(Tag<float>(), back);
  EachVector(half, [&](size_t j, size_t count) HWY_ATTR {
    const Vec<float> first = LoadUpTo(x + j, count), second = LoadUpTo(x + half + j, count),
                     c = LoadUpTo(cos + j, count), s = hn::Mul(sign, LoadUpTo(sin + j, count));
    StoreUpTo(hn::NegMulAdd(second, s, hn::Mul(first, c)), y + j, count);
    StoreUpTo(hn::MulAdd(first, s, hn::Mul(second, c)), y + half + j, count);
  });
}

template <class T>
HWY_INLINE void TurnTokens(const RotaryShape& p, Rows<const T> x, const ComputeType<T>* table,
                           bool back, Rows<T> y, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const int64_t b = token / p.time, t = token % p.time;
    const ComputeType<T>* const cos = table + (p.one_table ? t : token) * 2 * p.half;
    for (int64_t h = 0; h < p.heads; ++h)
      TurnHead(static_cast<size_t>(p.half), x.At(b, h, t), cos, cos + p.half,
               back ? ComputeType<T>(-1) : ComputeType<T>(1), y.At(b, h, t));
  }
}

#define CISTERN_ROTARY(T, Name)                                                             \
  void Rotary##Name(const RotaryShape& shape, Rows<const T> x, const ComputeType<T>* table, \
                    bool back, Rows<T> y, int64_t begin, int64_t end) {                     \
    TurnTokens(shape, x, table, back, y, begin, end);                                       \
  }
CISTERN_ROTARY(float, Float)
CISTERN_ROTARY(double, Double)
CISTERN_ROTARY(BFloat16, BFloat16)
#undef CISTERN_ROTARY

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {
namespace {

constexpr int64_t kGrain = 1 << 14;  // values of a thread at least

}  // namespace

HWY_EXPORT(RotaryFloat);
HWY_EXPORT(RotaryDouble);
HWY_EXPORT(RotaryBFloat16);

#define CISTERN_ROTARY(T, Name)                                                                  \
  template <>                                                                                    \
  void Rotary(const RotaryShape& shape, Rows<const T> x, const ComputeType<T>* table, bool back, \
              Rows<T> y) {                                                                       \
    const int64_t values = std::max<int64_t>(1, 2 * shape.half * shape.heads);                   \
    ParallelFor(shape.batch* shape.time, (kGrain + values - 1) / values,                         \
                [&](int64_t begin, int64_t end) {                                                \
                  CISTERN_DISPATCH(Rotary##Name)(shape, x, table, back, y, begin, end);          \
                });                                                                              \
  }
CISTERN_ROTARY(float, Float)
CISTERN_ROTARY(double, Double)
CISTERN_ROTARY(BFloat16, BFloat16)
#undef CISTERN_ROTARY

}  // namespace cistern
#endif  // HWY_ONCE
