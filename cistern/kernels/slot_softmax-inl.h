// Softmax over the slots of a chunk's rows; included once per Highway target.
#if defined(CISTERN_KERNELS_SLOT_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_SLOT_SOFTMAX_INL_H_
#undef CISTERN_KERNELS_SLOT_SOFTMAX_INL_H_
#else
#define CISTERN_KERNELS_SLOT_SOFTMAX_INL_H_
#endif

#include "cistern/kernels/slot_core-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// P = softmax(X) by rows, [rows, np]; X has -inf in its padding columns. P may be X.
template <class T>
HWY_NOINLINE void SoftmaxRows(size_t rows, size_t np, const T* X, T* P) {
  const Tag<T> d;
  for (size_t i = 0; i < rows; ++i, X += np, P += np) {
    Vec<T> highest = hn::Load(d, X);
    for (size_t l = kLanes<T>; l < np; l += kLanes<T>)
      highest = hn::Max(highest, hn::Load(d, X + l));
    const Vec<T> most = hn::MaxOfLanes(d, highest);
    Vec<T> sum = hn::Zero(d);
    for (size_t l = 0; l < np; l += kLanes<T>) {
      const Vec<T> e = WeightExp(hn::Sub(hn::Load(d, X + l), most));
      sum = hn::Add(sum, e);
      hn::Store(e, d, P + l);
    }
    const Vec<T> share = hn::Div(hn::Set(d, T{1}), hn::SumOfLanes(d, sum));
    for (size_t l = 0; l < np; l += kLanes<T>)
      hn::Store(hn::Mul(hn::Load(d, P + l), share), d, P + l);
  }
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

template <class T>
constexpr T kMinusInfinity = -std::numeric_limits<T>::infinity();

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
