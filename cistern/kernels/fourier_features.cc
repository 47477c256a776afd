#include "cistern/kernels/fourier_features.h"

#include <algorithm>
#include <vector>

#include "cistern/base/parallel.h"
#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/fourier_features.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/fourier_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Part `item` of the tokens of all heads.
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
FourierRows<S> RowsOf(const FourierMap<ComputeType<S>>& map, int64_t head) {
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(FourierRows<S>::Bytes(map), FourierRows<S>::kPieces);
  return FourierRows<S>(map, static_cast<size_t>(head), workspace);
}

template <class S>
void ForwardItems(int64_t first, int64_t last, const FourierShape& shape,
                  const FourierMap<ComputeType<S>>& map, const Rows<const S>& x,
                  const Rows<ComputeType<S>>& out) {
  for (int64_t item = first; item < last; ++item) {
    const PartOf p(shape, item);
    RowsOf<S>(map, p.h).Form(Sequence<const S>(x, p.b, p.h), p.begin, p.end - p.begin,
                             Sequence<ComputeType<S>>(out, p.b, p.h), p.begin);
  }
}

template <class S>
void BackwardItems(int64_t first, int64_t last, const FourierShape& shape,
                   const FourierMap<ComputeType<S>>& map, const Rows<const S>& x,
                   const Rows<const ComputeType<S>>& out, const Rows<const ComputeType<S>>& d_out,
                   const Rows<S>& dx, double* d_scales) {
  using T = ComputeType<S>;
  for (int64_t item = first; item < last; ++item) {
    const PartOf p(shape, item);
    FourierRows<S> rows = RowsOf<S>(map, p.h);
    rows.Back(Sequence<const S>(x, p.b, p.h), p.begin, p.end - p.begin,
              Sequence<const T>(out, p.b, p.h), Sequence<const T>(d_out, p.b, p.h), p.begin,
              Sequence<S>(dx, p.b, p.h));
    rows.AddScales(d_scales + item * map.width);
  }
}

#define CISTERN_FOURIER(S, Name)                                                     \
  void Forward##Name(int64_t first, int64_t last, const FourierShape& shape,         \
                     const FourierMap<ComputeType<S>>& map, const Rows<const S>& x,  \
                     const Rows<ComputeType<S>>& out) {                              \
    ForwardItems<S>(first, last, shape, map, x, out);                                \
  }                                                                                  \
  void Backward##Name(int64_t first, int64_t last, const FourierShape& shape,        \
                      const FourierMap<ComputeType<S>>& map, const Rows<const S>& x, \
                      const Rows<const ComputeType<S>>& out,                         \
                      const Rows<const ComputeType<S>>& d_out, const Rows<S>& dx,    \
                      double* d_scales) {                                            \
    BackwardItems<S>(first, last, shape, map, x, out, d_out, dx, d_scales);          \
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

int64_t PartsOf(const FourierShape& shape) {
  return (shape.length + kFourierPartRows - 1) / kFourierPartRows;
}
int64_t ItemsOf(const FourierShape& shape) { return shape.batch * shape.heads * PartsOf(shape); }
// Items of a thread at least.
template <class T>
int64_t Grain(const FourierShape& shape, const FourierMap<T>& map) {
  const int64_t work = std::min(shape.length, kFourierPartRows) * map.width * map.features;
  return 32768 / (work + 1) + 1;
}

}  // namespace

template <class T>
void SumScales(const FourierShape& shape, int64_t parts, int64_t width, const double* items,
               T* d_scale) {
  std::vector<double> sums(static_cast<size_t>(shape.heads * width));
  for (int64_t i = 0; i < shape.batch * shape.heads * parts; ++i) {
    double* const to = sums.data() + i / parts % shape.heads * width;
    for (int64_t j = 0; j < width; ++j) to[j] += items[i * width + j];
  }
  for (size_t i = 0; i < sums.size(); ++i) d_scale[i] = static_cast<T>(sums[i]);
}
template void SumScales(const FourierShape&, int64_t, int64_t, const double*, float*);
template void SumScales(const FourierShape&, int64_t, int64_t, const double*, double*);

HWY_EXPORT(ForwardFloat);
HWY_EXPORT(ForwardDouble);
HWY_EXPORT(ForwardBFloat16);
HWY_EXPORT(BackwardFloat);
HWY_EXPORT(BackwardDouble);
HWY_EXPORT(BackwardBFloat16);

#define CISTERN_FOURIER(S, Name)                                                                   \
  template <>                                                                                      \
  void FourierFeatures<S>(const FourierShape& shape, const FourierMap<ComputeType<S>>& map,        \
                          Rows<const S> x, Rows<ComputeType<S>> out) {                             \
    ParallelFor(ItemsOf(shape), Grain(shape, map), [&](int64_t first, int64_t last) {              \
      CISTERN_DISPATCH(Forward##Name)(first, last, shape, map, x, out);                            \
    });                                                                                            \
  }                                                                                                \
  template <>                                                                                      \
  void FourierFeaturesBackward<S>(                                                                 \
      const FourierShape& shape, const FourierMap<ComputeType<S>>& map, Rows<const S> x,           \
      Rows<const ComputeType<S>> out, Rows<const ComputeType<S>> d_out, Rows<S> dx,                \
      ComputeType<S>* d_scale) {                                                                   \
    std::vector<double> d_scales(static_cast<size_t>(ItemsOf(shape) * map.width));                 \
    ParallelFor(ItemsOf(shape), Grain(shape, map), [&](int64_t first, int64_t last) {              \
      CISTERN_DISPATCH(Backward##Name)                                                             \
      (first, last, shape, map, x, out, d_out, dx, d_scales.data());                               \
    });                                                                                            \
    if (d_scale != nullptr) SumScales(shape, PartsOf(shape), map.width, d_scales.data(), d_scale); \
  }
CISTERN_FOURIER(float, Float)
CISTERN_FOURIER(double, Double)
CISTERN_FOURIER(BFloat16, BFloat16)
#undef CISTERN_FOURIER

}  // namespace cistern
#endif  // HWY_ONCE
