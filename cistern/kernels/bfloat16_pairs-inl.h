#pragma once
// Products of bfloat16 by the processor's instruction for pairs (VDPBF16PS), summed in float;
// included once, in the pass of the one target that may have it (exact_attention_bfloat16.cc says
// how it gets there).
//
// The instruction multiplies 16 pairs with 16 pairs, (a0 b0 + a1 b1) of each added to one sum. So
// two steps of a product's depth are one 32-bit element, a pair: A's are read where they lie, those
// of B stand in the lanes of a vector.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cistern/kernels/bfloat16.h"
#include "cistern/kernels/slot_chunk-inl.h"

HWY_BEFORE_NAMESPACE();
HWY_PUSH_ATTRIBUTES("avx512bf16")
namespace cistern {
namespace HWY_NAMESPACE {

constexpr size_t kPairLanes = 16;

// A B: pair k of row i of A at a + i*row + k*step, all in values; that of column j of B at b[k*ldb
// + j]. depth: pairs.
struct PairFactors {
  const BFloat16* a;
  size_t row, step;
  const uint32_t* b;
  size_t ldb, depth;
};

// sum += A B, for rows r .. r+kRows-1 of A and the steps [begin, end) of the depth.
template <size_t kRows, int kVectors>
HWY_INLINE void PairChain(const PairFactors& x, size_t r, size_t begin, size_t end,
                          __m512 (&sum)[kRows][kVectors]) {
  const BFloat16* a = x.a + r * x.row + begin * x.step;
  const uint32_t* HWY_RESTRICT b = x.b + begin * x.ldb;
  for (size_t k = begin; k < end; ++k, a += x.step, b += x.ldb) {
    __m512bh bv[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j)
      bv[j] = (__m512bh)_mm512_loadu_si512(b + static_cast<size_t>(j) * kPairLanes);
#pragma GCC unroll 16
    for (size_t i = 0; i < kRows; ++i) {
      int32_t pair;
      std::memcpy(&pair, a + i * x.row, sizeof pair);
      const __m512bh av = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], av, bv[j]);
    }
  }
}

enum class PairsTo {
  kSet,    // C = scale A B
  kAdd,    // C += A B
  kTimes,  // C = C factor + A B, a factor for each column
};

template <PairsTo kTo, size_t kRows, int kVectors>
HWY_INLINE void PairTile(const PairFactors& x, size_t r, float* HWY_RESTRICT c, size_t ldc,
                         float scale, const float* HWY_RESTRICT factor) {
  __m512 sum[kRows][kVectors];
#pragma GCC unroll 8
  for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sum[i][j] = _mm512_setzero_ps();
  }
  PairChain(x, r, 0, x.depth, sum);
  const __m512 times = _mm512_set1_ps(scale);
#pragma GCC unroll 8
  for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      float* const to = c + i * ldc + static_cast<size_t>(j) * kPairLanes;
      if constexpr (kTo == PairsTo::kSet) {
        _mm512_storeu_ps(to, _mm512_mul_ps(times, sum[i][j]));
      } else if constexpr (kTo == PairsTo::kAdd) {
        _mm512_storeu_ps(to, _mm512_add_ps(sum[i][j], _mm512_loadu_ps(to)));
      } else {
        const __m512 of = _mm512_loadu_ps(factor + static_cast<size_t>(j) * kPairLanes);
        _mm512_storeu_ps(to, _mm512_fmadd_ps(of, _mm512_loadu_ps(to), sum[i][j]));
      }
    }
  }
}

template <PairsTo kTo, int kVectors>
HWY_NOINLINE void PairStrip(size_t rows, const PairFactors& x, float* c, size_t ldc, float scale,
                            const float* factor) {
  size_t r = 0;
  for (; r + 6 <= rows; r += 6) PairTile<kTo, 6, kVectors>(x, r, c + r * ldc, ldc, scale, factor);
  for (; r + 2 <= rows; r += 2) PairTile<kTo, 2, kVectors>(x, r, c + r * ldc, ldc, scale, factor);
  if (r < rows) PairTile<kTo, 1, kVectors>(x, r, c + r * ldc, ldc, scale, factor);
}

// C[rows, vectors] from A B.
template <PairsTo kTo>
void MultiplyPairs(size_t rows, size_t vectors, PairFactors x, float* c, size_t ldc,
                   float scale = 1, const float* factor = nullptr) {
  const auto next = [&](size_t count) {
    x.b += count * kPairLanes;
    c += count * kPairLanes;
    if (factor != nullptr) factor += count * kPairLanes;
    vectors -= count;
  };
  for (; vectors >= 4; next(4)) PairStrip<kTo, 4>(rows, x, c, ldc, scale, factor);
  for (; vectors >= 2; next(2)) PairStrip<kTo, 2>(rows, x, c, ldc, scale, factor);
  if (vectors == 1) PairStrip<kTo, 1>(rows, x, c, ldc, scale, factor);
}

// The first `count` of 32 values, zeros in the others.
HWY_INLINE __m512i LoadValues(const BFloat16* from, size_t count) {
  return count >= 32 ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16((1u << count) - 1, from);
}

// Two vectors of 32 values, interleaved: pairs of the first 16 of each, of the last 16 of each.
HWY_INLINE void StorePairs(__m512i even, __m512i odd, uint32_t* to) {
  alignas(64) static constexpr uint16_t kLow[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                    37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                    11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(kLow), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  _mm512_storeu_si512(to, _mm512_permutex2var_epi16(even, low, odd));
  _mm512_storeu_si512(to + kPairLanes, _mm512_permutex2var_epi16(even, high, odd));
}

// Leading dimension of pairs of rows.
constexpr size_t PairColumns(size_t width) { return RoundUp(width, 32); }

// pairs[ceil(count / 2), PairColumns(width)] of rows t.. of x: each of a row and the next one,
// which is zeros behind the last. What is not finite becomes 0: whether there is any.
HWY_NOINLINE inline bool PairRows(const Sequence<const BFloat16>& x, size_t t, size_t count,
                                  size_t width, uint32_t* pairs) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  uint32_t lost = 0;
  const auto finite = [&](__m512i v) HWY_ATTR {
    const __mmask32 bad = _mm512_cmpeq_epi16_mask(_mm512_and_si512(v, exponent), exponent);
    lost |= bad;
    return _mm512_mask_mov_epi16(v, bad, _mm512_setzero_si512());
  };
  for (size_t i = 0; i < count; i += 2) {
    const BFloat16 *even = x.At(t + i), *odd = i + 1 < count ? x.At(t + i + 1) : nullptr;
    for (size_t c = 0; c < width; c += 32, pairs += 32) {
      const __m512i a = finite(LoadValues(even + c, width - c)),
                    b = odd == nullptr ? _mm512_setzero_si512()
                                       : finite(LoadValues(odd + c, width - c));
      StorePairs(a, b, pairs);
    }
  }
  return lost == 0;
}

// rows[count, ld] of x; what is beyond the width is 0.
HWY_NOINLINE inline void CopyRows(const Sequence<const BFloat16>& x, size_t t, size_t count,
                                  size_t width, size_t ld, BFloat16* rows) {
  for (size_t i = 0; i < count; ++i, rows += ld) {
    std::memcpy(rows, x.At(t + i), width * sizeof(BFloat16));
    std::memset(rows + width, 0, (ld - width) * sizeof(BFloat16));
  }
}

// A's rows t.. of x, as pairs along their width: where they lie, or a copy that fills the last
// pair.
struct PairedRows {
  PairedRows(const Sequence<const BFloat16>& x, size_t t, size_t count, size_t width,
             BFloat16* copy) {
    if (width % 2 == 0) {
      data = x.At(t), row = static_cast<size_t>(x.time);
    } else {
      CopyRows(x, t, count, width, width + 1, copy);
      data = copy, row = width + 1;
    }
  }
  const BFloat16* data;
  size_t row;
};

// e0, e1 in bfloat16, as 32 values.
HWY_INLINE __m512i RoundTwo(__m512 e0, __m512 e1) { return (__m512i)_mm512_cvtne2ps_pbh(e1, e0); }
// Their pairs.
HWY_INLINE __m512i PairTwo(__m512i rounded) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                      21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                      11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), rounded);
}

HWY_INLINE void StorePairSum(__m512 sum, float* to) { _mm512_storeu_ps(to, sum); }
HWY_INLINE void StorePairSum(__m512 sum, BFloat16* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(sum));
}

// P[ceil(rows / 2), columns]: pairs of a row of X[rows, ld] and the next one, which is zeros behind
// the last.
HWY_NOINLINE inline void PairFloats(size_t rows, size_t vectors, const float* X, size_t ld,
                                    uint32_t* P) {
  for (size_t j = 0; j < rows; j += 2, X += 2 * ld, P += ld) {
    for (size_t i = 0; i < vectors * kPairLanes; i += kPairLanes) {
      const __m512 even = _mm512_loadu_ps(X + i),
                   odd = j + 1 < rows ? _mm512_loadu_ps(X + ld + i) : _mm512_setzero_ps();
      _mm512_storeu_si512(P + i, PairTwo(RoundTwo(even, odd)));
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_POP_ATTRIBUTES
HWY_AFTER_NAMESPACE();
