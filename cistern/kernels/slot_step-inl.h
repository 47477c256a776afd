// One token of the slot memory, for decoding: no packing, no scratch memory, arithmetic in double;
// included once per Highway target.
#if defined(CISTERN_KERNELS_SLOT_STEP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_SLOT_STEP_INL_H_
#undef CISTERN_KERNELS_SLOT_STEP_INL_H_
#else
#define CISTERN_KERNELS_SLOT_STEP_INL_H_
#endif

#include "cistern/kernels/slot_chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

constexpr size_t kStepSlots = 64;  // slots are taken in blocks, whose weights live on the stack

// z = logaddexp(z, s) and w = e^{s - z} for up to kStepSlots slots.
template <class T>
HWY_INLINE void StepWeights(size_t count, const T* s, double* z, double* w) {
  const Tag<double> d;
  HWY_ALIGN double sd[kStepSlots], zd[kStepSlots];
  for (size_t l = 0; l < count; ++l) {
    sd[l] = static_cast<double>(s[l]);
    zd[l] = z[l];
  }
  for (size_t l = count; l < kStepSlots; ++l) sd[l] = zd[l] = kEmpty;
  const Vec<double> one = hn::Set(d, 1.0), empty = hn::Set(d, kEmpty);
  for (size_t l = 0; l < count; l += kLanes<double>) {
    const Vec<double> sv = hn::Load(d, sd + l), zv = hn::Load(d, zd + l);
    const auto skip = hn::Eq(sv, empty), grows = hn::Gt(sv, zv);
    const Vec<double> distance =
        hn::IfThenElse(grows, hn::Sub(zv, sv), hn::Sub(sv, zv));  // <= 0, or NaN
    const Vec<double> e = ExpOrNaN<double>(distance), total = hn::Add(one, e);
    const Vec<double> next = hn::Add(hn::IfThenElse(grows, sv, zv), LogOrNaN<double>(total));
    const Vec<double> weight = hn::Div(hn::IfThenElse(grows, one, e), total);
    hn::Store(hn::IfThenElse(skip, zv, next), d, zd + l);
    hn::Store(hn::IfThenZeroElse(skip, weight), d, sd + l);
  }
  for (size_t l = 0; l < count; ++l) {
    z[l] = zd[l];
    w[l] = sd[l];
  }
}

// Columns [0, kVectors vectors) of out += sum_l r[l] M_l after M_l += w[l] (v - M_l).
template <int kVectors, class T>
HWY_INLINE void StepReadColumns(size_t count, const T* r, const double* w, const T* v,
                                double* memory, size_t width, T* out) {
  const Tag<double> d;
  constexpr size_t kN = kLanes<double>;
  Double value[kVectors], total[kVectors];
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) {
    value[j] = LoadAsDoubleU(v + j * kN);
    total[j] = LoadAsDoubleU(out + j * kN);
  }
  for (size_t l = 0; l < count; ++l) {
    double* row = memory + l * width;
    const Double weight = hn::Set(d, w[l]), read = hn::Set(d, static_cast<double>(r[l]));
    const bool written = w[l] != 0;
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      Double m = hn::LoadU(d, row + j * kN);
      if (written) {
        m = hn::MulAdd(weight, hn::Sub(value[j], m), m);
        hn::StoreU(m, d, row + j * kN);
      }
      total[j] = hn::MulAdd(read, m, total[j]);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) StoreDoubleU(total[j], out + j * kN);
}

// w of all slots [n], for steps that share them.
template <class T>
HWY_NOINLINE void StepAllWeights(size_t n, const T* s, double* z, double* w) {
  for (size_t begin = 0; begin < n; begin += kStepSlots)
    StepWeights(n - begin < kStepSlots ? n - begin : kStepSlots, s + begin, z + begin, w + begin);
}

// given: the weights of all slots, and z is left alone; null: they are made here.
template <class T>
HWY_NOINLINE void StepRead(size_t n, size_t width, const T* r, const T* s, const T* v,
                           double* memory, double* z, T* out, const double* given = nullptr) {
  constexpr size_t kN = kLanes<double>;
  HWY_ALIGN double made[kStepSlots];
  for (size_t j = 0; j < width; ++j) out[j] = 0;
  for (size_t begin = 0; begin < n; begin += kStepSlots) {
    const size_t count = n - begin < kStepSlots ? n - begin : kStepSlots;
    if (given == nullptr) StepWeights(count, s + begin, z + begin, made);
    const double* const w = given == nullptr ? made : given + begin;
    double* block = memory + begin * width;
    size_t j = 0;
    for (; j + 4 * kN <= width; j += 4 * kN)
      StepReadColumns<4>(count, r + begin, w, v + j, block + j, width, out + j);
    for (; j + kN <= width; j += kN)
      StepReadColumns<1>(count, r + begin, w, v + j, block + j, width, out + j);
    for (; j < width; ++j) {
      double total = static_cast<double>(out[j]);
      for (size_t l = 0; l < count; ++l) {
        double& m = block[l * width + j];
        if (w[l] != 0) m += w[l] * (static_cast<double>(v[j]) - m);
        total += static_cast<double>(r[begin + l]) * m;
      }
      out[j] = static_cast<T>(total);
    }
  }
}

template <class T>
HWY_NOINLINE void StepMatch(size_t n, size_t width, const T* q, const T* s, const T* k,
                            double* memory, double* z, T* out, const double* given = nullptr) {
  const Tag<double> d;
  HWY_ALIGN double made[kStepSlots];
  for (size_t begin = 0; begin < n; begin += kStepSlots) {
    const size_t count = n - begin < kStepSlots ? n - begin : kStepSlots;
    if (given == nullptr) StepWeights(count, s + begin, z + begin, made);
    const double* const w = given == nullptr ? made : given + begin;
    for (size_t l = 0; l < count; ++l) {
      double* row = memory + (begin + l) * width;
      const Double weight = hn::Set(d, w[l]);
      const bool written = w[l] != 0;
      Double total = hn::Zero(d);
      size_t j = 0;
      for (; j + kLanes<double> <= width; j += kLanes<double>) {
        Double m = hn::LoadU(d, row + j);
        if (written) {
          m = hn::MulAdd(weight, hn::Sub(LoadAsDoubleU(k + j), m), m);
          hn::StoreU(m, d, row + j);
        }
        total = hn::MulAdd(LoadAsDoubleU(q + j), m, total);
      }
      double rest = hn::GetLane(hn::SumOfLanes(d, total));
      for (; j < width; ++j) {
        if (written) row[j] += w[l] * (static_cast<double>(k[j]) - row[j]);
        rest += static_cast<double>(q[j]) * row[j];
      }
      out[begin + l] = static_cast<T>(rest);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
