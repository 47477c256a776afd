// Sums over all tokens of a head by segments that follow from the shape alone, so that threads
// share heads and results do not depend on their number; included once per Highway target.
#if defined(CISTERN_KERNELS_SEGMENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_SEGMENTS_INL_H_
#undef CISTERN_KERNELS_SEGMENTS_INL_H_
#else
#define CISTERN_KERNELS_SEGMENTS_INL_H_
#endif

#include <algorithm>

#include "cistern/base/parallel.h"
#include "cistern/kernels/token_products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

constexpr size_t kBidirectionalSegment = 2048, kBlockRows = 64;

// The segments of all heads' tokens.
struct SegmentList {
  explicit SegmentList(const SlotShape& shape)
      : heads(shape.batch * shape.heads),
        count((static_cast<size_t>(shape.length) + kBidirectionalSegment - 1) /
              kBidirectionalSegment),
        grain(std::max<int64_t>(1, HeadsPerThread(shape))) {}
  // body(head, segment, index), where segments of a head have indices one after another. A
  // segment's heads come one after another: where they lie side by side, they share pages of
  // memory.
  template <class Body>
  void For(Body&& body) const {
    ParallelFor(heads * static_cast<int64_t>(count), grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t head = i % heads;
        const auto segment = static_cast<size_t>(i / heads);
        body(head, segment, static_cast<size_t>(head) * count + segment);
      }
    });
  }
  int64_t heads;
  size_t count;
  int64_t grain;
};

// One segment of a head's tokens: [begin, end) are real, then padding up to `padded`.
struct Segment {
  Segment(const SlotShape& shape, const int64_t* lengths, int64_t head, size_t index)
      : b(head / shape.heads), h(head % shape.heads) {
    const auto length = static_cast<size_t>(shape.length),
               real = lengths == nullptr ? length : static_cast<size_t>(lengths[b]);
    begin = index * kBidirectionalSegment;
    padded = std::min(length, begin + kBidirectionalSegment);
    end = std::max(begin, std::min(padded, real));
  }
  int64_t b, h;
  size_t begin, end, padded;
};

// sums += panel.
template <class T>
HWY_NOINLINE void AddToDouble(size_t count, const T* panel, double* sums) {
  const Tag<double> d;
  for (size_t i = 0; i < count; i += kLanes<double>)
    hn::StoreU(hn::Add(hn::LoadU(d, sums + i), LoadAsDouble(panel + i)), d, sums + i);
}

// Rows as a panel, in `scratch` where they are none.
template <class T>
const T* AsPanel(const PanelRows<T>& rows, size_t, size_t, T*) {
  return rows.x;
}
template <class S, class T>
const T* AsPanel(const TokenRows<S>& rows, size_t count, size_t width, T* scratch) {
  return PanelOf(rows.x, rows.t, count, width, scratch);
}

// A panel [n, width] of sums A^T B over blocks of rows, in T for a span, then in double. S: of the
// tokens.
template <class S>
class SpanProduct {
  using T = ComputeType<S>;

 public:
  static size_t Bytes(size_t n, size_t width) {
    return Padded<T>(n) * Padded<T>(width) * sizeof(T) +
           OuterPairsFor<S>::Bytes(kBlockRows, n, width);
  }
  static constexpr size_t kPieces = 1 + OuterPairsFor<S>::kPieces;
  // sums [Padded(n) * Padded(width)], zeros.
  SpanProduct(size_t n, size_t width, double* sums, Workspace& workspace)
      : n_(n),
        width_(width),
        size_(Padded<T>(n) * Padded<T>(width)),
        sums_(sums),
        pairs_(kBlockRows, n, width, workspace) {
    panel_ = workspace.Take<T>(size_);
    std::memset(panel_, 0, size_ * sizeof(T));
  }
  // a [rows, Padded(n)]; b: a panel [rows, Padded(width)], or tokens, for which `scratch` is one.
  template <class B>
  void Add(size_t rows, const T* a, const B& b, T* scratch = nullptr) {
    const size_t np = Padded<T>(n_), dp = Padded<T>(width_);
    const bool first = rows_ == 0;
    rows_ += rows;
    if (pairs_.Take(rows, PanelRows<T>{a, np}, b) == rows) {
      first ? pairs_.template Multiply<false>(panel_, dp)
            : pairs_.template Multiply<true>(panel_, dp);
      return;
    }
    const Factors<T> x{a, 1, np, AsPanel(b, rows, width_, scratch), dp, rows};
    first ? Product<T>(n_, width_, x, panel_, dp) : AddProduct<T>(n_, width_, x, panel_, dp);
  }
  bool full() const { return rows_ >= kSpanRows; }
  void Close() {
    if (rows_ > 0) AddToDouble(size_, panel_, sums_);
    rows_ = 0;
  }

 private:
  const size_t n_, width_, size_;
  size_t rows_ = 0;
  T* panel_;
  double* sums_;
  OuterPairsFor<S> pairs_;
};

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
