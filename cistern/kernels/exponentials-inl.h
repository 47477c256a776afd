// Exponentials and reciprocals of whole vectors; included once per Highway target.
//
// Those of several vectors go on instruction by instruction in turn. One vector's is a chain of a
// dozen instructions that each wait for the one before: where the chains follow one another in the
// code, a core's scheduler fills with instructions that wait, and two thirds of its speed is left.
#if defined(CISTERN_KERNELS_EXPONENTIALS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_EXPONENTIALS_INL_H_
#undef CISTERN_KERNELS_EXPONENTIALS_INL_H_
#else
#define CISTERN_KERNELS_EXPONENTIALS_INL_H_
#endif

#include "cistern/kernels/gemm-inl.h"
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Highway's turn NaN into ordinary numbers.
template <class T>
HWY_INLINE Vec<T> ExpOrNaN(Vec<T> x) {
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(Tag<T>(), x));
}
template <class T>
HWY_INLINE Vec<T> LogOrNaN(Vec<T> x) {
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Log(Tag<T>(), x));
}

// visit(j) for the vectors 0 .. kCount - 1: one instruction of each.
template <int kCount, class Visit>
HWY_INLINE void ForVectors(Visit&& visit) {
#pragma GCC unroll 8
  for (int j = 0; j < kCount; ++j) visit(j);
}

// 0 where x < limit, else y; NaN stays NaN.
HWY_INLINE Vec<float> ZeroBelow(float limit, Vec<float> x, Vec<float> y) {
  const Vec<float> least = hn::Set(Tag<float>(), limit);
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
  return Vec<float>{_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.raw, least.raw, _CMP_NLT_UQ), y.raw)};
#else
  return hn::IfThenZeroElse(hn::Lt(x, least), y);
#endif
}

// 2^q; the last bits of `biased` are q + 127.
HWY_INLINE Vec<float> PowerOfTwo(Vec<float> biased) {
  const Tag<float> d;
  return hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(hn::RebindToUnsigned<Tag<float>>(), biased)));
}

// e^x = 2^q e^r with |r| <= ln 2 / 2, for -87 < x < 88.
template <int kCount>
struct ExpParts {
  HWY_INLINE explicit ExpParts(const Vec<float>* x) {
    const Tag<float> d;
    // Beside 2^23 the fraction rounds away: the last bits of the sum are q + 127, the exponent.
    const Vec<float> large = hn::Set(d, 0x1.8p23f + 127);
    Vec<float> biased[kCount], n[kCount];
    ForVectors<kCount>([&](int j) HWY_ATTR {
      biased[j] = hn::MulAdd(x[j], hn::Set(d, 1.44269504088896341f), large);
    });
    ForVectors<kCount>([&](int j) HWY_ATTR { n[j] = hn::Sub(biased[j], large); });
    // ln 2 in two parts, the first with few enough bits that n times it is exact.
    ForVectors<kCount>(
        [&](int j) HWY_ATTR { r[j] = hn::NegMulAdd(n[j], hn::Set(d, 0.693359375f), x[j]); });
    ForVectors<kCount>(
        [&](int j) HWY_ATTR { r[j] = hn::NegMulAdd(n[j], hn::Set(d, -2.12194440e-4f), r[j]); });
    ForVectors<kCount>([&](int j) HWY_ATTR { power[j] = PowerOfTwo(biased[j]); });
  }

  // y = e^r - 1, or e^r where kOne.
  template <bool kOne>
  HWY_INLINE void OfR(Vec<float>* y) const {
    // (e^r - 1 - r) / r^2, minimax: 4e-9 of e^r.
    const Tag<float> d;
    Vec<float> square[kCount], high[kCount];
    ForVectors<kCount>([&](int j) HWY_ATTR { square[j] = hn::Mul(r[j], r[j]); });
    ForVectors<kCount>([&](int j) HWY_ATTR {
      high[j] = hn::MulAdd(r[j], hn::Set(d, 8.3687966e-3f), hn::Set(d, 4.1668396e-2f));
    });
    ForVectors<kCount>([&](int j) HWY_ATTR {
      y[j] = hn::MulAdd(r[j], hn::Set(d, 1.6666520e-1f), hn::Set(d, 4.9999993e-1f));
    });
    ForVectors<kCount>([&](int j) HWY_ATTR {
      high[j] = hn::MulAdd(square[j], hn::Set(d, 1.3814433e-3f), high[j]);
    });
    ForVectors<kCount>([&](int j) HWY_ATTR { y[j] = hn::MulAdd(high[j], square[j], y[j]); });
    ForVectors<kCount>([&](int j) HWY_ATTR {
      const Vec<float> first = kOne ? hn::Add(r[j], hn::Set(d, 1.0f)) : r[j];
      y[j] = hn::MulAdd(y[j], square[j], first);
    });
  }
  Vec<float> r[kCount], power[kCount];  // power: 2^q
};

// x = e^x to 1 ulp for x < 88, NaN for NaN; 0 below -86, where e^x is of no weight beside sums of
// at least 1.
template <int kCount>
HWY_INLINE void WeightExps(Vec<float>* x) {
  const ExpParts<kCount> parts(x);
  Vec<float> e[kCount];
  parts.template OfR<true>(e);
  // A product, because a sum of bits would not keep NaN.
  ForVectors<kCount>(
      [&](int j) HWY_ATTR { x[j] = ZeroBelow(-86.0f, x[j], hn::Mul(e[j], parts.power[j])); });
}
template <int kCount>
HWY_INLINE void WeightExps(Vec<double>* x) {
  ForVectors<kCount>([&](int j) HWY_ATTR { x[j] = ExpOrNaN<double>(x[j]); });
}
template <class V>
HWY_INLINE V WeightExp(V x) {
  WeightExps<1>(&x);
  return x;
}

// x = 2^x to 1.6e-7 in float, e^x in double, for x up to 0 and somewhat above; NaN for NaN. In
// float 0 below -64: beside the largest weight, which is near 1, no sum would show it, and products
// with smaller ones are subnormal numbers, which halve the speed of a model with sharp attention.
template <int kCount>
HWY_INLINE void TileExps(Vec<float>* x) {
  const Tag<float> d;
  // The low bits of x + magic are the nearest integer + 127.
  const Vec<float> magic = hn::Set(d, 0x1.8p23f + 127.0f);
  Vec<float> shifted[kCount], r[kCount], power[kCount], p[kCount];
  ForVectors<kCount>([&](int j) HWY_ATTR { shifted[j] = hn::Add(x[j], magic); });
  ForVectors<kCount>([&](int j) HWY_ATTR { r[j] = hn::Sub(shifted[j], magic); });
  ForVectors<kCount>([&](int j) HWY_ATTR { r[j] = hn::Sub(x[j], r[j]); });
  ForVectors<kCount>([&](int j) HWY_ATTR { power[j] = PowerOfTwo(shifted[j]); });
  // Minimax in relative error, 1 at 0.
  ForVectors<kCount>([&](int j) HWY_ATTR {
    p[j] = hn::MulAdd(r[j], hn::Set(d, 0.00132647296f), hn::Set(d, 0.00967151485f));
  });
  const auto go_on = [&](float next) HWY_ATTR {
    ForVectors<kCount>([&](int j) HWY_ATTR { p[j] = hn::MulAdd(p[j], r[j], hn::Set(d, next)); });
  };
  go_on(0.0555073358f);
  go_on(0.240222424f);
  go_on(0.693147004f);
  go_on(1.0f);
  ForVectors<kCount>([&](int j)
                         HWY_ATTR { x[j] = ZeroBelow(-64.0f, x[j], hn::Mul(p[j], power[j])); });
}
template <int kCount>
HWY_INLINE void TileExps(Vec<double>* x) {
  ForVectors<kCount>([&](int j) HWY_ATTR { x[j] = ExpOrNaN<double>(x[j]); });
}
template <class V>
HWY_INLINE V TileExp(V x) {
  TileExps<1>(&x);
  return x;
}

// x = 1 / x for x of at least 1, to 1 ulp; where a division of a whole vector takes as long as all
// else that is done with it, by an approximation of 14 bits and a step of Newton's.
template <int kCount, class T>
HWY_INLINE void OneOvers(Vec<T>* x) {
  const Tag<T> d;
#if HWY_TARGET <= HWY_AVX3
  if constexpr (std::is_same_v<T, float>) {
    Vec<T> guess[kCount];
    ForVectors<kCount>([&](int j) HWY_ATTR { guess[j] = hn::ApproximateReciprocal(x[j]); });
    ForVectors<kCount>([&](int j)
                           HWY_ATTR { x[j] = hn::NegMulAdd(x[j], guess[j], hn::Set(d, T{1})); });
    ForVectors<kCount>([&](int j) HWY_ATTR { x[j] = hn::MulAdd(guess[j], x[j], guess[j]); });
    return;
  }
#endif
  ForVectors<kCount>([&](int j) HWY_ATTR { x[j] = hn::Div(hn::Set(d, T{1}), x[j]); });
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
