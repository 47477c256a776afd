// The read weights r of the fused walks, for a chunk's rows; included once per Highway target.
#if defined(CISTERN_KERNELS_SLOT_WEIGHTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_SLOT_WEIGHTS_INL_H_
#undef CISTERN_KERNELS_SLOT_WEIGHTS_INL_H_
#else
#define CISTERN_KERNELS_SLOT_WEIGHTS_INL_H_
#endif

#include <algorithm>

#include "cistern/kernels/slot_softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Latte's: r_t = softmax(x_t).
template <class T>
class TokenWeights {
 public:
  static size_t Bytes(size_t) { return 0; }
  static constexpr size_t kPieces = 0;
  TokenWeights(size_t, Workspace&) {}

  void Begin(const SlotChunk<T>&) {}

  // W = r F [rows, np] of rows t.. of x.
  template <class S>
  void Rows(const SlotChunk<T>& chunk, const Sequence<const S>& x, size_t t, T* W) {
    SoftmaxOfTokens(x, t, chunk.rows, chunk.n, chunk.F, W);
  }

  // The same W; D [rows, np] of leading dimension ldd, which holds dr, becomes dx; and
  // ab = F (r dr - dz) [rows, np], where z has no part in r.
  template <class S>
  HWY_NOINLINE void Gradients(const SlotChunk<T>& chunk, const Sequence<const S>& x, size_t t, T* W,
                              T* D, size_t ldd, T* ab) {
    const Tag<T> d;
    const size_t np = chunk.np;
    PackRows(x, t, chunk.rows, chunk.n, np, kMinusInfinity<T>, W);
    SoftmaxRows(chunk.rows, np, W, W);
    for (size_t i = 0; i < chunk.rows; ++i, D += ldd) {
      T* const w = W + i * np;
      const Vec<T> dot = RowDot(np, w, D);
      for (size_t l = 0; l < np; l += kLanes<T>) {
        const Vec<T> r = hn::Load(d, w + l), dr = hn::LoadU(d, D + l),
                     rf = hn::Mul(r, hn::Load(d, chunk.F + i * np + l));
        hn::StoreU(hn::Mul(r, hn::Sub(dr, dot)), d, D + l);
        hn::Store(hn::Mul(rf, dr), d, ab + i * np + l);
        hn::Store(rf, d, w + l);
      }
    }
  }

  // r [np] of one token, z being that after it.
  static void OfToken(size_t n, const T* x, const double*, T* r) {
    const size_t np = Padded<T>(n);
    PackRows(Sequence<const T>(x, n), 0, 1, n, np, kMinusInfinity<T>, r);
    SoftmaxRows(1, np, r, r);
  }
};

// Those of FAVOR+: r_t = softmax(x_t + z_t) over the slots that hold something. With z = zc - log F
// (slot_chunk-inl.h) that needs no logarithm:
//   r = e^(x + zc) / F over its sum,   W = r F = e^(x + zc) over the same sum,
// where 1 <= 1/F <= e^65. zc counts from one number for all slots, which keeps the bits of x where
// log-weights are large. That number is the past's, as zc is.
template <class T>
class FavorWeights {
 public:
  static size_t Bytes(size_t n) { return Padded<T>(n) * sizeof(T); }
  static constexpr size_t kPieces = 1;
  FavorWeights(size_t n, Workspace& workspace) : shift_(workspace.Take<T>(Padded<T>(n))) {}

  // Where a span begins.
  void Begin(const SlotChunk<T>& chunk) { zero_ = Highest(chunk.n, chunk.reference); }

  // As TokenWeights.
  template <class S>
  HWY_NOINLINE void Rows(const SlotChunk<T>& chunk, const Sequence<const S>& x, size_t t, T* W) {
    const Tag<T> d;
    const size_t np = chunk.np;
    Shift(chunk);
    const Sequence<const T> rows = RowsOf(chunk, x, t, W);
    for (size_t i = 0; i < chunk.rows; ++i, W += np) {
      const Vec<T> share = Exponentials<false>(np, rows.At(i), chunk.F + i * np, W, nullptr);
      for (size_t l = 0; l < np; l += kLanes<T>)
        hn::Store(hn::Mul(hn::Load(d, W + l), share), d, W + l);
    }
  }

  // As TokenWeights: dz = dx = r (dr - r . dr), so that r dr - dz = r (r . dr).
  template <class S>
  HWY_NOINLINE void Gradients(const SlotChunk<T>& chunk, const Sequence<const S>& x, size_t t, T* W,
                              T* D, size_t ldd, T* ab) {
    const Tag<T> d;
    const size_t np = chunk.np;
    Begin(chunk);
    Shift(chunk);
    const Sequence<const T> rows = RowsOf(chunk, x, t, W);
    for (size_t i = 0; i < chunk.rows; ++i, W += np, D += ldd, ab += np) {
      const Vec<T> share = Exponentials<true>(np, rows.At(i), chunk.F + i * np, W, ab),
                   dot = hn::Mul(share, RowDot(np, ab, D));
      for (size_t l = 0; l < np; l += kLanes<T>) {
        const Vec<T> w = hn::Mul(share, hn::Load(d, W + l)),
                     r = hn::Mul(share, hn::Load(d, ab + l));
        hn::StoreU(hn::Mul(r, hn::Sub(hn::LoadU(d, D + l), dot)), d, D + l);
        hn::Store(hn::Mul(w, dot), d, ab + l);
        hn::Store(w, d, W + l);
      }
    }
  }

  static void OfToken(size_t n, const T* x, const double* z, T* r) {
    const size_t np = Padded<T>(n);
    const double zero = Highest(n, z);
    bool any = false;
    for (size_t l = 0; l < np; ++l) {
      r[l] = l >= n || z[l] == kEmpty ? kMinusInfinity<T>
                                      : static_cast<T>(static_cast<double>(x[l]) + (z[l] - zero));
      any |= r[l] != kMinusInfinity<T>;
    }
    if (any) {
      SoftmaxRows(1, np, r, r);
    } else {
      std::memset(r, 0, np * sizeof(T));
    }
  }

 private:
  // The largest of n log-sums that are finite; 0 where there is none.
  static double Highest(size_t n, const double* z) {
    double highest = kEmpty;
    for (size_t l = 0; l < n; ++l) highest = std::max(highest, z[l]);
    return std::isfinite(highest) ? highest : 0;
  }

  // shift = zc - zero. A slot that got its reference inside the span has one from then on.
  void Shift(const SlotChunk<T>& chunk) {
    for (size_t l = 0; l < chunk.np; ++l)
      shift_[l] = l < chunk.n ? static_cast<T>(chunk.reference[l] - zero_) : T{0};
  }

  // Rows t.. of x, whole vectors of T: where they lie, or in W.
  template <class S>
  static Sequence<const T> RowsOf(const SlotChunk<T>& chunk, const Sequence<const S>& x, size_t t,
                                  T* W) {
    if constexpr (std::is_same_v<S, T>) {
      if (chunk.n == chunk.np) return {x.At(t), static_cast<size_t>(x.time)};
    }
    PackRows(x, t, chunk.rows, chunk.n, chunk.np, kMinusInfinity<T>, W);
    return {W, chunk.np};
  }

  // One row: W = e^(x + zc - m), with m the row's largest exponent, and R, where kRead, the same
  // over F; both 0 where a slot holds nothing. Returns 1 / the sum of R, 0 where the row reads
  // nothing. x may be W.
  template <bool kRead>
  HWY_INLINE Vec<T> Exponentials(size_t np, const T* x, const T* F, T* W, T* R) const {
    const Tag<T> d;
    const Vec<T> zero = hn::Zero(d), none = hn::Set(d, kMinusInfinity<T>);
    Vec<T> highest = none;
    for (size_t l = 0; l < np; l += kLanes<T>) {
      const auto empty = hn::Eq(hn::Load(d, F + l), zero);
      const Vec<T> y =
          hn::IfThenElse(empty, none, hn::Add(hn::LoadU(d, x + l), hn::Load(d, shift_ + l)));
      highest = hn::Max(highest, y);
      hn::Store(y, d, W + l);
    }
    Vec<T> most = hn::MaxOfLanes(d, highest);
    most = hn::IfThenZeroElse(hn::Eq(most, none), most);
    Vec<T> sum = zero;
    for (size_t l = 0; l < np; l += kLanes<T>) {
      const Vec<T> f = hn::Load(d, F + l), e = WeightExp(hn::Sub(hn::Load(d, W + l), most)),
                   r = hn::IfThenZeroElse(hn::Eq(f, zero), hn::Div(e, f));
      sum = hn::Add(sum, r);
      if constexpr (kRead) hn::Store(r, d, R + l);
      hn::Store(e, d, W + l);
    }
    const Vec<T> total = hn::SumOfLanes(d, sum);
    return hn::IfThenZeroElse(hn::Eq(total, zero), hn::Div(hn::Set(d, T{1}), total));
  }

  T* const shift_;  // [np]
  double zero_ = 0;
};

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
