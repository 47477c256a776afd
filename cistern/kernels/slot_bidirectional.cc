#include "cistern/kernels/slot_bidirectional.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/slot_bidirectional.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/segments-inl.h"
#include "cistern/kernels/slot_softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// References as a sum of two numbers of type T; 0 where there is none, so that log-weights of -inf
// have weight 0.
template <class T>
struct References {
  References(size_t n, const double* z, Workspace& workspace) {
    const size_t np = Padded<T>(n);
    hi = workspace.Take<T>(np);
    lo = workspace.Take<T>(np);
    for (size_t l = 0; l < np; ++l) {
      const double reference = l < n && z[l] != kEmpty ? z[l] : 0;
      hi[l] = static_cast<T>(reference);
      lo[l] = std::isfinite(reference) ? static_cast<T>(reference - static_cast<double>(hi[l])) : 0;
    }
  }
  static size_t Bytes(size_t n) { return 2 * Padded<T>(n) * sizeof(T); }
  static constexpr size_t kPieces = 2;
  T *hi, *lo;
};

// E = e^(s - reference) [rows, np] of rows t..; added to `sums` [np] where that is not null. Zeros
// in the padding, where s is -inf.
template <class T>
HWY_NOINLINE void WeightsOfRows(const References<T>& z, const Sequence<const T>& s, size_t t,
                                size_t rows, size_t n, T* E, T* sums) {
  const Tag<T> d;
  const size_t np = Padded<T>(n);
  const T* from = E;
  size_t ld = np;
  if (n == np) {
    from = s.At(t);
    ld = static_cast<size_t>(s.time);
  } else {
    PackRows(s, t, rows, n, np, kMinusInfinity<T>, E);
  }
  for (size_t l = 0; l < np; l += kLanes<T>) {
    const Vec<T> hi = hn::Load(d, z.hi + l), lo = hn::Load(d, z.lo + l);
    Vec<T> sum = hn::Zero(d);
    for (size_t i = 0; i < rows; ++i) {
      const Vec<T> e = WeightExp(hn::Sub(hn::Sub(hn::LoadU(d, from + i * ld + l), hi), lo));
      sum = hn::Add(sum, e);
      hn::Store(e, d, E + i * np + l);
    }
    if (sums != nullptr) hn::Store(hn::Add(hn::Load(d, sums + l), sum), d, sums + l);
  }
}

template <class T>
HWY_NOINLINE void HighestOfSegment(const Segment& segment, const Sequence<const T>& s, size_t n,
                                   T* highest) {
  const Tag<T> d;
  constexpr size_t kN = kLanes<T>;
  size_t l = 0;
  // Four vectors at once use whole lines of the cache.
  for (; l + 4 * kN <= n; l += 4 * kN) {
    Vec<T> m0 = hn::Set(d, kMinusInfinity<T>), m1 = m0, m2 = m0, m3 = m0;
    for (size_t t = segment.begin; t < segment.end; ++t) {
      const T* const from = s.At(t) + l;
      m0 = hn::Max(m0, hn::LoadU(d, from));
      m1 = hn::Max(m1, hn::LoadU(d, from + kN));
      m2 = hn::Max(m2, hn::LoadU(d, from + 2 * kN));
      m3 = hn::Max(m3, hn::LoadU(d, from + 3 * kN));
    }
    hn::StoreU(m0, d, highest + l);
    hn::StoreU(m1, d, highest + l + kN);
    hn::StoreU(m2, d, highest + l + 2 * kN);
    hn::StoreU(m3, d, highest + l + 3 * kN);
  }
  for (; l + kN <= n; l += kN) {
    Vec<T> most = hn::Set(d, kMinusInfinity<T>);
    for (size_t t = segment.begin; t < segment.end; ++t)
      most = hn::Max(most, hn::LoadU(d, s.At(t) + l));
    hn::StoreU(most, d, highest + l);
  }
  for (; l < n; ++l) {
    highest[l] = kMinusInfinity<T>;
    for (size_t t = segment.begin; t < segment.end; ++t)
      highest[l] = std::max(highest[l], s.At(t)[l]);
  }
}

// sums [np, dp] of e^(s - m) (x) v and totals [np] of e^(s - m), over a segment.
template <class T>
HWY_NOINLINE void SumsOfSegment(const Segment& segment, const Sequence<const T>& s,
                                const Sequence<const T>& v, size_t n, size_t width, const double* m,
                                double* sums, double* totals) {
  const size_t np = Padded<T>(n), dp = Padded<T>(width);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(References<T>::Bytes(n) + SpanProduct<T>::Bytes(n, width) +
                      sizeof(T) * (kBlockRows * (np + dp) + np),
                  References<T>::kPieces + SpanProduct<T>::kPieces + 3);
  const References<T> reference(n, m, workspace);
  SpanProduct<T> product(n, width, sums, workspace);
  T* const E = workspace.Take<T>(kBlockRows * np);
  T* const V_panel = workspace.Take<T>(kBlockRows * dp);
  T* const total = workspace.Take<T>(np);
  std::memset(total, 0, np * sizeof(T));
  const auto close = [&]() HWY_ATTR {
    product.Close();
    AddToDouble(np, total, totals);
    std::memset(total, 0, np * sizeof(T));
  };
  for (size_t t = segment.begin, rows; t < segment.end; t += rows) {
    rows = std::min(kBlockRows, segment.end - t);
    WeightsOfRows(reference, s, t, rows, n, E, total);
    product.Add(rows, E, PanelOf(v, t, rows, width, V_panel));
    if (product.full()) close();
  }
  close();
}

template <class T>
void WriteAll(const SlotShape& shape, const Rows<const T>& s, const Rows<const T>& v,
              const int64_t* lengths, double* memory, double* z) {
  const SegmentList list(shape);
  const auto n = static_cast<size_t>(shape.slots), width = static_cast<size_t>(shape.width);
  const size_t np = Padded<T>(n), dp = Padded<T>(width), size = np * dp;
  const auto heads = static_cast<size_t>(list.heads);
  std::vector<T> highest(heads * list.count * n);
  list.For([&](int64_t head, size_t part, size_t index) {
    const Segment segment(shape, lengths, head, part);
    HighestOfSegment(segment, Sequence<const T>(s, segment.b, segment.h), n,
                     highest.data() + index * n);
  });
  std::vector<double> reference(z, z + heads * n);
  for (size_t head = 0; head < heads; ++head) {
    for (size_t part = 0; part < list.count; ++part) {
      const T* const of = highest.data() + (head * list.count + part) * n;
      for (size_t l = 0; l < n; ++l)
        reference[head * n + l] = std::max(reference[head * n + l], static_cast<double>(of[l]));
    }
  }
  std::vector<double> sums(heads * list.count * (size + np));
  list.For([&](int64_t head, size_t part, size_t index) {
    const Segment segment(shape, lengths, head, part);
    double* const of = sums.data() + index * (size + np);
    SumsOfSegment(segment, Sequence<const T>(s, segment.b, segment.h),
                  Sequence<const T>(v, segment.b, segment.h), n, width,
                  reference.data() + static_cast<size_t>(head) * n, of, of + size);
  });
  ParallelFor(list.heads, list.grain, [&](int64_t begin, int64_t end) {
    for (auto head = static_cast<size_t>(begin); head < static_cast<size_t>(end); ++head) {
      double* const of = sums.data() + head * list.count * (size + np);
      for (size_t part = 1; part < list.count; ++part) {
        for (size_t i = 0; i < size + np; ++i) of[i] += of[part * (size + np) + i];
      }
      for (size_t l = 0; l < n; ++l) {
        const double m = reference[head * n + l];
        double* const row = memory + (head * n + l) * width;
        double* const z_of = z + head * n + l;
        if (m == kEmpty) {
          std::fill_n(row, width, 0.0);
          continue;
        }
        const double old = std::exp(*z_of - m), sum = old + (list.count == 0 ? 0.0 : of[size + l]),
                     share = 1 / sum;
        for (size_t j = 0; j < width; ++j) {
          // What an empty slot holds counts as zero, whatever it is.
          const double before = *z_of == kEmpty ? 0 : old * row[j];
          row[j] = (before + (list.count == 0 ? 0.0 : of[l * dp + j])) * share;
        }
        *z_of = m + std::log(sum);
      }
    }
  });
}

template <class T>
HWY_NOINLINE void WriteGradients(const Segment& segment, const Sequence<const T>& s,
                                 const Sequence<const T>& v, size_t n, size_t width,
                                 const double* z_after, const T* grad, const T* h,
                                 const Sequence<T>& ds, const Sequence<T>& dv) {
  const Tag<T> d;
  const size_t np = Padded<T>(n), dp = Padded<T>(width);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(
      References<T>::Bytes(n) + sizeof(T) * (2 * np * dp + np + kBlockRows * (2 * np + 2 * dp)),
      References<T>::kPieces + 7);
  const References<T> reference(n, z_after, workspace);
  T* const G = workspace.Take<T>(np * dp);
  T* const GT = workspace.Take<T>(dp * np);
  T* const h_row = workspace.Take<T>(np);
  T* const W = workspace.Take<T>(kBlockRows * np);
  T* const Y = workspace.Take<T>(kBlockRows * np);
  T* const V_panel = workspace.Take<T>(kBlockRows * dp);
  T* const D_panel = workspace.Take<T>(kBlockRows * dp);
  std::memset(G, 0, np * dp * sizeof(T));
  PackRows(Sequence<const T>(grad, width), 0, n, width, dp, T{0}, G);
  Transpose(np, dp, G, dp, GT, np);
  for (size_t l = 0; l < np; ++l) h_row[l] = l < n ? h[l] : T{0};
  for (size_t t = segment.begin, rows; t < segment.end; t += rows) {
    rows = std::min(kBlockRows, segment.end - t);
    WeightsOfRows<T>(reference, s, t, rows, n, W, nullptr);
    const RowsOut<T> D(dv, t, rows, width, D_panel);
    Product<T>(rows, width, {W, np, 1, G, dp, n}, D.data, D.ld);
    D.Finish();
    const T* const V = PanelOf(v, t, rows, width, V_panel);
    Product<T>(rows, n, {V, dp, 1, GT, np, width}, Y, np);
    for (size_t i = 0; i < rows; ++i) {
      T* const to = n == np ? ds.At(t + i) : Y + i * np;
      for (size_t l = 0; l < np; l += kLanes<T>) {
        const Vec<T> w = hn::Load(d, W + i * np + l),
                     y = hn::Sub(hn::Load(d, Y + i * np + l), hn::Load(d, h_row + l));
        hn::StoreU(hn::IfThenZeroElse(hn::Eq(w, hn::Zero(d)), hn::Mul(w, y)), d, to + l);
      }
    }
    if (n != np) UnpackRows(Y, t, rows, n, np, ds);
  }
  ZeroRows(segment.end, segment.padded, n, ds);
  ZeroRows(segment.end, segment.padded, width, dv);
}

template <class T>
void WriteBackwardAll(const SlotShape& shape, const Rows<const T>& s, const Rows<const T>& v,
                      const int64_t* lengths, const double* z_after, const T* G, const T* h,
                      const Rows<T>& ds, const Rows<T>& dv) {
  const SegmentList list(shape);
  list.For([&](int64_t head, size_t part, size_t) {
    const Segment segment(shape, lengths, head, part);
    const int64_t b = segment.b, y = segment.h;
    WriteGradients(segment, Sequence<const T>(s, b, y), Sequence<const T>(v, b, y),
                   static_cast<size_t>(shape.slots), static_cast<size_t>(shape.width),
                   z_after + head * shape.slots, G + head * shape.slots * shape.width,
                   h + head * shape.slots, Sequence<T>(ds, b, y), Sequence<T>(dv, b, y));
  });
}

// memory [n, width] as a panel of T [np, dp], zeros in the padding.
template <class T>
void PackMemory(const double* memory, size_t n, size_t width, T* panel) {
  const size_t dp = Padded<T>(width);
  std::memset(panel, 0, Padded<T>(n) * dp * sizeof(T));
  for (size_t l = 0; l < n; ++l) {
    for (size_t j = 0; j < width; ++j) panel[l * dp + j] = static_cast<T>(memory[l * width + j]);
  }
}

template <class T>
HWY_NOINLINE void ReadRows(const Segment& segment, const Sequence<const T>& x, size_t n,
                           size_t width, const double* memory, const Sequence<T>& out) {
  const size_t np = Padded<T>(n), dp = Padded<T>(width);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(sizeof(T) * (np * dp + kBlockRows * (np + dp)), 3);
  T* const M = workspace.Take<T>(np * dp);
  T* const P = workspace.Take<T>(kBlockRows * np);
  T* const O_panel = workspace.Take<T>(kBlockRows * dp);
  PackMemory(memory, n, width, M);
  for (size_t t = segment.begin, rows; t < segment.end; t += rows) {
    rows = std::min(kBlockRows, segment.end - t);
    SoftmaxOfTokens(x, t, rows, n, P);
    const RowsOut<T> O(out, t, rows, width, O_panel);
    Product<T>(rows, width, {P, np, 1, M, dp, n}, O.data, O.ld);
    O.Finish();
  }
}

template <class T>
void ReadAll(const SlotShape& shape, const Rows<const T>& x, const double* memory,
             const Rows<T>& out) {
  const SegmentList list(shape);
  list.For([&](int64_t head, size_t part, size_t) {
    const Segment segment(shape, nullptr, head, part);
    ReadRows(segment, Sequence<const T>(x, segment.b, segment.h), static_cast<size_t>(shape.slots),
             static_cast<size_t>(shape.width), memory + head * shape.slots * shape.width,
             Sequence<T>(out, segment.b, segment.h));
  });
}

// dx of a segment; sums [np, dp] of softmax(x) (x) g over it.
template <class T>
HWY_NOINLINE void ReadGradients(const Segment& segment, const Sequence<const T>& x,
                                const Sequence<const T>& g, size_t n, size_t width,
                                const double* memory, const Sequence<T>& dx, double* sums) {
  const Tag<T> d;
  const size_t np = Padded<T>(n), dp = Padded<T>(width);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(
      SpanProduct<T>::Bytes(n, width) + sizeof(T) * (2 * np * dp + kBlockRows * (2 * np + dp)),
      SpanProduct<T>::kPieces + 5);
  SpanProduct<T> product(n, width, sums, workspace);
  T* const M = workspace.Take<T>(np * dp);
  T* const MT = workspace.Take<T>(dp * np);
  T* const P = workspace.Take<T>(kBlockRows * np);
  T* const D = workspace.Take<T>(kBlockRows * np);
  T* const g_panel = workspace.Take<T>(kBlockRows * dp);
  PackMemory(memory, n, width, M);
  Transpose(np, dp, M, dp, MT, np);
  // Narrow vectors leave columns of the padding unwritten.
  std::memset(D, 0, kBlockRows * np * sizeof(T));
  for (size_t t = segment.begin, rows; t < segment.end; t += rows) {
    rows = std::min(kBlockRows, segment.end - t);
    SoftmaxOfTokens(x, t, rows, n, P);
    const T* const G = PanelOf(g, t, rows, width, g_panel);
    Product<T>(rows, n, {G, dp, 1, MT, np, width}, D, np);
    product.Add(rows, P, G);
    for (size_t i = 0; i < rows; ++i) {
      const T* const p = P + i * np;
      T* const dr = D + i * np;
      T* const to = n == np ? dx.At(t + i) : dr;
      const Vec<T> dot = RowDot(np, p, dr);
      for (size_t l = 0; l < np; l += kLanes<T>)
        hn::StoreU(hn::Mul(hn::Load(d, p + l), hn::Sub(hn::Load(d, dr + l), dot)), d, to + l);
    }
    if (n != np) UnpackRows(D, t, rows, n, np, dx);
    if (product.full()) product.Close();
  }
  product.Close();
}

template <class T>
void ReadBackwardAll(const SlotShape& shape, const Rows<const T>& x, const double* memory,
                     const Rows<const T>& g, const Rows<T>& dx, double* d_memory) {
  const SegmentList list(shape);
  const auto n = static_cast<size_t>(shape.slots), width = static_cast<size_t>(shape.width);
  const size_t dp = Padded<T>(width), size = Padded<T>(n) * dp;
  std::vector<double> sums(static_cast<size_t>(list.heads) * list.count * size);
  list.For([&](int64_t head, size_t part, size_t index) {
    const Segment segment(shape, nullptr, head, part);
    const int64_t b = segment.b, y = segment.h;
    ReadGradients(segment, Sequence<const T>(x, b, y), Sequence<const T>(g, b, y), n, width,
                  memory + head * shape.slots * shape.width, Sequence<T>(dx, b, y),
                  sums.data() + index * size);
  });
  for (size_t head = 0; head < static_cast<size_t>(list.heads); ++head) {
    double* const to = d_memory + head * n * width;
    std::fill_n(to, n * width, 0.0);
    for (size_t part = 0; part < list.count; ++part) {
      const double* const of = sums.data() + (head * list.count + part) * size;
      for (size_t l = 0; l < n; ++l) {
        for (size_t j = 0; j < width; ++j) to[l * width + j] += of[l * dp + j];
      }
    }
  }
}

#define CISTERN_SLOT_BIDIRECTIONAL(T, Name)                                                 \
  void SlotWrite##Name(const SlotShape& shape, Rows<const T> s, Rows<const T> v,            \
                       const int64_t* lengths, double* memory, double* z) {                 \
    WriteAll<T>(shape, s, v, lengths, memory, z);                                           \
  }                                                                                         \
  void SlotWriteBackward##Name(const SlotShape& shape, Rows<const T> s, Rows<const T> v,    \
                               const int64_t* lengths, const double* z_after, const T* G,   \
                               const T* h, Rows<T> ds, Rows<T> dv) {                        \
    WriteBackwardAll<T>(shape, s, v, lengths, z_after, G, h, ds, dv);                       \
  }                                                                                         \
  void SlotSoftmaxRead##Name(const SlotShape& shape, Rows<const T> x, const double* memory, \
                             Rows<T> out) {                                                 \
    ReadAll<T>(shape, x, memory, out);                                                      \
  }                                                                                         \
  void SlotSoftmaxReadBackward##Name(const SlotShape& shape, Rows<const T> x,               \
                                     const double* memory, Rows<const T> d_out, Rows<T> dx, \
                                     double* d_memory) {                                    \
    ReadBackwardAll<T>(shape, x, memory, d_out, dx, d_memory);                              \
  }
CISTERN_SLOT_BIDIRECTIONAL(float, Float)
CISTERN_SLOT_BIDIRECTIONAL(double, Double)
#undef CISTERN_SLOT_BIDIRECTIONAL

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(SlotWriteFloat);
HWY_EXPORT(SlotWriteDouble);
HWY_EXPORT(SlotWriteBackwardFloat);
HWY_EXPORT(SlotWriteBackwardDouble);
HWY_EXPORT(SlotSoftmaxReadFloat);
HWY_EXPORT(SlotSoftmaxReadDouble);
HWY_EXPORT(SlotSoftmaxReadBackwardFloat);
HWY_EXPORT(SlotSoftmaxReadBackwardDouble);

#define CISTERN_SLOT_BIDIRECTIONAL(T, Name)                                                        \
  template <>                                                                                      \
  void SlotWrite(const SlotShape& shape, Rows<const T> s, Rows<const T> v, const int64_t* lengths, \
                 double* memory, double* z) {                                                      \
    CISTERN_DISPATCH(SlotWrite##Name)(shape, s, v, lengths, memory, z);                            \
  }                                                                                                \
  template <>                                                                                      \
  void SlotWriteBackward(const SlotShape& shape, Rows<const T> s, Rows<const T> v,                 \
                         const int64_t* lengths, const double* z_after, const T* G, const T* h,    \
                         Rows<T> ds, Rows<T> dv) {                                                 \
    CISTERN_DISPATCH(SlotWriteBackward##Name)(shape, s, v, lengths, z_after, G, h, ds, dv);        \
  }                                                                                                \
  template <>                                                                                      \
  void SlotSoftmaxRead(const SlotShape& shape, Rows<const T> x, const double* memory,              \
                       Rows<T> out) {                                                              \
    CISTERN_DISPATCH(SlotSoftmaxRead##Name)(shape, x, memory, out);                                \
  }                                                                                                \
  template <>                                                                                      \
  void SlotSoftmaxReadBackward(const SlotShape& shape, Rows<const T> x, const double* memory,      \
                               Rows<const T> d_out, Rows<T> dx, double* d_memory) {                \
    CISTERN_DISPATCH(SlotSoftmaxReadBackward##Name)(shape, x, memory, d_out, dx, d_memory);        \
  }
CISTERN_SLOT_BIDIRECTIONAL(float, Float)
CISTERN_SLOT_BIDIRECTIONAL(double, Double)
#undef CISTERN_SLOT_BIDIRECTIONAL

}  // namespace cistern
#endif  // HWY_ONCE
