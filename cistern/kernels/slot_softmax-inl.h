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

// P = softmax(X) by rows: P [rows, np], X of leading dimension ldx, with -inf in its padding
// columns. P may be X.
template <class T>
HWY_NOINLINE void SoftmaxRows(size_t rows, size_t np, const T* X, size_t ldx, T* P) {
  const Tag<T> d;
  for (size_t i = 0; i < rows; ++i, X += ldx, P += np) {
    Vec<T> highest = hn::LoadU(d, X);
    for (size_t l = kLanes<T>; l < np; l += kLanes<T>)
      highest = hn::Max(highest, hn::LoadU(d, X + l));
    const Vec<T> most = hn::MaxOfLanes(d, highest);
    Vec<T> sum = hn::Zero(d);
    for (size_t l = 0; l < np; l += kLanes<T>) {
      const Vec<T> e = WeightExp(hn::Sub(hn::LoadU(d, X + l), most));
      sum = hn::Add(sum, e);
      hn::Store(e, d, P + l);
    }
    const Vec<T> share = hn::Div(hn::Set(d, T{1}), hn::SumOfLanes(d, sum));
    for (size_t l = 0; l < np; l += kLanes<T>)
      hn::Store(hn::Mul(hn::Load(d, P + l), share), d, P + l);
  }
}

template <class T>
void SoftmaxRows(size_t rows, size_t np, const T* X, T* P) {
  SoftmaxRows(rows, np, X, np, P);
}

// P = softmax of rows t.. of x [., n], which are read where they lie if they are whole vectors, one
// row after another (InPlace says why).
template <class S, class T>
void SoftmaxOfTokens(const Sequence<const S>& x, size_t t, size_t rows, size_t n, T* P) {
  const size_t np = Padded<T>(n);
  if constexpr (std::is_same_v<S, T>) {
    if (n == np && x.time == static_cast<int64_t>(n))
      return SoftmaxRows(rows, np, x.At(t), static_cast<size_t>(x.time), P);
  }
  PackRows(x, t, rows, n, np, kMinusInfinity<T>, P);
  SoftmaxRows(rows, np, P, P);
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
