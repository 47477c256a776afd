#include "cistern/kernels/gelu.h"

#include <algorithm>

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

// Phi(x), and e^(-x^2 / 2), which it is made of: with z = |x| / sqrt(2) and t = 1 / (1 + a z),
//   Phi(-|x|) = erfc(z) / 2 = e^(-z^2) t Q(t)
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

HWY_INLINE Normal NormalFrom(Vec<float> x, Vec<float> exp, Vec<float> t, Vec<float> q) {
  const Tag<float> d;
  const Vec<float> below = hn::Mul(exp, hn::Mul(t, q));  // Phi(-|x|)
  return {hn::IfThenElse(hn::Lt(x, hn::Zero(d)), below, hn::Sub(hn::Set(d, 1), below)), exp};
}

HWY_INLINE Vec<float> OnePlusZ(Vec<float> x, double a) {
  const Tag<float> d;
  return hn::MulAdd(hn::Abs(x), hn::Set(d, static_cast<float>(a * 0.70710678118654752)),
                    hn::Set(d, 1));
}

// Q interpolates at nine Chebyshev nodes of t for z up to 8: to 2e-8 of the value.
HWY_INLINE Normal NormalOf(Vec<float> x, float) {
  const Tag<float> d;
  const Vec<float> exp = WeightExp(hn::Mul(hn::Mul(x, x), hn::Set(d, -0.5f)));
  const Vec<float> t = hn::Div(hn::Set(d, 1), OnePlusZ(x, 0.38));
  return NormalFrom(
      x, exp, t,
      Polynomial(t, {0.029058680863291827f, -0.1290300046384137f, 0.17745182767109661f,
                     -0.07543530325174895f, 0.11120535790760652f, 0.07102821572009695f,
                     0.10149097855749123f, 0.10702920590812715f, 0.10720104916997015f}));
}

// 1 / x to 14 bits at least.
HWY_INLINE Vec<float> RoughReciprocal(Vec<float> x) {
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
  return hn::ApproximateReciprocal(x);
#else
  return hn::Div(hn::Set(Tag<float>(), 1), x);
#endif
}

// For results of eight bits: minimax polynomials of few terms, the exponential to 8e-5, Q to 2.1e-4
// of the value, and no division, which would take as long as all else.
HWY_INLINE Normal NormalOf(Vec<float> x, BFloat16) {
  const Tag<float> d;
  // 2^y, as 2^n 2^r: the low bits of y + magic are n + 127.
  const Vec<float> magic = hn::Set(d, 0x1.8p23f + 127.0f);
  const Vec<float> y = hn::Mul(hn::Mul(x, hn::Set(d, -0.72134752044448170f)), x);
  const Vec<float> shifted = hn::Add(y, magic), r = hn::Sub(y, hn::Sub(shifted, magic));
  const Vec<float> power = Polynomial(
      r, {0.05517167035424752f, 0.242611143099466f, 0.6932609870388835f, 0.99992807230371f});
  const Vec<float> exp = ZeroBelow(-126.0f, y, hn::Mul(power, PowerOfTwo(shifted)));
  const Vec<float> t = RoughReciprocal(OnePlusZ(x, 0.42));
  return NormalFrom(x, exp, t,
                    Polynomial(t, {0.22140407472289858f, 0.02070924472890195f, 0.14157476985216888f,
                                   0.11635038438735763f}));
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
      begin, end, y, [](Vec<float> v) { return hn::Mul(v, NormalOf(v, T()).phi); }, x);
}

// dy times the derivative of x Phi(x).
HWY_INLINE Vec<float> GradientOf(Vec<float> dy, Vec<float> x, const Normal& normal) {
  const Vec<float> density = hn::Mul(normal.exp, hn::Set(Tag<float>(), 0.39894228040143268f));
  return hn::Mul(dy, hn::MulAdd(x, density, normal.phi));
}

template <class T>
HWY_INLINE void GeluBackwardPart(int64_t begin, int64_t end, const T* dy, const T* x, T* dx) {
  Each(
      begin, end, dx, [](Vec<float> g, Vec<float> v) { return GradientOf(g, v, NormalOf(v, T())); },
      dy, x);
}

void GeluWithBackwardPart(int64_t begin, int64_t end, const float* dy, const float* x, float* y,
                          float* dx) {
  EachVector(static_cast<size_t>(end - begin), [&](size_t j, size_t count) HWY_ATTR {
    const size_t i = static_cast<size_t>(begin) + j;
    const Vec<float> v = LoadUpTo(x + i, count), g = LoadUpTo(dy + i, count);
    const Normal normal = NormalOf(v, float());
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
