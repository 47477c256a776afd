#include "cistern/kernels/gelu.h"

#include <algorithm>
#include <type_traits>

#include "cistern/base/parallel.h"
#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/gelu.cc"
#include "hwy/foreach_target.h"  // must come before highway.h

#include "cistern/kernels/bfloat16-inl.h"
#include "cistern/kernels/exponentials-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Phi(x), and e^(-x^2 / 2), which it is made of: with z = |x| / sqrt(2) and t = 1 / (1 + 0.38 z),
//   Phi(-|x|) = erfc(z) / 2 = e^(-z^2) t Q(t) / 2
// Q interpolates erfc(z) e^(z^2) / t at Chebyshev nodes of t for z up to 8: to 2e-8 of the value at
// nine, to 4e-5 at six.
struct Normal {
  Vec<float> phi, exp;
};

template <size_t kCount>
HWY_INLINE Vec<float> Polynomial(Vec<float> t, const float (&coefficients)[kCount]) {
  Vec<float> q = hn::Set(Tag<float>(), coefficients[0]);
#pragma GCC unroll 8
  for (size_t i = 1; i < kCount; ++i) q = hn::MulAdd(q, t, hn::Set(Tag<float>(), coefficients[i]));
  return q;
}

// kForBFloat16: for a result of eight bits, without a division, which would take as long as all
// else.
template <bool kForBFloat16>
HWY_INLINE Normal NormalOf(Vec<float> x) {
  const Tag<float> d;
  const auto set = [&](float value) { return hn::Set(d, value); };
  const Vec<float> exp = WeightExp(hn::Mul(hn::Mul(x, x), set(-0.5f)));
  const Vec<float> factor = set(static_cast<float>(0.38 * 0.70710678118654752));
  Vec<float> q;
  if constexpr (kForBFloat16) {
    // Beyond 20 the exponential is 0. One step of Newton's.
    const Vec<float> u = hn::MulAdd(hn::Min(hn::Abs(x), set(20)), factor, set(1));
    const Vec<float> guess = hn::ApproximateReciprocal(u);
    const Vec<float> t = hn::Mul(guess, hn::NegMulAdd(u, guess, set(2)));
    q = hn::Mul(t,
                Polynomial(t, {-0.134494349360466f, 0.6389610767364502f, -0.29866543412208557f,
                               0.40697532892227173f, 0.1689891666173935f, 0.21824364364147186f}));
  } else {
    const Vec<float> t = hn::Div(set(1), hn::MulAdd(hn::Abs(x), factor, set(1)));
    q = hn::Mul(t, Polynomial(t, {0.058117361726583654f, -0.2580600092768274f, 0.35490365534219326f,
                                  -0.1508706064985039f, 0.22241071582521302f, 0.1420564311401939f,
                                  0.20298195711498246f, 0.2140584118162543f, 0.2144020983339403f}));
  }
  const Vec<float> half = hn::Mul(hn::Mul(exp, set(0.5f)), q);
  return {hn::IfThenElse(hn::Lt(x, hn::Zero(d)), half, hn::Sub(set(1), half)), exp};
}

// out[i] = value(vectors of in[i]...)
template <class T, class F, class... In>
HWY_INLINE void Each(int64_t begin, int64_t end, T* out, F&& value, const In*... in) {
  EachVector(static_cast<size_t>(end - begin), [&](size_t j, size_t count) HWY_ATTR {
    StoreUpTo(value(LoadUpTo(in + begin + j, count)...), out + begin + j, count);
  });
}

template <class T>
HWY_INLINE void GeluPart(int64_t begin, int64_t end, const T* x, T* y) {
  Each(
      begin, end, y,
      [](Vec<float> v) { return hn::Mul(v, NormalOf<std::is_same_v<T, BFloat16>>(v).phi); }, x);
}

// dy times the derivative of x Phi(x).
HWY_INLINE Vec<float> GradientOf(Vec<float> dy, Vec<float> x, const Normal& normal) {
  const Vec<float> density = hn::Mul(normal.exp, hn::Set(Tag<float>(), 0.39894228040143268f));
  return hn::Mul(dy, hn::MulAdd(x, density, normal.phi));
}

template <class T>
HWY_INLINE void GeluBackwardPart(int64_t begin, int64_t end, const T* dy, const T* x, T* dx) {
  Each(
      begin, end, dx,
      [](Vec<float> g, Vec<float> v) {
        return GradientOf(g, v, NormalOf<std::is_same_v<T, BFloat16>>(v));
      },
      dy, x);
}

void GeluWithBackwardPart(int64_t begin, int64_t end, const float* dy, const float* x, float* y,
                          float* dx) {
  EachVector(static_cast<size_t>(end - begin), [&](size_t j, size_t count) HWY_ATTR {
    const size_t i = static_cast<size_t>(begin) + j;
    const Vec<float> v = LoadUpTo(x + i, count), g = LoadUpTo(dy + i, count);
    const Normal normal = NormalOf<false>(v);
    StoreUpTo(hn::Mul(v, normal.phi), y + i, count);
    StoreUpTo(GradientOf(g, v, normal), dx + i, count);
  });
}

#define CISTERN_GELU(T, Name)                                                                   \
  void Gelu##Name(int64_t begin, int64_t end, const T* x, T* y) { GeluPart(begin, end, x, y); } \
  void GeluBackward##Name(int64_t begin, int64_t end, const T* dy, const T* x, T* dx) {         \
    GeluBackwardPart(begin, end, dy, x, dx);                                                    \
  }
CISTERN_GELU(float, Float)
CISTERN_GELU(BFloat16, BFloat16)
#undef CISTERN_GELU

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {
namespace {

constexpr int64_t kGrain = 1 << 14;  // values of a thread at least

}  // namespace

HWY_EXPORT(GeluFloat);
HWY_EXPORT(GeluBFloat16);
HWY_EXPORT(GeluBackwardFloat);
HWY_EXPORT(GeluBackwardBFloat16);
HWY_EXPORT(GeluWithBackwardPart);

#define CISTERN_GELU(T, Name)                                      \
  template <>                                                      \
  void Gelu(int64_t n, const T* x, T* y) {                         \
    ParallelFor(n, kGrain, [&](int64_t begin, int64_t end) {       \
      CISTERN_DISPATCH(Gelu##Name)(begin, end, x, y);              \
    });                                                            \
  }                                                                \
  template <>                                                      \
  void GeluBackward(int64_t n, const T* dy, const T* x, T* dx) {   \
    ParallelFor(n, kGrain, [&](int64_t begin, int64_t end) {       \
      CISTERN_DISPATCH(GeluBackward##Name)(begin, end, dy, x, dx); \
    });                                                            \
  }
CISTERN_GELU(float, Float)
CISTERN_GELU(BFloat16, BFloat16)
#undef CISTERN_GELU

void GeluWithBackward(int64_t n, const float* dy, const float* x, float* y, float* dx) {
  ParallelFor(n, kGrain, [&](int64_t begin, int64_t end) {
    CISTERN_DISPATCH(GeluWithBackwardPart)(begin, end, dy, x, y, dx);
  });
}

}  // namespace cistern
#endif  // HWY_ONCE
