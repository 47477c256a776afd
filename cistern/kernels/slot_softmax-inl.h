// Softmax over the slots of a chunk's rows; included once per Highway target.
#if defined(CISTERN_KERNELS_SLOT_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_SLOT_SOFTMAX_INL_H_
#undef CISTERN_KERNELS_SLOT_SOFTMAX_INL_H_
#else
#define CISTERN_KERNELS_SLOT_SOFTMAX_INL_H_
#endif

#include "cistern/kernels/slot_core-inl.h"
#include "cistern/kernels/staged_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

template <class T>
constexpr T kMinusInfinity = -std::numeric_limits<T>::infinity();

// softmax(X) of one row of kVectors vectors, in registers; times F where that is not null.
template <int kVectors, bool kTimes, class S, class T>
HWY_INLINE void SoftmaxOfVectors(const S* X, const T* F, T* P) {
  const Tag<T> d;
  Vec<T> x[kVectors];
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) x[j] = LoadAs<T>(X + j * kLanes<T>);
  Vec<T> highest = x[0];
#pragma GCC unroll 4
  for (int j = 1; j < kVectors; ++j) highest = hn::Max(highest, x[j]);
  const Vec<T> most = hn::MaxOfLanes(d, highest);
  Vec<T> sum = hn::Zero(d);
  ForVectors<kVectors>([&](int j) HWY_ATTR { x[j] = hn::Sub(x[j], most); });
  WeightExps<kVectors>(x);
  ForVectors<kVectors>([&](int j) HWY_ATTR { sum = hn::Add(sum, x[j]); });
  const Vec<T> share = hn::Div(hn::Set(d, T{1}), hn::SumOfLanes(d, sum));
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) {
    Vec<T> p = hn::Mul(x[j], share);
    if constexpr (kTimes) p = hn::Mul(p, hn::Load(d, F + j * kLanes<T>));
    hn::Store(p, d, P + j * kLanes<T>);
  }
}

// The same of a row of any number of vectors.
template <bool kTimes, class S, class T>
HWY_INLINE void SoftmaxOfRow(size_t np, const S* X, const T* F, T* P) {
  const Tag<T> d;
  Vec<T> highest = LoadAs<T>(X);
  for (size_t l = kLanes<T>; l < np; l += kLanes<T>) highest = hn::Max(highest, LoadAs<T>(X + l));
  const Vec<T> most = hn::MaxOfLanes(d, highest);
  Vec<T> sum = hn::Zero(d);
  for (size_t l = 0; l < np; l += kLanes<T>) {
    const Vec<T> e = WeightExp(hn::Sub(LoadAs<T>(X + l), most));
    sum = hn::Add(sum, e);
    hn::Store(e, d, P + l);
  }
  const Vec<T> share = hn::Div(hn::Set(d, T{1}), hn::SumOfLanes(d, sum));
  for (size_t l = 0; l < np; l += kLanes<T>) {
    Vec<T> p = hn::Mul(hn::Load(d, P + l), share);
    if constexpr (kTimes) p = hn::Mul(p, hn::Load(d, F + l));
    hn::Store(p, d, P + l);
  }
}

template <bool kTimes, class S, class T>
HWY_NOINLINE void SoftmaxOfRows(size_t rows, size_t np, const S* X, size_t ldx, const T* F, T* P) {
  const auto each = [&](auto&& row) HWY_ATTR {
    for (size_t i = 0; i < rows; ++i) row(X + i * ldx, kTimes ? F + i * np : F, P + i * np);
  };
  const size_t vectors = np / kLanes<T>;
  if (vectors == 4) {
    each([](const S* x, const T* f, T* p) HWY_ATTR { SoftmaxOfVectors<4, kTimes>(x, f, p); });
  } else if (vectors == 2) {
    each([](const S* x, const T* f, T* p) HWY_ATTR { SoftmaxOfVectors<2, kTimes>(x, f, p); });
  } else {
    each([np](const S* x, const T* f, T* p) HWY_ATTR { SoftmaxOfRow<kTimes>(np, x, f, p); });
  }
}

// P = softmax(X) by rows: P [rows, np], X of leading dimension ldx, with -inf in its padding
// columns; times F [rows, np] where that is not null. P may be X.
template <class S, class T>
void SoftmaxRows(size_t rows, size_t np, const S* X, size_t ldx, std::type_identity_t<const T*> F,
                 T* P) {
  if (F == nullptr) {
    SoftmaxOfRows<false>(rows, np, X, ldx, F, P);
  } else {
    SoftmaxOfRows<true>(rows, np, X, ldx, F, P);
  }
}
template <class T>
void SoftmaxRows(size_t rows, size_t np, const T* X, T* P) {
  SoftmaxRows(rows, np, X, np, nullptr, P);
}

// P = softmax of rows t.. of x [., n], times F where that is not null. They are read where they lie
// if they are whole vectors, one row after another (InPlace says why).
template <class S, class T>
void SoftmaxOfTokens(const Sequence<const S>& x, size_t t, size_t rows, size_t n,
                     std::type_identity_t<const T*> F, T* P) {
  const size_t np = Padded<T>(n);
  if (n == np && (!std::is_same_v<S, T> || x.time == static_cast<int64_t>(n)))
    return SoftmaxRows(rows, np, x.At(t), static_cast<size_t>(x.time), F, P);
  PackRows(x, t, rows, n, np, kMinusInfinity<T>, P);
  SoftmaxRows(rows, np, P, np, F, P);
}

// sum_l P_l D_l of one row, in every lane; D need not be aligned.
template <class T>
HWY_INLINE Vec<T> RowDot(size_t np, const T* P, const T* D) {
  const Tag<T> d;
  Vec<T> sum = hn::Zero(d);
  for (size_t l = 0; l < np; l += kLanes<T>)
    sum = hn::MulAdd(hn::Load(d, P + l), hn::LoadU(d, D + l), sum);
  return hn::SumOfLanes(d, sum);
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
