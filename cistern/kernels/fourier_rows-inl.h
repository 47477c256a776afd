// Random Fourier features of some rows at a time, and what their gradients leave for the rows
// (fourier_features.h); included once per Highway target.
#if defined(CISTERN_KERNELS_FOURIER_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_FOURIER_ROWS_INL_H_
#undef CISTERN_KERNELS_FOURIER_ROWS_INL_H_
#else
#define CISTERN_KERNELS_FOURIER_ROWS_INL_H_
#endif

#include <algorithm>
#include <cmath>

#include "cistern/kernels/fourier_features.h"
#include "cistern/kernels/staged_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Highway's reductions of the argument hold up to there.
template <class T>
constexpr T kFarthest = 39000;

template <class T>
HWY_NOINLINE void SinCosFar(Vec<T> x, Vec<T>* sine, Vec<T>* cosine) {
  const Tag<T> d;
  HWY_ALIGN T from[kLanes<T>], s[kLanes<T>], c[kLanes<T>];
  hn::Store(x, d, from);
  for (size_t j = 0; j < kLanes<T>; ++j) {
    s[j] = static_cast<T>(std::sin(static_cast<double>(from[j])));
    c[j] = static_cast<T>(std::cos(static_cast<double>(from[j])));
  }
  *sine = hn::Load(d, s), *cosine = hn::Load(d, c);
}

template <class T>
HWY_INLINE void SinCos(Vec<T> x, Vec<T>* sine, Vec<T>* cosine) {
  const Tag<T> d;
  if (!hn::AllTrue(d, hn::Le(hn::Abs(x), hn::Set(d, kFarthest<T>))))
    return SinCosFar<T>(x, sine, cosine);
  *sine = hn::Sin(d, x), *cosine = hn::Cos(d, x);
}

// One head's map, with its matrix where it lies or in panels of this thread's workspace.
template <class S>
class FourierRows {
  using T = ComputeType<S>;
  static constexpr size_t kRows = 32;

 public:
  static size_t Bytes(const FourierMap<T>& map) {
    const size_t mp = Padded<T>(static_cast<size_t>(map.features)),
                 dp = Padded<T>(static_cast<size_t>(map.width));
    return sizeof(T) * (2 * mp * dp + kRows * (3 * dp + mp) + 2 * dp);
  }
  static constexpr size_t kPieces = 8;

  FourierRows(const FourierMap<T>& map, size_t head, Workspace& workspace)
      : width_(static_cast<size_t>(map.width)),
        features_(static_cast<size_t>(map.features)),
        dp_(Padded<T>(width_)),
        mp_(Padded<T>(features_)),
        given_(map.matrices + head * features_ * width_),
        normalise_(map.normalise),
        factor_(static_cast<T>(map.factor)) {
    matrix_ = workspace.Take<T>(mp_ * dp_);
    turned_ = workspace.Take<T>(dp_ * mp_);
    P_ = workspace.Take<T>(kRows * dp_);
    Y_ = workspace.Take<T>(kRows * mp_);
    D_ = workspace.Take<T>(kRows * dp_);
    N_ = workspace.Take<T>(kRows * dp_);
    scale_ = workspace.Take<T>(dp_);
    d_scale_ = workspace.Take<T>(dp_);
    const T* const scale = map.scale == nullptr ? nullptr : map.scale + head * width_;
    for (size_t j = 0; j < dp_; ++j)
      scale_[j] = j >= width_ ? T{0} : scale == nullptr ? T{1} : scale[j];
    std::fill(d_scale_, d_scale_ + dp_, T{0});
  }

  size_t width() const { return width_; }

  // Rows at.. of `out` = features of rows t.. of x.
  template <class F>
  HWY_NOINLINE void Form(const Sequence<const S>& x, size_t t, size_t count, const Sequence<F>& out,
                         size_t at) {
    const Vec<T> factor = hn::Set(Tag<T>(), factor_);
    for (size_t done = 0; done < count; done += kRows) {
      const size_t rows = std::min(kRows, count - done);
      Scaled(x, t + done, rows);
      if (count == 1) {
        // Not worth turning the matrix, nor a copy of it where its rows are whole vectors.
        const T* const matrix = width_ == dp_ ? given_ : Matrix();
        for (size_t j = 0; j < features_; ++j)
          Y_[j] = hn::GetLane(hn::SumOfLanes(Tag<T>(), DotRow(matrix + j * dp_)));
        std::fill(Y_ + features_, Y_ + mp_, T{0});
      } else {
        if (!is_turned_) Transpose(mp_, dp_, Matrix(), dp_, turned_, mp_);
        is_turned_ = true;
        Product<T>(rows, features_, {P_, dp_, 1, turned_, mp_, width_}, Y_, mp_);
      }
      for (size_t i = 0; i < rows; ++i) {
        F* const to = out.At(at + done + i);
        for (size_t j = 0; j < features_; j += kLanes<T>) {
          Vec<T> sine, cosine;
          SinCos<T>(hn::Load(Tag<T>(), Y_ + i * mp_ + j), &sine, &cosine);
          StorePart(hn::Mul(factor, sine), j, features_, to);
          StorePart(hn::Mul(factor, cosine), j, features_, to + features_);
        }
      }
    }
  }

  // Rows t.. of dx from rows at.. of the features and of their gradients. What the rows add to the
  // gradient of scale stays here until AddScales.
  template <class F>
  HWY_NOINLINE void Back(const Sequence<const S>& x, size_t t, size_t count,
                         const Sequence<const F>& features, const Sequence<const F>& gradients,
                         size_t at, const Sequence<S>& dx) {
    const Tag<T> d;
    for (size_t done = 0; done < count; done += kRows) {
      const size_t rows = std::min(kRows, count - done);
      for (size_t i = 0; i < rows; ++i) {
        const F *const y = features.At(at + done + i), *const g = gradients.At(at + done + i);
        for (size_t j = 0; j < features_; j += kLanes<T>) {
          const Vec<T> kept =
              hn::Mul(LoadPart(g + features_, j, features_), LoadPart(y, j, features_));
          hn::Store(
              hn::MulSub(LoadPart(g, j, features_), LoadPart(y + features_, j, features_), kept), d,
              Y_ + i * mp_ + j);
        }
      }
      Product<T>(rows, width_, {Y_, mp_, 1, Matrix(), dp_, features_}, D_, dp_);
      PackRows(x, t + done, rows, width_, dp_, T{0}, N_);
      for (size_t i = 0; i < rows; ++i) OfRow(N_ + i * dp_, D_ + i * dp_, dx.At(t + done + i));
    }
  }

  // sums [d] += the gradient of scale of the rows since the last call.
  void AddScales(double* sums) {
    for (size_t j = 0; j < width_; ++j) sums[j] += static_cast<double>(d_scale_[j]);
    std::fill(d_scale_, d_scale_ + dp_, T{0});
  }

 private:
  // Row 0 of P times a row of the matrix, lane by lane.
  HWY_INLINE Vec<T> DotRow(const T* row) const {
    const Tag<T> d;
    Vec<T> sum = hn::Zero(d);
    for (size_t j = 0; j < dp_; j += kLanes<T>)
      sum = hn::MulAdd(hn::Load(d, P_ + j), hn::LoadU(d, row + j), sum);
    return sum;
  }

  // The matrix [mp, dp], zero in its padding.
  const T* Matrix() {
    if (is_packed_) return matrix_;
    PackRows(Sequence<const T>(given_, width_), 0, features_, width_, dp_, T{0}, matrix_);
    std::fill(matrix_ + features_ * dp_, matrix_ + mp_ * dp_, T{0});
    is_packed_ = true;
    return matrix_;
  }

  // 1 / (|x| + epsilon) of a packed row, and |x|.
  HWY_INLINE T Share(const T* x, T* length) const {
    const Tag<T> d;
    Vec<T> sum = hn::Zero(d);
    for (size_t j = 0; j < dp_; j += kLanes<T>) {
      const Vec<T> v = hn::Load(d, x + j);
      sum = hn::MulAdd(v, v, sum);
    }
    *length = std::sqrt(hn::GetLane(hn::SumOfLanes(d, sum)));
    return T{1} / (*length + static_cast<T>(kLengthEpsilon));
  }

  // P = rows t.. of x, normalised and scaled.
  HWY_INLINE void Scaled(const Sequence<const S>& x, size_t t, size_t rows) {
    const Tag<T> d;
    PackRows(x, t, rows, width_, dp_, T{0}, P_);
    for (size_t i = 0; i < rows; ++i) {
      T *const row = P_ + i * dp_, length;
      const Vec<T> share = hn::Set(d, normalise_ ? Share(row, &length) : T{1});
      for (size_t j = 0; j < dp_; j += kLanes<T>)
        hn::Store(hn::Mul(hn::Mul(hn::Load(d, row + j), share), hn::Load(d, scale_ + j)), d,
                  row + j);
    }
  }

  // From D, the gradient of the scaled row: with n = x / (|x| + epsilon) and dn = scale D,
  // dx = share dn - x (x . dn) share^2 / |x|, and d_scale += n D.
  HWY_INLINE void OfRow(const T* x, T* D, S* dx) {
    const Tag<T> d;
    T length = 0;
    const T share = normalise_ ? Share(x, &length) : T{1};
    const Vec<T> s = hn::Set(d, share);
    Vec<T> dot = hn::Zero(d);
    for (size_t j = 0; j < width_; j += kLanes<T>) {  // D has no more columns
      const Vec<T> v = hn::Load(d, x + j), g = hn::Load(d, D + j),
                   dn = hn::Mul(hn::Load(d, scale_ + j), g);
      hn::Store(hn::MulAdd(hn::Mul(s, v), g, hn::Load(d, d_scale_ + j)), d, d_scale_ + j);
      dot = hn::MulAdd(v, dn, dot);
      hn::Store(hn::Mul(s, dn), d, D + j);
    }
    const T back = normalise_ && length > 0
                       ? hn::GetLane(hn::SumOfLanes(d, dot)) * share * share / length
                       : T{0};
    const Vec<T> of_length = hn::Set(d, back);
    for (size_t j = 0; j < width_; j += kLanes<T>) {
      const Vec<T> own = hn::Load(d, D + j);
      StorePart(normalise_ ? hn::NegMulAdd(hn::Load(d, x + j), of_length, own) : own, j, width_,
                dx);
    }
  }

  const size_t width_, features_, dp_, mp_;
  const T* const given_;
  const bool normalise_;
  const T factor_;
  bool is_packed_ = false, is_turned_ = false;
  T *matrix_, *turned_, *P_, *Y_, *D_, *N_, *scale_, *d_scale_;
};

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
