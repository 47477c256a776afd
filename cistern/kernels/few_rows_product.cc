#include "cistern/kernels/few_rows_product.h"

#include <algorithm>

#include "cistern/base/parallel.h"
#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/few_rows_product.cc"
#include "hwy/foreach_target.h"  // must come before highway.h

#include "cistern/kernels/bfloat16-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// The operands of one call.
template <class T_, class W_>
struct FewRows {
  using T = T_;
  using W = W_;
  FewRowsShape shape;
  const T* x;
  const W* w;
  const T* b;
  T* y;
};

template <class T>
HWY_INLINE Vec<T> LoadWhole(const T* from) {
  return hn::LoadU(Tag<T>(), from);
}
HWY_INLINE Vec<float> LoadWhole(const BFloat16* from) { return LoadFloats(from); }

// The first `count` lanes of a vector, zeros in the others.
template <class T, class S>
HWY_INLINE Vec<T> LoadRest(const S* from, size_t count) {
  HWY_ALIGN S part[kLanes<T>] = {};
  std::copy_n(from, count, part);
  return LoadWhole(part);
}

// y[r .. r+kRows, o .. o+kOuts): one vector of sums for each, whatever the tile.
template <int kRows, int kOuts, class Operands>
HWY_INLINE void FewRowsTile(const Operands& p, int64_t r, int64_t o) {
  using T = typename Operands::T;
  using W = typename Operands::W;
  const Tag<T> d;
  const auto in = static_cast<size_t>(p.shape.in);
  const T* const x = p.x + r * p.shape.in;
  const W* const w = p.w + o * p.shape.in;
  Vec<T> sum[kRows][kOuts];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kOuts; ++j) sum[i][j] = hn::Zero(d);
  }
  const auto add = [&](auto&& load, size_t at) HWY_ATTR {
    Vec<T> row[kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) row[i] = load(x + static_cast<size_t>(i) * in + at);
#pragma GCC unroll 8
    for (int j = 0; j < kOuts; ++j) {
      const W* const from = w + static_cast<size_t>(j) * in + at;
      // The next tile's weights, on their way while this one's meet four rows or are widened.
      if constexpr (kRows > 1 || sizeof(W) == 2) hwy::Prefetch(from + kOuts * in);
      const Vec<T> weight = load(from);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) sum[i][j] = hn::MulAdd(row[i], weight, sum[i][j]);
    }
  };
  size_t at = 0;
  for (; at + kLanes<T> <= in; at += kLanes<T>)
    add([&](const auto* from) HWY_ATTR { return LoadWhole(from); }, at);
  if (at < in) add([&](const auto* from) HWY_ATTR { return LoadRest<T>(from, in - at); }, at);
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kOuts; ++j) {
      const T total = hn::GetLane(hn::SumOfLanes(d, sum[i][j]));
      p.y[(r + i) * p.shape.out + o + j] = p.b == nullptr ? total : total + p.b[o + j];
    }
  }
}

// kOuts outputs of all rows. As many sums as fit the registers at a time, and never fewer than hide
// a multiply-add's latency; many rows of weights at a time are many streams from memory.
template <int kOuts, class Operands>
HWY_INLINE void FewRowsOutputs(const Operands& p, int64_t o) {
  constexpr int kPart = kTileRows >= 8 ? 4 : 2;  // of the outputs, beside four rows
  int64_t r = 0;
  for (; r + 4 <= p.shape.rows; r += 4) {
    if constexpr (kOuts > kPart) {
#pragma GCC unroll 4
      for (int j = 0; j < kOuts; j += kPart) FewRowsTile<4, kPart>(p, r, o + j);
    } else {
      FewRowsTile<4, kOuts>(p, r, o);
    }
  }
  for (; r < p.shape.rows; ++r) FewRowsTile<1, kOuts>(p, r, o);
}

template <class Operands>
HWY_INLINE void FewRowsPart(const Operands& p, int64_t begin, int64_t end) {
  int64_t o = begin;
  for (; o + 8 <= end; o += 8) FewRowsOutputs<8>(p, o);
  for (; o < end; ++o) FewRowsOutputs<1>(p, o);
}

#define CISTERN_FEW_ROWS(T, W, Name)                                                      \
  void FewRows##Name(const FewRowsShape& shape, const T* x, const W* w, const T* b, T* y, \
                     int64_t begin, int64_t end) {                                        \
    FewRowsPart(FewRows<T, W>{shape, x, w, b, y}, begin, end);                            \
  }
CISTERN_FEW_ROWS(float, float, Float)
CISTERN_FEW_ROWS(double, double, Double)
CISTERN_FEW_ROWS(float, BFloat16, BFloat16)
#undef CISTERN_FEW_ROWS

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {
namespace {

constexpr int64_t kGrain = 1 << 14;  // multiply-adds of a thread at least

}  // namespace

HWY_EXPORT(FewRowsFloat);
HWY_EXPORT(FewRowsDouble);
HWY_EXPORT(FewRowsBFloat16);

#define CISTERN_FEW_ROWS(T, W, Name)                                                         \
  template <>                                                                                \
  void FewRowsProduct(const FewRowsShape& shape, const T* x, const W* w, const T* b, T* y) { \
    constexpr int64_t kBlock = 8; /* outputs that share what is read of x */                 \
    const int64_t blocks = (shape.out + kBlock - 1) / kBlock,                                \
                  work = std::max<int64_t>(1, kBlock * shape.in * shape.rows);               \
    ParallelFor(blocks, (kGrain + work - 1) / work, [&](int64_t begin, int64_t end) {        \
      CISTERN_DISPATCH(FewRows##Name)                                                        \
      (shape, x, w, b, y, begin * kBlock, std::min(end * kBlock, shape.out));                \
    });                                                                                      \
  }
CISTERN_FEW_ROWS(float, float, Float)
CISTERN_FEW_ROWS(double, double, Double)
CISTERN_FEW_ROWS(float, BFloat16, BFloat16)
#undef CISTERN_FEW_ROWS

}  // namespace cistern
#endif  // HWY_ONCE
