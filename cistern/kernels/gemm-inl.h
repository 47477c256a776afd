// Small matrix products on padded, aligned row-major panels, for any vector width; included once
// per Highway target.
//
// Every element of a product is one sequential chain of multiply-adds over the depth, whatever the
// tile it falls into, and triangular products stop exactly at the diagonal: an element depends on
// no bit of rows outside its triangle, be they NaN.
#if defined(CISTERN_KERNELS_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_GEMM_INL_H_
#undef CISTERN_KERNELS_GEMM_INL_H_
#else
#define CISTERN_KERNELS_GEMM_INL_H_
#endif

#include <cstddef>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <class T>
using Tag = hn::ScalableTag<T>;
template <class T>
using Vec = hn::Vec<Tag<T>>;
template <class T>
constexpr size_t kLanes = hn::MaxLanes(Tag<T>());

// A register tile has kTileRows x kTileVectors accumulators: 4x4 where there are 32 vector
// registers, 4x2 where there are 16.
constexpr size_t kTileRows = 4;
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL || HWY_TARGET == HWY_NEON
constexpr int kTileVectors = 4;
#else
constexpr int kTileVectors = 2;
#endif

constexpr size_t RoundUp(size_t x, size_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

// Leading dimension of a panel: whole vectors, and whole tiles when its columns become the rows of
// a product.
template <class T>
constexpr size_t Padded(size_t columns) {
  return RoundUp(columns, kLanes<T> > kTileRows ? kLanes<T> : kTileRows);
}

// One product A B. A(i,k) = a[i*row + k*step], so a transposed panel is a choice of strides; B(k,j)
// = b[k*ldb + j].
template <class T>
struct Factors {
  const T* a;
  size_t row, step;
  const T* b;
  size_t ldb, depth;
};

enum class Triangle { kNone, kLower, kUpper };

template <class T, int kVectors>
struct Tile {
  Vec<T> c[kTileRows][kVectors];
};

// tile rows [kFirst, kLast) += A(., k) B(k, .); a and b point at step k.
template <int kFirst, int kLast, int kVectors, class T>
HWY_INLINE void Step(Tile<T, kVectors>& tile, const T* HWY_RESTRICT a, size_t row,
                     const T* HWY_RESTRICT b) {
  const Tag<T> d;
  Vec<T> bv[kVectors];
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) bv[j] = hn::Load(d, b + j * kLanes<T>);
#pragma GCC unroll 4
  for (int i = kFirst; i < kLast; ++i) {
    const Vec<T> av = hn::Set(d, a[i * row]);
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) tile.c[i][j] = hn::MulAdd(av, bv[j], tile.c[i][j]);
  }
}

// C[rows, kVectors vectors] = full + triangle of `tri` (kLower: depth k <= row; kUpper: row <= k <
// tri.depth). rows: whole tiles.
template <Triangle kTriangle, int kVectors, class T>
HWY_NOINLINE void Panel(size_t rows, const Factors<T>& full, const Factors<T>& tri,
                        T* HWY_RESTRICT c, size_t ldc) {
  const Tag<T> d;
  for (size_t r = 0; r < rows; r += kTileRows) {
    Tile<T, kVectors> tile;
#pragma GCC unroll 4
    for (size_t i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) tile.c[i][j] = hn::Zero(d);
    }
    {
      const T* a = full.a + r * full.row;
      const T* b = full.b;
      for (size_t k = 0; k < full.depth; ++k, a += full.step, b += full.ldb)
        Step<0, 4>(tile, a, full.row, b);
    }
    if constexpr (kTriangle == Triangle::kLower) {
      const T* a = tri.a + r * tri.row;
      const T* b = tri.b;
      for (size_t k = 0; k < r; ++k, a += tri.step, b += tri.ldb) Step<0, 4>(tile, a, tri.row, b);
      Step<0, 4>(tile, a, tri.row, b);
      Step<1, 4>(tile, a + tri.step, tri.row, b + tri.ldb);
      Step<2, 4>(tile, a + 2 * tri.step, tri.row, b + 2 * tri.ldb);
      Step<3, 4>(tile, a + 3 * tri.step, tri.row, b + 3 * tri.ldb);
    }
    if constexpr (kTriangle == Triangle::kUpper) {
      const T* a = tri.a + r * tri.row + r * tri.step;
      const T* b = tri.b + r * tri.ldb;
      const size_t depth = tri.depth > r ? tri.depth - r : 0;
      if (depth > 0) Step<0, 1>(tile, a, tri.row, b);
      if (depth > 1) Step<0, 2>(tile, a + tri.step, tri.row, b + tri.ldb);
      if (depth > 2) Step<0, 3>(tile, a + 2 * tri.step, tri.row, b + 2 * tri.ldb);
      a += 3 * tri.step;
      b += 3 * tri.ldb;
      for (size_t k = 3; k < depth; ++k, a += tri.step, b += tri.ldb)
        Step<0, 4>(tile, a, tri.row, b);
    }
#pragma GCC unroll 4
    for (size_t i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j)
        hn::Store(tile.c[i][j], d, c + (r + i) * ldc + j * kLanes<T>);
    }
  }
}

// C[rows, columns] = full.A full.B + triangle(tri.A) tri.B; rows are rounded up to whole tiles,
// columns to whole vectors.
template <Triangle kTriangle, class T>
void Product(size_t rows, size_t columns, Factors<T> full, Factors<T> tri, T* c, size_t ldc) {
  constexpr size_t kStride = kTileVectors * kLanes<T>;
  rows = RoundUp(rows, kTileRows);
  size_t left = (columns + kLanes<T> - 1) / kLanes<T>;
  for (; left >= size_t{kTileVectors};
       left -= kTileVectors, c += kStride, full.b += kStride, tri.b += kStride) {
    Panel<kTriangle, kTileVectors>(rows, full, tri, c, ldc);
  }
  if (left == 1) Panel<kTriangle, 1>(rows, full, tri, c, ldc);
  if constexpr (kTileVectors > 2) {
    if (left == 2) Panel<kTriangle, 2>(rows, full, tri, c, ldc);
    if (left == 3) Panel<kTriangle, 3>(rows, full, tri, c, ldc);
  }
}

template <class T>
void Product(size_t rows, size_t columns, const Factors<T>& full, T* c, size_t ldc) {
  Product<Triangle::kNone>(rows, columns, full, full, c, ldc);
}

// The lower triangle of C[rows, rows] = A B; above the diagonal C holds anything.
template <class T>
void LowerProduct(size_t rows, const Factors<T>& full, T* c, size_t ldc) {
  constexpr size_t kBlock = Padded<T>(1);
  for (size_t r = 0; r < rows; r += kBlock) {
    Factors<T> block = full;
    block.a += r * full.row;
    const size_t end = rows - r < kBlock ? rows : r + kBlock;
    Product(end - r, end, block, c + r * ldc, ldc);
  }
}

// dst[columns, rows] = src[rows, columns]^T; both dimensions are rounded up to whole vectors.
template <class T>
void Transpose(size_t rows, size_t columns, const T* HWY_RESTRICT src, size_t lds,
               T* HWY_RESTRICT dst, size_t ldd) {
  constexpr size_t kN = kLanes<T>;
  const Tag<T> d;
  for (size_t r = 0; r < rows; r += kN) {
    for (size_t c = 0; c < columns; c += kN) {
#if HWY_TARGET == HWY_SCALAR
      hn::Store(hn::Load(d, src + r * lds + c), d, dst + c * ldd + r);
#else
      // Each round moves the even elements of the whole block to its first half: a rotation of the
      // index (row, column) by one bit.
      Vec<T> x[kN], y[kN];
#pragma GCC unroll 16
      for (size_t i = 0; i < kN; ++i) x[i] = hn::Load(d, src + (r + i) * lds + c);
#pragma GCC unroll 4
      for (size_t round = 1; round < kN; round *= 2) {
#pragma GCC unroll 8
        for (size_t i = 0; i < kN / 2; ++i) {
          y[i] = hn::ConcatEven(d, x[2 * i + 1], x[2 * i]);
          y[kN / 2 + i] = hn::ConcatOdd(d, x[2 * i + 1], x[2 * i]);
        }
#pragma GCC unroll 16
        for (size_t i = 0; i < kN; ++i) x[i] = y[i];
      }
#pragma GCC unroll 16
      for (size_t i = 0; i < kN; ++i) hn::Store(x[i], d, dst + (c + i) * ldd + r);
#endif
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
