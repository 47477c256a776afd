// Chunks of the summing slot memory: where they end and their gates; included once per Highway
// target.
//
// With c_t the sum of the log-gates of a slot after the chunk's first row, e^{c_t - c_i} (i <= t)
// is split into F_t = e^{c_t} and 1 / F_i. The first row's own gate is applied to the memory that
// comes in, so that any single gate works, 0 too:
//   M_t = F_t (first M_before + sum_{i<=t} E_i (x) u_i),   E_i = w_i / F_i.
// A chunk ends before a row that starts a document and before a row whose c leaves +-kGateReach.
// Then F stays so far from the ends of float's range that products with other small factors do too.
// c is a double, and F is rounded once: 1 / F_i cancels F_i to the last bit.
#if defined(CISTERN_KERNELS_SUM_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_SUM_CHUNK_INL_H_
#undef CISTERN_KERNELS_SUM_CHUNK_INL_H_
#else
#define CISTERN_KERNELS_SUM_CHUNK_INL_H_
#endif

#include <utility>

#include "cistern/kernels/slot_chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

constexpr double kGateReach = 30;  // e^-30 = 9e-14

// gate * x, where a gate of 0 forgets whatever x is.
HWY_INLINE Double Keep(Double gate, Double x) {
  return hn::IfThenZeroElse(hn::Eq(gate, hn::Zero(Tag<double>())), hn::Mul(gate, x));
}

enum class Gating { kNone, kShared, kSlots };

// Without gates there is no F, and E is w itself.
template <Gating kGating, class T>
class SumChunk {
  static constexpr bool kGated = kGating != Gating::kNone;

 public:
  static size_t Bytes(size_t slots) {
    const size_t np = Padded<T>(slots);
    return np * (kChunkRows * sizeof(T) +
                 (kGated ? (kChunkRows + 3) * sizeof(T) + 4 * sizeof(double) : 0));
  }
  static constexpr size_t kPieces = 9;

  SumChunk(size_t slots, Workspace& workspace) : n(slots), np(Padded<T>(slots)) {
    E = workspace.Take<T>(kChunkRows * np);
    if constexpr (kGated) {
      F = workspace.Take<T>(kChunkRows * np);
      for (T** piece : {&gate_, &hi_, &lo_}) *piece = workspace.Take<T>(np);
      for (double** piece : {&first, &last, &c_, &next_}) *piece = workspace.Take<double>(np);
    }
  }

  // Settles `rows`, the rows t.. of the chunk, at most up to `end`; and F, first, last, of which F
  // is only needed with `factors`.
  HWY_NOINLINE void Begin(const Sequence<const T>& log_gate, const Tokens& tokens, size_t t,
                          size_t end, bool factors = true) {
    const size_t most = end - t < kChunkRows ? end - t : kChunkRows;
    rows = 1;
    if constexpr (kGating == Gating::kNone) {
      while (rows < most && !tokens.StartsAt(t + rows)) ++rows;
    } else if constexpr (kGating == Gating::kShared) {
      double sum = 0;
      Fill(tokens.StartsAt(t) ? 1.0 : std::exp(static_cast<double>(*log_gate.At(t))), first);
      Fill(T{1}, F);
      for (; rows < most && !tokens.StartsAt(t + rows); ++rows) {
        const double next = sum + static_cast<double>(*log_gate.At(t + rows));
        if (!(std::abs(next) <= kGateReach)) break;
        sum = next;
        Fill(static_cast<T>(std::exp(sum)), F + rows * np);
      }
      Fill(std::exp(sum), last);
    } else {
      const Tag<double> d;
      const Tag<T> dt;
      PackRows(log_gate, t, 1, n, np, T{0}, gate_);
      for (size_t l = 0; l < np; l += kLanes<double>) {
        hn::Store(tokens.StartsAt(t) ? hn::Set(d, 1.0) : ExpOrNaN<double>(LoadAsDouble(gate_ + l)),
                  d, first + l);
        hn::Store(hn::Zero(d), d, c_ + l);
      }
      Fill(T{1}, F);
      for (; rows < most && !tokens.StartsAt(t + rows); ++rows) {
        PackRows(log_gate, t + rows, 1, n, np, T{0}, gate_);
        if (!Sum()) break;
        std::swap(c_, next_);
        for (size_t l = 0; factors && l < np; l += kLanes<T>) {
          const Vec<T> f = hn::Exp(dt, hn::Load(dt, hi_ + l));
          hn::Store(hn::MulAdd(f, hn::Load(dt, lo_ + l), f), dt, F + rows * np + l);
        }
      }
      for (size_t l = 0; l < np; l += kLanes<double>)
        hn::Store(hn::Exp(d, hn::Load(d, c_ + l)), d, last + l);
    }
  }

  // E from the write weights of the chunk's rows.
  HWY_NOINLINE void Weights(const Sequence<const T>& w, size_t t) {
    PackRows(w, t, rows, n, np, T{0}, E);
    if constexpr (kGated) {
      const Tag<T> d;
      for (size_t i = 0; i < rows * np; i += kLanes<T>)
        hn::Store(hn::Div(hn::Load(d, E + i), hn::Load(d, F + i)), d, E + i);
    }
  }

  // panel [rows, np] times F.
  void TimesF(T* panel) const {
    const Tag<T> d;
    for (size_t i = 0; i < rows * np; i += kLanes<T>)
      hn::Store(hn::Mul(hn::Load(d, panel + i), hn::Load(d, F + i)), d, panel + i);
  }

  const size_t n, np;
  size_t rows = 0;
  T *E, *F = nullptr;                        // [rows, np]
  double *first = nullptr, *last = nullptr;  // [np]: the first row's gate; e^c of the last row

 private:
  template <class X>
  void Fill(X value, X* row) const {
    const Tag<X> d;
    for (size_t l = 0; l < np; l += kLanes<X>) hn::Store(hn::Set(d, value), d, row + l);
  }

  // next = c + the row's log-gates, also as hi + lo = next in T; whether all are within reach (NaN
  // is not).
  bool Sum() const {
    const Tag<double> d;
    const Double reach = hn::Set(d, kGateReach);
    auto within = hn::Eq(reach, reach);
    for (size_t l = 0; l < np; l += kLanes<double>) {
      const Double next = hn::Add(hn::Load(d, c_ + l), LoadAsDouble(gate_ + l));
      within = hn::And(within, hn::Le(hn::Abs(next), reach));
      hn::Store(next, d, next_ + l);
      StoreDouble(next, hi_ + l);
      StoreDouble(hn::Sub(next, LoadAsDouble(hi_ + l)), lo_ + l);
    }
    return hn::AllTrue(d, within);
  }

  T *gate_ = nullptr, *hi_ = nullptr, *lo_ = nullptr;
  double *c_ = nullptr, *next_ = nullptr;
};

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
