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

// Rows of a and b are packed so many at a time: a strip of 32 columns of each, 16 KB, and the sums
// of a block of 32 x 32 lie in the first-level cache while they meet.
constexpr size_t kTurnedRows = 256, kTurnedPairs = kTurnedRows / 2;
constexpr size_t kTurnedStrip = kAmxStrip * kTurnedPairs;  // pairs of a strip
constexpr size_t kTurnedBlock = kAmxStrip * kAmxStrip;     // sums of a block

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

// Strips of b, 32 columns a strip, each with one pair of rows after another.
HWY_NOINLINE void PackRight(BFloat16Matrix b, size_t rows, size_t columns, uint32_t* to) {
  for (size_t r = 0; r < rows; r += 2 * kAmxPairs) {
    for (size_t j = 0; j < columns; j += kAmxStrip)
      PairBlock(From(b, r, j), rows - r, std::min(kAmxStrip, columns - j),
                to + j / kAmxStrip * kTurnedStrip + r / 2 * kAmxStrip);
  }
}

// A strip of a as tiles: 16 columns a tile, each with 16 pairs of rows one after another.
HWY_NOINLINE void PackLeft(BFloat16Matrix a, size_t rows, size_t columns, uint32_t* to) {
  alignas(64) uint32_t pairs[kAmxPairs * kAmxStrip];
  const PairFactors turned = {
      reinterpret_cast<const BFloat16*>(pairs), 2, 2 * kAmxStrip, nullptr, 0, kAmxPairs};
  for (size_t r = 0; r < rows; r += 2 * kAmxPairs, to += 2 * kAmxTile) {
    PairBlock(From(a, r, 0), rows - r, columns, pairs);
    for (size_t half = 0; half < 2; ++half)
      PackTile(turned, half * kAmxRows, 0, kAmxPairs, to + half * kAmxTile);
  }
}

// sums [32, 32], contiguous, of one strip each.
HWY_INLINE void AddStrips(size_t rows, bool begins, const uint32_t* a, const uint32_t* b,
                          float* sums, LinesAhead& ahead_a, LinesAhead& ahead_b, size_t lines_a,
                          size_t lines_b) {
  if (begins) {
    ZeroTileSums();
  } else {
    LoadTileSums<2, 2>(sums, kAmxStrip);
  }
  for (size_t r = 0; r < rows; r += 2 * kAmxPairs, a += 2 * kAmxTile, b += 2 * kAmxTile) {
    AddTileProducts<2, 2>(a, a + kAmxTile, kAmxPairs * sizeof(uint32_t), b,
                          kAmxStrip * sizeof(uint32_t));
    ahead_a.Ask(lines_a);
    ahead_b.Ask(lines_b);
  }
  StoreTileSums<2, 2>(sums, kAmxStrip);
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
HWY_NOINLINE void TurnedPart(const TransposedShape& shape, BFloat16Matrix a, BFloat16Matrix b,
                             const TurnedSums& to) {
  const size_t all = size_t(shape.rows), left = size_t(shape.left), right = size_t(shape.right);
  const size_t across = (right + kAmxStrip - 1) / kAmxStrip,
               down = (left + kAmxStrip - 1) / kAmxStrip;
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(
      sizeof(uint32_t) * (1 + across) * kTurnedStrip + sizeof(float) * down * across * kTurnedBlock,
      3);
  auto* const packed_a = workspace.Take<uint32_t>(kTurnedStrip);
  auto* const packed_b = workspace.Take<uint32_t>(across * kTurnedStrip);
  auto* const sums = workspace.Take<float>(down * across * kTurnedBlock);
  // a's next strip and b's next rows, spread over the products before them.
  constexpr size_t kSteps = kTurnedPairs / kAmxPairs, kMostLines = 4;
  const size_t lines_a = std::min(kMostLines, kTurnedRows / kSteps / across + 1),
               lines_b = std::min(kMostLines, kTurnedRows / kSteps / down + 1);
  const AmxTiles tiles;
  size_t r = 0;
  do {  // without rows the sums are 0
    const size_t rows = std::min(kTurnedRows, all - r), next = r + rows,
                 later = std::min(kTurnedRows, all - next);
    PackRight(From(b, r, 0), rows, right, packed_b);
    LinesAhead ahead_b(From(b, next, 0), later, right);
    for (size_t i = 0; i < down; ++i) {
      PackLeft(From(a, r, i * kAmxStrip), rows, std::min(kAmxStrip, left - i * kAmxStrip),
               packed_a);
      const bool turns = i + 1 == down;
      LinesAhead ahead_a(turns ? From(a, next, 0) : From(a, r, (i + 1) * kAmxStrip),
                         turns ? later : rows, 1);
      for (size_t j = 0; j < across; ++j)
        AddStrips(rows, r == 0, packed_a, packed_b + j * kTurnedStrip,
                  sums + (i * across + j) * kTurnedBlock, ahead_a, ahead_b, lines_a, lines_b);
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

bool CanMultiplyTransposed() { return UsesAmx(); }

void TransposedProduct(const TransposedShape& shape, BFloat16Matrix a, BFloat16Matrix b, bool add,
                       float* c, int64_t step) {
  CISTERN_CHECK(UsesAmx(), "[transposed product] this processor has no tiles (AMX)");
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
                    N_AVX3::TurnedPart(
                        {shape.rows, std::min(kLeft, left - i), std::min(kRight, last - j)},
                        {a.data + i, a.step}, {b.data + j, b.step},
                        {turned ? c + j * step + i : c + i * step + j, size_t(step), add, turned});
                }
              });
}

#else

bool CanMultiplyTransposed() { return false; }

void TransposedProduct(const TransposedShape&, BFloat16Matrix, BFloat16Matrix, bool, float*,
                       int64_t) {
  Fail("this build has no products by tiles (AMX)");
}

#endif

}  // namespace cistern
#endif  // HWY_ONCE
