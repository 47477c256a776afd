// Tokens of linear attention as features, and the gradients of features back to tokens; included
// once per Highway target.
#if defined(CISTERN_KERNELS_LINEAR_FEATURES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_LINEAR_FEATURES_INL_H_
#undef CISTERN_KERNELS_LINEAR_FEATURES_INL_H_
#else
#define CISTERN_KERNELS_LINEAR_FEATURES_INL_H_
#endif

#include <optional>

#include "cistern/kernels/fourier_rows-inl.h"
#include "cistern/kernels/linear_attention.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// y = elu(x) + 1 of kCount vectors of a row from j on, without the loss of digits that adding one
// to expm1(x) has for x far below zero; or its derivative, where kSlope.
template <bool kSlope, int kCount, class S, class T>
HWY_INLINE void EluPlusOne(const S* row, size_t j, size_t n, Vec<T>* y) {
  const Tag<T> d;
  const Vec<T> one = hn::Set(d, T{1}), zero = hn::Zero(d);
  Vec<T> x[kCount];
  ForVectors<kCount>([&](int v)
                         HWY_ATTR { x[v] = y[v] = LoadPart(row, j + size_t(v) * kLanes<T>, n); });
  WeightExps<kCount>(y);
  ForVectors<kCount>([&](int v) HWY_ATTR {
    y[v] = hn::IfThenElse(hn::Gt(x[v], zero), kSlope ? one : hn::Add(x[v], one), y[v]);
  });
}

// take(count, j): all of a row's n numbers, by `count` vectors at once, a constant, from j on.
template <class T, class Take>
HWY_INLINE void ForRow(size_t n, Take&& take) {
  size_t j = 0;
  for (; j + 4 * kLanes<T> <= n; j += 4 * kLanes<T>) take(std::integral_constant<int, 4>(), j);
  for (; j < n; j += kLanes<T>) take(std::integral_constant<int, 1>(), j);
}

// features [count, np] = phi(rows t.. of x), zero in the padding.
template <class S, class T>
HWY_NOINLINE void MapRows(T eps, const Sequence<const S>& x, size_t t, size_t count, size_t n,
                          size_t np, T* features) {
  const Tag<T> d;
  const Vec<T> added = hn::Set(d, eps);
  for (size_t i = 0; i < count; ++i, features += np) {
    const S* const from = x.At(t + i);
    ForRow<T>(n, [&]<int kCount>(std::integral_constant<int, kCount>, size_t j) HWY_ATTR {
      Vec<T> y[kCount];
      EluPlusOne<false, kCount, S, T>(from, j, n, y);
      ForVectors<kCount>([&](int v) HWY_ATTR {
        hn::Store(hn::Add(y[v], added), d, features + j + size_t(v) * kLanes<T>);
      });
    });
    for (size_t j = n; j < np; ++j) features[j] = 0;
  }
}

// Rows t.. of x as features, a panel of leading dimension np: in place, or in `panel`.
template <class S, class T>
const T* FeaturesOf(const LinearRule& rule, const Sequence<const S>& x, size_t t, size_t count,
                    size_t n, T* panel) {
  if (rule.map == FeatureMap::kNone) return PanelOf(x, t, count, n, panel);
  MapRows(static_cast<T>(rule.map_eps), x, t, count, n, Padded<T>(n), panel);
  return panel;
}

// Rows t.. of `to` = gradient of the features [count, np] times the slope of phi at rows t.. of x.
template <class S, class T>
HWY_NOINLINE void UnmapRows(FeatureMap map, const T* gradient, const Sequence<const S>& x, size_t t,
                            size_t count, size_t n, size_t np, const Sequence<S>& to) {
  if (map == FeatureMap::kNone) return UnpackRows(gradient, t, count, n, np, to);
  const Tag<T> d;
  for (size_t i = 0; i < count; ++i, gradient += np) {
    const S* const from = x.At(t + i);
    S* const row = to.At(t + i);
    ForRow<T>(n, [&]<int kCount>(std::integral_constant<int, kCount>, size_t j) HWY_ATTR {
      Vec<T> slope[kCount];
      EluPlusOne<true, kCount, S, T>(from, j, n, slope);
      ForVectors<kCount>([&](int v) HWY_ATTR {
        const size_t at = j + size_t(v) * kLanes<T>;
        StorePart(hn::Mul(slope[v], hn::Load(d, gradient + at)), at, n, row);
      });
    });
  }
}

// One thread's reading of a head's tokens as features.
template <class S>
class FeatureReader {
  using T = ComputeType<S>;
  static constexpr size_t kRows = 32;

 public:
  // fourier: given with FeatureMap::kFourier, else null.
  static size_t Bytes(const FourierMap<T>* fourier, size_t n) {
    return fourier == nullptr ? 0
                              : FourierRows<S>::Bytes(*fourier) + sizeof(T) * kRows * Padded<T>(n);
  }
  static constexpr size_t kPieces = FourierRows<S>::kPieces + 1;
  FeatureReader(const LinearRule& rule, const FourierMap<T>* fourier, int64_t head, size_t n,
                Workspace& workspace)
      : rule_(rule), n_(n), np_(Padded<T>(n)) {
    if (fourier == nullptr) return;
    fourier_.emplace(*fourier, static_cast<size_t>(head), workspace);
    again_ = workspace.Take<T>(kRows * np_);
  }

  // Of a token, as it is given.
  size_t width() const { return fourier_ ? fourier_->width() : n_; }

  // Rows t.. of x as features, a panel of leading dimension Padded(n): in place, or in `panel`.
  const T* Of(const Sequence<const S>& x, size_t t, size_t count, T* panel) {
    if (!fourier_) return FeaturesOf(rule_, x, t, count, n_, panel);
    FormFourier(x, t, count, panel);
    return panel;
  }

  // Rows t.. of `to` = what the gradient of features [count, np] gives for rows t.. of x. `formed`:
  // their features, or null where they are not at hand. d_scale [width], of a Fourier map's scale,
  // is added to unless it is null.
  void Back(const T* gradient, const T* formed, const Sequence<const S>& x, size_t t, size_t count,
            const Sequence<S>& to, double* d_scale) {
    if (!fourier_) return UnmapRows(rule_.map, gradient, x, t, count, n_, np_, to);
    if (formed == nullptr) FormFourier(x, t, count, again_);
    fourier_->Back(x, t, count, Sequence<const T>(formed == nullptr ? again_ : formed, np_),
                   Sequence<const T>(gradient, np_), 0, to);
    if (d_scale != nullptr) fourier_->AddScales(d_scale);
  }

 private:
  void FormFourier(const Sequence<const S>& x, size_t t, size_t count, T* panel) {
    fourier_->Form(x, t, count, Sequence<T>(panel, np_), 0);
    for (size_t i = 0; i < count; ++i) std::fill(panel + i * np_ + n_, panel + (i + 1) * np_, T{0});
  }

  const LinearRule& rule_;
  const size_t n_, np_;
  std::optional<FourierRows<S>> fourier_;
  T* again_ = nullptr;
};

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
