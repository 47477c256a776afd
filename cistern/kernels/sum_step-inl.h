// One token of the summing slot memory, for decoding: no packing, arithmetic in double; included
// once per Highway target.
#if defined(CISTERN_KERNELS_SUM_STEP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_SUM_STEP_INL_H_
#undef CISTERN_KERNELS_SUM_STEP_INL_H_
#else
#define CISTERN_KERNELS_SUM_STEP_INL_H_
#endif

#include "cistern/kernels/sum_chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Columns [0, kVectors vectors) of M_l = gate_l M_l + w_l v and of out = sum_l r_l M_l.
template <int kVectors, class T>
HWY_INLINE void StepSumReadColumns(size_t n, const T* r, const T* w, const T* v, const double* gate,
                                   double* memory, size_t width, T* out) {
  const Tag<double> d;
  constexpr size_t kN = kLanes<double>;
  Double value[kVectors], total[kVectors];
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) {
    value[j] = LoadAsDoubleU(v + j * kN);
    total[j] = hn::Zero(d);
  }
  for (size_t l = 0; l < n; ++l) {
    double* row = memory + l * width;
    const Double weight = hn::Set(d, static_cast<double>(w[l])),
                 read = hn::Set(d, static_cast<double>(r[l])), g = hn::Set(d, gate[l]);
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      const Double m = hn::MulAdd(weight, value[j], Keep(g, hn::LoadU(d, row + j * kN)));
      hn::StoreU(m, d, row + j * kN);
      total[j] = hn::MulAdd(read, m, total[j]);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) StoreDoubleU(total[j], out + j * kN);
}

template <class T>
HWY_NOINLINE void StepSumRead(size_t n, size_t width, const T* r, const T* w, const T* v,
                              const double* gate, double* memory, T* out) {
  constexpr size_t kN = kLanes<double>;
  size_t j = 0;
  for (; j + 4 * kN <= width; j += 4 * kN)
    StepSumReadColumns<4>(n, r, w, v + j, gate, memory + j, width, out + j);
  for (; j + kN <= width; j += kN)
    StepSumReadColumns<1>(n, r, w, v + j, gate, memory + j, width, out + j);
  for (; j < width; ++j) {
    double total = 0;
    for (size_t l = 0; l < n; ++l) {
      double& m = memory[l * width + j];
      m = (gate[l] == 0 ? 0 : gate[l] * m) + double(w[l]) * double(v[j]);
      total += double(r[l]) * m;
    }
    out[j] = static_cast<T>(total);
  }
}

template <class T>
HWY_NOINLINE void StepSumMatch(size_t n, size_t width, const T* q, const T* w, const T* k,
                               const double* gate, double* memory, T* out) {
  const Tag<double> d;
  for (size_t l = 0; l < n; ++l) {
    double* row = memory + l * width;
    const Double weight = hn::Set(d, static_cast<double>(w[l])), g = hn::Set(d, gate[l]);
    Double total = hn::Zero(d);
    size_t j = 0;
    for (; j + kLanes<double> <= width; j += kLanes<double>) {
      const Double m = hn::MulAdd(weight, LoadAsDoubleU(k + j), Keep(g, hn::LoadU(d, row + j)));
      hn::StoreU(m, d, row + j);
      total = hn::MulAdd(LoadAsDoubleU(q + j), m, total);
    }
    double rest = hn::GetLane(hn::SumOfLanes(d, total));
    for (; j < width; ++j) {
      row[j] = (gate[l] == 0 ? 0 : gate[l] * row[j]) + double(w[l]) * double(k[j]);
      rest += double(q[j]) * row[j];
    }
    out[l] = static_cast<T>(rest);
  }
}

// The gates of one token, to gate [n rounded up to whole vectors]: e^{log_gate}; 1 without gates, 0
// where a document starts. log_gate [gates], gates = n, 1 or 0.
template <class T>
HWY_NOINLINE void StepGates(size_t n, size_t gates, const T* log_gate, bool starts, double* gate) {
  const Tag<double> d;
  if (starts || gates <= 1) {
    const double one = starts ? 0 : gates == 0 ? 1 : std::exp(static_cast<double>(*log_gate));
    for (size_t l = 0; l < n; ++l) gate[l] = one;
    return;
  }
  for (size_t l = 0; l < RoundUp(n, kLanes<double>); ++l)
    gate[l] = l < n ? static_cast<double>(log_gate[l]) : 0;
  for (size_t l = 0; l < n; l += kLanes<double>)
    hn::Store(ExpOrNaN<double>(hn::Load(d, gate + l)), d, gate + l);
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
