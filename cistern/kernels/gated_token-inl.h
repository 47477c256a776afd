// One head of gated slots, and one token of it with its state in double; included once per Highway
// target.
#if defined(CISTERN_KERNELS_GATED_TOKEN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_GATED_TOKEN_INL_H_
#undef CISTERN_KERNELS_GATED_TOKEN_INL_H_
#else
#define CISTERN_KERNELS_GATED_TOKEN_INL_H_
#endif

#include "cistern/kernels/gated_slots-inl.h"
#include "cistern/kernels/gated_slots.h"
#include "cistern/kernels/sum_step-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// One part of a head's tokens.
template <class S>
struct GatedForwardHead : ForwardHead<ComputeType<S>> {
  using T = ComputeType<S>;
  GatedForwardHead(const SlotShape& shape, const GatedSlotsOptions& options,
                   const GatedSlotsInputs<S>& in, const Rows<S>& to, const Rows<T>& scores,
                   const RowMask& mask, int64_t index, const HeadParts& parts, int64_t part)
      : ForwardHead<T>(shape, mask, index, parts, part),
        q(in.q, this->b, this->h),
        k(in.k, this->b, this->h),
        v(in.v, this->b, this->h),
        x(in.x, this->b, this->h),
        out(to, this->b, this->h),
        y(scores, this->b, this->h),
        scale(static_cast<T>(options.scale)),
        rate(static_cast<T>(1 / options.temperature)) {}
  Sequence<const S> q, k, v, x;
  Sequence<S> out;
  Sequence<T> y;
  T scale, rate;
};

// A sequence of one token.
template <class S>
HWY_NOINLINE void GatedSlotsOfToken(const GatedForwardHead<S>& head, double* keys, double* values) {
  using T = ComputeType<S>;
  const size_t n = head.n, width = head.width, np = Padded<T>(n), dp = Padded<T>(width);
  if (head.tokens.length == 0) {
    ZeroRows(0, 1, width, head.out);
    if (head.y.data != nullptr) ZeroRows(0, 1, n, head.y);
    return;
  }
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(sizeof(T) * (3 * dp + 3 * np) + sizeof(double) * np, 7);
  T* const q = workspace.Take<T>(dp);  // then out
  T* const k = workspace.Take<T>(dp);
  T* const v = workspace.Take<T>(dp);
  T* const write = workspace.Take<T>(np);  // the logits, then 1 - g
  T* const log_gate = workspace.Take<T>(np);
  T* const y = workspace.Take<T>(np);
  double* const gate = workspace.Take<double>(np);
  const Tag<T> d;
  PackRows(head.q, 0, 1, width, dp, T{0}, q);
  PackRows(head.k, 0, 1, width, dp, T{0}, k);
  PackRows(head.v, 0, 1, width, dp, T{0}, v);
  PackRows(head.x, 0, 1, n, np, std::numeric_limits<T>::infinity(), write);
  for (size_t l = 0; l < np; l += kLanes<T>) {
    Vec<T> log, w;
    GateOf<T>(hn::Load(d, write + l), hn::Set(d, head.rate), log, w);
    hn::Store(log, d, log_gate + l);
    hn::Store(w, d, write + l);
  }
  if (head.tokens.StartsAt(0)) {
    std::fill_n(gate, np, 0.0);
  } else {
    for (size_t l = 0; l < np; l += kLanes<double>)
      hn::Store(ExpOrNaN<double>(LoadAsDouble(log_gate + l)), Tag<double>(), gate + l);
  }
  StepSumMatch(n, width, q, write, k, gate, keys, y);
  for (size_t l = 0; l < n; ++l) y[l] *= head.scale;
  if (head.y.data != nullptr) UnpackRows(y, 0, 1, n, np, head.y);
  FillPadding(1, n, np, kMinusInfinity<T>, y);
  SoftmaxRows(1, np, y, y);
  StepSumRead(n, width, y, write, v, gate, values, q);
  UnpackRows(q, 0, 1, width, dp, head.out);
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
