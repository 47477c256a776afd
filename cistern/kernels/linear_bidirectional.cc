#include "cistern/kernels/linear_bidirectional.h"

#include <algorithm>
#include <vector>

#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/linear_bidirectional.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/linear_core-inl.h"
#include "cistern/kernels/segments-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Sizes, and where a head's memory [n, stride] lies.
template <class T>
struct LinearSizes {
  LinearSizes(const SlotShape& shape, const LinearRule& rule)
      : n(static_cast<size_t>(shape.slots)),
        width(static_cast<size_t>(shape.width)),
        stride(static_cast<size_t>(rule.Columns(shape.width))),
        np(Padded<T>(n)),
        dp(Padded<T>(width)),
        divides(stride > width) {}
  size_t memory() const { return n * stride; }
  size_t sums() const { return np * dp + np; }  // of a segment: S [np, dp], z [np]
  size_t n, width, stride, np, dp;
  bool divides;
};

// The memory of a head as panels of T, zeros in their padding: S [np, dp], its transpose where that
// is not null, and z [np].
template <class T>
void PackSums(const LinearSizes<T>& size, const double* memory, T* S, T* ST, T* z) {
  std::memset(S, 0, size.np * size.dp * sizeof(T));
  std::memset(z, 0, size.np * sizeof(T));
  for (size_t l = 0; l < size.n; ++l, memory += size.stride) {
    for (size_t j = 0; j < size.width; ++j) S[l * size.dp + j] = static_cast<T>(memory[j]);
    if (size.divides) z[l] = static_cast<T>(memory[size.width]);
  }
  if (ST != nullptr) Transpose(size.np, size.dp, S, size.dp, ST, size.np);
}

// The segments' sums join [n, stride] of a head, in their order.
template <class T>
void JoinSums(const LinearSizes<T>& size, size_t segments, const double* sums, double* memory) {
  for (size_t part = 0; part < segments; ++part, sums += size.sums()) {
    for (size_t l = 0; l < size.n; ++l) {
      double* const row = memory + l * size.stride;
      for (size_t j = 0; j < size.width; ++j) row[j] += sums[l * size.dp + j];
      if (size.divides) row[size.width] += sums[size.np * size.dp + l];
    }
  }
}

// total [np] += sum_i factors_i rows_i, with factors of 1 where they are null.
template <class T>
HWY_NOINLINE void AddRowsTo(size_t rows, size_t np, const T* X, const T* factors, T* total) {
  const Tag<T> d;
  for (size_t l = 0; l < np; l += kLanes<T>) {
    Vec<T> sum = hn::Load(d, total + l);
    for (size_t i = 0; i < rows; ++i) {
      const Vec<T> x = hn::LoadU(d, X + i * np + l);
      sum = factors == nullptr ? hn::Add(sum, x) : hn::MulAdd(hn::Set(d, factors[i]), x, sum);
    }
    hn::Store(sum, d, total + l);
  }
}

// S and z of a segment, in T for a span, then in double.
template <class S>
class SegmentSums {
  using T = ComputeType<S>;

 public:
  static size_t Bytes(const LinearSizes<T>& size) {
    return SpanProduct<S>::Bytes(size.n, size.width) + size.np * sizeof(T);
  }
  static constexpr size_t kPieces = SpanProduct<S>::kPieces + 1;
  SegmentSums(const LinearSizes<T>& size, double* sums, Workspace& workspace)
      : np_(size.np),
        product_(size.n, size.width, sums, workspace),
        z_(workspace.Take<T>(size.np)),
        z_sums_(sums + size.np * size.dp) {
    std::memset(z_, 0, np_ * sizeof(T));
  }
  // S += X^T Y, z += X^T factors. Y, scratch: as SpanProduct.
  template <class Y>
  void Add(size_t rows, const T* X, const Y& y, const T* factors, T* scratch = nullptr) {
    product_.Add(rows, X, y, scratch);
    AddRowsTo(rows, np_, X, factors, z_);
    if (product_.full()) Close();
  }
  void Close() {
    product_.Close();
    AddToDouble(np_, z_, z_sums_);
    std::memset(z_, 0, np_ * sizeof(T));
  }

 private:
  size_t np_;
  SpanProduct<S> product_;
  T* z_;
  double* z_sums_;
};

template <class T>
struct LinearMap {
  const LinearRule& rule;
  const FourierMap<T>* fourier;
};

template <class S, class T = ComputeType<S>>
HWY_NOINLINE void SumsOfTokens(const LinearSizes<T>& size, const LinearMap<T>& map,
                               const Segment& segment, const Sequence<const S>& k,
                               const Sequence<const S>& v, double* sums) {
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(SegmentSums<S>::Bytes(size) + FeatureReader<S>::Bytes(map.fourier, size.n) +
                      sizeof(T) * kBlockRows * (size.np + size.dp),
                  SegmentSums<S>::kPieces + FeatureReader<S>::kPieces + 2);
  SegmentSums<S> total(size, sums, workspace);
  FeatureReader<S> features(map.rule, map.fourier, segment.h, size.n, workspace);
  T* const K_panel = workspace.Take<T>(kBlockRows * size.np);
  T* const V_panel = workspace.Take<T>(kBlockRows * size.dp);
  for (size_t t = segment.begin, rows; t < segment.end; t += rows) {
    rows = std::min(kBlockRows, segment.end - t);
    RowsAhead::OfThisThread().Clear();
    const size_t next = t + rows, end = std::min(next + kBlockRows, segment.end);
    NoteRows(k, next, end, features.width());
    NoteRows(v, next, end, size.width);
    total.Add(rows, features.Of(k, t, rows, K_panel), TokenRows<S>{v, t}, nullptr, V_panel);
  }
  total.Close();
}

template <class S, class T = ComputeType<S>>
void WriteAll(const SlotShape& shape, const LinearMap<T>& map, const Rows<const S>& k,
              const Rows<const S>& v, const int64_t* lengths, double* memory) {
  const SegmentList list(shape);
  const LinearSizes<T> size(shape, map.rule);
  std::vector<double> sums(static_cast<size_t>(list.heads) * list.count * size.sums());
  list.For([&](int64_t head, size_t part, size_t index) {
    const Segment segment(shape, lengths, head, part);
    SumsOfTokens<S>(size, map, segment, {k, segment.b, segment.h}, {v, segment.b, segment.h},
                    sums.data() + index * size.sums());
  });
  for (size_t head = 0; head < static_cast<size_t>(list.heads); ++head)
    JoinSums(size, list.count, sums.data() + head * list.count * size.sums(),
             memory + head * size.memory());
}

template <class S, class T = ComputeType<S>>
HWY_NOINLINE void WriteGradients(const LinearSizes<T>& size, const LinearMap<T>& map,
                                 const Segment& segment, const Sequence<const S>& k,
                                 const Sequence<const S>& v, const double* grad,
                                 const Sequence<S>& dk, const Sequence<S>& dv, double* d_scale) {
  const size_t n = size.n, width = size.width, np = size.np, dp = size.dp;
  Workspace& workspace = Workspace::OfThisThread();
  using Pairs = PanelPairsFor<S>;
  workspace.Start(Pairs::Bytes(kBlockRows, n, width) + Pairs::Bytes(kBlockRows, width, n) +
                      FeatureReader<S>::Bytes(map.fourier, n) +
                      sizeof(T) * (2 * np * dp + np + 2 * kBlockRows * (np + dp)),
                  2 * Pairs::kPieces + FeatureReader<S>::kPieces + 7);
  FeatureReader<S> features(map.rule, map.fourier, segment.h, n, workspace);
  Pairs of_G(kBlockRows, n, width, workspace), of_GT(kBlockRows, width, n, workspace);
  T* const G = workspace.Take<T>(np * dp);
  T* const GT = workspace.Take<T>(dp * np);
  T* const Gz = workspace.Take<T>(np);
  T* const K_panel = workspace.Take<T>(kBlockRows * np);
  T* const Y = workspace.Take<T>(kBlockRows * np);
  T* const V_panel = workspace.Take<T>(kBlockRows * dp);
  T* const D_panel = workspace.Take<T>(kBlockRows * dp);
  PackSums(size, grad, G, GT, Gz);
  of_G.Set(G, dp);
  of_GT.Set(GT, np);
  for (size_t t = segment.begin, rows; t < segment.end; t += rows) {
    rows = std::min(kBlockRows, segment.end - t);
    RowsAhead::OfThisThread().Clear();
    const size_t next = t + rows, end = std::min(next + kBlockRows, segment.end);
    NoteRows(k, next, end, features.width());
    NoteRows(v, next, end, size.width);
    const T* const K = features.Of(k, t, rows, K_panel);
    if (!of_G.TimesTo(rows, PanelRows<T>{K, np}, dv, t, D_panel)) {
      const RowsOut<S> D(dv, t, rows, width, D_panel);
      Product<T>(rows, width, {K, np, 1, G, dp, n}, D.data, D.ld);
      D.Finish();
    }
    const TokenRows<S> of_v = {v, t};
    if (!of_GT.template Times<false>(rows, of_v, Y, np)) {
      Product<T>(rows, n, {AsPanel(of_v, rows, width, V_panel), dp, 1, GT, np, width}, Y, np);
    }
    if (size.divides) AddRow<T>(rows, np, nullptr, Gz, Y);
    features.Back(Y, K, k, t, rows, dk, d_scale);
  }
  ZeroRows(segment.end, segment.padded, features.width(), dk);
  ZeroRows(segment.end, segment.padded, width, dv);
}

// The gradient of a Fourier map's scale, [H,d], from that of each segment; of none where d_scale is
// null.
template <class T>
class ScalesOfSegments {
 public:
  ScalesOfSegments(const SlotShape& shape, const SegmentList& list, const FourierMap<T>* fourier,
                   T* d_scale)
      : shape_{shape.batch, shape.heads, shape.length},
        parts_(static_cast<int64_t>(list.count)),
        width_(d_scale == nullptr ? 0 : fourier->width),
        d_scale_(d_scale),
        sums_(static_cast<size_t>(list.heads * parts_ * width_)) {}
  double* Of(size_t segment) {
    return d_scale_ == nullptr ? nullptr : sums_.data() + segment * static_cast<size_t>(width_);
  }
  void Sum() const {
    if (d_scale_ != nullptr) SumScales(shape_, parts_, width_, sums_.data(), d_scale_);
  }

 private:
  const FourierShape shape_;
  const int64_t parts_, width_;
  T* const d_scale_;
  std::vector<double> sums_;
};

template <class S, class T = ComputeType<S>>
void WriteBackwardAll(const SlotShape& shape, const LinearMap<T>& map, const Rows<const S>& k,
                      const Rows<const S>& v, const int64_t* lengths, const double* G,
                      const Rows<S>& dk, const Rows<S>& dv, T* d_scale) {
  const SegmentList list(shape);
  const LinearSizes<T> size(shape, map.rule);
  ScalesOfSegments<T> scales(shape, list, map.fourier, d_scale);
  list.For([&](int64_t head, size_t part, size_t index) {
    const Segment segment(shape, lengths, head, part);
    const int64_t b = segment.b, h = segment.h;
    WriteGradients<S>(size, map, segment, {k, b, h}, {v, b, h},
                      G + static_cast<size_t>(head) * size.memory(), {dk, b, h}, {dv, b, h},
                      scales.Of(index));
  });
  scales.Sum();
}

// phi(q) . z of each row of a panel.
template <class T>
HWY_NOINLINE void DotRows(size_t rows, size_t np, const T* Q, const T* z, T* to) {
  const Tag<T> d;
  for (size_t i = 0; i < rows; ++i)
    to[i] = hn::GetLane(hn::SumOfLanes(d, DotOf(np, z, Q + i * np)));
}

template <class S, class T = ComputeType<S>>
HWY_NOINLINE void ReadRows(const LinearSizes<T>& size, const LinearMap<T>& map,
                           const Segment& segment, const Sequence<const S>& q, const double* memory,
                           const Sequence<S>& out) {
  const Tag<T> d;
  const size_t n = size.n, width = size.width, np = size.np, dp = size.dp;
  Workspace& workspace = Workspace::OfThisThread();
  using Pairs = PanelPairsFor<S>;
  workspace.Start(Pairs::Bytes(kBlockRows, n, width) + FeatureReader<S>::Bytes(map.fourier, n) +
                      sizeof(T) * (np * dp + np + kBlockRows * (np + dp + 1)),
                  Pairs::kPieces + FeatureReader<S>::kPieces + 5);
  const LinearRule& rule = map.rule;
  FeatureReader<S> features(rule, map.fourier, segment.h, n, workspace);
  Pairs of_M(kBlockRows, n, width, workspace);
  T* const M = workspace.Take<T>(np * dp);
  T* const z = workspace.Take<T>(np);
  T* const Q_panel = workspace.Take<T>(kBlockRows * np);
  T* const O = workspace.Take<T>(kBlockRows * dp);
  T* const dots = workspace.Take<T>(kBlockRows);
  PackSums<T>(size, memory, M, nullptr, z);
  of_M.Set(M, dp);
  const T value = static_cast<T>(rule.value);
  for (size_t t = segment.begin, rows; t < segment.end; t += rows) {
    rows = std::min(kBlockRows, segment.end - t);
    RowsAhead::OfThisThread().Clear();
    const size_t next = t + rows, end = std::min(next + kBlockRows, segment.end);
    NoteRows(q, next, end, features.width());
    const T* const Q = features.Of(q, t, rows, Q_panel);
    if (!of_M.template Times<false>(rows, PanelRows<T>{Q, np}, O, dp))
      Product<T>(rows, width, {Q, np, 1, M, dp, n}, O, dp);
    if (size.divides) DotRows(rows, np, Q, z, dots);
    for (size_t i = 0; i < rows; ++i) {
      const T factor = size.divides ? 1 / DivisorOf(rule.divisor, value, dots[i]) : value;
      const Vec<T> f = hn::Set(d, factor);
      const T* const from = O + i * dp;
      for (size_t j = 0; j < width; j += kLanes<T>)
        StorePart(hn::Mul(f, hn::Load(d, from + j)), j, width, out.At(t + i));
    }
  }
}

template <class S, class T = ComputeType<S>>
void ReadAll(const SlotShape& shape, const LinearMap<T>& map, const Rows<const S>& q,
             const double* memory, const Rows<S>& out) {
  const SegmentList list(shape);
  const LinearSizes<T> size(shape, map.rule);
  list.For([&](int64_t head, size_t part, size_t) {
    const Segment segment(shape, nullptr, head, part);
    ReadRows<S>(size, map, segment, {q, segment.b, segment.h},
                memory + static_cast<size_t>(head) * size.memory(), {out, segment.b, segment.h});
  });
}

// With y = N / D: the gradients n = g / D of N and e = -(n . y) D' of phi(q) . z, as in
// linear_attention_backward.cc; n as a panel [rows, dp].
template <class S, class T>
HWY_NOINLINE void QuotientGradients(const LinearSizes<T>& size, const LinearRule& rule,
                                    const Sequence<const S>& g, const Sequence<const S>& out,
                                    size_t t, size_t rows, const T* dots, T* N, T* e) {
  const Tag<T> d;
  const T value = static_cast<T>(rule.value);
  for (size_t i = 0; i < rows; ++i) {
    const T inverse = size.divides ? 1 / DivisorOf(rule.divisor, value, dots[i]) : value;
    const Vec<T> f = hn::Set(d, inverse);
    const S *const from = g.At(t + i), *const y = out.At(t + i);
    T* const to = N + i * size.dp;
    Vec<T> sum = hn::Zero(d);
    for (size_t j = 0; j < size.width; j += kLanes<T>) {
      const Vec<T> x = hn::Mul(f, LoadPart(from, j, size.width));
      sum = hn::MulAdd(x, LoadPart(y, j, size.width), sum);
      hn::Store(x, d, to + j);
    }
    for (size_t j = size.width; j < size.dp; ++j) to[j] = 0;
    e[i] = size.divides
               ? -hn::GetLane(hn::SumOfLanes(d, sum)) * DivisorSlope(rule.divisor, value, dots[i])
               : T{0};
  }
}

// dq of a segment; sums of phi(q) (x) n and of e phi(q) over it.
template <class S, class T = ComputeType<S>>
HWY_NOINLINE void ReadGradients(const LinearSizes<T>& size, const LinearMap<T>& map,
                                const Segment& segment, const Sequence<const S>& q,
                                const double* memory, const Sequence<const S>& out,
                                const Sequence<const S>& g, const Sequence<S>& dq, double* sums,
                                double* d_scale) {
  const size_t n = size.n, width = size.width, np = size.np, dp = size.dp;
  Workspace& workspace = Workspace::OfThisThread();
  using Pairs = PanelPairsFor<S>;
  workspace.Start(SegmentSums<S>::Bytes(size) + Pairs::Bytes(kBlockRows, width, n) +
                      FeatureReader<S>::Bytes(map.fourier, n) +
                      sizeof(T) * (2 * np * dp + np + kBlockRows * (2 * np + dp + 2)),
                  SegmentSums<S>::kPieces + Pairs::kPieces + FeatureReader<S>::kPieces + 8);
  SegmentSums<S> total(size, sums, workspace);
  FeatureReader<S> features(map.rule, map.fourier, segment.h, n, workspace);
  Pairs of_MT(kBlockRows, width, n, workspace);
  T* const M = workspace.Take<T>(np * dp);
  T* const MT = workspace.Take<T>(dp * np);
  T* const z = workspace.Take<T>(np);
  T* const Q_panel = workspace.Take<T>(kBlockRows * np);
  T* const Y = workspace.Take<T>(kBlockRows * np);
  T* const N = workspace.Take<T>(kBlockRows * dp);
  T* const dots = workspace.Take<T>(kBlockRows);
  T* const e = workspace.Take<T>(kBlockRows);
  PackSums(size, memory, M, MT, z);
  of_MT.Set(MT, np);
  for (size_t t = segment.begin, rows; t < segment.end; t += rows) {
    rows = std::min(kBlockRows, segment.end - t);
    RowsAhead::OfThisThread().Clear();
    const size_t next = t + rows, end = std::min(next + kBlockRows, segment.end);
    NoteRows(q, next, end, features.width());
    NoteRows(g, next, end, size.width);
    NoteRows(out, next, end, size.width);
    const T* const Q = features.Of(q, t, rows, Q_panel);
    if (size.divides) DotRows(rows, np, Q, z, dots);
    QuotientGradients(size, map.rule, g, out, t, rows, dots, N, e);
    const PanelRows<T> of_n = {N, dp};
    if (!of_MT.template Times<false>(rows, of_n, Y, np))
      Product<T>(rows, n, {N, dp, 1, MT, np, width}, Y, np);
    if (size.divides) AddRow<T>(rows, np, e, z, Y);
    features.Back(Y, Q, q, t, rows, dq, d_scale);
    total.Add(rows, Q, of_n, e);
  }
  total.Close();
}

template <class S, class T = ComputeType<S>>
void ReadBackwardAll(const SlotShape& shape, const LinearMap<T>& map, const Rows<const S>& q,
                     const double* memory, const Rows<const S>& out, const Rows<const S>& g,
                     const Rows<S>& dq, double* d_memory, T* d_scale) {
  const SegmentList list(shape);
  const LinearSizes<T> size(shape, map.rule);
  std::vector<double> sums(static_cast<size_t>(list.heads) * list.count * size.sums());
  ScalesOfSegments<T> scales(shape, list, map.fourier, d_scale);
  list.For([&](int64_t head, size_t part, size_t index) {
    const Segment segment(shape, nullptr, head, part);
    const int64_t b = segment.b, h = segment.h;
    ReadGradients<S>(size, map, segment, {q, b, h},
                     memory + static_cast<size_t>(head) * size.memory(), {out, b, h}, {g, b, h},
                     {dq, b, h}, sums.data() + index * size.sums(), scales.Of(index));
  });
  scales.Sum();
  std::fill_n(d_memory, static_cast<size_t>(list.heads) * size.memory(), 0.0);
  for (size_t head = 0; head < static_cast<size_t>(list.heads); ++head)
    JoinSums(size, list.count, sums.data() + head * list.count * size.sums(),
             d_memory + head * size.memory());
}

#define CISTERN_LINEAR_BIDIRECTIONAL(T, Name)                                                 \
  void LinearWrite##Name(const SlotShape& shape, const LinearRule& rule, Rows<const T> k,     \
                         Rows<const T> v, const int64_t* lengths, double* memory,             \
                         const FourierMap<ComputeType<T>>* fourier) {                         \
    WriteAll<T>(shape, {rule, fourier}, k, v, lengths, memory);                               \
  }                                                                                           \
  void LinearWriteBackward##Name(                                                             \
      const SlotShape& shape, const LinearRule& rule, Rows<const T> k, Rows<const T> v,       \
      const int64_t* lengths, const double* G, Rows<T> dk, Rows<T> dv,                        \
      const FourierMap<ComputeType<T>>* fourier, ComputeType<T>* d_scale) {                   \
    WriteBackwardAll<T>(shape, {rule, fourier}, k, v, lengths, G, dk, dv, d_scale);           \
  }                                                                                           \
  void LinearRead##Name(const SlotShape& shape, const LinearRule& rule, Rows<const T> q,      \
                        const double* memory, Rows<T> out,                                    \
                        const FourierMap<ComputeType<T>>* fourier) {                          \
    ReadAll<T>(shape, {rule, fourier}, q, memory, out);                                       \
  }                                                                                           \
  void LinearReadBackward##Name(                                                              \
      const SlotShape& shape, const LinearRule& rule, Rows<const T> q, const double* memory,  \
      Rows<const T> out, Rows<const T> d_out, Rows<T> dq, double* d_memory,                   \
      const FourierMap<ComputeType<T>>* fourier, ComputeType<T>* d_scale) {                   \
    ReadBackwardAll<T>(shape, {rule, fourier}, q, memory, out, d_out, dq, d_memory, d_scale); \
  }
CISTERN_LINEAR_BIDIRECTIONAL(float, Float)
CISTERN_LINEAR_BIDIRECTIONAL(double, Double)
CISTERN_LINEAR_BIDIRECTIONAL(BFloat16, BFloat16)
#undef CISTERN_LINEAR_BIDIRECTIONAL

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(LinearWriteFloat);
HWY_EXPORT(LinearWriteDouble);
HWY_EXPORT(LinearWriteBFloat16);
HWY_EXPORT(LinearWriteBackwardFloat);
HWY_EXPORT(LinearWriteBackwardDouble);
HWY_EXPORT(LinearWriteBackwardBFloat16);
HWY_EXPORT(LinearReadFloat);
HWY_EXPORT(LinearReadDouble);
HWY_EXPORT(LinearReadBFloat16);
HWY_EXPORT(LinearReadBackwardFloat);
HWY_EXPORT(LinearReadBackwardDouble);
HWY_EXPORT(LinearReadBackwardBFloat16);

#define CISTERN_LINEAR_BIDIRECTIONAL(T, Name)                                                      \
  template <>                                                                                      \
  void LinearWrite(const SlotShape& shape, const LinearRule& rule, Rows<const T> k,                \
                   Rows<const T> v, const int64_t* lengths, double* memory,                        \
                   const FourierMap<ComputeType<T>>* fourier) {                                    \
    CISTERN_DISPATCH(LinearWrite##Name)(shape, rule, k, v, lengths, memory, fourier);              \
  }                                                                                                \
  template <>                                                                                      \
  void LinearWriteBackward(const SlotShape& shape, const LinearRule& rule, Rows<const T> k,        \
                           Rows<const T> v, const int64_t* lengths, const double* G, Rows<T> dk,   \
                           Rows<T> dv, const FourierMap<ComputeType<T>>* fourier,                  \
                           ComputeType<T>* d_scale) {                                              \
    CISTERN_DISPATCH(LinearWriteBackward##Name)                                                    \
    (shape, rule, k, v, lengths, G, dk, dv, fourier, d_scale);                                     \
  }                                                                                                \
  template <>                                                                                      \
  void LinearRead(const SlotShape& shape, const LinearRule& rule, Rows<const T> q,                 \
                  const double* memory, Rows<T> out, const FourierMap<ComputeType<T>>* fourier) {  \
    CISTERN_DISPATCH(LinearRead##Name)(shape, rule, q, memory, out, fourier);                      \
  }                                                                                                \
  template <>                                                                                      \
  void LinearReadBackward(const SlotShape& shape, const LinearRule& rule, Rows<const T> q,         \
                          const double* memory, Rows<const T> out, Rows<const T> d_out,            \
                          Rows<T> dq, double* d_memory, const FourierMap<ComputeType<T>>* fourier, \
                          ComputeType<T>* d_scale) {                                               \
    CISTERN_DISPATCH(LinearReadBackward##Name)                                                     \
    (shape, rule, q, memory, out, d_out, dq, d_memory, fourier, d_scale);                          \
  }
CISTERN_LINEAR_BIDIRECTIONAL(float, Float)
CISTERN_LINEAR_BIDIRECTIONAL(double, Double)
CISTERN_LINEAR_BIDIRECTIONAL(BFloat16, BFloat16)
#undef CISTERN_LINEAR_BIDIRECTIONAL

}  // namespace cistern
#endif  // HWY_ONCE
