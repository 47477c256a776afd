#include "cistern/kernels/dispatch.h"
#include "cistern/kernels/linear_attention.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/linear_attention_backward.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/linear_core-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// With y = N / D, D = divisor(z), the gradients of N and z are
//   n_t = g_t / D_t     e_t = -(n_t . y_t) D'(z_t)
// and each head goes twice over its tokens, forwards for
//   dphi(q)_t = S_t n_t + e_t z_t
// and in reverse, with R_t = R_{t+1} + phi(q_t) (x) n_t and r_t = r_{t+1} + e_t phi(q_t), for
//   dv_t = phi(k_t) R_t     dphi(k)_t = R_t v_t + r_t.
template <class S>
struct LinearTensors {
  using T = ComputeType<S>;
  Sequence<const S> q, k, v, out, g;
  Sequence<const T> z;
  Sequence<S> dq, dk, dv;
  T *inverse, *e;   // 1 / D and e of each token
  double* d_scale;  // of each segment, or null
  double* ScaleOf(size_t t, size_t channels) const {
    return d_scale == nullptr ? nullptr : d_scale + t / kSegmentRows * channels;
  }
};

template <class S, class T = ComputeType<S>>
HWY_NOINLINE void DivisorGradients(const LinearPart<T>& part, const LinearTensors<S>& x,
                                   size_t begin, size_t end) {
  const Tag<T> d;
  const T value = static_cast<T>(part.rule.value);
  const DivisorRule rule = part.rule.divisor;
  for (size_t t = begin; t < end; ++t) {
    if (rule == DivisorRule::kNone) {
      x.inverse[t] = value;
      x.e[t] = 0;
      continue;
    }
    Vec<T> sum = hn::Zero(d);
    for (size_t j = 0; j < part.width; j += kLanes<T>)
      sum =
          hn::MulAdd(LoadPart(x.g.At(t), j, part.width), LoadPart(x.out.At(t), j, part.width), sum);
    const T z = *x.z.At(t);
    x.inverse[t] = 1 / DivisorOf(rule, value, z);
    x.e[t] = -hn::GetLane(hn::SumOfLanes(d, sum)) * x.inverse[t] * DivisorSlope(rule, value, z);
  }
}

// n of rows t.. as a panel [count, dp].
template <class S, class T = ComputeType<S>>
HWY_NOINLINE void NumeratorGradients(const LinearPart<T>& part, const LinearTensors<S>& x, size_t t,
                                     size_t count, size_t dp, T* panel) {
  const Tag<T> d;
  for (size_t i = 0; i < count; ++i, panel += dp) {
    const S* const from = x.g.At(t + i);
    const Vec<T> f = hn::Set(d, x.inverse[t + i]);
    for (size_t j = 0; j < part.width; j += kLanes<T>)
      hn::Store(hn::Mul(f, LoadPart(from, j, part.width)), d, panel + j);
    for (size_t j = part.width; j < dp; ++j) panel[j] = 0;
  }
}

// B[i, .] += e_i for all entries that are used.
template <class T>
void AddToRows(size_t rows, const T* e, T* B) {
  const Tag<T> d;
  constexpr size_t kCp = kChunkPadded<T>;
  for (size_t i = 0; i < rows; ++i) {
    const Vec<T> x = hn::Set(d, e[i]);
    for (size_t j = i * kCp; j <= i * kCp + i; j += kLanes<T>)
      hn::Store(hn::Add(hn::Load(d, B + j), x), d, B + j);
  }
}

// Notes the rows of a coming chunk's tokens that both walks read (rows_ahead.h).
template <class S>
void NoteTokens(const LinearTensors<S>& x, size_t t, size_t end, size_t channels, size_t width) {
  RowsAhead::OfThisThread().Clear();
  for (const auto* y : {&x.k, &x.q}) NoteRows(*y, t, end, channels);
  for (const auto* y : {&x.v, &x.g}) NoteRows(*y, t, end, width);
}

// dq of a part's tokens; memory: before them.
template <class S, class T = ComputeType<S>>
HWY_NOINLINE void QueryGradients(const LinearPart<T>& part, const LinearTensors<S>& x,
                                 const double* memory) {
  const size_t n = part.n, width = part.width, np = Padded<T>(n), dp = Padded<T>(width);
  constexpr size_t kC = kChunkRows, kCp = kChunkPadded<T>;
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(
      LinearSums<T>::Bytes(np, dp) + FeatureReader<S>::Bytes(part.fourier, n) +
          ChunkPairsFor<S>::Bytes(width, n) +
          sizeof(T) * (kC * (2 * np + 2 * dp + kCp) + dp * kCp + np),
      LinearSums<T>::kPieces + FeatureReader<S>::kPieces + ChunkPairsFor<S>::kPieces + 7);
  LinearSums<T> sums(true, n, width, workspace);
  FeatureReader<S> features(part.rule, part.fourier, part.h, n, workspace);
  ChunkPairsFor<S> pairs(width, n, workspace);
  T* const K_panel = workspace.Take<T>(kC * np);
  T* const V_panel = workspace.Take<T>(kC * dp);
  T* const N = workspace.Take<T>(kC * dp);
  T* const X = workspace.Take<T>(kC * np);
  T* const B = workspace.Take<T>(kC * kCp);  // tril(n v^T + e)
  T* const VT = workspace.Take<T>(dp * kCp);
  T* const seen = workspace.Take<T>(np);
  const bool divides = part.stride > width;

  const Tokens& tokens = part.tokens;
  sums.Load(memory, part.stride);
  for (size_t t = 0, rows; t < tokens.length; t += rows) {
    if (t > 0 && t % kSegmentRows == 0) sums.EndSegment();
    if (tokens.StartsAt(t)) sums.Clear();
    rows = part.RowsAt(t);
    const size_t next = t + rows, end = std::min(tokens.length, next + kC);
    NoteTokens(x, next, end, features.width(), width);
    NoteRows(x.out, next, end, width);
    const T* const K = features.Of(x.k, t, rows, K_panel);
    DivisorGradients(part, x, t, t + rows);
    NumeratorGradients(part, x, t, rows, dp, N);
    const TokenRows<S> of_v = {x.v, t};
    const size_t paired = pairs.Take(rows, of_v, PanelRows<T>{K, np});
    const T* V = nullptr;
    if (paired < rows) {
      V = PanelOf(x.v, t, rows, width, V_panel);
      Transpose(rows, width, V, dp, VT, kCp);
      LowerProduct<T>(rows, {N, dp, 1, VT, kCp, width}, B, kCp);
      if (divides) AddToRows(rows, x.e + t, B);
      Product<Triangle::kLower, T>(rows, n, {N, dp, 1, sums.S.Seen(), np, width},
                                   {B, kCp, 1, K, np, rows}, X, np);
    }
    if (paired > 0) {
      pairs.Read(PanelRows<T>{N, dp}, of_v, sums.S, X, np, [&](T* triangle) {
        if (divides) AddToRows(paired, x.e + t, triangle);
      });
    }
    if (divides) {
      sums.z.Seen(seen);
      AddRow(rows, np, x.e + t, seen, X);
    }
    features.Back(X, nullptr, x.q, t, rows, x.dq, x.ScaleOf(t, features.width()));
    if (paired == rows) {
      pairs.Write(sums.S);
    } else {
      sums.S.Write(width, n, {V, 1, dp, K, np, rows});  // V^T K
    }
    sums.z.Write(rows, K, nullptr);
    sums.Pass(rows);
  }
  ZeroRows(tokens.length, part.total, features.width(), x.dq);
}

// Where the chunks of a part's tokens [begin, end) begin, and the end behind them.
template <class T>
void ChunksOf(const LinearPart<T>& part, size_t begin, size_t end, std::vector<size_t>& begins) {
  begins.clear();
  for (size_t t = begin; t < end; t += part.RowsAt(t)) begins.push_back(t);
  begins.push_back(end);
}

// dk and dv of a part's tokens. G: the gradient of the memory behind them, replaced by that of the
// memory before them.
template <class S, class T = ComputeType<S>>
HWY_NOINLINE void KeyGradients(const LinearPart<T>& part, const LinearTensors<S>& x, double* G) {
  const size_t n = part.n, width = part.width, np = Padded<T>(n), dp = Padded<T>(width);
  constexpr size_t kC = kChunkRows, kCp = kChunkPadded<T>;
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(
      LinearSums<T>::Bytes(np, dp) + FeatureReader<S>::Bytes(part.fourier, n) +
          ChunkPairsFor<S>::Bytes(n, width) +
          sizeof(T) * (kC * (3 * np + 3 * dp + 2 * kCp) + (np + dp) * kCp + np * dp + np),
      LinearSums<T>::kPieces + FeatureReader<S>::kPieces + ChunkPairsFor<S>::kPieces + 12);
  LinearSums<T> sums(false, n, width, workspace);
  FeatureReader<S> features(part.rule, part.fourier, part.h, n, workspace);
  ChunkPairsFor<S> pairs(n, width, workspace);
  T* const Q_panel = workspace.Take<T>(kC * np);
  T* const K_panel = workspace.Take<T>(kC * np);
  T* const V_panel = workspace.Take<T>(kC * dp);
  T* const N = workspace.Take<T>(kC * dp);
  T* const Y = workspace.Take<T>(kC * np);
  T* const D_panel = workspace.Take<T>(kC * dp);
  T* const A = workspace.Take<T>(kC * kCp);  // tril(Q K^T)
  T* const B = workspace.Take<T>(kC * kCp);  // tril(n v^T + e)
  T* const KT = workspace.Take<T>(np * kCp);
  T* const VT = workspace.Take<T>(dp * kCp);
  T* const RT = workspace.Take<T>(dp * np);
  T* const seen = workspace.Take<T>(np);
  const bool divides = part.stride > width;

  const Tokens& tokens = part.tokens;
  std::vector<size_t> begins;
  sums.Load(G, part.stride);
  for (size_t segment = (tokens.length + kSegmentRows - 1) / kSegmentRows; segment-- > 0;) {
    ChunksOf(part, segment * kSegmentRows, std::min(tokens.length, (segment + 1) * kSegmentRows),
             begins);
    for (size_t c = begins.size() - 1; c-- > 0;) {
      const size_t t = begins[c], rows = begins[c + 1] - t, before = t < kC ? 0 : t - kC;
      NoteTokens(x, before, t, features.width(), width);
      const T* const Q = features.Of(x.q, t, rows, Q_panel);
      const T* const K = features.Of(x.k, t, rows, K_panel);
      NumeratorGradients(part, x, t, rows, dp, N);
      const T* const R = sums.S.Seen();
      const RowsOut<S> D(x.dv, t, rows, width, D_panel);
      const PanelRows<T> of_q = {Q, np}, of_n = {N, dp};
      const bool paired = pairs.Take(rows, of_q, of_n) == rows;
      if (paired) {
        pairs.ReverseRead(of_q, PanelRows<T>{K, np}, R, dp, D.data, D.ld);
        pairs.template ReverseMatch<false>(of_n, TokenRows<S>{x.v, t}, R, dp, Y, np,
                                           [&](T* triangle) {
                                             if (divides) AddToRows(rows, x.e + t, triangle);
                                           });
      } else {
        const T* const V = PanelOf(x.v, t, rows, width, V_panel);
        Transpose(np, dp, R, dp, RT, np);
        Transpose(rows, n, K, np, KT, kCp);
        LowerProduct<T>(rows, {Q, np, 1, KT, kCp, n}, A, kCp);
        Product<Triangle::kUpper, T>(rows, width, {K, np, 1, R, dp, n}, {A, 1, kCp, N, dp, rows},
                                     D.data, D.ld);

        Transpose(rows, width, V, dp, VT, kCp);
        LowerProduct<T>(rows, {N, dp, 1, VT, kCp, width}, B, kCp);
        if (divides) AddToRows(rows, x.e + t, B);
        Product<Triangle::kUpper, T>(rows, n, {V, dp, 1, RT, np, width}, {B, 1, kCp, Q, np, rows},
                                     Y, np);
      }
      D.Finish();
      if (divides) {
        sums.z.Seen(seen);
        AddRow<T>(rows, np, nullptr, seen, Y);
      }
      features.Back(Y, K, x.k, t, rows, x.dk, x.ScaleOf(t, features.width()));
      if (paired) {
        pairs.Write(sums.S);
      } else {
        sums.S.Write(n, width, {Q, 1, np, N, dp, rows});  // Q^T n
      }
      sums.z.Write(rows, Q, x.e + t);
      sums.Pass(rows);
      if (tokens.StartsAt(t)) sums.Clear();
    }
    sums.EndSegment();
  }
  sums.StoreBase(G, part.stride);
  ZeroRows(tokens.length, part.total, features.width(), x.dk);
  ZeroRows(tokens.length, part.total, width, x.dv);
}

// What a segment adds to the gradient of the memory before it: its tokens up to the first start of
// a document. Whether there is one.
template <class S, class T = ComputeType<S>>
HWY_NOINLINE bool SumGradients(const LinearPart<T>& part, const LinearTensors<S>& x, double* G) {
  const size_t n = part.n, width = part.width, np = Padded<T>(n), dp = Padded<T>(width);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(
      LinearSums<T>::Bytes(np, dp) + FeatureReader<S>::Bytes(part.fourier, n) +
          ChunkPairsFor<S>::Bytes(n, width) + sizeof(T) * kChunkRows * (np + dp),
      LinearSums<T>::kPieces + FeatureReader<S>::kPieces + ChunkPairsFor<S>::kPieces + 2);
  LinearSums<T> sums(false, n, width, workspace);
  FeatureReader<S> features(part.rule, part.fourier, part.h, n, workspace);
  ChunkPairsFor<S> pairs(n, width, workspace);
  T* const Q_panel = workspace.Take<T>(kChunkRows * np);
  T* const N = workspace.Take<T>(kChunkRows * dp);
  size_t end = 0;
  while (end < part.tokens.length && !part.tokens.StartsAt(end)) ++end;
  std::vector<size_t> begins;
  ChunksOf(part, 0, end, begins);
  sums.Clear();
  for (size_t c = begins.size() - 1; c-- > 0;) {
    const size_t t = begins[c], rows = begins[c + 1] - t;
    const T* const Q = features.Of(x.q, t, rows, Q_panel);
    NumeratorGradients(part, x, t, rows, dp, N);
    if (pairs.Take(rows, PanelRows<T>{Q, np}, PanelRows<T>{N, dp}) == rows) {
      pairs.Write(sums.S);
    } else {
      sums.S.Write(n, width, {Q, 1, np, N, dp, rows});
    }
    sums.z.Write(rows, Q, x.e + t);
    sums.Pass(rows);
  }
  sums.Close();
  sums.StoreAdded(G, part.stride);
  return end < part.tokens.length;
}

template <class S, class T = ComputeType<S>>
void LinearBackwardOfAll(const SlotShape& shape, const LinearRule& rule, const Rows<const S>& q,
                         const Rows<const S>& k, const Rows<const S>& v, const Rows<const S>& out,
                         const Rows<const T>& z, const Rows<const S>& g, const RowMask& mask,
                         const double* memory, double* G, const Rows<S>& dq, const Rows<S>& dk,
                         const Rows<S>& dv, const FourierMap<T>* fourier, T* d_scale) {
  const auto size = static_cast<size_t>(shape.slots * rule.Columns(shape.width)),
             length = static_cast<size_t>(shape.length);
  const LinearRuns runs(shape);
  const auto of_head = static_cast<int64_t>(runs.runs);
  std::vector<T> factors(2 * static_cast<size_t>(runs.heads) * length);
  const auto channels = static_cast<size_t>(d_scale == nullptr ? 0 : fourier->width);
  std::vector<double> scales(static_cast<size_t>(runs.heads) * runs.segments * channels);
  const auto part_of = [&](int64_t index, size_t first, size_t last) {
    return LinearPart<T>(shape, rule, fourier, mask, index, first, last);
  };
  const auto tensors_of = [&](const LinearPart<T>& part, int64_t index) {
    T* const of_tokens = factors.data() + 2 * static_cast<size_t>(index) * length + part.begin;
    const size_t segment = static_cast<size_t>(index) * runs.segments + part.begin / kSegmentRows;
    return LinearTensors<S>{
        part.Of(q),         part.Of(k),
        part.Of(v),         part.Of(out),
        part.Of(g),         part.Of(z),
        part.Of(dq),        part.Of(dk),
        part.Of(dv),        of_tokens,
        of_tokens + length, d_scale == nullptr ? nullptr : scales.data() + segment * channels};
  };
  // body(part, tensors, which) for each run of each head.
  const auto for_runs = [&](auto&& body) {
    ParallelFor(runs.heads * of_head, of_head > 1 ? 1 : HeadsPerThread(shape),
                [&](int64_t begin, int64_t end) {
                  for (int64_t i = begin; i < end; ++i) {
                    const auto run = static_cast<size_t>(i % of_head);
                    const LinearPart<T> part =
                        part_of(i / of_head, runs.Begin(run), runs.Begin(run + 1));
                    body(part, tensors_of(part, i / of_head), static_cast<size_t>(i));
                  }
                });
  };
  const auto sum_scales = [&] {
    if (d_scale != nullptr)
      SumScales({shape.batch, shape.heads, shape.length}, static_cast<int64_t>(runs.segments),
                fourier->width, scales.data(), d_scale);
  };
  if (runs.runs == 1) {
    for_runs([&](const LinearPart<T>& part, const LinearTensors<S>& x, size_t i) {
      QueryGradients(part, x, memory + i * size);
      KeyGradients(part, x, G + i * size);
    });
    return sum_scales();
  }
  for_runs([&](const LinearPart<T>& part, const LinearTensors<S>& x, size_t) {
    DivisorGradients(part, x, 0, part.tokens.length);
  });
  const std::vector<double> before =
      MemoryOfRuns(runs, false, size, memory, [&](size_t index, size_t segment, double* added) {
        const LinearPart<T> part = part_of(static_cast<int64_t>(index), segment, segment + 1);
        return SumSegment<S>(part, part.Of(k), part.Of(v), added);
      });
  std::vector<double> behind =
      MemoryOfRuns(runs, true, size, G, [&](size_t index, size_t segment, double* added) {
        const LinearPart<T> part = part_of(static_cast<int64_t>(index), segment, segment + 1);
        return SumGradients(part, tensors_of(part, static_cast<int64_t>(index)), added);
      });
  for_runs([&](const LinearPart<T>& part, const LinearTensors<S>& x, size_t i) {
    QueryGradients(part, x, before.data() + i * size);
    KeyGradients(part, x, behind.data() + i * size);
  });
  for (size_t h = 0; h < static_cast<size_t>(runs.heads); ++h)
    std::copy_n(behind.data() + h * runs.runs * size, size, G + h * size);
  sum_scales();
}

#define CISTERN_LINEAR_BACKWARD(T, Name)                                                          \
  void LinearBackward##Name(const SlotShape& shape, const LinearRule& rule, Rows<const T> q,      \
                            Rows<const T> k, Rows<const T> v, Rows<const T> out,                  \
                            Rows<const ComputeType<T>> z, Rows<const T> g, const RowMask& mask,   \
                            const double* memory, double* G, Rows<T> dq, Rows<T> dk, Rows<T> dv,  \
                            const FourierMap<ComputeType<T>>* fourier, ComputeType<T>* d_scale) { \
    LinearBackwardOfAll<T>(shape, rule, q, k, v, out, z, g, mask, memory, G, dq, dk, dv, fourier, \
                           d_scale);                                                              \
  }
CISTERN_LINEAR_BACKWARD(float, Float)
CISTERN_LINEAR_BACKWARD(double, Double)
CISTERN_LINEAR_BACKWARD(BFloat16, BFloat16)
#undef CISTERN_LINEAR_BACKWARD

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(LinearBackwardFloat);
HWY_EXPORT(LinearBackwardDouble);
HWY_EXPORT(LinearBackwardBFloat16);

#define CISTERN_LINEAR_BACKWARD(T, Name)                                                    \
  template <>                                                                               \
  void LinearBackward(const SlotShape& shape, const LinearRule& rule, Rows<const T> q,      \
                      Rows<const T> k, Rows<const T> v, Rows<const T> out,                  \
                      Rows<const ComputeType<T>> z, Rows<const T> g, const RowMask& mask,   \
                      const double* memory, double* G, Rows<T> dq, Rows<T> dk, Rows<T> dv,  \
                      const FourierMap<ComputeType<T>>* fourier, ComputeType<T>* d_scale) { \
    CISTERN_DISPATCH(LinearBackward##Name)                                                  \
    (shape, rule, q, k, v, out, z, g, mask, memory, G, dq, dk, dv, fourier, d_scale);       \
  }
CISTERN_LINEAR_BACKWARD(float, Float)
CISTERN_LINEAR_BACKWARD(double, Double)
CISTERN_LINEAR_BACKWARD(BFloat16, BFloat16)
#undef CISTERN_LINEAR_BACKWARD

}  // namespace cistern
#endif  // HWY_ONCE
