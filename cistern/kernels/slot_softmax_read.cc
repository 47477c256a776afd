#include <algorithm>
#include <limits>
#include <vector>

#include "cistern/kernels/dispatch.h"
#include "cistern/kernels/favor_attention.h"
#include "cistern/kernels/slot_bidirectional.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/slot_softmax_read.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/favor_tokens-inl.h"
#include "cistern/kernels/slot_products-inl.h"
#include "cistern/kernels/slot_softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// P [rows, np] = softmax of the logits of rows t.., and dx = P (dP - sum_l P dP) from D = dP. Where
// logits depend on more than tokens, gradients of that are Sums() doubles of a segment, and
// TakeSums() adds those of a head's parts, which lie `step` apart.
//
// Logits that are given.
template <class S>
class GivenLogits {
 public:
  using T = ComputeType<S>;
  struct Source {
    Rows<const S> x;
    Rows<S> dx;  // of the backward
  };
  static size_t Bytes(const Source&, size_t, size_t) { return 0; }
  static constexpr size_t kPieces = 0;
  static size_t Sums(const Source&, size_t, size_t) { return 0; }
  static void TakeSums(const Source&, size_t, size_t, size_t, size_t, const double*, size_t) {}

  GivenLogits(const SlotShape& shape, const Source& source, const Segment& segment, double*,
              Workspace&)
      : x_(source.x, segment.b, segment.h),
        dx_(source.dx, segment.b, segment.h),
        n_(static_cast<size_t>(shape.slots)) {}
  void Softmax(size_t t, size_t rows, T* P) { SoftmaxOfTokens(x_, t, rows, n_, nullptr, P); }
  void Note(size_t t, size_t end) { NoteRows(x_, t, end, n_); }
  HWY_NOINLINE void Gradients(size_t t, size_t rows, const T* P, T* D) {
    const Tag<T> d;
    const size_t np = Padded<T>(n_);
    for (size_t i = 0; i < rows; ++i) {
      const T* const p = P + i * np;
      const T* const dr = D + i * np;
      const Vec<T> dot = RowDot(np, p, dr);
      for (size_t l = 0; l < n_; l += kLanes<T>)
        StorePart(hn::Mul(hn::Load(d, p + l), hn::Sub(hn::Load(d, dr + l), dot)), l, n_,
                  dx_.At(t + i));
    }
  }
  void Close() {}
  void CloseIfFull() {}

 private:
  const Sequence<const S> x_;
  const Sequence<S> dx_;
  const size_t n_;
};

// Logits scale q . K, of the slots that hold something.
template <class S>
class LogitsOfKeys {
 public:
  using T = ComputeType<S>;
  struct Source {
    Rows<const S> q;
    SlotKeys keys;
    Rows<S> dq;
    double* d_keys;
  };
  static size_t Bytes(const Source&, size_t n, size_t width) {
    return SlotProducts<S>::Bytes(n, width) + 2 * Padded<T>(n) * sizeof(T);
  }
  static constexpr size_t kPieces = SlotProducts<S>::kPieces + 2;
  static size_t Sums(const Source&, size_t n, size_t width) {
    return SlotProducts<S>::Sums(n, width);
  }
  static void TakeSums(const Source& source, size_t head, size_t n, size_t width, size_t parts,
                       const double* sums, size_t step) {
    AddParts<T>(n, width, parts, sums, step, source.keys.scale, source.d_keys + head * n * width);
  }

  // sums: as for SlotProducts.
  LogitsOfKeys(const SlotShape& shape, const Source& source, const Segment& segment, double* sums,
               Workspace& workspace)
      : n_(static_cast<size_t>(shape.slots)),
        np_(Padded<T>(n_)),
        products_({source.keys.scale, source.keys.keys, shape.width}, segment, shape, source.q,
                  source.dq, sums, workspace) {
    open_ = workspace.Take<T>(np_);
    closed_ = workspace.Take<T>(np_);
    const auto head = static_cast<size_t>(segment.b * shape.heads + segment.h);
    const double* const z = source.keys.z == nullptr ? nullptr : source.keys.z + head * n_;
    for (size_t l = 0; l < np_; ++l) {
      const bool empty = l < n_ && z != nullptr && z[l] == kEmpty;
      open_[l] = l < n_ && !empty ? T{1} : T{0};
      // Lower than all, where others take part; a softmax of nothing else is uniform.
      closed_[l] = empty ? std::numeric_limits<T>::lowest() : kMinusInfinity<T>;
      all_open_ = all_open_ && open_[l] != 0;
    }
  }

  HWY_NOINLINE void Softmax(size_t t, size_t rows, T* P) {
    const Tag<T> d;
    products_.Form(t, rows, P);
    if (!all_open_) {
      for (size_t i = 0; i < rows; ++i) {
        for (size_t l = 0; l < np_; l += kLanes<T>) {
          const auto open = hn::Ne(hn::Load(d, open_ + l), hn::Zero(d));
          T* const x = P + i * np_ + l;
          hn::Store(hn::IfThenElse(open, hn::Load(d, x), hn::Load(d, closed_ + l)), d, x);
        }
      }
    }
    SoftmaxRows(rows, np_, P, P);
  }
  void Note(size_t t, size_t end) { products_.Note(t, end); }
  // After Softmax of the same rows.
  HWY_NOINLINE void Gradients(size_t t, size_t rows, const T* P, T* D) {
    const Tag<T> d;
    for (size_t i = 0; i < rows; ++i) {
      const T* const p = P + i * np_;
      T* const dr = D + i * np_;
      const Vec<T> dot = RowDot(np_, p, dr);
      for (size_t l = 0; l < np_; l += kLanes<T>) {
        const Vec<T> dx = hn::Mul(hn::Load(d, p + l), hn::Sub(hn::Load(d, dr + l), dot));
        const auto closed = hn::Eq(hn::Load(d, open_ + l), hn::Zero(d));
        hn::Store(hn::IfThenZeroElse(closed, dx), d, dr + l);
      }
    }
    products_.Gradients(t, rows, D);
  }
  void Close() { products_.Close(); }
  void CloseIfFull() { products_.CloseIfFull(); }

 private:
  const size_t n_, np_;
  SlotProducts<S> products_;
  T *open_, *closed_;
  bool all_open_ = true;
};

// Those of FAVOR+: the logarithms of features of queries, and z.
template <class S>
class FavorLogits {
 public:
  using T = ComputeType<S>;
  struct Source {
    const FavorMap<T>& map;
    Rows<const S> q;
    const double* z;
    Rows<S> dq;
    double* d_z;
  };
  using Reader = typename FavorTokens<S>::Reader;
  static size_t Bytes(const Source& source, size_t n, size_t) {
    return Reader::Bytes(source.map, n) + 2 * sizeof(T) * Padded<T>(n);
  }
  static constexpr size_t kPieces = Reader::kPieces + 2;
  static size_t Sums(const Source&, size_t n, size_t) { return Padded<T>(n); }
  static void TakeSums(const Source& source, size_t head, size_t n, size_t, size_t parts,
                       const double* sums, size_t step) {
    AddParts<T>(1, n, parts, sums, step, 1, source.d_z + head * n);
  }

  FavorLogits(const SlotShape& shape, const Source& source, const Segment& segment, double* sums,
              Workspace& workspace)
      : tokens_(FavorTokens<S>::OfQueries(source.map, {source.q, segment.b, segment.h},
                                          {source.dq, segment.b, segment.h})),
        reader_(tokens_, static_cast<size_t>(shape.slots), workspace),
        n_(static_cast<size_t>(shape.slots)),
        np_(Padded<T>(n_)),
        sums_(sums),
        z_(workspace.Take<T>(np_)),
        d_z_(workspace.Take<T>(np_)) {
    // Counted from the largest, z loses nothing of weight.
    const double* const z = source.z + (segment.b * shape.heads + segment.h) * shape.slots;
    double most = kEmpty;
    for (size_t l = 0; l < n_; ++l) most = std::max(most, z[l]);
    for (size_t l = 0; l < np_; ++l) {
      z_[l] = l >= n_ ? kMinusInfinity<T> : most == kEmpty ? T{0} : static_cast<T>(z[l] - most);
    }
  }

  HWY_NOINLINE void Softmax(size_t t, size_t rows, T* P) {
    const Tag<T> d;
    for (size_t i = 0; i < rows; ++i) {
      if (i % kChunkRows == 0) x_ = reader_.Queries(t + i, std::min(kChunkRows, rows - i)).At(0);
      const T* const x = x_ + i % kChunkRows * np_;
      for (size_t l = 0; l < np_; l += kLanes<T>)
        hn::Store(hn::Add(hn::Load(d, x + l), hn::Load(d, z_ + l)), d, P + i * np_ + l);
    }
    FillPadding(rows, n_, np_, kMinusInfinity<T>, P);  // where x holds anything
    SoftmaxRows(rows, np_, P, P);
  }
  void Note(size_t t, size_t end) { reader_.NoteQueries(t, end); }
  HWY_NOINLINE void Gradients(size_t t, size_t rows, const T* P, T* D) {
    const Tag<T> d;
    std::fill(d_z_, d_z_ + np_, T{0});
    for (size_t i = 0; i < rows; ++i) {
      const T* const p = P + i * np_;
      T* const dr = D + i * np_;
      const Vec<T> dot = RowDot(np_, p, dr);
      for (size_t l = 0; l < np_; l += kLanes<T>) {
        const Vec<T> dx = hn::Mul(hn::Load(d, p + l), hn::Sub(hn::Load(d, dr + l), dot));
        hn::Store(dx, d, dr + l);
        hn::Store(hn::Add(hn::Load(d, d_z_ + l), dx), d, d_z_ + l);
      }
    }
    AddToDouble(np_, d_z_, sums_);
    for (size_t done = 0; done < rows; done += kChunkRows)
      reader_.PutQueries(D + done * np_, np_, t + done, std::min(kChunkRows, rows - done));
  }
  void Close() {}
  void CloseIfFull() {}

 private:
  const FavorTokens<S> tokens_;
  Reader reader_;
  const size_t n_, np_;
  double* const sums_;  // [np] of a segment's gradients of z
  T *z_, *d_z_;
  const T* x_ = nullptr;
};

template <class S, class Logits>
HWY_NOINLINE void ReadRows(const SlotShape& shape, const Segment& segment,
                           const typename Logits::Source& source, const double* memory,
                           const Sequence<S>& out) {
  using T = ComputeType<S>;
  const auto n = static_cast<size_t>(shape.slots), width = static_cast<size_t>(shape.width);
  const size_t np = Padded<T>(n), dp = Padded<T>(width);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(Logits::Bytes(source, n, width) + PanelPairsFor<S>::Bytes(kBlockRows, n, width) +
                      sizeof(T) * (np * dp + kBlockRows * (np + dp)),
                  Logits::kPieces + PanelPairsFor<S>::kPieces + 3);
  Logits logits(shape, source, segment, nullptr, workspace);
  PanelPairsFor<S> of_M(kBlockRows, n, width, workspace);
  T* const M = workspace.Take<T>(np * dp);
  T* const P = workspace.Take<T>(kBlockRows * np);
  T* const O_panel = workspace.Take<T>(kBlockRows * dp);
  PackMemory(memory, 1, n, width, M);
  of_M.Set(M, dp);
  for (size_t t = segment.begin, rows; t < segment.end; t += rows) {
    rows = std::min(kBlockRows, segment.end - t);
    RowsAhead::OfThisThread().Clear();
    logits.Note(t + rows, std::min(t + rows + kBlockRows, segment.end));
    logits.Softmax(t, rows, P);
    if (of_M.TimesTo(rows, PanelRows<T>{P, np}, out, t, O_panel)) continue;
    const RowsOut<S> O(out, t, rows, width, O_panel);
    Product<T>(rows, width, {P, np, 1, M, dp, n}, O.data, O.ld);
    O.Finish();
  }
}

template <class S, class Logits>
void ReadAll(const SlotShape& shape, const typename Logits::Source& source, const double* memory,
             const Rows<S>& out) {
  const SegmentList list(shape);
  list.For([&](int64_t head, size_t part, size_t) {
    const Segment segment(shape, nullptr, head, part);
    ReadRows<S, Logits>(shape, segment, source, memory + head * shape.slots * shape.width,
                        {out, segment.b, segment.h});
  });
}

// The gradients of a segment's logits; sums [np, dp] of softmax (x) g over it, then those of
// its keys.
template <class S, class Logits>
HWY_NOINLINE void ReadGradients(const SlotShape& shape, const Segment& segment,
                                const typename Logits::Source& source, const Sequence<const S>& g,
                                const double* memory, double* sums) {
  using T = ComputeType<S>;
  const auto n = static_cast<size_t>(shape.slots), width = static_cast<size_t>(shape.width);
  const size_t np = Padded<T>(n), dp = Padded<T>(width);
  Workspace& workspace = Workspace::OfThisThread();
  using Pairs = PanelPairsFor<S>;
  workspace.Start(Logits::Bytes(source, n, width) + SpanProduct<S>::Bytes(n, width) +
                      Pairs::Bytes(kBlockRows, width, n) +
                      sizeof(T) * (2 * np * dp + kBlockRows * (2 * np + dp)),
                  Logits::kPieces + SpanProduct<S>::kPieces + Pairs::kPieces + 5);
  Logits logits(shape, source, segment, sums + np * dp, workspace);
  SpanProduct<S> product(n, width, sums, workspace);
  Pairs of_MT(kBlockRows, width, n, workspace);
  T* const M = workspace.Take<T>(np * dp);
  T* const MT = workspace.Take<T>(dp * np);
  T* const P = workspace.Take<T>(kBlockRows * np);
  T* const D = workspace.Take<T>(kBlockRows * np);
  T* const g_panel = workspace.Take<T>(kBlockRows * dp);
  PackMemory(memory, 1, n, width, M);
  Transpose(np, dp, M, dp, MT, np);
  of_MT.Set(MT, np);
  // Narrow vectors leave columns of the padding unwritten.
  std::memset(D, 0, kBlockRows * np * sizeof(T));
  for (size_t t = segment.begin, rows; t < segment.end; t += rows) {
    rows = std::min(kBlockRows, segment.end - t);
    const size_t next = t + rows, end = std::min(next + kBlockRows, segment.end);
    RowsAhead::OfThisThread().Clear();
    logits.Note(next, end);
    NoteRows(g, next, end, width);
    logits.Softmax(t, rows, P);
    const TokenRows<S> of_g = {g, t};
    if (of_MT.template Times<false>(rows, of_g, D, np)) {
      product.Add(rows, P, of_g, g_panel);
    } else {
      const T* const G = AsPanel(of_g, rows, width, g_panel);
      Product<T>(rows, n, {G, dp, 1, MT, np, width}, D, np);
      product.Add(rows, P, PanelRows<T>{G, dp});
    }
    logits.Gradients(t, rows, P, D);
    logits.CloseIfFull();
    if (product.full()) product.Close();
  }
  logits.Close();
  product.Close();
}

template <class S, class Logits>
void ReadBackwardAll(const SlotShape& shape, const typename Logits::Source& source,
                     const double* memory, const Rows<const S>& g, double* d_memory) {
  using T = ComputeType<S>;
  const SegmentList list(shape);
  const auto n = static_cast<size_t>(shape.slots), width = static_cast<size_t>(shape.width);
  const size_t panel = Padded<T>(n) * Padded<T>(width),
               size = panel + Logits::Sums(source, n, width);
  std::vector<double> sums(static_cast<size_t>(list.heads) * list.count * size);
  list.For([&](int64_t head, size_t part, size_t index) {
    const Segment segment(shape, nullptr, head, part);
    ReadGradients<S, Logits>(shape, segment, source, {g, segment.b, segment.h},
                             memory + head * shape.slots * shape.width, sums.data() + index * size);
  });
  for (size_t head = 0; head < static_cast<size_t>(list.heads); ++head) {
    const double* const of = sums.data() + head * list.count * size;
    AddParts<T>(n, width, list.count, of, size, 1, d_memory + head * n * width);
    Logits::TakeSums(source, head, n, width, list.count, of + panel, size);
  }
}

#define CISTERN_SLOT_READ(T, Name)                                                               \
  void SlotSoftmaxRead##Name(const SlotShape& shape, Rows<const T> x, const double* memory,      \
                             Rows<T> out) {                                                      \
    ReadAll<T, GivenLogits<T>>(shape, {x, {}}, memory, out);                                     \
  }                                                                                              \
  void SlotSoftmaxReadBackward##Name(const SlotShape& shape, Rows<const T> x,                    \
                                     const double* memory, Rows<const T> d_out, Rows<T> dx,      \
                                     double* d_memory) {                                         \
    ReadBackwardAll<T, GivenLogits<T>>(shape, {x, dx}, memory, d_out, d_memory);                 \
  }                                                                                              \
  void SlotAttend##Name(const SlotShape& shape, Rows<const T> q, const SlotKeys& keys,           \
                        const double* memory, Rows<T> out) {                                     \
    ReadAll<T, LogitsOfKeys<T>>(shape, {q, keys, {}, nullptr}, memory, out);                     \
  }                                                                                              \
  void SlotAttendBackward##Name(const SlotShape& shape, Rows<const T> q, const SlotKeys& keys,   \
                                const double* memory, Rows<const T> d_out, Rows<T> dq,           \
                                double* d_keys, double* d_memory) {                              \
    ReadBackwardAll<T, LogitsOfKeys<T>>(shape, {q, keys, dq, d_keys}, memory, d_out, d_memory);  \
  }                                                                                              \
  void FavorRead##Name(const SlotShape& shape, const FavorMap<ComputeType<T>>& map,              \
                       Rows<const T> q, const double* memory, const double* z, Rows<T> out) {    \
    ReadAll<T, FavorLogits<T>>(shape, {map, q, z, {}, nullptr}, memory, out);                    \
  }                                                                                              \
  void FavorReadBackward##Name(const SlotShape& shape, const FavorMap<ComputeType<T>>& map,      \
                               Rows<const T> q, const double* memory, const double* z,           \
                               Rows<const T> d_out, Rows<T> dq, double* d_memory, double* d_z) { \
    ReadBackwardAll<T, FavorLogits<T>>(shape, {map, q, z, dq, d_z}, memory, d_out, d_memory);    \
  }
CISTERN_SLOT_READ(float, Float)
CISTERN_SLOT_READ(double, Double)
CISTERN_SLOT_READ(BFloat16, BFloat16)
#undef CISTERN_SLOT_READ

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(SlotSoftmaxReadFloat);
HWY_EXPORT(SlotSoftmaxReadDouble);
HWY_EXPORT(SlotSoftmaxReadBFloat16);
HWY_EXPORT(SlotSoftmaxReadBackwardFloat);
HWY_EXPORT(SlotSoftmaxReadBackwardDouble);
HWY_EXPORT(SlotSoftmaxReadBackwardBFloat16);
HWY_EXPORT(SlotAttendFloat);
HWY_EXPORT(SlotAttendDouble);
HWY_EXPORT(SlotAttendBFloat16);
HWY_EXPORT(SlotAttendBackwardFloat);
HWY_EXPORT(SlotAttendBackwardDouble);
HWY_EXPORT(SlotAttendBackwardBFloat16);
HWY_EXPORT(FavorReadFloat);
HWY_EXPORT(FavorReadDouble);
HWY_EXPORT(FavorReadBFloat16);
HWY_EXPORT(FavorReadBackwardFloat);
HWY_EXPORT(FavorReadBackwardDouble);
HWY_EXPORT(FavorReadBackwardBFloat16);

#define CISTERN_SLOT_READ(T, Name)                                                                 \
  template <>                                                                                      \
  void SlotSoftmaxRead(const SlotShape& shape, Rows<const T> x, const double* memory,              \
                       Rows<T> out) {                                                              \
    CISTERN_DISPATCH(SlotSoftmaxRead##Name)(shape, x, memory, out);                                \
  }                                                                                                \
  template <>                                                                                      \
  void SlotSoftmaxReadBackward(const SlotShape& shape, Rows<const T> x, const double* memory,      \
                               Rows<const T> d_out, Rows<T> dx, double* d_memory) {                \
    CISTERN_DISPATCH(SlotSoftmaxReadBackward##Name)(shape, x, memory, d_out, dx, d_memory);        \
  }                                                                                                \
  template <>                                                                                      \
  void SlotAttend(const SlotShape& shape, Rows<const T> q, const SlotKeys& keys,                   \
                  const double* memory, Rows<T> out) {                                             \
    CISTERN_DISPATCH(SlotAttend##Name)(shape, q, keys, memory, out);                               \
  }                                                                                                \
  template <>                                                                                      \
  void SlotAttendBackward(const SlotShape& shape, Rows<const T> q, const SlotKeys& keys,           \
                          const double* memory, Rows<const T> d_out, Rows<T> dq, double* d_keys,   \
                          double* d_memory) {                                                      \
    CISTERN_DISPATCH(SlotAttendBackward##Name)                                                     \
    (shape, q, keys, memory, d_out, dq, d_keys, d_memory);                                         \
  }                                                                                                \
  template <>                                                                                      \
  void FavorRead(const SlotShape& shape, const FavorMap<ComputeType<T>>& map, Rows<const T> q,     \
                 const double* memory, const double* z, Rows<T> out) {                             \
    CISTERN_DISPATCH(FavorRead##Name)(shape, map, q, memory, z, out);                              \
  }                                                                                                \
  template <>                                                                                      \
  void FavorReadBackward(const SlotShape& shape, const FavorMap<ComputeType<T>>& map,              \
                         Rows<const T> q, const double* memory, const double* z,                   \
                         Rows<const T> d_out, Rows<T> dq, double* d_memory, double* d_z) {         \
    CISTERN_DISPATCH(FavorReadBackward##Name)(shape, map, q, memory, z, d_out, dq, d_memory, d_z); \
  }
CISTERN_SLOT_READ(float, Float)
CISTERN_SLOT_READ(double, Double)
CISTERN_SLOT_READ(BFloat16, BFloat16)
#undef CISTERN_SLOT_READ

}  // namespace cistern
#endif  // HWY_ONCE
