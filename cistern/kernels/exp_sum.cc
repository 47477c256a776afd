#include "cistern/kernels/exp_sum.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/exp_sum.cc"
#include "hwy/foreach_target.h"  // must come before highway.h

#include "cistern/kernels/slot_step-inl.h"  // StepExp
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// body(vector, first, lanes, chain) for each vector of x, of which the last is filled up with
// `fill`. Four chains, so that a vector need not wait for the one before.
template <class Body>
HWY_INLINE void EachDouble(int64_t n, const double* x, double fill, Body&& body) {
  const Tag<double> d;
  constexpr size_t kN = kLanes<double>;
  const auto count = static_cast<size_t>(n);
  size_t i = 0;
  for (; i + 4 * kN <= count; i += 4 * kN) {
#pragma GCC unroll 4
    for (size_t chain = 0; chain < 4; ++chain)
      body(hn::LoadU(d, x + i + chain * kN), i + chain * kN, kN, chain);
  }
  for (; i < count; i += kN) {
    const size_t left = std::min(kN, count - i);
    HWY_ALIGN double part[kN];
    std::fill_n(part, kN, fill);
    std::copy_n(x + i, left, part);
    body(hn::Load(d, part), i, left, size_t{0});
  }
}

double LargestOf(int64_t n, const double* x) {
  const Tag<double> d;
  constexpr double kLeast = -std::numeric_limits<double>::infinity();
  Double most[4];
  for (Double& m : most) m = hn::Set(d, kLeast);
  auto nan = hn::IsNaN(hn::Zero(d));
  EachDouble(n, x, kLeast, [&](Double v, size_t, size_t, size_t chain) HWY_ATTR {
    most[chain] = hn::Max(most[chain], v);
    nan = hn::Or(nan, hn::IsNaN(v));
  });
  if (!hn::AllFalse(d, nan)) return std::numeric_limits<double>::quiet_NaN();
  const Double all = hn::Max(hn::Max(most[0], most[1]), hn::Max(most[2], most[3]));
  return hn::GetLane(hn::MaxOfLanes(d, all));
}

double ExpSumOf(int64_t n, const double* x, double largest, double divisor, double* e) {
  const Tag<double> d;
  const Double shift = hn::Set(d, largest), by = hn::Set(d, divisor);
  Double sum[4];
  for (Double& s : sum) s = hn::Zero(d);
  const double fill = -std::numeric_limits<double>::infinity();
  EachDouble(n, x, fill, [&](Double v, size_t first, size_t lanes, size_t chain) HWY_ATTR {
    const Double exp = StepExp(hn::Div(hn::Sub(v, shift), by));
    sum[chain] = hn::Add(sum[chain], exp);
    if (e == nullptr) return;
    if (lanes == kLanes<double>) return hn::StoreU(exp, d, e + first);
    HWY_ALIGN double part[kLanes<double>];
    hn::Store(exp, d, part);
    std::copy_n(part, lanes, e + first);
  });
  const Double all = hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3]));
  return hn::GetLane(hn::SumOfLanes(d, all));
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(LargestOf);
HWY_EXPORT(ExpSumOf);

double Largest(int64_t n, const double* x) { return CISTERN_DISPATCH(LargestOf)(n, x); }

double ExpSum(int64_t n, const double* x, double largest, double divisor, double* e) {
  return CISTERN_DISPATCH(ExpSumOf)(n, x, largest, divisor, e);
}

}  // namespace cistern
#endif  // HWY_ONCE
