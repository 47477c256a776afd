#include "cistern/kernels/learned_features.h"

#include <algorithm>
#include <vector>

#include "cistern/base/parallel.h"
#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/learned_features.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/segments-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// W of head h times the scale, [np, dp]; zero in the padding.
template <class T>
void PackWeights(const SlotShape& shape, const LearnedMap<T>& map, int64_t h, T* W) {
  const auto n = static_cast<size_t>(shape.slots), width = static_cast<size_t>(shape.width);
  const size_t np = Padded<T>(n), dp = Padded<T>(width);
  PackRows(Sequence<const T>(map.weights + static_cast<size_t>(h) * n * width, width), 0, n, width,
           dp, T{0}, W);
  std::fill(W + n * dp, W + np * dp, T{0});
  const T scale = static_cast<T>(map.scale);
  for (size_t i = 0; i < n * dp; ++i) W[i] *= scale;
}

// Asks for the rows of the next block of a segment.
template <class S>
void NoteNext(const Segment& segment, size_t t, size_t width, const Sequence<const S>& x) {
  NoteRows(x, t, std::min(t + kBlockRows, segment.end), width);
}

// Rows t.. of `out` = max(0, Y + b).
template <class S, class T = ComputeType<S>>
HWY_NOINLINE void PositiveRows(size_t rows, size_t n, const T* Y, const T* bias, size_t t,
                               const Sequence<S>& out) {
  const Tag<T> d;
  const size_t np = Padded<T>(n);
  for (size_t i = 0; i < rows; ++i, Y += np) {
    S* const to = out.At(t + i);
    for (size_t j = 0; j < n; j += kLanes<T>) {
      const Vec<T> y = hn::Add(hn::Load(d, Y + j), hn::Load(d, bias + j));
      StorePart(hn::IfThenZeroElse(hn::Lt(y, hn::Zero(d)), y), j, n, to);
    }
  }
}

// G [rows, np] = rows t.. of the gradients where the outputs are positive, else 0; sums [np] +=
// its rows.
template <class S, class T = ComputeType<S>>
HWY_NOINLINE void PositiveGradients(size_t rows, size_t n, const Sequence<const S>& out,
                                    const Sequence<const S>& d_out, size_t t, T* G, T* sums) {
  const Tag<T> d;
  const size_t np = Padded<T>(n);
  for (size_t i = 0; i < rows; ++i, G += np) {
    const S *const y = out.At(t + i), *const g = d_out.At(t + i);
    size_t j = 0;
    for (; j < n; j += kLanes<T>) {
      const Vec<T> kept =
          hn::IfThenZeroElse(hn::Le(LoadPart(y, j, n), hn::Zero(d)), LoadPart(g, j, n));
      hn::Store(kept, d, G + j);
      hn::Store(hn::Add(hn::Load(d, sums + j), kept), d, sums + j);
    }
    for (; j < np; ++j) G[j] = 0;
  }
}

template <class S, class T = ComputeType<S>>
HWY_NOINLINE void FormRows(const SlotShape& shape, const LearnedMap<T>& map, const Segment& segment,
                           const Sequence<const S>& x, const Sequence<S>& out) {
  const auto n = static_cast<size_t>(shape.slots), width = static_cast<size_t>(shape.width);
  const size_t np = Padded<T>(n), dp = Padded<T>(width);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(sizeof(T) * (2 * np * dp + np + kBlockRows * (np + dp)), 5);
  T* const W = workspace.Take<T>(np * dp);
  T* const turned = workspace.Take<T>(dp * np);
  T* const bias = workspace.Take<T>(np);
  T* const X_panel = workspace.Take<T>(kBlockRows * dp);
  T* const Y = workspace.Take<T>(kBlockRows * np);
  PackWeights(shape, map, segment.h, W);
  Transpose(np, dp, W, dp, turned, np);
  std::copy_n(map.bias + static_cast<size_t>(segment.h) * n, n, bias);
  std::fill(bias + n, bias + np, T{0});
  for (size_t t = segment.begin, rows; t < segment.end; t += rows) {
    rows = std::min(kBlockRows, segment.end - t);
    RowsAhead::OfThisThread().Clear();
    NoteNext(segment, t + rows, width, x);
    const T* const X = PanelOf(x, t, rows, width, X_panel);
    Product<T>(rows, n, {X, dp, 1, turned, np, width}, Y, np);
    PositiveRows(rows, n, Y, bias, t, out);
  }
}

// sums: of W [np * dp], then of b [np]; zeros.
template <class S, class T = ComputeType<S>>
HWY_NOINLINE void FormGradients(const SlotShape& shape, const LearnedMap<T>& map,
                                const Segment& segment, const Sequence<const S>& x,
                                const Sequence<const S>& out, const Sequence<const S>& d_out,
                                const Sequence<S>& dx, double* sums) {
  const auto n = static_cast<size_t>(shape.slots), width = static_cast<size_t>(shape.width);
  const size_t np = Padded<T>(n), dp = Padded<T>(width);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(
      SpanProduct<S>::Bytes(n, width) + sizeof(T) * (np * dp + np + kBlockRows * (np + 2 * dp)),
      SpanProduct<S>::kPieces + 5);
  SpanProduct<S> of_W(n, width, sums, workspace);
  T* const W = workspace.Take<T>(np * dp);
  T* const of_bias = workspace.Take<T>(np);
  T* const G = workspace.Take<T>(kBlockRows * np);
  T* const X_panel = workspace.Take<T>(kBlockRows * dp);
  T* const D_panel = workspace.Take<T>(kBlockRows * dp);
  PackWeights(shape, map, segment.h, W);
  const auto close = [&]() HWY_ATTR {
    of_W.Close();
    AddToDouble(np, of_bias, sums + np * dp);
    std::fill(of_bias, of_bias + np, T{0});
  };
  std::fill(of_bias, of_bias + np, T{0});
  for (size_t t = segment.begin, rows; t < segment.end; t += rows) {
    rows = std::min(kBlockRows, segment.end - t);
    RowsAhead::OfThisThread().Clear();
    NoteNext(segment, t + rows, width, x);
    NoteNext(segment, t + rows, n, out);
    NoteNext(segment, t + rows, n, d_out);
    PositiveGradients(rows, n, out, d_out, t, G, of_bias);
    const RowsOut<S> D(dx, t, rows, width, D_panel);
    Product<T>(rows, width, {G, np, 1, W, dp, n}, D.data, D.ld);
    D.Finish();
    of_W.Add(rows, G, TokenRows<S>{x, t}, X_panel);
    if (of_W.full()) close();
  }
  close();
}

// The sums of head h over the rows of the batch and their segments, in this order.
template <class T>
void JoinGradients(const SlotShape& shape, const LearnedMap<T>& map, int64_t h, size_t segments,
                   const double* sums, T* d_weights, T* d_bias) {
  const auto n = static_cast<size_t>(shape.slots), width = static_cast<size_t>(shape.width),
             heads = static_cast<size_t>(shape.heads), batch = static_cast<size_t>(shape.batch),
             head = static_cast<size_t>(h);
  const size_t np = Padded<T>(n), dp = Padded<T>(width), size = np * dp + np;
  std::vector<double> all(size);
  for (size_t b = 0; b < batch; ++b) {
    const double* of_row = sums + (b * heads + head) * segments * size;
    for (size_t s = 0; s < segments; ++s, of_row += size) {
      for (size_t i = 0; i < size; ++i) all[i] += of_row[i];
    }
  }
  for (size_t l = 0; l < n; ++l) {
    for (size_t j = 0; j < width; ++j)
      d_weights[(head * n + l) * width + j] = static_cast<T>(map.scale * all[l * dp + j]);
    d_bias[head * n + l] = static_cast<T>(all[np * dp + l]);
  }
}

template <class S>
void FormAll(const SlotShape& shape, const LearnedMap<ComputeType<S>>& map, const Rows<const S>& x,
             const Rows<S>& out) {
  SegmentList(shape).For([&](int64_t head, size_t part, size_t) {
    const Segment segment(shape, nullptr, head, part);
    FormRows<S>(shape, map, segment, {x, segment.b, segment.h}, {out, segment.b, segment.h});
  });
}

template <class S>
void GradientsOfAll(const SlotShape& shape, const LearnedMap<ComputeType<S>>& map,
                    const Rows<const S>& x, const Rows<const S>& out, const Rows<const S>& d_out,
                    const Rows<S>& dx, ComputeType<S>* d_weights, ComputeType<S>* d_bias) {
  using T = ComputeType<S>;
  const SegmentList list(shape);
  const size_t np = Padded<T>(static_cast<size_t>(shape.slots)),
               size = np * Padded<T>(static_cast<size_t>(shape.width)) + np;
  std::vector<double> sums(static_cast<size_t>(list.heads) * list.count * size);
  list.For([&](int64_t head, size_t part, size_t index) {
    const Segment segment(shape, nullptr, head, part);
    const int64_t b = segment.b, h = segment.h;
    FormGradients<S>(shape, map, segment, {x, b, h}, {out, b, h}, {d_out, b, h}, {dx, b, h},
                     sums.data() + index * size);
  });
  ParallelFor(shape.heads, list.grain, [&](int64_t begin, int64_t end) {
    for (int64_t h = begin; h < end; ++h)
      JoinGradients<T>(shape, map, h, list.count, sums.data(), d_weights, d_bias);
  });
}

#define CISTERN_LEARNED_FEATURES(S, Name)                                                         \
  void Form##Name(const SlotShape& shape, const LearnedMap<ComputeType<S>>& map, Rows<const S> x, \
                  Rows<S> out) {                                                                  \
    FormAll<S>(shape, map, x, out);                                                               \
  }                                                                                               \
  void Gradients##Name(const SlotShape& shape, const LearnedMap<ComputeType<S>>& map,             \
                       Rows<const S> x, Rows<const S> out, Rows<const S> d_out, Rows<S> dx,       \
                       ComputeType<S>* d_weights, ComputeType<S>* d_bias) {                       \
    GradientsOfAll<S>(shape, map, x, out, d_out, dx, d_weights, d_bias);                          \
  }
CISTERN_LEARNED_FEATURES(float, Float)
CISTERN_LEARNED_FEATURES(double, Double)
CISTERN_LEARNED_FEATURES(BFloat16, BFloat16)
#undef CISTERN_LEARNED_FEATURES

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(FormFloat);
HWY_EXPORT(FormDouble);
HWY_EXPORT(FormBFloat16);
HWY_EXPORT(GradientsFloat);
HWY_EXPORT(GradientsDouble);
HWY_EXPORT(GradientsBFloat16);

#define CISTERN_LEARNED_FEATURES(S, Name)                                                          \
  template <>                                                                                      \
  void LearnedFeatures<S>(const SlotShape& shape, const LearnedMap<ComputeType<S>>& map,           \
                          Rows<const S> x, Rows<S> out) {                                          \
    CISTERN_DISPATCH(Form##Name)(shape, map, x, out);                                              \
  }                                                                                                \
  template <>                                                                                      \
  void LearnedFeaturesBackward<S>(const SlotShape& shape, const LearnedMap<ComputeType<S>>& map,   \
                                  Rows<const S> x, Rows<const S> out, Rows<const S> d_out,         \
                                  Rows<S> dx, ComputeType<S>* d_weights, ComputeType<S>* d_bias) { \
    CISTERN_DISPATCH(Gradients##Name)(shape, map, x, out, d_out, dx, d_weights, d_bias);           \
  }
CISTERN_LEARNED_FEATURES(float, Float)
CISTERN_LEARNED_FEATURES(double, Double)
CISTERN_LEARNED_FEATURES(BFloat16, BFloat16)
#undef CISTERN_LEARNED_FEATURES

}  // namespace cistern
#endif  // HWY_ONCE
