#include "cistern/kernels/fourier_features.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cistern/base/parallel.h"
#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/fourier_features.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

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

// One head's part of the tokens, with its matrix in panels.
template <class S>
class FourierPart {
  using T = ComputeType<S>;
  static constexpr size_t kRows = 32;

 public:
  FourierPart(const FourierShape& shape, const Sequence<const S>& x, const T* scale,
              const T* matrix)
      : x_(x),
        width_(static_cast<size_t>(shape.width)),
        features_(static_cast<size_t>(shape.features)),
        dp_(Padded<T>(width_)),
        mp_(Padded<T>(features_)),
        normalise_(shape.normalise),
        factor_(static_cast<T>(shape.factor)) {
    Workspace& workspace = Workspace::OfThisThread();
    workspace.Start(sizeof(T) * (2 * mp_ * dp_ + kRows * (3 * dp_ + mp_) + 2 * dp_ + kRows), 8);
    matrix_ = workspace.Take<T>(mp_ * dp_);
    turned_ = workspace.Take<T>(dp_ * mp_);
    P_ = workspace.Take<T>(kRows * dp_);
    Y_ = workspace.Take<T>(kRows * mp_);
    D_ = workspace.Take<T>(kRows * dp_);
    N_ = workspace.Take<T>(kRows * dp_);
    scale_ = workspace.Take<T>(dp_);
    d_scale_ = workspace.Take<T>(dp_);
    PackRows(Sequence<const T>(matrix, width_), 0, features_, width_, dp_, T{0}, matrix_);
    std::fill(matrix_ + features_ * dp_, matrix_ + mp_ * dp_, T{0});
    for (size_t j = 0; j < dp_; ++j)
      scale_[j] = j >= width_ ? T{0} : scale == nullptr ? T{1} : scale[j];
  }

  HWY_NOINLINE void Forward(size_t begin, size_t end, const Sequence<S>& out) {
    Transpose(mp_, dp_, matrix_, dp_, turned_, mp_);
    for (size_t t = begin; t < end; t += kRows) {
      const size_t rows = std::min(kRows, end - t);
      Scaled(t, rows);
      Product<T>(rows, features_, {P_, dp_, 1, turned_, mp_, width_}, Y_, mp_);
      const Vec<T> factor = hn::Set(Tag<T>(), factor_);
      for (size_t i = 0; i < rows; ++i) {
        S* const to = out.At(t + i);
        for (size_t j = 0; j < features_; j += kLanes<T>) {
          Vec<T> sine, cosine;
          SinCos<T>(hn::Load(Tag<T>(), Y_ + i * mp_ + j), &sine, &cosine);
          StorePart(hn::Mul(factor, sine), j, features_, to);
          StorePart(hn::Mul(factor, cosine), j, features_, to + features_);
        }
      }
    }
  }

  // d_scale [d]: of these tokens.
  HWY_NOINLINE void Backward(size_t begin, size_t end, const Sequence<const S>& out,
                             const Sequence<const S>& d_out, const Sequence<S>& dx, T* d_scale) {
    const Tag<T> d;
    std::fill(d_scale_, d_scale_ + dp_, T{0});
    for (size_t t = begin; t < end; t += kRows) {
      const size_t rows = std::min(kRows, end - t);
      for (size_t i = 0; i < rows; ++i) {
        const S *const y = out.At(t + i), *const g = d_out.At(t + i);
        for (size_t j = 0; j < features_; j += kLanes<T>) {
          const Vec<T> kept =
              hn::Mul(LoadPart(g + features_, j, features_), LoadPart(y, j, features_));
          hn::Store(
              hn::MulSub(LoadPart(g, j, features_), LoadPart(y + features_, j, features_), kept), d,
              Y_ + i * mp_ + j);
        }
      }
      Product<T>(rows, width_, {Y_, mp_, 1, matrix_, dp_, features_}, D_, dp_);
      PackRows(x_, t, rows, width_, dp_, T{0}, N_);
      for (size_t i = 0; i < rows; ++i) OfRow(N_ + i * dp_, D_ + i * dp_, dx.At(t + i));
    }
    std::copy_n(d_scale_, width_, d_scale);
  }

 private:
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
  HWY_INLINE void Scaled(size_t t, size_t rows) {
    const Tag<T> d;
    PackRows(x_, t, rows, width_, dp_, T{0}, P_);
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
    for (size_t j = 0; j < dp_; j += kLanes<T>) {
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

  const Sequence<const S> x_;
  const size_t width_, features_, dp_, mp_;
  const bool normalise_;
  const T factor_;
  T *matrix_, *turned_, *P_, *Y_, *D_, *N_, *scale_, *d_scale_;
};

// Part `part` of head (b, h).
struct PartOf {
  PartOf(const FourierShape& shape, int64_t item) {
    const int64_t parts = (shape.length + kFourierPartRows - 1) / kFourierPartRows,
                  head = item / parts;
    b = head / shape.heads, h = head % shape.heads;
    begin = static_cast<size_t>(item % parts * kFourierPartRows);
    end =
        std::min(begin + static_cast<size_t>(kFourierPartRows), static_cast<size_t>(shape.length));
  }
  int64_t b, h;
  size_t begin, end;
};

template <class S>
void ForwardItems(int64_t first, int64_t last, const FourierShape& shape, const Rows<const S>& x,
                  const ComputeType<S>* scale, const ComputeType<S>* matrices, const Rows<S>& out) {
  for (int64_t item = first; item < last; ++item) {
    const PartOf p(shape, item);
    FourierPart<S> part(shape, {x, p.b, p.h}, scale ? scale + p.h * shape.width : nullptr,
                        matrices + p.h * shape.features * shape.width);
    part.Forward(p.begin, p.end, {out, p.b, p.h});
  }
}

template <class S>
void BackwardItems(int64_t first, int64_t last, const FourierShape& shape, const Rows<const S>& x,
                   const ComputeType<S>* scale, const ComputeType<S>* matrices,
                   const Rows<const S>& out, const Rows<const S>& d_out, const Rows<S>& dx,
                   ComputeType<S>* d_scales) {
  for (int64_t item = first; item < last; ++item) {
    const PartOf p(shape, item);
    FourierPart<S> part(shape, {x, p.b, p.h}, scale ? scale + p.h * shape.width : nullptr,
                        matrices + p.h * shape.features * shape.width);
    part.Backward(p.begin, p.end, {out, p.b, p.h}, {d_out, p.b, p.h}, {dx, p.b, p.h},
                  d_scales + item * shape.width);
  }
}

#define CISTERN_FOURIER(S, Name)                                                                 \
  void Forward##Name(int64_t first, int64_t last, const FourierShape& shape,                     \
                     const Rows<const S>& x, const ComputeType<S>* scale,                        \
                     const ComputeType<S>* matrices, const Rows<S>& out) {                       \
    ForwardItems<S>(first, last, shape, x, scale, matrices, out);                                \
  }                                                                                              \
  void Backward##Name(int64_t first, int64_t last, const FourierShape& shape,                    \
                      const Rows<const S>& x, const ComputeType<S>* scale,                       \
                      const ComputeType<S>* matrices, const Rows<const S>& out,                  \
                      const Rows<const S>& d_out, const Rows<S>& dx, ComputeType<S>* d_scales) { \
    BackwardItems<S>(first, last, shape, x, scale, matrices, out, d_out, dx, d_scales);          \
  }
CISTERN_FOURIER(float, Float)
CISTERN_FOURIER(double, Double)
CISTERN_FOURIER(BFloat16, BFloat16)
#undef CISTERN_FOURIER

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {
namespace {

int64_t ItemsOf(const FourierShape& shape) {
  return shape.batch * shape.heads * ((shape.length + kFourierPartRows - 1) / kFourierPartRows);
}
// Items of a thread at least.
int64_t Grain(const FourierShape& shape) {
  const int64_t work = std::min(shape.length, kFourierPartRows) * shape.width * shape.features;
  return 32768 / (work + 1) + 1;
}

// sums [H,d] = those of each head's items.
template <class T>
void SumItems(const FourierShape& shape, const std::vector<T>& items, T* sums) {
  const int64_t count = ItemsOf(shape),
                of_head = (shape.length + kFourierPartRows - 1) / kFourierPartRows;
  std::vector<double> exact(static_cast<size_t>(shape.heads * shape.width));
  for (int64_t i = 0; i < count; ++i) {
    double* const to = exact.data() + i / of_head % shape.heads * shape.width;
    const T* const from = items.data() + i * shape.width;
    for (int64_t j = 0; j < shape.width; ++j) to[j] += static_cast<double>(from[j]);
  }
  for (size_t i = 0; i < exact.size(); ++i) sums[i] = static_cast<T>(exact[i]);
}

}  // namespace

HWY_EXPORT(ForwardFloat);
HWY_EXPORT(ForwardDouble);
HWY_EXPORT(ForwardBFloat16);
HWY_EXPORT(BackwardFloat);
HWY_EXPORT(BackwardDouble);
HWY_EXPORT(BackwardBFloat16);

#define CISTERN_FOURIER(S, Name)                                                                \
  template <>                                                                                   \
  void FourierFeatures(const FourierShape& shape, Rows<const S> x, const ComputeType<S>* scale, \
                       const ComputeType<S>* matrices, Rows<S> out) {                           \
    ParallelFor(ItemsOf(shape), Grain(shape), [&](int64_t first, int64_t last) {                \
      CISTERN_DISPATCH(Forward##Name)(first, last, shape, x, scale, matrices, out);             \
    });                                                                                         \
  }                                                                                             \
  template <>                                                                                   \
  void FourierFeaturesBackward(const FourierShape& shape, Rows<const S> x,                      \
                               const ComputeType<S>* scale, const ComputeType<S>* matrices,     \
                               Rows<const S> out, Rows<const S> d_out, Rows<S> dx,              \
                               ComputeType<S>* d_scale) {                                       \
    std::vector<ComputeType<S>> d_scales(static_cast<size_t>(ItemsOf(shape) * shape.width));    \
    ParallelFor(ItemsOf(shape), Grain(shape), [&](int64_t first, int64_t last) {                \
      CISTERN_DISPATCH(Backward##Name)                                                          \
      (first, last, shape, x, scale, matrices, out, d_out, dx, d_scales.data());                \
    });                                                                                         \
    if (d_scale != nullptr) SumItems(shape, d_scales, d_scale);                                 \
  }
CISTERN_FOURIER(float, Float)
CISTERN_FOURIER(double, Double)
CISTERN_FOURIER(BFloat16, BFloat16)
#undef CISTERN_FOURIER

}  // namespace cistern
#endif  // HWY_ONCE
