// One token of the slot memory, for decoding: in place, arithmetic in double;
// included once per Highway target.
#if defined(CISTERN_KERNELS_SLOT_STEP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_SLOT_STEP_INL_H_
#undef CISTERN_KERNELS_SLOT_STEP_INL_H_
#else
#define CISTERN_KERNELS_SLOT_STEP_INL_H_
#endif

#include <initializer_list>

#include "cistern/kernels/slot_core-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// e^x for x <= 0 to 2 ulp: 0 below -708, NaN for NaN.
HWY_INLINE Double StepExp(Double x) {
  const Tag<double> d;
  const hn::RebindToSigned<Tag<double>> di;
  // x log2(e) to a whole number n, which the low bits of the sum hold.
  const Double shift = hn::Set(d, 0x1.8p52),
               shifted = hn::MulAdd(x, hn::Set(d, 0x1.71547652b82fep0), shift),
               n = hn::Sub(shifted, shift);
  Double r = hn::NegMulAdd(n, hn::Set(d, 0x1.62e42fee00000p-1), x);
  r = hn::NegMulAdd(n, hn::Set(d, 0x1.a39ef35793c76p-33), r);
  // (e^r - 1 - r) / r^2 on |r| <= ln(2) / 2, interpolated in Chebyshev's points: 1.3e-17.
  const Double r2 = hn::Mul(r, r);
  Double even =
      hn::MulAdd(r2, hn::Set(d, 0x1.289185613a3d6p-22), hn::Set(d, 0x1.a019b90d2ae7ap-16));
  Double odd = hn::MulAdd(r2, hn::Set(d, 0x1.af38a9b0ec855p-26), hn::Set(d, 0x1.71de0dae63bb3p-19));
  even = hn::MulAdd(r2, even, hn::Set(d, 0x1.6c16c1788bd90p-10));
  odd = hn::MulAdd(r2, odd, hn::Set(d, 0x1.a01a01a7c41d5p-13));
  even = hn::MulAdd(r2, even, hn::Set(d, 0x1.5555555553d63p-5));
  odd = hn::MulAdd(r2, odd, hn::Set(d, 0x1.11111111109b3p-7));
  even = hn::MulAdd(r2, even, hn::Set(d, 0.5));
  odd = hn::MulAdd(r2, odd, hn::Set(d, 0x1.5555555555556p-3));
  const Double p = hn::MulAdd(r2, hn::MulAdd(r, odd, even), r);
  // Times 2^n: a product, because a sum of bits would not keep NaN.
  const Double power = hn::BitCast(
      d, hn::ShiftLeft<52>(hn::Add(hn::BitCast(di, shifted), hn::Set(di, int64_t{1023}))));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -708.0)), hn::MulAdd(power, p, power));
}

// z = logaddexp(z, s) and w = e^{s - z} of one vector of slots.
HWY_INLINE void StepVector(Double s, Double* z, Double* w) {
  const Tag<double> d;
  const Double one = hn::Set(d, 1.0);
  const auto skip = hn::Eq(s, hn::Set(d, kEmpty)), grows = hn::Gt(s, *z);
  const Double gap = hn::Sub(*z, s),
               e = StepExp(hn::IfThenElse(grows, gap, hn::Neg(gap)));  // of a number <= 0, or NaN
  const Double a = hn::Add(one, e), b = hn::Add(a, one), inverse = hn::Div(one, hn::Mul(a, b)),
               weight = hn::Mul(hn::IfThenElse(grows, one, e), hn::Mul(b, inverse));
  // log(1 + e) = 2 atanh(y) with y = e / (2 + e) <= 1/3; (atanh(y) / y - 1) / y^2 interpolated in
  // Chebyshev's points: 5e-18.
  const Double y = hn::Mul(e, hn::Mul(a, inverse)), u = hn::Mul(y, y), u2 = hn::Mul(u, u);
  Double even = hn::MulAdd(u2, hn::Set(d, 0x1.687a6e7c95176p-5), hn::Set(d, 0x1.10ac75dc602b1p-4));
  Double odd = hn::MulAdd(u2, hn::Set(d, 0x1.4b0a26c5f2aefp-4), hn::Set(d, 0x1.eb905e8575054p-5));
  even = hn::MulAdd(u2, even, hn::Set(d, 0x1.745cf0b0e03bdp-4));
  odd = hn::MulAdd(u2, odd, hn::Set(d, 0x1.3b18b294bebf9p-4));
  even = hn::MulAdd(u2, even, hn::Set(d, 0x1.24924923d44c6p-3));
  odd = hn::MulAdd(u2, odd, hn::Set(d, 0x1.c71c727143318p-4));
  even = hn::MulAdd(u2, even, hn::Set(d, 0x1.5555555555555p-2));
  odd = hn::MulAdd(u2, odd, hn::Set(d, 0x1.999999999a3ddp-3));
  const Double twice = hn::Add(y, y),
               more = hn::MulAdd(hn::Mul(twice, u), hn::MulAdd(u, odd, even), twice),
               next = hn::Add(hn::IfThenElse(grows, s, *z), more);
  *z = hn::IfThenElse(skip, *z, next);
  *w = hn::IfThenZeroElse(skip, weight);
}

// z = logaddexp(z, s) and w = e^{s - z} of all slots [n].
template <class T>
HWY_NOINLINE void StepWeights(size_t n, const T* s, double* z, double* w) {
  const Tag<double> d;
  constexpr size_t kN = kLanes<double>;
  size_t l = 0;
  for (; l + kN <= n; l += kN) {
    Double zv = hn::LoadU(d, z + l), weight;
    StepVector(LoadAsDoubleU(s + l), &zv, &weight);
    hn::StoreU(zv, d, z + l);
    hn::StoreU(weight, d, w + l);
  }
  if (l == n) return;
  HWY_ALIGN double sd[kN], zd[kN], wd[kN];
  for (size_t i = 0; i < kN; ++i) {
    sd[i] = l + i < n ? static_cast<double>(s[l + i]) : kEmpty;
    zd[i] = l + i < n ? z[l + i] : kEmpty;
  }
  Double zv = hn::Load(d, zd), weight;
  StepVector(hn::Load(d, sd), &zv, &weight);
  hn::Store(zv, d, zd);
  hn::Store(weight, d, wd);
  for (size_t i = 0; l + i < n; ++i) z[l + i] = zd[i], w[l + i] = wd[i];
}

// Zeroes the memory of slots that hold nothing, whatever the caller left there.
inline void StepForget(size_t n, size_t width, const double* z, double* memory) {
  const Tag<double> d;
  constexpr size_t kN = kLanes<double>;
  const Double empty = hn::Set(d, kEmpty);
  size_t l = 0;
  for (; l + kN <= n; l += kN) {
    if (hn::AllFalse(d, hn::Eq(hn::LoadU(d, z + l), empty))) continue;
    for (size_t i = l; i < l + kN; ++i)
      if (z[i] == kEmpty) std::memset(memory + i * width, 0, width * sizeof(double));
  }
  for (; l < n; ++l)
    if (z[l] == kEmpty) std::memset(memory + l * width, 0, width * sizeof(double));
}

// Columns [0, kVectors vectors) of M_l += w[l] (v - M_l) and of out = sum_l r[l] M_l.
template <int kVectors, class T>
HWY_INLINE void StepReadColumns(size_t n, const T* r, const double* w, const double* v,
                                double* memory, size_t width, T* out) {
  const Tag<double> d;
  constexpr size_t kN = kLanes<double>;
  Double total[kVectors];
#pragma GCC unroll 8
  for (int j = 0; j < kVectors; ++j) total[j] = hn::Zero(d);
  for (size_t l = 0; l < n; ++l, memory += width) {
    const Double read = hn::Set(d, static_cast<double>(r[l]));
    if (w[l] != 0) {
      const Double weight = hn::Set(d, w[l]);
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) {
        Double m = hn::LoadU(d, memory + j * kN);
        m = hn::NegMulAdd(weight, hn::Sub(m, hn::LoadU(d, v + j * kN)), m);
        hn::StoreU(m, d, memory + j * kN);
        total[j] = hn::MulAdd(read, m, total[j]);
      }
    } else {
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j)
        total[j] = hn::MulAdd(read, hn::LoadU(d, memory + j * kN), total[j]);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < kVectors; ++j) StoreDoubleU(total[j], out + j * kN);
}

// x [width] as doubles.
template <class T>
HWY_INLINE void StepWiden(size_t width, const T* x, double* to) {
  size_t j = 0;
  for (; j + kLanes<double> <= width; j += kLanes<double>)
    hn::StoreU(LoadAsDoubleU(x + j), Tag<double>(), to + j);
  for (; j < width; ++j) to[j] = static_cast<double>(x[j]);
}

// out = sum_l r[l] M_l after M_l += w[l] (v - M_l). v_wide: [width] of scratch.
template <class T>
HWY_NOINLINE void StepRead(size_t n, size_t width, const T* r, const double* w, const T* v,
                           double* v_wide, double* memory, T* out) {
  constexpr size_t kN = kLanes<double>;
  StepWiden(width, v, v_wide);
  size_t j = 0;
  for (; j + 8 * kN <= width; j += 8 * kN)
    StepReadColumns<8>(n, r, w, v_wide + j, memory + j, width, out + j);
  for (; j + 2 * kN <= width; j += 2 * kN)
    StepReadColumns<2>(n, r, w, v_wide + j, memory + j, width, out + j);
  for (; j + kN <= width; j += kN)
    StepReadColumns<1>(n, r, w, v_wide + j, memory + j, width, out + j);
  for (; j < width; ++j) {
    double total = 0;
    for (size_t l = 0; l < n; ++l) {
      double& m = memory[l * width + j];
      if (w[l] != 0) m -= w[l] * (m - v_wide[j]);
      total += static_cast<double>(r[l]) * m;
    }
    out[j] = static_cast<T>(total);
  }
}

// Rows [0, kRows) of M_l += w[l] (k - M_l), where kWritten, and of out[l] = q . M_l.
template <int kRows, bool kWritten, class T>
HWY_INLINE void StepMatchRows(size_t width, const double* q, const double* k, const double* w,
                              double* memory, T* out) {
  const Tag<double> d;
  constexpr size_t kN = kLanes<double>;
  Double total[kRows], weight[kRows];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
    total[i] = hn::Zero(d);
    weight[i] = hn::Set(d, w[i]);
  }
  size_t j = 0;
  for (; j + kN <= width; j += kN) {
    const Double key = hn::LoadU(d, k + j), query = hn::LoadU(d, q + j);
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      double* const at = memory + static_cast<size_t>(i) * width + j;
      Double m = hn::LoadU(d, at);
      if constexpr (kWritten) {
        m = hn::NegMulAdd(weight[i], hn::Sub(m, key), m);
        hn::StoreU(m, d, at);
      }
      total[i] = hn::MulAdd(query, m, total[i]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
    double sum = hn::GetLane(hn::SumOfLanes(d, total[i]));
    for (size_t c = j; c < width; ++c) {
      double& m = memory[static_cast<size_t>(i) * width + c];
      if constexpr (kWritten) m -= w[i] * (m - k[c]);
      sum += q[c] * m;
    }
    out[i] = static_cast<T>(sum);
  }
}

// out[l] = q . M_l after M_l += w[l] (k - M_l). wide: [2 width] of scratch.
template <class T>
HWY_NOINLINE void StepMatch(size_t n, size_t width, const T* q, const double* w, const T* k,
                            double* wide, double* memory, T* out) {
  StepWiden(width, q, wide);
  StepWiden(width, k, wide + width);
  // What k holds, NaN too, does not reach a slot that is not written.
  for (size_t l = 0; l < n;) {
    double* const rows = memory + l * width;
    if (l + 4 <= n && w[l] != 0 && w[l + 1] != 0 && w[l + 2] != 0 && w[l + 3] != 0) {
      StepMatchRows<4, true>(width, wide, wide + width, w + l, rows, out + l);
      l += 4;
    } else if (w[l] != 0) {
      StepMatchRows<1, true>(width, wide, wide + width, w + l, rows, out + l);
      ++l;
    } else {
      StepMatchRows<1, false>(width, wide, wide + width, w + l, rows, out + l);
      ++l;
    }
  }
}

// The states of a head's one token: z, and what the caller left in slots that hold nothing.
// Whether there is a token, and it is not padding.
template <class T>
bool StepBegin(const ForwardHead<T>& head, double* z, std::initializer_list<double*> memories) {
  if (head.tokens.length > 0 && head.tokens.StartsAt(0)) {
    for (size_t l = 0; l < head.n; ++l) z[l] = kEmpty;
  }
  for (double* memory : memories) StepForget(head.n, head.width, z, memory);
  return head.tokens.length > 0;
}

// Scratch of one token for n slots: w [n] and two rows of the width.
struct StepScratch {
  StepScratch(size_t n, size_t width, Workspace& workspace)
      : w(workspace.Take<double>(n)), wide(workspace.Take<double>(2 * width)) {}
  static size_t Bytes(size_t n, size_t width) { return (n + 2 * width) * sizeof(double); }
  static constexpr size_t kPieces = 2;
  double *w, *wide;
};

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
