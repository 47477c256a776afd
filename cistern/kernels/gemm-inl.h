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
#include <type_traits>

#include "cistern/kernels/rows_ahead.h"
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

// A register tile of products with triangles has kTileRows x kTileVectors accumulators: 8x2 where
// there are 32 vector registers, 4x2 where there are 16.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL || HWY_TARGET == HWY_NEON
constexpr size_t kTileRows = 8;
#else
constexpr size_t kTileRows = 4;
#endif
constexpr int kTileVectors = 2;

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

// Accumulators of a register tile of whole products: 6 x 4 or 8 x 2 vectors where there are 32
// registers, 6 x 2 where there are 16.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL || HWY_TARGET == HWY_NEON
constexpr int kStripVectors = 4;
#else
constexpr int kStripVectors = 2;
#endif

enum class From {
  kZero,   // C = A B
  kSum,    // C += A B, one chain from C on
  kApart,  // C += A B, the product being a chain of its own: where C is large, more exact
  kTimes,  // C = C factor + A B, a factor for each column
};

template <From kFrom, bool kUnitRow, size_t kRows, int kVectors, class T>
HWY_INLINE void TileOf(const Factors<T>& x, const T* HWY_RESTRICT a, T* HWY_RESTRICT c, size_t ldc,
                       const T* HWY_RESTRICT factor) {
  const Tag<T> d;
  constexpr size_t kN = kLanes<T>;
  Vec<T> sum[kRows][kVectors];
#pragma GCC unroll 8
  for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      if constexpr (kFrom == From::kZero || kFrom == From::kApart) sum[i][j] = hn::Zero(d);
      if constexpr (kFrom == From::kSum) sum[i][j] = hn::LoadU(d, c + i * ldc + j * kN);
      if constexpr (kFrom == From::kTimes)
        sum[i][j] = hn::Mul(hn::LoadU(d, c + i * ldc + j * kN), hn::Load(d, factor + j * kN));
    }
  }
  const size_t row = kUnitRow ? 1 : x.row;
  const T* HWY_RESTRICT b = x.b;
  for (size_t k = 0; k < x.depth; ++k, a += x.step, b += x.ldb) {
    Vec<T> bv[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) bv[j] = hn::LoadU(d, b + j * kN);
#pragma GCC unroll 8
    for (size_t i = 0; i < kRows; ++i) {
      const Vec<T> av = hn::Set(d, a[i * row]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::MulAdd(av, bv[j], sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      T* const to = c + i * ldc + j * kN;
      if constexpr (kFrom == From::kApart) sum[i][j] = hn::Add(hn::LoadU(d, to), sum[i][j]);
      hn::StoreU(sum[i][j], d, to);
    }
  }
}

template <From kFrom, bool kUnitRow, int kVectors, class T>
HWY_NOINLINE void Strip(size_t rows, const Factors<T>& x, T* c, size_t ldc, const T* factor) {
  RowsAhead& ahead = RowsAhead::OfThisThread();
  size_t r = 0;
  const auto tiles = [&]<size_t kRows>(std::integral_constant<size_t, kRows>) HWY_ATTR {
    for (; r + kRows <= rows; r += kRows) {
      TileOf<kFrom, kUnitRow, kRows, kVectors>(x, x.a + r * (kUnitRow ? 1 : x.row), c + r * ldc,
                                               ldc, factor);
      ahead.Ask();
    }
  };
  if constexpr (kStripVectors == 4 && kVectors < 4) tiles(std::integral_constant<size_t, 8>());
  tiles(std::integral_constant<size_t, 6>());
  tiles(std::integral_constant<size_t, 4>());
  tiles(std::integral_constant<size_t, 2>());
  tiles(std::integral_constant<size_t, 1>());
}

// C[rows, vectors] from A B, any number of rows; kUnitRow: x.row is 1.
template <From kFrom, bool kUnitRow, class T>
void Multiply(size_t rows, size_t vectors, Factors<T> x, T* c, size_t ldc,
              const T* factor = nullptr) {
  const auto strips = [&]<int kVectors>(std::integral_constant<int, kVectors>) {
    for (; vectors >= size_t{kVectors}; vectors -= kVectors) {
      Strip<kFrom, kUnitRow, kVectors>(rows, x, c, ldc, factor);
      x.b += kVectors * kLanes<T>;
      c += kVectors * kLanes<T>;
      if (factor != nullptr) factor += kVectors * kLanes<T>;
    }
  };
  if constexpr (kStripVectors == 4) strips(std::integral_constant<int, 4>());
  strips(std::integral_constant<int, 2>());
  strips(std::integral_constant<int, 1>());
}

enum class Triangle { kLower, kUpper };

template <class T, int kVectors>
struct Tile {
  Vec<T> c[kTileRows][kVectors];
};

// tile rows [kFirst, kLast) += A(., k) B(k, .); a and b point at step k.
template <size_t kFirst, size_t kLast, int kVectors, class T>
HWY_INLINE void Step(Tile<T, kVectors>& tile, const T* HWY_RESTRICT a, size_t row,
                     const T* HWY_RESTRICT b) {
  const Tag<T> d;
  Vec<T> bv[kVectors];
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) bv[j] = hn::LoadU(d, b + j * kLanes<T>);
#pragma GCC unroll 8
  for (size_t i = kFirst; i < kLast; ++i) {
    const Vec<T> av = hn::Set(d, a[i * row]);
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) tile.c[i][j] = hn::MulAdd(av, bv[j], tile.c[i][j]);
  }
}

// The steps on the diagonal of a lower triangle: step i reaches rows i and below.
template <size_t kFirst, int kVectors, class T>
HWY_INLINE void LowerSteps(Tile<T, kVectors>& tile, const Factors<T>& x, const T* a, const T* b) {
  Step<kFirst, kTileRows>(tile, a, x.row, b);
  if constexpr (kFirst + 1 < kTileRows) LowerSteps<kFirst + 1>(tile, x, a + x.step, b + x.ldb);
}

// Those of an upper triangle, as far as its depth goes: step i reaches rows up to i.
template <size_t kLast, int kVectors, class T>
HWY_INLINE void UpperSteps(Tile<T, kVectors>& tile, const Factors<T>& x, const T* a, const T* b,
                           size_t depth) {
  if (depth == 0) return;
  Step<0, kLast>(tile, a, x.row, b);
  if constexpr (kLast + 1 < kTileRows)
    UpperSteps<kLast + 1>(tile, x, a + x.step, b + x.ldb, depth - 1);
}

// C[rows, kVectors vectors] = full + triangle of `tri` (kLower: depth k <= row; kUpper: row <= k <
// tri.depth), added to C where kAdd. rows: whole tiles.
template <Triangle kTriangle, bool kAdd, int kVectors, class T>
HWY_NOINLINE void Panel(size_t rows, const Factors<T>& full, const Factors<T>& tri,
                        T* HWY_RESTRICT c, size_t ldc) {
  const Tag<T> d;
  RowsAhead& ahead = RowsAhead::OfThisThread();
  for (size_t r = 0; r < rows; r += kTileRows) {
    Tile<T, kVectors> tile;
#pragma GCC unroll 8
    for (size_t i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) tile.c[i][j] = hn::Zero(d);
    }
    {
      const T* a = full.a + r * full.row;
      const T* b = full.b;
      for (size_t k = 0; k < full.depth; ++k, a += full.step, b += full.ldb)
        Step<0, kTileRows>(tile, a, full.row, b);
    }
    if constexpr (kTriangle == Triangle::kLower) {
      const T* a = tri.a + r * tri.row;
      const T* b = tri.b;
      for (size_t k = 0; k < r; ++k, a += tri.step, b += tri.ldb)
        Step<0, kTileRows>(tile, a, tri.row, b);
      LowerSteps<0>(tile, tri, a, b);
    }
    if constexpr (kTriangle == Triangle::kUpper) {
      const T* a = tri.a + r * tri.row + r * tri.step;
      const T* b = tri.b + r * tri.ldb;
      const size_t depth = tri.depth > r ? tri.depth - r : 0;
      UpperSteps<1>(tile, tri, a, b, depth);
      a += (kTileRows - 1) * tri.step;
      b += (kTileRows - 1) * tri.ldb;
      for (size_t k = kTileRows - 1; k < depth; ++k, a += tri.step, b += tri.ldb)
        Step<0, kTileRows>(tile, a, tri.row, b);
    }
#pragma GCC unroll 8
    for (size_t i = 0; i < kTileRows; ++i) {
      T* const to = c + (r + i) * ldc;
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        Vec<T> sum = tile.c[i][j];
        if constexpr (kAdd) sum = hn::Add(hn::LoadU(d, to + j * kLanes<T>), sum);
        hn::StoreU(sum, d, to + j * kLanes<T>);
      }
    }
    ahead.Ask();
  }
}

// C[rows, columns] = full.A full.B + triangle(tri.A) tri.B, added to C where kAdd; rows are rounded
// up to whole tiles, columns to whole vectors.
template <Triangle kTriangle, bool kAdd, class T>
void Product(size_t rows, size_t columns, Factors<T> full, Factors<T> tri, T* c, size_t ldc) {
  constexpr size_t kStride = kTileVectors * kLanes<T>;
  rows = RoundUp(rows, kTileRows);
  size_t left = (columns + kLanes<T> - 1) / kLanes<T>;
  for (; left >= size_t{kTileVectors};
       left -= kTileVectors, c += kStride, full.b += kStride, tri.b += kStride) {
    Panel<kTriangle, kAdd, kTileVectors>(rows, full, tri, c, ldc);
  }
  if (left == 1) Panel<kTriangle, kAdd, 1>(rows, full, tri, c, ldc);
}
template <Triangle kTriangle, class T>
void Product(size_t rows, size_t columns, const Factors<T>& full, const Factors<T>& tri, T* c,
             size_t ldc) {
  Product<kTriangle, false>(rows, columns, full, tri, c, ldc);
}
// C[rows, columns] from A B, rounded up likewise.
template <From kFrom, class T>
void WholeProduct(size_t rows, size_t columns, const Factors<T>& x, T* c, size_t ldc) {
  rows = RoundUp(rows, kTileRows);
  const size_t vectors = (columns + kLanes<T> - 1) / kLanes<T>;
  if (x.row == 1) {
    Multiply<kFrom, true>(rows, vectors, x, c, ldc);
  } else {
    Multiply<kFrom, false>(rows, vectors, x, c, ldc);
  }
}
template <class T>
void Product(size_t rows, size_t columns, const Factors<T>& x, T* c, size_t ldc) {
  WholeProduct<From::kZero>(rows, columns, x, c, ldc);
}
// C += A B
template <class T>
void AddProduct(size_t rows, size_t columns, const Factors<T>& x, T* c, size_t ldc) {
  WholeProduct<From::kApart>(rows, columns, x, c, ldc);
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

#if HWY_TARGET != HWY_SCALAR
// One vector of 128-bit blocks: block b from src + b * step.
template <class T>
HWY_INLINE Vec<T> GatherBlocks(const T* HWY_RESTRICT src, size_t step) {
  const Tag<T> d;
  constexpr size_t kBlock = 16 / sizeof(T);
  Vec<T> x = hn::LoadDup128(d, src);
#pragma GCC unroll 4
  for (size_t b = 1; b < kLanes<T> / kBlock; ++b)
    x = hn::IfThenElse(hn::FirstN(d, b * kBlock), x, hn::LoadDup128(d, src + b * step));
  return x;
}
#endif

// dst[columns, rows] = src[rows, columns]^T; both dimensions are rounded up to whole vectors.
template <class T>
HWY_NOINLINE void Transpose(size_t rows, size_t columns, const T* HWY_RESTRICT src, size_t lds,
                            T* HWY_RESTRICT dst, size_t ldd) {
  constexpr size_t kN = kLanes<T>;
  const Tag<T> d;
  for (size_t r = 0; r < rows; r += kN) {
    for (size_t c = 0; c < columns; c += kN) {
#if HWY_TARGET == HWY_SCALAR
      hn::Store(hn::LoadU(d, src + r * lds + c), d, dst + c * ldd + r);
#else
      // Blocks that lie kBlock rows apart share a vector, so that a transposition inside of blocks
      // leaves whole rows of dst.
      constexpr size_t kBlock = 16 / sizeof(T);
      for (size_t j = c; j < c + kN; j += kBlock) {
        const T* const from = src + r * lds + j;
        T* const to = dst + j * ldd + r;
        if constexpr (sizeof(T) == 8) {
          const Vec<T> x0 = GatherBlocks(from, kBlock * lds),
                       x1 = GatherBlocks(from + lds, kBlock * lds);
          hn::Store(hn::InterleaveLower(d, x0, x1), d, to);
          hn::Store(hn::InterleaveUpper(d, x0, x1), d, to + ldd);
        } else {
          const hn::Repartition<double, Tag<T>> pairs;
          const Vec<T> x0 = GatherBlocks(from, kBlock * lds),
                       x1 = GatherBlocks(from + lds, kBlock * lds),
                       x2 = GatherBlocks(from + 2 * lds, kBlock * lds),
                       x3 = GatherBlocks(from + 3 * lds, kBlock * lds);
          const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(d, x0, x1)),
                     low23 = hn::BitCast(pairs, hn::InterleaveLower(d, x2, x3)),
                     high01 = hn::BitCast(pairs, hn::InterleaveUpper(d, x0, x1)),
                     high23 = hn::BitCast(pairs, hn::InterleaveUpper(d, x2, x3));
          const auto put = [&](auto v, size_t i)
                               HWY_ATTR { hn::Store(hn::BitCast(d, v), d, to + i * ldd); };
          put(hn::InterleaveLower(pairs, low01, low23), 0);
          put(hn::InterleaveUpper(pairs, low01, low23), 1);
          put(hn::InterleaveLower(pairs, high01, high23), 2);
          put(hn::InterleaveUpper(pairs, high01, high23), 3);
        }
      }
#endif
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
