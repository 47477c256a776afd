// Where the log-weights of a write of all tokens come from, and where their gradients go; included
// once per Highway target.
#if defined(CISTERN_KERNELS_SLOT_WRITE_WEIGHTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_SLOT_WRITE_WEIGHTS_INL_H_
#undef CISTERN_KERNELS_SLOT_WRITE_WEIGHTS_INL_H_
#else
#define CISTERN_KERNELS_SLOT_WRITE_WEIGHTS_INL_H_
#endif

#include "cistern/kernels/favor_tokens-inl.h"
#include "cistern/kernels/slot_products-inl.h"
#include "cistern/kernels/slot_softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Log-weights of rows as whole vectors, -inf in the padding: where they lie, or in a panel.
template <class T>
struct LogWeights {
  template <class S>
  LogWeights(const Sequence<const S>& s, size_t t, size_t rows, size_t n, T* panel)
      : from(panel), step(Padded<T>(n)) {
    if constexpr (std::is_same_v<S, T>) {
      if (n == step) {
        from = s.At(t);
        step = static_cast<size_t>(s.time);
        return;
      }
    }
    PackRows(s, t, rows, n, step, kMinusInfinity<T>, panel);
  }
  LogWeights(const T* panel, size_t padded) : from(panel), step(padded) {}
  const T* from;
  size_t step;  // of its rows
};

// One vector of w (y - h), 0 where w is.
template <class T>
HWY_INLINE Vec<T> WeightGradient(const T* w, const T* y, const T* h) {
  const Tag<T> d;
  const Vec<T> weight = hn::Load(d, w);
  return hn::IfThenZeroElse(hn::Eq(weight, hn::Zero(d)),
                            hn::Mul(weight, hn::Sub(hn::Load(d, y), hn::Load(d, h))));
}

// Y = that, of [rows, np].
template <class T>
HWY_INLINE void WeightGradients(size_t rows, size_t np, const T* W, T* Y, const T* h) {
  const Tag<T> d;
  for (size_t i = 0; i < rows; ++i, W += np, Y += np) {
    for (size_t l = 0; l < np; l += kLanes<T>)
      hn::Store(WeightGradient(W + l, Y + l, h + l), d, Y + l);
  }
}

// Where a write's log-weights come from, and where their gradients go; of one segment of a head.
// Where they depend on more than tokens, gradients of that are Sums() doubles of a segment, and
// TakeSums() adds those of a head's parts, which lie `step` apart.
//
// They lie in memory.
template <class S>
class GivenWeights {
 public:
  using T = ComputeType<S>;
  struct Source {
    Rows<const S> s;
    Rows<S> ds;  // of the backward
  };
  static size_t Bytes(const Source&, size_t) { return 0; }
  static constexpr size_t kPieces = 0;
  static size_t Sums(const Source&, size_t) { return 0; }
  static void TakeSums(const Source&, size_t, size_t, size_t, const double*, size_t) {}
  GivenWeights(const Source& source, const SlotShape& shape, const Segment& segment, double*,
               Workspace&)
      : s_(source.s, segment.b, segment.h),
        ds_(source.ds, segment.b, segment.h),
        n_(static_cast<size_t>(shape.slots)) {}

  void Note(size_t t, size_t end) const { NoteRows(s_, t, end, n_); }
  LogWeights<T> At(size_t t, size_t rows, T* panel) const { return {s_, t, rows, n_, panel}; }
  // ds = W (Y - h), 0 where W is, from W and Y [rows, np].
  HWY_NOINLINE void Gradients(size_t t, size_t rows, const T* W, T* Y, const T* h) const {
    const size_t np = Padded<T>(n_);
    for (size_t i = 0; i < rows; ++i) {
      for (size_t l = 0; l < n_; l += kLanes<T>)
        StorePart(WeightGradient(W + i * np + l, Y + i * np + l, h + l), l, n_, ds_.At(t + i));
    }
  }
  void ZeroGradients(size_t t, size_t end) const { ZeroRows(t, end, n_, ds_); }
  void Close() {}
  void CloseIfFull() {}

 private:
  const Sequence<const S> s_;
  const Sequence<S> ds_;
  const size_t n_;
};

// Logarithms of FAVOR+'s features of keys.
template <class S>
class FavorWeights {
 public:
  using T = ComputeType<S>;
  struct Source {
    const FavorMap<T>& map;
    Rows<const S> k;
    Rows<S> dk;
  };
  using Reader = typename FavorTokens<S>::Reader;
  static size_t Bytes(const Source& source, size_t n) { return Reader::Bytes(source.map, n); }
  static constexpr size_t kPieces = Reader::kPieces;
  static size_t Sums(const Source&, size_t) { return 0; }
  static void TakeSums(const Source&, size_t, size_t, size_t, const double*, size_t) {}
  FavorWeights(const Source& source, const SlotShape& shape, const Segment& segment, double*,
               Workspace& workspace)
      : tokens_(FavorTokens<S>::OfKeys(source.map, {source.k, segment.b, segment.h},
                                       {source.dk, segment.b, segment.h})),
        reader_(tokens_, static_cast<size_t>(shape.slots), workspace),
        n_(static_cast<size_t>(shape.slots)) {}

  void Note(size_t t, size_t end) const { reader_.NoteLogWeights(t, end); }
  LogWeights<T> At(size_t t, size_t rows, T*) {
    return LogWeights<T>(reader_.LogWeights(t, rows).At(0), Padded<T>(n_));
  }
  HWY_NOINLINE void Gradients(size_t t, size_t rows, const T* W, T* Y, const T* h) {
    const size_t np = Padded<T>(n_);
    WeightGradients(rows, np, W, Y, h);
    for (size_t done = 0; done < rows; done += kChunkRows)
      reader_.PutLogWeights(Y + done * np, t + done, std::min(kChunkRows, rows - done));
  }
  void ZeroGradients(size_t t, size_t end) const {
    ZeroRows(t, end, static_cast<size_t>(tokens_.map.width), tokens_.dk);
  }
  void Close() {}
  void CloseIfFull() {}

 private:
  const FavorTokens<S> tokens_;
  Reader reader_;
  const size_t n_;
};

// Products of keys with the slots' queries.
template <class S>
class QueryWeights {
 public:
  using T = ComputeType<S>;
  struct Source {
    SlotVectors queries;
    Rows<const S> k;
    Rows<S> dk;
    double* d_queries;
  };
  static size_t Bytes(const Source& source, size_t n) {
    return SlotProducts<S>::Bytes(n, Width(source));
  }
  static constexpr size_t kPieces = SlotProducts<S>::kPieces;
  static size_t Sums(const Source& source, size_t n) {
    return SlotProducts<S>::Sums(n, Width(source));
  }
  static void TakeSums(const Source& source, size_t head, size_t n, size_t parts,
                       const double* sums, size_t step) {
    AddParts<T>(n, Width(source), parts, sums, step, source.queries.scale,
                source.d_queries + head * n * Width(source));
  }
  QueryWeights(const Source& source, const SlotShape& shape, const Segment& segment, double* sums,
               Workspace& workspace)
      : np_(Padded<T>(static_cast<size_t>(shape.slots))),
        products_(source.queries, segment, shape, source.k, source.dk, sums, workspace) {}

  void Note(size_t t, size_t end) const { products_.Note(t, end); }
  LogWeights<T> At(size_t t, size_t rows, T* panel) {
    products_.Form(t, rows, panel);
    return LogWeights<T>(panel, np_);
  }
  // After At of the same rows.
  HWY_NOINLINE void Gradients(size_t t, size_t rows, const T* W, T* Y, const T* h) {
    WeightGradients(rows, np_, W, Y, h);
    products_.Gradients(t, rows, Y);
  }
  void ZeroGradients(size_t t, size_t end) const { products_.ZeroGradients(t, end); }
  void Close() { products_.Close(); }
  void CloseIfFull() { products_.CloseIfFull(); }

 private:
  static size_t Width(const Source& source) { return static_cast<size_t>(source.queries.width); }
  const size_t np_;
  SlotProducts<S> products_;
};

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
