#include "cistern/kernels/favor_attention.h"
#include "cistern/kernels/slot_bidirectional.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/slot_write.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/slot_write_weights-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// E = e^(s - hi - lo) [rows, np], zeros where s is -inf; added to `sums` [np]. lo and sums may be
// null: zeros, and nowhere. E may hold the rows of s.
template <class T>
HWY_NOINLINE void Exponentials(const LogWeights<T>& s, size_t rows, size_t np, const T* hi,
                               const T* lo, T* E, T* sums) {
  const Tag<T> d;
  for (size_t l = 0; l < np; l += kLanes<T>) {
    const Vec<T> high = hn::Load(d, hi + l),
                 low = lo == nullptr ? hn::Zero(d) : hn::Load(d, lo + l);
    Vec<T> sum = hn::Zero(d);
    size_t i = 0;
    const auto some = [&]<int kRows>(std::integral_constant<int, kRows>) HWY_ATTR {
      for (; i + kRows <= rows; i += kRows) {
        Vec<T> e[kRows];
        ForVectors<kRows>([&](int j) HWY_ATTR {
          e[j] = hn::Sub(hn::Sub(hn::LoadU(d, s.from + (i + size_t(j)) * s.step + l), high), low);
        });
        WeightExps<kRows>(e);
        ForVectors<kRows>([&](int j) HWY_ATTR {
          sum = hn::Add(sum, e[j]);
          hn::Store(e[j], d, E + (i + size_t(j)) * np + l);
        });
      }
    };
    some(std::integral_constant<int, 4>());
    some(std::integral_constant<int, 1>());
    if (sums != nullptr) hn::Store(hn::Add(hn::Load(d, sums + l), sum), d, sums + l);
  }
}

// What the weights of a segment count from: the largest log-weight of its first rows, moved where
// later ones are out of reach of it.
template <class T>
class SegmentReference {
 public:
  static size_t Bytes(size_t n) { return 3 * Padded<T>(n) * sizeof(T); }
  static constexpr size_t kPieces = 3;
  SegmentReference(size_t n, Workspace& workspace) : end_(RoundUp(n, kLanes<T>)) {
    const size_t np = Padded<T>(n);
    for (T** x : {&most_, &hi_, &factor_}) *x = workspace.Take<T>(np);
    for (size_t l = 0; l < np; ++l) most_[l] = kMinusInfinity<T>, hi_[l] = 0;
  }

  // Whether it moves for these rows. Sums of earlier ones are then to be multiplied by factor().
  HWY_NOINLINE bool Reach(const LogWeights<T>& s, size_t rows) {
    const Tag<T> d;
    bool moved = false;
    for (size_t l = 0; l < end_; l += kLanes<T>) {
      Vec<T> high = hn::LoadU(d, s.from + l);
      for (size_t i = 1; i < rows; ++i) high = hn::Max(high, hn::LoadU(d, s.from + i * s.step + l));
      const Vec<T> most = hn::Load(d, most_ + l);
      const auto beyond = hn::Gt(high, hn::Add(most, hn::Set(d, static_cast<T>(kReach))));
      hn::Store(hn::IfThenElse(beyond, high, most), d, factor_ + l);
      moved = moved || !hn::AllFalse(d, beyond);
    }
    if (!moved) return false;
    for (size_t l = 0; l < end_; ++l) {
      const T most = factor_[l];
      factor_[l] = most == most_[l] ? T{1} : std::exp(most_[l] - most);
      most_[l] = most;
      hi_[l] = most == kMinusInfinity<T> ? T{0} : most;
    }
    return true;
  }
  const T* factor() const { return factor_; }
  const T* most() const { return most_; }  // -inf: nothing was written
  const T* hi() const { return hi_; }

 private:
  const size_t end_;  // of the slots, in whole vectors; what lies behind may be anything
  T *most_, *hi_, *factor_;
};

// What a segment of a head adds to the memories, in doubles: for all that is written, one after
// another, sums [np, dp] of e^(s - m) (x) v; totals [np] of e^(s - m); m [np].
struct SegmentSums {
  SegmentSums(size_t padded_slots, size_t padded_width, size_t memories)
      : np(padded_slots),
        panel(np * padded_width),
        totals(memories * panel),
        m(totals + np),
        size(m + np) {}
  size_t np, panel, totals, m, size;  // places in the whole
};

template <class Weights, class S, class T = ComputeType<S>>
HWY_NOINLINE void SumsOfSegment(const SlotShape& shape, const Segment& segment,
                                const typename Weights::Source& source,
                                std::span<const SlotWritten<S>> written, const SegmentSums& at,
                                double* sums) {
  const auto n = static_cast<size_t>(shape.slots), width = static_cast<size_t>(shape.width);
  const size_t np = at.np, dp = Padded<T>(width);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(
      SegmentReference<T>::Bytes(n) + Weights::Bytes(source, n) +
          written.size() * SpanProduct<S>::Bytes(n, width) +
          sizeof(T) * (kBlockRows * (np + dp) + np),
      SegmentReference<T>::kPieces + Weights::kPieces + kMostWritten * SpanProduct<S>::kPieces + 3);
  SegmentReference<T> reference(n, workspace);
  Weights weights(source, shape, segment, nullptr, workspace);
  std::vector<SpanProduct<S>> products;
  std::vector<Sequence<const S>> values;
  for (const SlotWritten<S>& x : written) {
    products.emplace_back(n, width, sums + products.size() * at.panel, workspace);
    values.emplace_back(x.v, segment.b, segment.h);
  }
  T* const E = workspace.Take<T>(kBlockRows * np);
  T* const V_panel = workspace.Take<T>(kBlockRows * dp);
  T* const total = workspace.Take<T>(np);
  std::memset(total, 0, np * sizeof(T));
  const auto close = [&]() HWY_ATTR {
    for (SpanProduct<S>& product : products) product.Close();
    AddToDouble(np, total, sums + at.totals);
    std::memset(total, 0, np * sizeof(T));
  };
  for (size_t t = segment.begin, rows; t < segment.end; t += rows) {
    rows = std::min(kBlockRows, segment.end - t);
    const size_t next = t + rows, end = std::min(next + kBlockRows, segment.end);
    RowsAhead::OfThisThread().Clear();
    weights.Note(next, end);
    for (const Sequence<const S>& v : values) NoteRows(v, next, end, width);
    const LogWeights<T> s = weights.At(t, rows, E);
    if (reference.Reach(s, rows) && t > segment.begin) {
      close();
      for (size_t l = 0; l < n; ++l) {
        const double factor = reference.factor()[l];
        if (factor == 1) continue;
        sums[at.totals + l] *= factor;
        for (size_t i = 0; i < products.size(); ++i) {
          double* const row = sums + i * at.panel + l * dp;
          for (size_t j = 0; j < dp; ++j) row[j] *= factor;
        }
      }
    }
    Exponentials<T>(s, rows, np, reference.hi(), nullptr, E, total);
    for (size_t i = 0; i < products.size(); ++i) {
      products[i].Add(rows, E, TokenRows<S>{values[i], t}, V_panel);
    }
    if (products[0].full()) close();
  }
  close();
  for (size_t l = 0; l < np; ++l) sums[at.m + l] = static_cast<double>(reference.most()[l]);
}

// memories and z of a head, from the sums of its segments, of which the first is written to.
template <class S, class T = ComputeType<S>>
void MoveOn(std::span<const SlotWritten<S>> written, size_t n, size_t width, size_t segments,
            const SegmentSums& at, size_t head, double* sums, double* z) {
  const size_t dp = Padded<T>(width);
  for (size_t l = 0; l < n; ++l) {
    double m = z[l], total = 0;
    for (size_t part = 0; part < segments; ++part) {
      m = std::max(m, sums[part * at.size + at.m + l]);
      total += sums[part * at.size + at.totals + l];
    }
    // Log-weights of -inf have totals of 0.
    if (m == kEmpty && total != 0) m = std::numeric_limits<double>::quiet_NaN();
    total = 0;
    if (m != kEmpty) {
      for (size_t part = 0; part < segments; ++part) {
        double* const of = sums + part * at.size;
        const double factor = of[at.m + l] == kEmpty ? 0 : std::exp(of[at.m + l] - m);
        total += factor * of[at.totals + l];
        for (size_t i = 0; i < written.size(); ++i) {
          double *const to = sums + i * at.panel + l * dp, *const from = of + i * at.panel + l * dp;
          for (size_t j = 0; j < width; ++j) to[j] = (part == 0 ? 0 : to[j]) + factor * from[j];
        }
      }
    }
    const bool empty = z[l] == kEmpty;
    const double old = empty ? 0 : std::exp(z[l] - m), share = 1 / (old + total);
    for (size_t i = 0; i < written.size(); ++i) {
      double* const row = written[i].memory + (head * n + l) * width;
      const double* const sum = sums + i * at.panel + l * dp;
      // What an empty slot holds counts as zero, whatever it is.
      for (size_t j = 0; j < width; ++j)
        row[j] = m == kEmpty ? 0 : ((empty ? 0 : old * row[j]) + sum[j]) * share;
    }
    if (m != kEmpty) z[l] = m + std::log(old + total);
  }
}

template <class Weights, class S, class T = ComputeType<S>>
void WriteAll(const SlotShape& shape, const typename Weights::Source& source,
              std::span<const SlotWritten<S>> written, const int64_t* lengths, double* z) {
  const SegmentList list(shape);
  const auto n = static_cast<size_t>(shape.slots), width = static_cast<size_t>(shape.width);
  const SegmentSums at(Padded<T>(n), Padded<T>(width), written.size());
  if (list.count == 0) {
    for (const SlotWritten<S>& x : written) {
      for (size_t l = 0; l < static_cast<size_t>(list.heads) * n; ++l) {
        if (z[l] == kEmpty) std::fill_n(x.memory + l * width, width, 0.0);
      }
    }
    return;
  }
  std::vector<double> sums(static_cast<size_t>(list.heads) * list.count * at.size);
  list.For([&](int64_t head, size_t part, size_t index) {
    const Segment segment(shape, lengths, head, part);
    SumsOfSegment<Weights, S>(shape, segment, source, written, at, sums.data() + index * at.size);
  });
  ParallelFor(list.heads, list.grain, [&](int64_t begin, int64_t end) {
    for (auto head = static_cast<size_t>(begin); head < static_cast<size_t>(end); ++head)
      MoveOn(written, n, width, list.count, at, head, sums.data() + head * list.count * at.size,
             z + head * n);
  });
}

// G [n, width] of one head as a panel, and its transpose; rows that go in and come out.
template <class S, class T = ComputeType<S>>
struct WrittenHead {
  using Pairs = PanelPairsFor<S>;
  static size_t Bytes(size_t n, size_t width) {
    return 2 * Padded<T>(n) * Padded<T>(width) * sizeof(T) + Pairs::Bytes(kBlockRows, n, width) +
           Pairs::Bytes(kBlockRows, width, n);
  }
  static constexpr size_t kPieces = 2 + 2 * Pairs::kPieces;
  WrittenHead(const SlotWrittenGradients<S>& x, const Segment& segment, int64_t head, size_t n,
              size_t width, Workspace& workspace)
      : v(x.v, segment.b, segment.h),
        dv(x.dv, segment.b, segment.h),
        of_G(kBlockRows, n, width, workspace),
        of_GT(kBlockRows, width, n, workspace) {
    const size_t np = Padded<T>(n), dp = Padded<T>(width);
    G = workspace.Take<T>(np * dp);
    GT = workspace.Take<T>(dp * np);
    std::memset(G, 0, np * dp * sizeof(T));
    PackRows(Sequence<const T>(x.G + static_cast<size_t>(head) * n * width, width), 0, n, width, dp,
             T{0}, G);
    Transpose(np, dp, G, dp, GT, np);
    of_G.Set(G, dp);
    of_GT.Set(GT, np);
  }
  Sequence<const S> v;
  Sequence<S> dv;
  Pairs of_G, of_GT;
  T *G, *GT;
};

template <class Weights, class S, class T = ComputeType<S>>
HWY_NOINLINE void WriteGradients(const SlotShape& shape, const Segment& segment, int64_t head,
                                 const typename Weights::Source& source,
                                 std::span<const SlotWrittenGradients<S>> written,
                                 const double* z_after, const T* h, double* sums) {
  const auto n = static_cast<size_t>(shape.slots), width = static_cast<size_t>(shape.width);
  const size_t np = Padded<T>(n), dp = Padded<T>(width);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(written.size() * WrittenHead<S>::Bytes(n, width) + Weights::Bytes(source, n) +
                      sizeof(T) * (3 * np + kBlockRows * (2 * np + 2 * dp)),
                  kMostWritten * WrittenHead<S>::kPieces + Weights::kPieces + 7);
  Weights weights(source, shape, segment, sums, workspace);
  std::vector<WrittenHead<S>> heads;
  for (const SlotWrittenGradients<S>& x : written)
    heads.emplace_back(x, segment, head, n, width, workspace);
  // z' as a sum of two numbers of type T; 0 where it is -inf, for log-weights of -inf.
  T* const hi = workspace.Take<T>(np);
  T* const lo = workspace.Take<T>(np);
  T* const h_row = workspace.Take<T>(np);
  T* const W = workspace.Take<T>(kBlockRows * np);
  T* const Y = workspace.Take<T>(kBlockRows * np);
  T* const V_panel = workspace.Take<T>(kBlockRows * dp);
  T* const D_panel = workspace.Take<T>(kBlockRows * dp);
  for (size_t l = 0; l < np; ++l) {
    const double reference = l < n && z_after[l] != kEmpty ? z_after[l] : 0;
    hi[l] = static_cast<T>(reference);
    lo[l] = std::isfinite(reference) ? static_cast<T>(reference - static_cast<double>(hi[l])) : 0;
    h_row[l] = l < n ? h[l] : T{0};
  }
  for (size_t t = segment.begin, rows; t < segment.end; t += rows) {
    rows = std::min(kBlockRows, segment.end - t);
    const size_t next = t + rows, end = std::min(next + kBlockRows, segment.end);
    RowsAhead::OfThisThread().Clear();
    weights.Note(next, end);
    for (const WrittenHead<S>& x : heads) NoteRows(x.v, next, end, width);
    Exponentials<T>(weights.At(t, rows, W), rows, np, hi, lo, W, nullptr);
    bool first = true;
    for (WrittenHead<S>& x : heads) {
      if (!x.of_G.TimesTo(rows, PanelRows<T>{W, np}, x.dv, t, D_panel)) {
        const RowsOut<S> D(x.dv, t, rows, width, D_panel);
        Product<T>(rows, width, {W, np, 1, x.G, dp, n}, D.data, D.ld);
        D.Finish();
      }
      const TokenRows<S> v = {x.v, t};
      if (!(first ? x.of_GT.template Times<false>(rows, v, Y, np)
                  : x.of_GT.template Times<true>(rows, v, Y, np))) {
        const Factors<T> products = {AsPanel(v, rows, width, V_panel), dp, 1, x.GT, np, width};
        first ? Product<T>(rows, n, products, Y, np) : AddProduct<T>(rows, n, products, Y, np);
      }
      first = false;
    }
    weights.Gradients(t, rows, W, Y, h_row);
    weights.CloseIfFull();
  }
  weights.Close();
  weights.ZeroGradients(segment.end, segment.padded);
  for (const WrittenHead<S>& x : heads) ZeroRows(segment.end, segment.padded, width, x.dv);
}

template <class Weights, class S, class T = ComputeType<S>>
void WriteBackwardAll(const SlotShape& shape, const typename Weights::Source& source,
                      std::span<const SlotWrittenGradients<S>> written, const int64_t* lengths,
                      const double* z_after, const T* h) {
  const SegmentList list(shape);
  const auto n = static_cast<size_t>(shape.slots);
  const size_t size = Weights::Sums(source, n);
  std::vector<double> sums(static_cast<size_t>(list.heads) * list.count * size);
  list.For([&](int64_t head, size_t part, size_t index) {
    const Segment segment(shape, lengths, head, part);
    WriteGradients<Weights, S>(shape, segment, head, source, written, z_after + head * shape.slots,
                               h + head * shape.slots, sums.data() + index * size);
  });
  for (size_t head = 0; head < static_cast<size_t>(list.heads); ++head)
    Weights::TakeSums(source, head, n, list.count, sums.data() + head * list.count * size, size);
}

#define CISTERN_SLOT_WRITE(T, Name)                                                                \
  void SlotWrite##Name(const SlotShape& shape, Rows<const T> s,                                    \
                       std::span<const SlotWritten<T>> written, const int64_t* lengths,            \
                       double* z) {                                                                \
    WriteAll<GivenWeights<T>, T>(shape, {s, {}}, written, lengths, z);                             \
  }                                                                                                \
  void SlotWriteBackward##Name(                                                                    \
      const SlotShape& shape, Rows<const T> s, std::span<const SlotWrittenGradients<T>> written,   \
      const int64_t* lengths, const double* z_after, const ComputeType<T>* h, Rows<T> ds) {        \
    WriteBackwardAll<GivenWeights<T>, T>(shape, {s, ds}, written, lengths, z_after, h);            \
  }                                                                                                \
  void FavorWrite##Name(const SlotShape& shape, const FavorMap<ComputeType<T>>& map,               \
                        Rows<const T> k, Rows<const T> v, const int64_t* lengths, double* memory,  \
                        double* z) {                                                               \
    const SlotWritten<T> written[] = {{v, memory}};                                                \
    WriteAll<FavorWeights<T>, T>(shape, {map, k, {}}, written, lengths, z);                        \
  }                                                                                                \
  void FavorWriteBackward##Name(const SlotShape& shape, const FavorMap<ComputeType<T>>& map,       \
                                Rows<const T> k, const SlotWrittenGradients<T>& v,                 \
                                const int64_t* lengths, const double* z_after,                     \
                                const ComputeType<T>* h, Rows<T> dk) {                             \
    WriteBackwardAll<FavorWeights<T>, T>(shape, {map, k, dk}, {&v, 1}, lengths, z_after, h);       \
  }                                                                                                \
  void SlotPack##Name(const SlotShape& shape, const SlotVectors& queries, Rows<const T> k,         \
                      Rows<const T> v, const int64_t* lengths, double* memory, double* z) {        \
    const SlotWritten<T> written[] = {{v, memory}};                                                \
    WriteAll<QueryWeights<T>, T>(shape, {queries, k, {}, nullptr}, written, lengths, z);           \
  }                                                                                                \
  void SlotPackBackward##Name(const SlotShape& shape, const SlotVectors& queries, Rows<const T> k, \
                              const SlotWrittenGradients<T>& v, const int64_t* lengths,            \
                              const double* z_after, const ComputeType<T>* h, Rows<T> dk,          \
                              double* d_queries) {                                                 \
    WriteBackwardAll<QueryWeights<T>, T>(shape, {queries, k, dk, d_queries}, {&v, 1}, lengths,     \
                                         z_after, h);                                              \
  }
CISTERN_SLOT_WRITE(float, Float)
CISTERN_SLOT_WRITE(double, Double)
CISTERN_SLOT_WRITE(BFloat16, BFloat16)
#undef CISTERN_SLOT_WRITE

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(SlotWriteFloat);
HWY_EXPORT(SlotWriteDouble);
HWY_EXPORT(SlotWriteBFloat16);
HWY_EXPORT(SlotWriteBackwardFloat);
HWY_EXPORT(SlotWriteBackwardDouble);
HWY_EXPORT(SlotWriteBackwardBFloat16);
HWY_EXPORT(FavorWriteFloat);
HWY_EXPORT(FavorWriteDouble);
HWY_EXPORT(FavorWriteBFloat16);
HWY_EXPORT(FavorWriteBackwardFloat);
HWY_EXPORT(FavorWriteBackwardDouble);
HWY_EXPORT(FavorWriteBackwardBFloat16);
HWY_EXPORT(SlotPackFloat);
HWY_EXPORT(SlotPackDouble);
HWY_EXPORT(SlotPackBFloat16);
HWY_EXPORT(SlotPackBackwardFloat);
HWY_EXPORT(SlotPackBackwardDouble);
HWY_EXPORT(SlotPackBackwardBFloat16);

#define CISTERN_SLOT_WRITE(T, Name)                                                                \
  template <>                                                                                      \
  void SlotWrite(const SlotShape& shape, Rows<const T> s, std::span<const SlotWritten<T>> written, \
                 const int64_t* lengths, double* z) {                                              \
    CISTERN_DISPATCH(SlotWrite##Name)(shape, s, written, lengths, z);                              \
  }                                                                                                \
  template <>                                                                                      \
  void SlotWriteBackward(const SlotShape& shape, Rows<const T> s,                                  \
                         std::span<const SlotWrittenGradients<T>> written, const int64_t* lengths, \
                         const double* z_after, const ComputeType<T>* h, Rows<T> ds) {             \
    CISTERN_DISPATCH(SlotWriteBackward##Name)(shape, s, written, lengths, z_after, h, ds);         \
  }                                                                                                \
  template <>                                                                                      \
  void FavorWrite(const SlotShape& shape, const FavorMap<ComputeType<T>>& map, Rows<const T> k,    \
                  Rows<const T> v, const int64_t* lengths, double* memory, double* z) {            \
    CISTERN_DISPATCH(FavorWrite##Name)(shape, map, k, v, lengths, memory, z);                      \
  }                                                                                                \
  template <>                                                                                      \
  void FavorWriteBackward(const SlotShape& shape, const FavorMap<ComputeType<T>>& map,             \
                          Rows<const T> k, const SlotWrittenGradients<T>& v,                       \
                          const int64_t* lengths, const double* z_after, const ComputeType<T>* h,  \
                          Rows<T> dk) {                                                            \
    CISTERN_DISPATCH(FavorWriteBackward##Name)(shape, map, k, v, lengths, z_after, h, dk);         \
  }                                                                                                \
  template <>                                                                                      \
  void SlotPack(const SlotShape& shape, const SlotVectors& queries, Rows<const T> k,               \
                Rows<const T> v, const int64_t* lengths, double* memory, double* z) {              \
    CISTERN_DISPATCH(SlotPack##Name)(shape, queries, k, v, lengths, memory, z);                    \
  }                                                                                                \
  template <>                                                                                      \
  void SlotPackBackward(const SlotShape& shape, const SlotVectors& queries, Rows<const T> k,       \
                        const SlotWrittenGradients<T>& v, const int64_t* lengths,                  \
                        const double* z_after, const ComputeType<T>* h, Rows<T> dk,                \
                        double* d_queries) {                                                       \
    CISTERN_DISPATCH(SlotPackBackward##Name)                                                       \
    (shape, queries, k, v, lengths, z_after, h, dk, d_queries);                                    \
  }
CISTERN_SLOT_WRITE(float, Float)
CISTERN_SLOT_WRITE(double, Double)
CISTERN_SLOT_WRITE(BFloat16, BFloat16)
#undef CISTERN_SLOT_WRITE

}  // namespace cistern
#endif  // HWY_ONCE
