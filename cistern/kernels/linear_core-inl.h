// What the forward and the backward of linear attention share: one head's part of a sequence, its
// chunks, divisors and sums; included once per Highway target.
#if defined(CISTERN_KERNELS_LINEAR_CORE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_LINEAR_CORE_INL_H_
#undef CISTERN_KERNELS_LINEAR_CORE_INL_H_
#else
#define CISTERN_KERNELS_LINEAR_CORE_INL_H_
#endif

#include <algorithm>
#include <vector>

#include "cistern/base/parallel.h"
#include "cistern/kernels/linear_features-inl.h"
#include "cistern/kernels/slot_core-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// A segment is the most that one thread has to take alone: what its spans add is summed apart from
// what came before it, so that the sums of segments may be formed at once.
constexpr size_t kSegmentRows = 1024;

template <class T>
HWY_INLINE T DivisorOf(DivisorRule rule, T value, T z) {
  switch (rule) {
    case DivisorRule::kPlus:
      return z + value;
    case DivisorRule::kAtLeast:
      return z < value ? value : z;
    case DivisorRule::kMagnitude:
      return std::abs(z) < value ? value : std::abs(z);
    case DivisorRule::kSignSafe:
      return std::abs(z) < value ? (z < 0 ? -value : value) : z;
    case DivisorRule::kNone:
      break;
  }
  return 1 / value;
}

// Its derivative by z.
template <class T>
HWY_INLINE T DivisorSlope(DivisorRule rule, T value, T z) {
  switch (rule) {
    case DivisorRule::kPlus:
      return 1;
    case DivisorRule::kAtLeast:
      return z >= value ? T{1} : T{0};
    case DivisorRule::kMagnitude:
      return std::abs(z) < value ? T{0} : z < 0 ? T{-1} : T{1};
    case DivisorRule::kSignSafe:
      return std::abs(z) < value ? T{0} : T{1};
    case DivisorRule::kNone:
      break;
  }
  return 0;
}

// sum_j x[j] y[j] over a padded row.
template <class T>
HWY_INLINE Vec<T> DotOf(size_t padded, const T* x, const T* y) {
  const Tag<T> d;
  Vec<T> sum = hn::Zero(d);
  for (size_t j = 0; j < padded; j += kLanes<T>)
    sum = hn::MulAdd(hn::Load(d, x + j), hn::LoadU(d, y + j), sum);
  return sum;
}

// X[i, .] += factor_i row, with factors of 1 where they are null.
template <class T>
void AddRow(size_t rows, size_t np, const T* factors, const T* row, T* X) {
  const Tag<T> d;
  for (size_t i = 0; i < rows; ++i, X += np) {
    const Vec<T> f = hn::Set(d, factors == nullptr ? T{1} : factors[i]);
    for (size_t j = 0; j < np; j += kLanes<T>)
      hn::Store(hn::MulAdd(f, hn::Load(d, row + j), hn::Load(d, X + j)), d, X + j);
  }
}

// A vector of sums as SpanMemory is a panel of them.
template <class T>
class SpanVector {
 public:
  static size_t Bytes(size_t padded) { return padded * (sizeof(double) + 2 * sizeof(T)); }
  static constexpr size_t kPieces = 3;
  SpanVector(size_t padded, Workspace& workspace) : size_(padded) {
    M = workspace.Take<double>(size_);
    past = workspace.Take<T>(size_);
    U_ = workspace.Take<T>(size_);
  }
  void Clear() {
    for (size_t i = 0; i < size_; ++i) M[i] = 0, past[i] = U_[i] = 0;
  }
  // What the rows of the coming chunk see of earlier ones, to `seen` [padded].
  void Seen(T* seen) const {
    const Tag<T> d;
    for (size_t i = 0; i < size_; i += kLanes<T>)
      hn::Store(hn::Add(hn::Load(d, past + i), hn::Load(d, U_ + i)), d, seen + i);
  }
  // U += sum_i factors[i] rows_i, or the sum of the rows where factors is null.
  HWY_NOINLINE void Write(size_t count, const T* rows, const T* factors) {
    const Tag<T> d;
    for (size_t l = 0; l < size_; l += kLanes<T>) {
      Vec<T> sum = hn::Zero(d);
      const T* from = rows + l;
      if (factors == nullptr) {
        for (size_t i = 0; i < count; ++i, from += size_) sum = hn::Add(sum, hn::LoadU(d, from));
      } else {
        for (size_t i = 0; i < count; ++i, from += size_)
          sum = hn::MulAdd(hn::Set(d, factors[i]), hn::LoadU(d, from), sum);
      }
      hn::Store(hn::Add(hn::Load(d, U_ + l), sum), d, U_ + l);
    }
  }
  void Sum(const double* base) {
    for (size_t i = 0; i < size_; ++i) {
      M[i] += static_cast<double>(U_[i]);
      past[i] = static_cast<T>(base[i] + M[i]);
      U_[i] = 0;
    }
  }

 private:
  const size_t size_;
  T* U_;

 public:
  double* M;
  T* past;
};

// The sums of one head, slots [np, dp] or, transposed, [dp, np]; and z, of slots [np]. Both are a
// base, what came before the segment, and what the segment's spans have added to it.
template <class T>
class LinearSums {
 public:
  static size_t Bytes(size_t np, size_t dp) {
    return SpanMemory<T>::Bytes(np, dp) + SpanVector<T>::Bytes(np) +
           (np * dp + np) * sizeof(double);
  }
  static constexpr size_t kPieces = SpanMemory<T>::kPieces + SpanVector<T>::kPieces + 2;
  LinearSums(bool transposed, size_t slots, size_t columns, Workspace& workspace)
      : S(transposed ? Padded<T>(columns) : Padded<T>(slots),
          transposed ? Padded<T>(slots) : Padded<T>(columns), workspace),
        z(Padded<T>(slots), workspace),
        n_(slots),
        width_(columns),
        np_(Padded<T>(slots)),
        size_(Padded<T>(slots) * Padded<T>(columns)),
        row_(transposed ? 1 : S.ld),
        column_(transposed ? S.ld : 1) {
    base_ = workspace.Take<double>(size_);
    base_z_ = workspace.Take<double>(np_);
  }

  void Clear() {
    S.Clear();
    z.Clear();
    std::memset(base_, 0, size_ * sizeof(double));
    std::memset(base_z_, 0, np_ * sizeof(double));
    rows_ = 0;
  }
  // The base from memory [n, stride]: with a last column for z where stride > width.
  void Load(const double* memory, size_t stride) {
    Clear();
    for (size_t l = 0; l < n_; ++l) {
      const double* const row = memory + l * stride;
      for (size_t j = 0; j < width_; ++j) {
        const size_t at = l * row_ + j * column_;
        base_[at] = row[j];
        S.past[at] = static_cast<T>(row[j]);
      }
      if (stride == width_) continue;
      base_z_[l] = row[width_];
      z.past[l] = static_cast<T>(row[width_]);
    }
  }
  // What was added to the base; or the base.
  void StoreAdded(double* memory, size_t stride) const { Store(S.M, z.M, memory, stride); }
  void StoreBase(double* memory, size_t stride) const { Store(base_, base_z_, memory, stride); }

  // After each chunk: ends the span where it is full.
  void Pass(size_t rows) {
    rows_ += rows;
    if (rows_ >= kSpanRows) Close();
  }
  void Close() {
    S.Sum(base_);
    z.Sum(base_z_);
    rows_ = 0;
  }
  // What was added joins the base.
  HWY_NOINLINE void EndSegment() {
    Close();
    for (size_t i = 0; i < size_; ++i) base_[i] += S.M[i], S.M[i] = 0;
    for (size_t i = 0; i < np_; ++i) base_z_[i] += z.M[i], z.M[i] = 0;
  }

  SpanMemory<T> S;
  SpanVector<T> z;

 private:
  void Store(const double* sums, const double* z_sums, double* memory, size_t stride) const {
    for (size_t l = 0; l < n_; ++l) {
      double* const row = memory + l * stride;
      for (size_t j = 0; j < width_; ++j) row[j] = sums[l * row_ + j * column_];
      if (stride > width_) row[width_] = z_sums[l];
    }
  }
  const size_t n_, width_, np_, size_, row_, column_;
  size_t rows_ = 0;
  double *base_, *base_z_;
};

// Segments [first, last) of one head's tokens.
template <class T>
struct LinearPart {
  LinearPart(const SlotShape& shape, const LinearRule& given, const FourierMap<T>* map,
             const RowMask& mask, int64_t index, size_t first, size_t last)
      : rule(given),
        fourier(map),
        n(static_cast<size_t>(shape.slots)),
        width(static_cast<size_t>(shape.width)),
        stride(static_cast<size_t>(given.Columns(shape.width))),
        b(index / shape.heads),
        h(index % shape.heads),
        tokens(shape, mask, b) {
    const size_t length = static_cast<size_t>(shape.length);
    begin = std::min(length, first * kSegmentRows);
    total = std::min(length, last * kSegmentRows) - begin;
    tokens.length = tokens.length <= begin ? 0 : std::min(total, tokens.length - begin);
    if (tokens.starts != nullptr) tokens.starts += begin;
  }
  template <class X>
  Sequence<X> Of(const Rows<X>& rows) const {
    Sequence<X> x(rows, b, h);
    if (x.data != nullptr) x.data = x.At(begin);
    return x;
  }
  // Rows t.. of a chunk: none but the first begins a document, and no segment ends inside.
  size_t RowsAt(size_t t) const {
    const size_t most = std::min({tokens.length - t, kChunkRows, kSegmentRows - t % kSegmentRows});
    size_t rows = 1;
    while (rows < most && !tokens.StartsAt(t + rows)) ++rows;
    return rows;
  }

  LinearRule rule;
  const FourierMap<T>* fourier;
  size_t n, width, stride;
  int64_t b, h;
  Tokens tokens;
  size_t begin, total;
};

// Which segments a thread takes at once: whole heads, or, where there are more threads than heads,
// runs of segments. The numbers do not depend on it.
struct LinearRuns {
  explicit LinearRuns(const SlotShape& shape)
      : heads(shape.batch * shape.heads),
        segments((static_cast<size_t>(shape.length) + kSegmentRows - 1) / kSegmentRows) {
    const auto threads = static_cast<size_t>(ThreadsHere()), all = static_cast<size_t>(heads);
    if (all == 0 || all >= threads) return;
    runs = std::max<size_t>(
        1, std::min((threads + all - 1) / all, static_cast<size_t>(shape.length) / kSegmentRows));
  }
  size_t Begin(size_t run) const { return segments * run / runs; }
  int64_t heads;
  size_t segments, runs = 1;
};

// What the sums over a segment's tokens of phi(k) (x) v, and of phi(k), add to the memory: from the
// last start of a document on. Whether there is one.
template <class S, class T = ComputeType<S>>
HWY_NOINLINE bool SumSegment(const LinearPart<T>& part, const Sequence<const S>& k,
                             const Sequence<const S>& v, double* memory) {
  const size_t n = part.n, width = part.width, np = Padded<T>(n), dp = Padded<T>(width);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(
      LinearSums<T>::Bytes(np, dp) + FeatureReader<S>::Bytes(part.fourier, n) +
          ChunkPairsFor<S>::Bytes(n, width) + sizeof(T) * kChunkRows * (np + dp),
      LinearSums<T>::kPieces + FeatureReader<S>::kPieces + ChunkPairsFor<S>::kPieces + 2);
  LinearSums<T> sums(false, n, width, workspace);
  FeatureReader<S> features(part.rule, part.fourier, part.h, n, workspace);
  ChunkPairsFor<S> pairs(n, width, workspace);
  T* const K_panel = workspace.Take<T>(kChunkRows * np);
  T* const V_panel = workspace.Take<T>(kChunkRows * dp);
  sums.Clear();
  size_t t = 0;
  bool starts = false;
  for (size_t i = part.tokens.length; i-- > 0 && !starts;) {
    if (part.tokens.StartsAt(i)) t = i, starts = true;
  }
  for (size_t rows; t < part.tokens.length; t += rows) {
    rows = part.RowsAt(t);
    const T* const K = features.Of(k, t, rows, K_panel);
    if (pairs.Take(rows, PanelRows<T>{K, np}, TokenRows<S>{v, t}) == rows) {
      pairs.Write(sums.S);
    } else {
      const T* const V = PanelOf(v, t, rows, width, V_panel);
      sums.S.Write(n, width, {K, 1, np, V, dp, rows});
    }
    sums.z.Write(rows, K, nullptr);
    sums.Pass(rows);
  }
  sums.Close();
  sums.StoreAdded(memory, part.stride);
  return starts;
}

// The memory [size] before each run: that of the sequence, and what `sum` says that the segments
// before the run add. sum(index, segment, added) returns whether the segment forgets what came
// before it. reverse: "before" is behind.
template <class Sum>
std::vector<double> MemoryOfRuns(const LinearRuns& runs, bool reverse, size_t size,
                                 const double* memory, Sum&& sum) {
  const size_t heads = static_cast<size_t>(runs.heads), last = runs.runs - 1;
  std::vector<double> of_runs(heads * runs.runs * size);
  const size_t first = reverse ? runs.Begin(1) : 0, count = runs.runs == 1 ? 0
                                                            : reverse      ? runs.segments - first
                                                                           : runs.Begin(last);
  std::vector<double> added(heads * count * size);
  std::vector<uint8_t> forgets(heads * count);
  ParallelFor(static_cast<int64_t>(heads * count), 1, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i)
      forgets[i] = sum(i / count, first + i % count, added.data() + i * size);
  });
  for (size_t h = 0; h < heads; ++h) {
    std::vector<double> now(memory + h * size, memory + (h + 1) * size);
    for (size_t step = 0; step < runs.runs; ++step) {
      const size_t run = reverse ? last - step : step;
      std::copy(now.begin(), now.end(),
                of_runs.begin() + static_cast<ptrdiff_t>((h * runs.runs + run) * size));
      if (step == last) break;
      const size_t from = runs.Begin(run), to = runs.Begin(run + 1);
      for (size_t k = 0; k < to - from; ++k) {
        const size_t i = h * count + (reverse ? to - 1 - k : from + k) - first;
        for (size_t j = 0; j < size; ++j)
          now[j] = (forgets[i] != 0 ? 0 : now[j]) + added[i * size + j];
      }
    }
  }
  return of_runs;
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
