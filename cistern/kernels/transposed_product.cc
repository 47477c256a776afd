#include "cistern/kernels/transposed_product.h"

#include <algorithm>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/base/parallel.h"
#include "cistern/kernels/dispatch.h"
#include "cistern/kernels/workspace.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/transposed_product.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "hwy/highway.h"

#if HWY_TARGET == HWY_AVX3
#include "cistern/kernels/pair_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
HWY_PUSH_ATTRIBUTES("avx512bf16,amx-tile,amx-bf16")
namespace cistern {
namespace HWY_NAMESPACE {

// Rows of a and b are packed so many at a time, in strips of 32 columns: one of each, and the sums
// of a block of 32 x 32, lie in the first-level cache while they meet. A strip has 16 KB by tiles,
// 8 by pairs, whose sums are read once for every 8 columns.
template <bool kTiles>
constexpr size_t kTurnedRows = kTiles ? 256 : 128;
template <bool kTiles>
constexpr size_t kTurnedStrip = kAmxStrip* kTurnedRows<kTiles> / 2;  // pairs of a strip
constexpr size_t kTurnedBlock = kAmxStrip * kAmxStrip;               // sums of a block

// A part of c, whose sums (512 KB) lie in the second-level cache from rows to rows.
constexpr size_t kMostLeft = 256, kMostRight = 512;

// Lines that are read soon, asked for while tiles are multiplied. Into the second-level cache: the
// first, where RowsAhead has them, is full here (8 % slower).
class LinesAhead {
 public:
  LinesAhead(BFloat16Matrix x, size_t rows, size_t columns)
      : x_(x), rows_(rows), lines_((columns + kLine - 1) / kLine) {}
  HWY_INLINE void Ask(size_t lines) {
    for (; lines > 0 && row_ < rows_; --lines) {
      _mm_prefetch(reinterpret_cast<const char*>(x_.data + row_ * size_t(x_.step) + line_ * kLine),
                   _MM_HINT_T1);
      if (++line_ == lines_) line_ = 0, ++row_;
    }
  }

 private:
  static constexpr size_t kLine = 64 / sizeof(BFloat16);
  BFloat16Matrix x_;
  size_t rows_, lines_, row_ = 0, line_ = 0;
};

// to[16 pairs of rows, 32] = x[.., columns], which has `rows` rows and `columns` columns there;
// zeros in the rest.
HWY_INLINE void PairBlock(BFloat16Matrix x, size_t rows, size_t columns, uint32_t* to) {
  const size_t step = size_t(x.step);
  for (size_t r = 0; r < 2 * kAmxPairs; r += 2, to += kAmxStrip) {
    const BFloat16* from = x.data + r * step;
    StorePairs(r < rows ? LoadValues(from, columns) : _mm512_setzero_si512(),
               r + 1 < rows ? LoadValues(from + step, columns) : _mm512_setzero_si512(), to);
  }
}

HWY_INLINE BFloat16Matrix From(BFloat16Matrix x, size_t row, size_t column) {
  return {x.data + row * size_t(x.step) + column, x.step};
}

// Strips of 32 columns, `strip` pairs apart, each with one pair of rows after another.
HWY_NOINLINE void PackStrips(BFloat16Matrix x, size_t rows, size_t columns, size_t strip,
                             uint32_t* to) {
  for (size_t r = 0; r < rows; r += 2 * kAmxPairs) {
    for (size_t j = 0; j < columns; j += kAmxStrip)
      PairBlock(From(x, r, j), rows - r, std::min(kAmxStrip, columns - j),
                to + j / kAmxStrip * strip + r / 2 * kAmxStrip);
  }
}

// A strip of a as tiles: 16 columns a tile, each with 16 pairs of rows one after another.
HWY_NOINLINE void PackTiles(BFloat16Matrix a, size_t rows, size_t columns, uint32_t* to) {
  alignas(64) uint32_t pairs[kAmxPairs * kAmxStrip];
  const PairFactors turned = {
      reinterpret_cast<const BFloat16*>(pairs), 2, 2 * kAmxStrip, nullptr, 0, kAmxPairs};
  for (size_t r = 0; r < rows; r += 2 * kAmxPairs, to += 2 * kAmxTile) {
    PairBlock(From(a, r, 0), rows - r, columns, pairs);
    for (size_t half = 0; half < 2; ++half)
      PackTile(turned, half * kAmxRows, 0, kAmxPairs, to + half * kAmxTile);
  }
}

// Asks for the next lines of both operands.
struct BothAhead {
  LinesAhead a, b;
  size_t lines_a, lines_b;  // at a time
  HWY_INLINE void Ask() {
    a.Ask(lines_a);
    b.Ask(lines_b);
  }
};

// sums [32, 32], contiguous, of one strip each.
HWY_INLINE void AddTileStrips(size_t rows, bool begins, const uint32_t* a, const uint32_t* b,
                              float* sums, BothAhead& ahead) {
  if (begins) {
    ZeroTileSums();
  } else {
    LoadTileSums<2, 2>(sums, kAmxStrip);
  }
  for (size_t r = 0; r < rows; r += 2 * kAmxPairs, a += 2 * kAmxTile, b += 2 * kAmxTile) {
    AddTileProducts<2, 2>(a, a + kAmxTile, kAmxPairs * sizeof(uint32_t), b,
                          kAmxStrip * sizeof(uint32_t));
    ahead.Ask();
  }
  StoreTileSums<2, 2>(sums, kAmxStrip);
}

// The same by pairs, 8 x 32 sums at a time.
HWY_INLINE void AddPairStrips(size_t rows, bool begins, const uint32_t* a, const uint32_t* b,
                              float* sums, BothAhead& ahead) {
  constexpr size_t kDown = 8, kVectors = kAmxStrip / kPairLanes;
  const size_t pairs = (rows + 1) / 2;
  for (size_t i = 0; i < kAmxStrip; i += kDown, sums += kDown * kAmxStrip) {
    __m512 sum[kDown][kVectors];
#pragma GCC unroll 16
    for (size_t v = 0; v < kDown * kVectors; ++v)
      sum[v / kVectors][v % kVectors] =
          begins ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + v * kPairLanes);
    PairChain({reinterpret_cast<const BFloat16*>(a + i), 2, 2 * kAmxStrip, b, kAmxStrip, pairs}, 0,
              0, pairs, sum);
#pragma GCC unroll 16
    for (size_t v = 0; v < kDown * kVectors; ++v)
      _mm512_storeu_ps(sums + v * kPairLanes, sum[v / kVectors][v % kVectors]);
    ahead.Ask();
  }
}

// Where the sums of a part go: their transpose, where a and b changed places.
struct TurnedSums {
  float* c;
  size_t step;
  bool add, transposed;

  // Those of the rows from i on and the columns from j on.
  void Store(const float* sums, size_t i, size_t j, size_t rows, size_t columns) const {
    alignas(64) float turned[kTurnedBlock];
    if (transposed) {
      Transpose(kAmxStrip, kAmxStrip, sums, kAmxStrip, turned, kAmxStrip);
      sums = turned;
      std::swap(rows, columns);
      std::swap(i, j);
    }
    float* to = c + i * step + j;
    for (; rows > 0; --rows, sums += kAmxStrip, to += step) {
      for (size_t k = 0; k < columns; ++k) to[k] = add ? to[k] + sums[k] : sums[k];
    }
  }
};

// One part of c.
template <bool kTiles>
HWY_NOINLINE void TurnedPart(const TransposedShape& shape, BFloat16Matrix a, BFloat16Matrix b,
                             const TurnedSums& to) {
  const size_t all = size_t(shape.rows), left = size_t(shape.left), right = size_t(shape.right);
  const size_t across = (right + kAmxStrip - 1) / kAmxStrip,
               down = (left + kAmxStrip - 1) / kAmxStrip;
  Workspace& workspace = Workspace::OfThisThread();
  constexpr size_t kRows = kTurnedRows<kTiles>, kStrip = kTurnedStrip<kTiles>;
  workspace.Start(
      sizeof(uint32_t) * (1 + across) * kStrip + sizeof(float) * down * across * kTurnedBlock, 3);
  auto* const packed_a = workspace.Take<uint32_t>(kStrip);
  auto* const packed_b = workspace.Take<uint32_t>(across * kStrip);
  auto* const sums = workspace.Take<float>(down * across * kTurnedBlock);
  // a's next strip and b's next rows, spread over the products before them.
  constexpr size_t kSteps = kTiles ? kRows / 2 / kAmxPairs : 4, kMostLines = kTiles ? 4 : 8;
  const size_t lines_a = std::min(kMostLines, kRows / kSteps / across + 1),
               lines_b = std::min(kMostLines, kRows / kSteps / down + 1);
  const AmxTiles tiles(kTiles);
  size_t r = 0;
  do {  // without rows the sums are 0
    const size_t rows = std::min(kRows, all - r), next = r + rows,
                 later = std::min(kRows, all - next);
    PackStrips(From(b, r, 0), rows, right, kStrip, packed_b);
    BothAhead ahead = {{a, 0, 0}, {From(b, next, 0), later, right}, lines_a, lines_b};
    for (size_t i = 0; i < down; ++i) {
      const size_t columns = std::min(kAmxStrip, left - i * kAmxStrip);
      if constexpr (kTiles) {
        PackTiles(From(a, r, i * kAmxStrip), rows, columns, packed_a);
      } else {
        PackStrips(From(a, r, i * kAmxStrip), rows, columns, kStrip, packed_a);
      }
      const bool turns = i + 1 == down;
      ahead.a = LinesAhead(turns ? From(a, next, 0) : From(a, r, (i + 1) * kAmxStrip),
                           turns ? later : rows, 1);
      for (size_t j = 0; j < across; ++j) {
        float* const to = sums + (i * across + j) * kTurnedBlock;
        const uint32_t* const strip = packed_b + j * kStrip;
        kTiles ? AddTileStrips(rows, r == 0, packed_a, strip, to, ahead)
               : AddPairStrips(rows, r == 0, packed_a, strip, to, ahead);
      }
    }
    r = next;
  } while (r < all);
  for (size_t i = 0; i < down; ++i) {
    for (size_t j = 0; j < across; ++j)
      to.Store(sums + (i * across + j) * kTurnedBlock, i * kAmxStrip, j * kAmxStrip,
               std::min(kAmxStrip, left - i * kAmxStrip),
               std::min(kAmxStrip, right - j * kAmxStrip));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_POP_ATTRIBUTES
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET == HWY_AVX3

#if HWY_ONCE
namespace cistern {

#if HWY_TARGETS & HWY_AVX3

bool CanMultiplyTransposed() { return GainsByBFloat16() && ActiveIsa().starts_with("avx512"); }

void TransposedProduct(const TransposedShape& shape, BFloat16Matrix a, BFloat16Matrix b, bool add,
                       float* c, int64_t step) {
  CISTERN_CHECK(CanMultiplyTransposed(), "[transposed product] not on this processor");
  const auto part = UsesAmx() ? N_AVX3::TurnedPart<true> : N_AVX3::TurnedPart<false>;
  // The narrower one is a, whose columns become rows.
  const bool turned = shape.left > shape.right;
  const int64_t left = std::min(shape.left, shape.right), right = std::max(shape.left, shape.right);
  if (turned) std::swap(a, b);
  if (left == 0) return;
  constexpr auto kLeft = int64_t{N_AVX3::kMostLeft}, kRight = int64_t{N_AVX3::kMostRight},
                 kStrip = int64_t{N_AVX3::kAmxStrip};
  constexpr int64_t kGrain = int64_t{1} << 22;  // multiply-adds of a thread at least
  const int64_t work = shape.rows * left * kStrip + 1;
  ParallelFor((right + kStrip - 1) / kStrip, (kGrain + work - 1) / work,
              [&](int64_t begin, int64_t end) {
                const int64_t last = std::min(right, end * kStrip);
                for (int64_t j = begin * kStrip; j < last; j += kRight) {
                  for (int64_t i = 0; i < left; i += kLeft)
                    part({shape.rows, std::min(kLeft, left - i), std::min(kRight, last - j)},
                         {a.data + i, a.step}, {b.data + j, b.step},
                         {turned ? c + j * step + i : c + i * step + j, size_t(step), add, turned});
                }
              });
}

#else

bool CanMultiplyTransposed() { return false; }

void TransposedProduct(const TransposedShape&, BFloat16Matrix, BFloat16Matrix, bool, float*,
                       int64_t) {
  Fail("this build has no products of bfloat16");
}

#endif

}  // namespace cistern
#endif  // HWY_ONCE
