#pragma once
// Products by pairs of bfloat16 of rows, which are a panel's or tokens (pair_panels-inl.h): what
// enters a product is rounded once, sums are float; included once, in the pass of the one target
// that may have the instruction.
#include <algorithm>

#include "cistern/kernels/isa.h"
#include "cistern/kernels/pair_panels-inl.h"
#include "cistern/kernels/workspace.h"

HWY_BEFORE_NAMESPACE();
HWY_PUSH_ATTRIBUTES("avx512bf16")
namespace cistern {
namespace HWY_NAMESPACE {

// x^T y of up to `most` rows of x [., height] and y [., across].
class OuterPairs {
 public:
  static size_t Bytes(size_t most, size_t height, size_t across) {
    return (most + 1) / 2 * (PairColumns(height) + PairColumns(across)) * sizeof(uint32_t);
  }
  static constexpr size_t kPieces = 2;
  OuterPairs(size_t most, size_t height, size_t across, Workspace& workspace)
      : height_(height), across_(across) {
    x_ = workspace.Take<uint32_t>((most + 1) / 2 * ldx());
    y_ = workspace.Take<uint32_t>((most + 1) / 2 * ldy());
  }

  // Takes the rows before the first one that holds anything not finite. Their number; 0 where pairs
  // are not faster than floats.
  template <class X, class Y>
  size_t Take(size_t rows, const X& x, const Y& y) {
    if (!GainsByBFloat16()) return 0;
    rows_ = rows;
    if (PairOf(x, rows, height_, x_) && PairOf(y, rows, across_, y_)) return rows;
    rows_ = std::min(FiniteRows(x, rows, height_), FiniteRows(y, rows, across_));
    PairOf(x, rows_, height_, x_);
    PairOf(y, rows_, across_, y_);
    return rows_;
  }

  // S [height, ld] = x^T y of the rows that were taken, or += that.
  template <bool kAdd>
  void Multiply(float* S, size_t ld) const {
    PairProduct<PairTriangle::kNone, kAdd>(
        height_, vectors(),
        {reinterpret_cast<const BFloat16*>(x_), 2, 2 * ldx(), y_, ldy(), steps()}, {}, S, ld);
  }

  const uint32_t* x() const { return x_; }
  const uint32_t* y() const { return y_; }
  size_t rows() const { return rows_; }
  size_t steps() const { return (rows_ + 1) / 2; }
  size_t height() const { return height_; }
  size_t across() const { return across_; }
  size_t vectors() const { return (across_ + kPairLanes - 1) / kPairLanes; }
  size_t ldx() const { return PairColumns(height_); }
  size_t ldy() const { return PairColumns(across_); }

 private:
  AmxTiles tiles_{UsesAmx()};
  size_t height_, across_, rows_ = 0;
  uint32_t *x_, *y_;
};

// A B for one B [depth, columns] and many blocks of up to `most` rows of A.
class PanelPairs {
 public:
  static size_t Bytes(size_t most, size_t depth, size_t columns) {
    return (depth + 1) / 2 * PairColumns(columns) * sizeof(uint32_t) +
           most * PairColumns(depth) * sizeof(BFloat16);
  }
  static constexpr size_t kPieces = 2;
  PanelPairs(size_t most, size_t depth, size_t columns, Workspace& workspace)
      : depth_(depth), columns_(columns), ld_(PairColumns(columns)) {
    pairs_ = workspace.Take<uint32_t>((depth + 1) / 2 * ld_);
    rows_ = workspace.Take<BFloat16>(most * PairColumns(depth));
  }

  void Set(const float* B, size_t ldb) {
    if (GainsByBFloat16()) PairPanel<false>(depth_, vectors(), B, ldb, pairs_, ld_);
  }

  // C [rows, columns] = A B, or += that; false, and nothing is computed, where pairs are not
  // faster.
  template <bool kAdd, class A, class C>
  bool Times(size_t rows, const A& a, C* c, size_t ldc) {
    if (!GainsByBFloat16()) return false;
    const RoundedRows rounded = RoundRows<false>(a, rows, depth_, rows_);
    PairProduct<PairTriangle::kNone, kAdd>(
        rows, vectors(), {rounded.a, rounded.ld, 2, pairs_, ld_, (depth_ + 1) / 2}, {}, c, ldc);
    return true;
  }
  // Rows t.. of `to` = A B; `panel` [rows, Padded(columns)] is scratch.
  template <class A>
  bool TimesTo(size_t rows, const A& a, const Sequence<BFloat16>& to, size_t t, float* panel) {
    if (columns_ % kPairLanes == 0)
      return Times<false>(rows, a, to.At(t), static_cast<size_t>(to.time));
    const size_t ld = vectors() * kPairLanes;
    if (!Times<false>(rows, a, panel, ld)) return false;
    UnpackRows(panel, t, rows, columns_, ld, to);
    return true;
  }

 private:
  size_t vectors() const { return (columns_ + kPairLanes - 1) / kPairLanes; }
  AmxTiles tiles_{UsesAmx()};
  size_t depth_, columns_, ld_;
  uint32_t* pairs_;
  BFloat16* rows_;
};

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_POP_ATTRIBUTES
HWY_AFTER_NAMESPACE();
