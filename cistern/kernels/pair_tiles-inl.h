#pragma once
// Products of pairs (pair_panels-inl.h) by the processor's tiles (amx_product-inl.h) of any shape;
// included once, in the pass of the one target that may have them.
//
// A tile of A is 16 rows of 16 pairs, which are read where they lie one after another. Where they
// do not, as in x^T y, and where the depth ends inside of a tile, tiles are packed, with zeros
// behind the end.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cistern/kernels/amx_product-inl.h"
#include "cistern/kernels/bfloat16_pairs-inl.h"
#include "cistern/kernels/rows_ahead.h"

HWY_BEFORE_NAMESPACE();
HWY_PUSH_ATTRIBUTES("avx512bf16,amx-tile,amx-bf16")
namespace cistern {
namespace HWY_NAMESPACE {

constexpr size_t kAmxTile = kAmxRows * kAmxPairs;

// to[16, 16] = 16 rows of `depth` pairs of x from row r and step k on, zeros in the rest.
HWY_NOINLINE inline void PackTile(const PairFactors& x, size_t r, size_t k, size_t depth,
                                  uint32_t* to) {
  const BFloat16* a = x.a + r * x.row + k * x.step;
  if (x.step == 2) {
    const __mmask16 some = static_cast<__mmask16>((1u << depth) - 1);
    for (size_t i = 0; i < kAmxRows; ++i, a += x.row)
      _mm512_store_si512(to + i * kAmxPairs, _mm512_maskz_loadu_epi32(some, a));
  } else if (x.row == 2 && depth == kAmxPairs) {  // pairs move as floats do
    size_t side = kAmxRows;
    asm("" : "+r"(side));  // GCC 12 has an internal error where it knows the size
    Transpose(side, side, reinterpret_cast<const float*>(a), x.step / 2,
              reinterpret_cast<float*>(to), kAmxPairs);
  } else {
    std::memset(to, 0, kAmxTile * sizeof(uint32_t));
    for (size_t i = 0; i < kAmxRows; ++i) {
      for (size_t j = 0; j < depth; ++j)
        std::memcpy(to + i * kAmxPairs + j, a + i * x.row + j * x.step, sizeof(uint32_t));
    }
  }
}

// The tiles of A for one or two times 16 rows.
class TilesOfA {
 public:
  // Packed tiles lie in `packed`, which holds kMost for each 16 rows.
  static constexpr size_t kMost = 4;
  TilesOfA(const PairFactors& x, size_t r, size_t tiles, uint32_t* packed)
      : x_(x), r_(r), packed_(packed), first_(x.step == 2 ? x.depth / kAmxPairs : 0) {
    for (size_t k = first_ * kAmxPairs; k < x.depth; k += kAmxPairs) {
      for (size_t i = 0; i < tiles; ++i)
        PackTile(x, r + i * kAmxRows, k, std::min(kAmxPairs, x.depth - k),
                 packed_ + (2 * (k / kAmxPairs - first_) + i) * kAmxTile);
    }
  }
  static bool Fits(const PairFactors& x) { return x.step == 2 || x.depth <= kMost * kAmxPairs; }

  struct Place {
    const void* at;
    size_t step;  // in bytes
  };
  HWY_INLINE Place At(size_t tile, size_t block) const {
    if (block >= first_)
      return {packed_ + (2 * (block - first_) + tile) * kAmxTile, kAmxPairs * sizeof(uint32_t)};
    return {x_.a + (r_ + tile * kAmxRows) * x_.row + block * kAmxPairs * x_.step,
            x_.row * sizeof(BFloat16)};
  }

 private:
  const PairFactors& x_;
  size_t r_;
  uint32_t* packed_;
  size_t first_;  // block of depth that is packed, and those after it
};

// The sums in tiles 0 to 3 += A B, of kDown x kAcross tiles; B's from column `at` on.
template <size_t kDown, size_t kAcross>
HWY_INLINE void AddTiles(const PairFactors& x, const TilesOfA& a, size_t at) {
  alignas(64) uint32_t rest[kAcross * kAmxTile];
  for (size_t k = 0, block = 0; k < x.depth; k += kAmxPairs, ++block) {
    const uint32_t* b = x.b + k * x.ldb + at;
    size_t row_b = x.ldb * sizeof(uint32_t);
    if (x.depth - k < kAmxPairs) {
      std::memset(rest, 0, sizeof rest);
      for (size_t j = 0; j < x.depth - k; ++j)
        std::memcpy(rest + j * kAcross * kAmxPairs, b + j * x.ldb,
                    kAcross * kAmxPairs * sizeof(uint32_t));
      b = rest, row_b = kAcross * kAmxPairs * sizeof(uint32_t);
    }
    asm volatile("" ::: "memory");
    const TilesOfA::Place upper = a.At(0, block), lower = a.At(kDown - 1, block);
    AddTileProducts<kDown, kAcross>(upper.at, lower.at, upper.step, b, row_b);
  }
}

template <size_t kDown, size_t kAcross>
HWY_INLINE void StoreTileSums(BFloat16* c, size_t ldc) {
  alignas(64) float sums[kDown * kAmxRows * kAcross * kAmxRows];
  StoreTileSums<kDown, kAcross>(sums, kAcross * kAmxRows);
  for (size_t i = 0; i < kDown * kAmxRows; ++i) {
    for (size_t j = 0; j < kAcross * kAmxRows; j += kPairLanes)
      StorePairSum(_mm512_load_ps(sums + i * kAcross * kAmxRows + j), c + i * ldc + j);
  }
}

// C[16 kDown rows from r on, vectors] = the product of `full` + that of `tri`, or += that.
template <bool kAdd, size_t kDown, class C>
HWY_INLINE void TileRows(size_t r, size_t vectors, const PairFactors& full, const PairFactors& tri,
                         C* c, size_t ldc) {
  alignas(64) uint32_t packed[2][2 * TilesOfA::kMost * kAmxTile];
  const TilesOfA of_full(full, r, kDown, packed[0]), of_tri(tri, r, kDown, packed[1]);
  RowsAhead& ahead = RowsAhead::OfThisThread();
  c += r * ldc;
  const auto part = [&]<size_t kAcross>(std::integral_constant<size_t, kAcross>, size_t at) {
    if constexpr (kAdd) {
      LoadTileSums<kDown, kAcross>(c + at, ldc);
    } else {
      ZeroTileSums();
    }
    AddTiles<kDown, kAcross>(full, of_full, at);
    AddTiles<kDown, kAcross>(tri, of_tri, at);
    StoreTileSums<kDown, kAcross>(c + at, ldc);
    ahead.Ask();
  };
  size_t v = 0;
  for (; v + 2 <= vectors; v += 2) part(std::integral_constant<size_t, 2>(), v * kPairLanes);
  if (v < vectors) part(std::integral_constant<size_t, 1>(), v * kPairLanes);
}

// As PairProduct, by tiles, of the first rows, as many as make whole tiles: their number. AmxTiles
// has to exist.
template <bool kAdd, class C>
HWY_NOINLINE size_t TileProduct(size_t rows, size_t vectors, const PairFactors& full,
                                const PairFactors& tri, C* c, size_t ldc) {
  if (!TilesOfA::Fits(full) || !TilesOfA::Fits(tri)) return 0;
  size_t r = 0;
  for (; r + 2 * kAmxRows <= rows; r += 2 * kAmxRows)
    TileRows<kAdd, 2>(r, vectors, full, tri, c, ldc);
  if (r + kAmxRows > rows) return r;
  TileRows<kAdd, 1>(r, vectors, full, tri, c, ldc);
  return r + kAmxRows;
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_POP_ATTRIBUTES
HWY_AFTER_NAMESPACE();
