#pragma once
// Panels of floats and rows of tokens as operands of products by pairs (bfloat16_pairs-inl.h), and
// products with triangles, as gemm-inl.h has them of floats; included once, in the pass of the one
// target that may have the instruction.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "cistern/kernels/bfloat16_pairs-inl.h"
#include "cistern/kernels/isa.h"
#include "cistern/kernels/pair_tiles-inl.h"
#include "cistern/kernels/rows_ahead.h"

HWY_BEFORE_NAMESPACE();
HWY_PUSH_ATTRIBUTES("avx512bf16")
namespace cistern {
namespace HWY_NAMESPACE {

// Up to 16 floats, zeros in the other lanes.
HWY_INLINE __m512 LoadFirst(const float* from, size_t count) {
  return count >= 16 ? _mm512_loadu_ps(from)
                     : _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
}

// to[rows, ld] = x rounded, zeros up to the next 32 columns. kLower: and above the diagonal.
template <bool kLower>
HWY_NOINLINE void RoundPanel(size_t rows, size_t columns, const float* x, size_t ldx, BFloat16* to,
                             size_t ld) {
  for (size_t i = 0; i < rows; ++i, x += ldx, to += ld) {
    const size_t end = kLower ? std::min(columns, i + 1) : columns;
    size_t k = 0;
    for (; k + 32 <= end; k += 32)
      _mm512_storeu_si512(to + k, RoundTwo(_mm512_loadu_ps(x + k), _mm512_loadu_ps(x + k + 16)));
    for (; k < columns; k += 32) {
      const size_t left = end > k ? end - k : 0;
      _mm512_storeu_si512(to + k, RoundTwo(LoadFirst(x + k, left),
                                           LoadFirst(x + k + 16, left > 16 ? left - 16 : 0)));
    }
  }
}

// to[ceil(rows / 2), ld]: pairs of a row and the next one, zeros behind the last; whether all of
// them are finite. kLower: zeros above the diagonal.
template <bool kLower>
HWY_NOINLINE bool PairPanel(size_t rows, size_t vectors, const float* x, size_t ldx, uint32_t* to,
                            size_t ld) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  __mmask32 lost = 0;
  for (size_t k = 0; k < rows; k += 2, x += 2 * ldx, to += ld) {
    const bool last = k + 1 == rows;
    for (size_t c = 0; c < vectors * kPairLanes; c += kPairLanes) {
      __m512 even = _mm512_setzero_ps(), odd = even;
      if constexpr (kLower) {
        even = LoadFirst(x + c, k + 1 > c ? k + 1 - c : 0);
        if (!last) odd = LoadFirst(x + ldx + c, k + 2 > c ? k + 2 - c : 0);
      } else {
        even = _mm512_loadu_ps(x + c);
        if (!last) odd = _mm512_loadu_ps(x + ldx + c);
      }
      const __m512i rounded = RoundTwo(even, odd);
      lost |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(rounded, exponent), exponent);
      _mm512_storeu_si512(to + c, PairTwo(rounded));
    }
  }
  return lost == 0;
}

// The same of the sums x + y.
HWY_NOINLINE inline void PairSums(size_t rows, size_t vectors, const float* x, const float* y,
                                  size_t ldx, uint32_t* to, size_t ld) {
  for (size_t k = 0; k < rows; k += 2, x += 2 * ldx, y += 2 * ldx, to += ld) {
    for (size_t c = 0; c < vectors * kPairLanes; c += kPairLanes) {
      const __m512 even = _mm512_add_ps(_mm512_loadu_ps(x + c), _mm512_loadu_ps(y + c)),
                   odd = k + 1 == rows ? _mm512_setzero_ps()
                                       : _mm512_add_ps(_mm512_loadu_ps(x + ldx + c),
                                                       _mm512_loadu_ps(y + ldx + c));
      _mm512_storeu_si512(to + c, PairTwo(RoundTwo(even, odd)));
    }
  }
}

// Rows as they are read by the product's A, along their columns; `copy` [kChunkRows,
// PairColumns(width)] is where panels are rounded to. kWhole: for TransposePairs, which reads whole
// vectors of 16 rows and 32 columns, and rows that lie a whole number of pairs apart.
struct RoundedRows {
  const BFloat16* a;
  size_t ld;
};
template <bool kWhole>
HWY_INLINE RoundedRows RoundRows(const PanelRows<float>& x, size_t rows, size_t width,
                                 BFloat16* copy) {
  const size_t ld = PairColumns(width);
  RoundPanel<false>(rows, width, x.x, x.ld, copy, ld);
  return {copy, ld};
}
template <bool kWhole>
HWY_INLINE RoundedRows RoundRows(const TokenRows<BFloat16>& x, size_t rows, size_t width,
                                 BFloat16* copy) {
  if (kWhole ? rows % 16 == 0 && width % 32 == 0 && x.x.time % 2 == 0 : width % 2 == 0)
    return {x.x.At(x.t), static_cast<size_t>(x.x.time)};
  const size_t ld = PairColumns(width);
  CopyRows(x.x, x.t, rows, width, ld, copy);
  return {copy, ld};
}

// Pairs of rows, to [ceil(rows / 2), PairColumns(width)]; whether all are finite.
HWY_INLINE bool PairOf(const PanelRows<float>& x, size_t rows, size_t width, uint32_t* to) {
  return PairPanel<false>(rows, (width + kPairLanes - 1) / kPairLanes, x.x, x.ld, to,
                          PairColumns(width));
}
HWY_INLINE bool PairOf(const TokenRows<BFloat16>& x, size_t rows, size_t width, uint32_t* to) {
  return PairRows(x.x, x.t, rows, width, to);
}

// How many rows there are before the first one that is not finite when it is rounded.
inline size_t FiniteRows(const PanelRows<float>& x, size_t rows, size_t width) {
  for (size_t i = 0; i < rows; ++i) {
    for (size_t j = 0; j < width; ++j) {
      if (!std::isfinite(static_cast<float>(BFloat16(x.x[i * x.ld + j])))) return i;
    }
  }
  return rows;
}
inline size_t FiniteRows(const TokenRows<BFloat16>& x, size_t rows, size_t width) {
  for (size_t i = 0; i < rows; ++i) {
    for (size_t j = 0; j < width; ++j) {
      if (!std::isfinite(static_cast<float>(x.x.At(x.t + i)[j]))) return i;
    }
  }
  return rows;
}

// to[width / 2, ld] = the pairs along x's rows, transposed; whole vectors.
HWY_INLINE void TransposePairs(size_t rows, size_t width, const RoundedRows& x, uint32_t* to,
                               size_t ld) {
  Transpose(rows, (width + 1) / 2, reinterpret_cast<const float*>(x.a), x.ld / 2,
            reinterpret_cast<float*>(to), ld);
}

enum class PairTriangle { kNone, kLower, kUpper };

// Rows r .. rows of it.
template <PairTriangle kTriangle, bool kAdd, int kVectors, class C>
HWY_NOINLINE void PairStripOf(size_t r, size_t rows, const PairFactors& full,
                              const PairFactors& tri, C* c, size_t ldc) {
  RowsAhead& ahead = RowsAhead::OfThisThread();
  const auto tiles = [&]<size_t kRows>(std::integral_constant<size_t, kRows>) HWY_ATTR {
    for (; r + kRows <= rows; r += kRows) {
      __m512 sum[kRows][kVectors];
#pragma GCC unroll 16
      for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) sum[i][j] = _mm512_setzero_ps();
      }
      PairChain(full, r, 0, full.depth, sum);
      if constexpr (kTriangle == PairTriangle::kLower)
        PairChain(tri, r, 0, std::min(tri.depth, (r + kRows + 1) / 2), sum);
      if constexpr (kTriangle == PairTriangle::kUpper) PairChain(tri, r, r / 2, tri.depth, sum);
#pragma GCC unroll 16
      for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) {
          C* const to = c + (r + i) * ldc + static_cast<size_t>(j) * kPairLanes;
          if constexpr (kAdd) sum[i][j] = _mm512_add_ps(_mm512_loadu_ps(to), sum[i][j]);
          StorePairSum(sum[i][j], to);
        }
      }
      ahead.Ask();
    }
  };
  // As many sums as hide the instruction's latency.
  if constexpr (kVectors == 1) tiles(std::integral_constant<size_t, 16>());
  if constexpr (kVectors <= 2) tiles(std::integral_constant<size_t, 8>());
  tiles(std::integral_constant<size_t, 6>());
  tiles(std::integral_constant<size_t, 2>());
  tiles(std::integral_constant<size_t, 1>());
}

// C[rows, vectors] = full + triangle of `tri`, whose A is 0 outside of it; added to C where kAdd.
// C: floats, or what they are rounded to. Whole tiles of rows by AMX, where it is in use.
template <PairTriangle kTriangle, bool kAdd, class C>
void PairProduct(size_t rows, size_t vectors, PairFactors full, PairFactors tri, C* c, size_t ldc) {
  const size_t r = UsesAmx() ? TileProduct<kAdd>(rows, vectors, full, tri, c, ldc) : 0;
  if (r == rows) return;
  const auto strips = [&]<int kVectors>(std::integral_constant<int, kVectors>) {
    constexpr size_t kColumns = kVectors * kPairLanes;
    for (; vectors >= size_t{kVectors}; vectors -= kVectors) {
      PairStripOf<kTriangle, kAdd, kVectors>(r, rows, full, tri, c, ldc);
      full.b += kColumns, c += kColumns;
      if constexpr (kTriangle != PairTriangle::kNone) tri.b += kColumns;
    }
  };
  strips(std::integral_constant<int, 4>());
  strips(std::integral_constant<int, 2>());
  strips(std::integral_constant<int, 1>());
}

// The lower triangle of C[rows, rows] = A B; above the diagonal C holds anything.
inline void PairLowerProduct(size_t rows, PairFactors x, float* c, size_t ldc) {
  for (size_t r = 0; r < rows; r += kPairLanes) {
    PairProduct<PairTriangle::kNone, false>(std::min(rows - r, kPairLanes), r / kPairLanes + 1, x,
                                            {}, c, ldc);
    x.a += kPairLanes * x.row, c += kPairLanes * ldc;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_POP_ATTRIBUTES
HWY_AFTER_NAMESPACE();
