#include "cistern/kernels/gelu.h"

#include <algorithm>

#include "cistern/base/parallel.h"
#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/gelu.cc"
#include "hwy/foreach_target.h"  // must come before highway.h

#include "cistern/kernels/slot_chunk-inl.h"  // WeightExp
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Phi(x), and e^(-x^2 / 2), which it is made of: with z = |x| / sqrt(2) and t = 1 / (1 + 0.38 z),
//   Phi(-|x|) = erfc(z) / 2 = e^(-z^2) t Q(t) / 2
// Q interpolates erfc(z) e^(z^2) / t at nine Chebyshev nodes of t for z up to 8: 2e-8 of the value.
struct Normal {
  Vec<float> phi, exp;
};

HWY_INLINE Normal NormalOf(Vec<float> x) {
  const Tag<float> d;
  const auto set = [&](float value) { return hn::Set(d, value); };
  const Vec<float> exp = WeightExp(hn::Mul(hn::Mul(x, x), set(-0.5f)));
  const Vec<float> t = hn::Div(
      set(1), hn::MulAdd(hn::Abs(x), set(static_cast<float>(0.38 * 0.70710678118654752)), set(1)));
  Vec<float> q = set(0.058117361726583654f);
  q = hn::MulAdd(q, t, set(-0.2580600092768274f));
  q = hn::MulAdd(q, t, set(0.35490365534219326f));
  q = hn::MulAdd(q, t, set(-0.1508706064985039f));
  q = hn::MulAdd(q, t, set(0.22241071582521302f));
  q = hn::MulAdd(q, t, set(0.1420564311401939f));
  q = hn::MulAdd(q, t, set(0.20298195711498246f));
  q = hn::MulAdd(q, t, set(0.2140584118162543f));
  q = hn::MulAdd(q, t, set(0.2144020983339403f));
  const Vec<float> half = hn::Mul(hn::Mul(exp, set(0.5f)), hn::Mul(t, q));
  return {hn::IfThenElse(hn::Lt(x, hn::Zero(d)), half, hn::Sub(set(1), half)), exp};
}

// out[i] = value(vectors of in[i]...), the last lanes through a buffer.
template <class F, class... In>
HWY_INLINE void Each(int64_t begin, int64_t end, float* out, F&& value, const In*... in) {
  const Tag<float> d;
  const auto lanes = static_cast<int64_t>(kLanes<float>);
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) hn::StoreU(value(hn::LoadU(d, in + i)...), d, out + i);
  if (i == end) return;
  const auto rest = [&](const float* from) {
    HWY_ALIGN float part[HWY_MAX_BYTES / sizeof(float)] = {};
    std::copy_n(from + i, end - i, part);
    return hn::Load(d, part);
  };
  HWY_ALIGN float part[HWY_MAX_BYTES / sizeof(float)];
  hn::Store(value(rest(in)...), d, part);
  std::copy_n(part, end - i, out + i);
}

void GeluPart(int64_t begin, int64_t end, const float* x, float* y) {
  Each(
      begin, end, y, [](Vec<float> v) { return hn::Mul(v, NormalOf(v).phi); }, x);
}

void GeluBackwardPart(int64_t begin, int64_t end, const float* dy, const float* x, float* dx) {
  Each(
      begin, end, dx,
      [](Vec<float> g, Vec<float> v) {
        const Normal normal = NormalOf(v);
        const Vec<float> density = hn::Mul(normal.exp, hn::Set(Tag<float>(), 0.39894228040143268f));
        return hn::Mul(g, hn::MulAdd(v, density, normal.phi));
      },
      dy, x);
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {
namespace {

constexpr int64_t kGrain = 1 << 14;  // values of a thread at least

}  // namespace

HWY_EXPORT(GeluPart);
HWY_EXPORT(GeluBackwardPart);

void Gelu(int64_t n, const float* x, float* y) {
  ParallelFor(n, kGrain, [&](int64_t begin, int64_t end) {
    CISTERN_DISPATCH(GeluPart)(begin, end, x, y);
  });
}

void GeluBackward(int64_t n, const float* dy, const float* x, float* dx) {
  ParallelFor(n, kGrain, [&](int64_t begin, int64_t end) {
    CISTERN_DISPATCH(GeluBackwardPart)(begin, end, dy, x, dx);
  });
}

}  // namespace cistern
#endif  // HWY_ONCE
