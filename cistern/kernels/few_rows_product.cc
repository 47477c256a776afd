#include "cistern/kernels/few_rows_product.h"

#include <algorithm>

#include "cistern/base/parallel.h"
#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/few_rows_product.cc"
#include "hwy/foreach_target.h"  // must come before highway.h

#include "cistern/kernels/gemm-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// The operands of one call.
template <class T>
struct FewRows {
  FewRowsShape shape;
  const T *x, *w, *b;
  T* y;
};

// The first `count` lanes of a vector, zeros in the others.
template <class T>
HWY_INLINE Vec<T> LoadRest(const T* from, size_t count) {
  HWY_ALIGN T part[kLanes<T>] = {};
  std::copy_n(from, count, part);
  return hn::Load(Tag<T>(), part);
}

// y[r .. r+kRows, o .. o+kOuts): one vector of sums for each, whatever the tile.
template <int kRows, int kOuts, class T>
HWY_INLINE void FewRowsTile(const FewRows<T>& p, int64_t r, int64_t o) {
  const Tag<T> d;
  const auto in = static_cast<size_t>(p.shape.in);
  const T *const x = p.x + r * p.shape.in, *const w = p.w + o * p.shape.in;
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
      const T* const from = w + static_cast<size_t>(j) * in + at;
      // The next tile's weights, on their way while this one's meet four rows.
      if constexpr (kRows > 1) hwy::Prefetch(from + kOuts * in);
      const Vec<T> weight = load(from);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) sum[i][j] = hn::MulAdd(row[i], weight, sum[i][j]);
    }
  };
  size_t at = 0;
  for (; at + kLanes<T> <= in; at += kLanes<T>)
    add([&](const T* from) HWY_ATTR { return hn::LoadU(d, from); }, at);
  if (at < in) add([&](const T* from) HWY_ATTR { return LoadRest(from, in - at); }, at);
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
template <int kOuts, class T>
HWY_INLINE void FewRowsOutputs(const FewRows<T>& p, int64_t o) {
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

template <class T>
HWY_INLINE void FewRowsPart(const FewRows<T>& p, int64_t begin, int64_t end) {
  int64_t o = begin;
  for (; o + 8 <= end; o += 8) FewRowsOutputs<8>(p, o);
  for (; o < end; ++o) FewRowsOutputs<1>(p, o);
}

#define CISTERN_FEW_ROWS(T, Name)                                                         \
  void FewRows##Name(const FewRowsShape& shape, const T* x, const T* w, const T* b, T* y, \
                     int64_t begin, int64_t end) {                                        \
    FewRowsPart(FewRows<T>{shape, x, w, b, y}, begin, end);                               \
  }
CISTERN_FEW_ROWS(float, Float)
CISTERN_FEW_ROWS(double, Double)
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

#define CISTERN_FEW_ROWS(T, Name)                                                            \
  template <>                                                                                \
  void FewRowsProduct(const FewRowsShape& shape, const T* x, const T* w, const T* b, T* y) { \
    constexpr int64_t kBlock = 8; /* outputs that share what is read of x */                 \
    const int64_t blocks = (shape.out + kBlock - 1) / kBlock,                                \
                  work = std::max<int64_t>(1, kBlock * shape.in * shape.rows);               \
    ParallelFor(blocks, (kGrain + work - 1) / work, [&](int64_t begin, int64_t end) {        \
      CISTERN_DISPATCH(FewRows##Name)                                                        \
      (shape, x, w, b, y, begin * kBlock, std::min(end * kBlock, shape.out));                \
    });                                                                                      \
  }
CISTERN_FEW_ROWS(float, Float)
CISTERN_FEW_ROWS(double, Double)
#undef CISTERN_FEW_ROWS

}  // namespace cistern
#endif  // HWY_ONCE
