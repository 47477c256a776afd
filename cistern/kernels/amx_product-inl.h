#pragma once
// Products of bfloat16 by the processor's tiles (Intel's AMX), summed in float; included once, in
// the pass of the one target that may have them.
//
// A tile register holds 16 rows of 64 bytes. One instruction (TDPBF16PS) adds to 16 x 16 sums what
// 16 pairs of the depth give, some eight thousand multiply-adds in 16 cycles. A's tiles are rows of
// pairs, those of B one pair of 16 columns a row, as in bfloat16_pairs-inl.h.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "cistern/kernels/bfloat16.h"

HWY_BEFORE_NAMESPACE();
HWY_PUSH_ATTRIBUTES("amx-tile,amx-bf16")
namespace cistern {
namespace HWY_NAMESPACE {

constexpr size_t kAmxRows = 16, kAmxPairs = 16;
constexpr size_t kAmxStrip = 2 * kAmxRows;  // rows and columns of a product

// The tiles of this thread, whole ones, while any of these exists.
class AmxTiles {
 public:
  explicit AmxTiles(bool used = true) : used_(used) {
    if (!used_ || Users()++ > 0) return;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (size_t tile = 0; tile < 8; ++tile) config.rows[tile] = 16, config.row_bytes[tile] = 64;
    // The intrinsics do not tell the compiler which memory they read, here and below.
    asm volatile("" ::: "memory");
    _tile_loadconfig(&config);
  }
  AmxTiles(AmxTiles&& other) noexcept : used_(std::exchange(other.used_, false)) {}
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
  ~AmxTiles() {
    if (used_ && --Users() == 0) _tile_release();
  }

 private:
  static int& Users() {
    static thread_local int users = 0;
    return users;
  }
  bool used_;
};

// The sums of kDown x kAcross tiles of C lie in the tiles 0 to 3: as 0, from memory, to memory.
HWY_INLINE void ZeroTileSums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
template <size_t kDown, size_t kAcross>
HWY_INLINE void LoadTileSums(const float* c, size_t ldc) {
  const size_t row = ldc * sizeof(float);
  asm volatile("" ::: "memory");
  _tile_loadd(0, c, row);
  if constexpr (kAcross == 2) _tile_loadd(1, c + kAmxRows, row);
  if constexpr (kDown == 2) _tile_loadd(2, c + kAmxRows * ldc, row);
  if constexpr (kDown == 2 && kAcross == 2) _tile_loadd(3, c + kAmxRows * ldc + kAmxRows, row);
}
template <size_t kDown, size_t kAcross>
HWY_INLINE void StoreTileSums(float* c, size_t ldc) {
  const size_t row = ldc * sizeof(float);
  _tile_stored(0, c, row);
  if constexpr (kAcross == 2) _tile_stored(1, c + kAmxRows, row);
  if constexpr (kDown == 2) _tile_stored(2, c + kAmxRows * ldc, row);
  if constexpr (kDown == 2 && kAcross == 2) _tile_stored(3, c + kAmxRows * ldc + kAmxRows, row);
  asm volatile("" ::: "memory");
}

// The sums += 16 pairs of the depth; a0, a1: the upper and the lower tile of A, row_a bytes from
// row to row; b: likewise, the second tile of B beside the first.
template <size_t kDown, size_t kAcross>
HWY_INLINE void AddTileProducts(const void* a0, const void* a1, size_t row_a, const uint32_t* b,
                                size_t row_b) {
  _tile_loadd(6, b, row_b);
  _tile_loadd(4, a0, row_a);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (kAcross == 2) {
    _tile_loadd(7, b + kAmxPairs, row_b);
    _tile_dpbf16ps(1, 4, 7);
  }
  if constexpr (kDown == 2) {
    _tile_loadd(5, a1, row_a);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (kAcross == 2) _tile_dpbf16ps(3, 5, 7);
  }
}

// C[32, 32] = A B, or C += A B. depth: pairs, a multiple of 16. lda, ldb, ldc: in values, pairs and
// floats.
template <bool kAdd>
HWY_INLINE void MultiplyAmx(size_t depth, const BFloat16* a, size_t lda, const uint32_t* b,
                            size_t ldb, float* c, size_t ldc) {
  asm volatile("" ::: "memory");
  kAdd ? LoadTileSums<2, 2>(c, ldc) : ZeroTileSums();
  for (size_t k = 0; k < depth; k += kAmxPairs, a += 2 * kAmxPairs, b += kAmxPairs * ldb)
    AddTileProducts<2, 2>(a, a + kAmxRows * lda, lda * sizeof(BFloat16), b, ldb * sizeof(uint32_t));
  StoreTileSums<2, 2>(c, ldc);
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_POP_ATTRIBUTES
HWY_AFTER_NAMESPACE();
