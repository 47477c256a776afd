#include "cistern/kernels/linear_attention.h"

#include <algorithm>

#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/linear_attention.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/linear_core-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Rows t.. of out = O [rows, dp] over their divisors; z_t = Q_t . z + sum_{i<=t} A[t,i].
template <class S, class T>
HWY_NOINLINE void DivideRows(const LinearRule& rule, size_t rows, size_t width, const T* Q,
                             size_t np, const T* seen, const T* A, const T* O, size_t dp, size_t t,
                             const Sequence<S>& out, const Sequence<T>& z_out) {
  const Tag<T> d;
  constexpr size_t kCp = kChunkPadded<T>;
  const T value = static_cast<T>(rule.value);
  const bool divides = rule.divisor != DivisorRule::kNone;
  for (size_t i = 0; i < rows; ++i, O += dp) {
    T factor = value;
    if (divides) {
      Vec<T> sum = DotOf(np, seen, Q + i * np);
      const T* const weights = A + i * kCp;
      size_t j = 0;
      for (; j + kLanes<T> <= i + 1; j += kLanes<T>) sum = hn::Add(sum, hn::Load(d, weights + j));
      // What lies above the diagonal may be NaN.
      if (j <= i)
        sum = hn::Add(sum, hn::IfThenElseZero(hn::FirstN(d, i + 1 - j), hn::Load(d, weights + j)));
      const T z = hn::GetLane(hn::SumOfLanes(d, sum));
      if (z_out.data != nullptr) *z_out.At(t + i) = z;
      factor = 1 / DivisorOf(rule.divisor, value, z);
    }
    const Vec<T> f = hn::Set(d, factor);
    S* const to = out.At(t + i);
    for (size_t j = 0; j < width; j += kLanes<T>)
      StorePart(hn::Mul(f, hn::Load(d, O + j)), j, width, to);
  }
}

template <class S, class T = ComputeType<S>>
HWY_NOINLINE void LinearOfPart(const LinearPart<T>& part, const Sequence<const S>& q,
                               const Sequence<const S>& k, const Sequence<const S>& v,
                               double* memory, const Sequence<S>& out, const Sequence<T>& z_out) {
  const size_t n = part.n, width = part.width, np = Padded<T>(n), dp = Padded<T>(width);
  constexpr size_t kC = kChunkRows, kCp = kChunkPadded<T>;
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(
      LinearSums<T>::Bytes(np, dp) + FeatureReader<S>::Bytes(part.fourier, n) +
          ChunkPairsFor<S>::Bytes(n, width) +
          sizeof(T) * (kC * (2 * np + 2 * dp + kCp) + np * (kCp + 1)),
      LinearSums<T>::kPieces + FeatureReader<S>::kPieces + ChunkPairsFor<S>::kPieces + 7);
  LinearSums<T> sums(false, n, width, workspace);
  FeatureReader<S> features(part.rule, part.fourier, part.h, n, workspace);
  ChunkPairsFor<S> pairs(n, width, workspace);
  T* const Q_panel = workspace.Take<T>(kC * np);
  T* const K_panel = workspace.Take<T>(kC * np);
  T* const V_panel = workspace.Take<T>(kC * dp);
  T* const O = workspace.Take<T>(kC * dp);
  T* const A = workspace.Take<T>(kC * kCp);  // tril(Q K^T)
  T* const KT = workspace.Take<T>(np * kCp);
  T* const seen = workspace.Take<T>(np);

  const Tokens& tokens = part.tokens;
  sums.Load(memory, part.stride);
  for (size_t t = 0, rows; t < tokens.length; t += rows) {
    if (t > 0 && t % kSegmentRows == 0) sums.EndSegment();
    if (tokens.StartsAt(t)) sums.Clear();
    rows = part.RowsAt(t);
    const size_t next = t + rows, end = std::min(tokens.length, next + kC);
    RowsAhead::OfThisThread().Clear();
    for (const auto* x : {&q, &k}) NoteRows(*x, next, end, features.width());
    NoteRows(v, next, end, width);
    const T* const Q = features.Of(q, t, rows, Q_panel);
    const T* const K = features.Of(k, t, rows, K_panel);
    const PanelRows<T> of_q = {Q, np}, of_k = {K, np};
    const size_t paired = pairs.Take(rows, of_k, TokenRows<S>{v, t});
    const T* V = nullptr;
    if (paired < rows) {
      V = PanelOf(v, t, rows, width, V_panel);
      Transpose(rows, n, K, np, KT, kCp);
      LowerProduct<T>(rows, {Q, np, 1, KT, kCp, n}, A, kCp);
      Product<Triangle::kLower, T>(rows, width, {Q, np, 1, sums.S.Seen(), dp, n},
                                   {A, kCp, 1, V, dp, rows}, O, dp);
    }
    if (paired > 0) {
      pairs.Read(of_q, of_k, sums.S, O, dp,
                 [&](const T* triangle) { std::copy_n(triangle, paired * kCp, A); });
    }
    sums.z.Seen(seen);
    DivideRows(part.rule, rows, width, Q, np, seen, A, O, dp, t, out, z_out);
    if (paired == rows) {
      pairs.Write(sums.S);
    } else {
      sums.S.Write(n, width, {K, 1, np, V, dp, rows});  // K^T V
    }
    sums.z.Write(rows, K, nullptr);
    sums.Pass(rows);
  }
  sums.EndSegment();
  sums.StoreBase(memory, part.stride);
  ZeroRows(tokens.length, part.total, width, out);
  if (z_out.data != nullptr) ZeroRows(tokens.length, part.total, 1, z_out);
}

// Columns [0, kVectors vectors) of S_l += k_l v and of out = sum_l q_l S_l; q and k double.
template <int kVectors, class T>
HWY_INLINE void StepColumns(size_t n, const double* q, const double* k, const T* v, double* memory,
                            size_t stride, Double factor, T* out) {
  const Tag<double> d;
  constexpr size_t kN = kLanes<double>;
  Double value[kVectors], total[kVectors];
#pragma GCC unroll 8
  for (int j = 0; j < kVectors; ++j) {
    value[j] = LoadAsDoubleU(v + j * kN);
    total[j] = hn::Zero(d);
  }
  for (size_t l = 0; l < n; ++l, memory += stride) {
    const Double weight = hn::Set(d, k[l]), read = hn::Set(d, q[l]);
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      const Double m = hn::MulAdd(weight, value[j], hn::LoadU(d, memory + j * kN));
      hn::StoreU(m, d, memory + j * kN);
      total[j] = hn::MulAdd(read, m, total[j]);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < kVectors; ++j) StoreDoubleU(hn::Mul(factor, total[j]), out + j * kN);
}

// One token, in double and in place.
template <class S, class T = ComputeType<S>>
HWY_NOINLINE void LinearToken(const LinearPart<T>& part, const Sequence<const S>& q_rows,
                              const Sequence<const S>& k_rows, const Sequence<const S>& v_rows,
                              double* memory, const Sequence<S>& out_rows,
                              const Sequence<T>& z_row) {
  const size_t n = part.n, width = part.width, stride = part.stride, np = Padded<T>(n),
               dp = Padded<T>(width);
  T* const z_out = z_row.data;
  if (part.tokens.length == 0) {
    ZeroRows(0, 1, width, out_rows);
    if (z_out != nullptr) *z_out = 0;
    return;
  }
  if (part.tokens.StartsAt(0)) std::fill_n(memory, n * stride, 0.0);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(2 * np * (sizeof(T) + sizeof(double)) + 2 * dp * sizeof(T) +
                      FeatureReader<S>::Bytes(part.fourier, n),
                  4 + FeatureReader<S>::kPieces);
  FeatureReader<S> reader(part.rule, part.fourier, part.h, n, workspace);
  T* const features = workspace.Take<T>(2 * np);
  double* const q = workspace.Take<double>(2 * np);
  double* const k = q + np;
  const T* v;
  T* out;
  if constexpr (std::is_same_v<S, T>) {
    v = v_rows.data, out = out_rows.data;
  } else {
    T* const panel = workspace.Take<T>(dp);
    out = workspace.Take<T>(dp);
    PackRows(v_rows, 0, 1, width, dp, T{0}, panel);
    v = panel;
  }
  if (part.rule.map == FeatureMap::kNone) {
    PackRows(q_rows, 0, 1, n, np, T{0}, features);
    PackRows(k_rows, 0, 1, n, np, T{0}, features + np);
  } else {
    reader.Of(q_rows, 0, 1, features);
    reader.Of(k_rows, 0, 1, features + np);
  }
  const Tag<double> d;
  for (size_t l = 0; l < 2 * np; l += kLanes<double>)
    hn::Store(LoadAsDouble(features + l), d, q + l);
  double factor = part.rule.value;
  if (stride > width) {
    double z[4] = {};  // four sums at once: one would wait for itself
    double* to = memory + width;
    for (size_t l = 0; l < n; ++l, to += stride) {
      *to += k[l];
      z[l % 4] += q[l] * *to;
    }
    const double sum = (z[0] + z[1]) + (z[2] + z[3]);
    if (z_out != nullptr) *z_out = static_cast<T>(sum);
    factor = 1 / DivisorOf(part.rule.divisor, part.rule.value, sum);
  }
  constexpr size_t kN = kLanes<double>;
  const Double f = hn::Set(d, factor);
  size_t j = 0;
  for (; j + 4 * kN <= width; j += 4 * kN)
    StepColumns<4>(n, q, k, v + j, memory + j, stride, f, out + j);
  for (; j + kN <= width; j += kN) StepColumns<1>(n, q, k, v + j, memory + j, stride, f, out + j);
  for (; j < width; ++j) {
    double total = 0;
    for (size_t l = 0; l < n; ++l) {
      double& m = memory[l * stride + j];
      m += k[l] * static_cast<double>(v[j]);
      total += q[l] * m;
    }
    out[j] = static_cast<T>(factor * total);
  }
  if constexpr (!std::is_same_v<S, T>) UnpackRows(out, 0, 1, width, dp, out_rows);
}

template <class S, class T = ComputeType<S>>
void LinearAll(const SlotShape& shape, const LinearRule& rule, const Rows<const S>& q,
               const Rows<const S>& k, const Rows<const S>& v, const RowMask& mask, double* memory,
               const Rows<S>& out, const Rows<T>& z, const FourierMap<T>* fourier) {
  const auto size = static_cast<size_t>(shape.slots * rule.Columns(shape.width));
  const LinearRuns runs(shape);
  const auto walk = [&](int64_t index, size_t run, double* state) {
    const LinearPart<T> part(shape, rule, fourier, mask, index, runs.Begin(run),
                             runs.Begin(run + 1));
    (shape.length == 1 ? LinearToken<S> : LinearOfPart<S>)(part, part.Of(q), part.Of(k), part.Of(v),
                                                           state, part.Of(out), part.Of(z));
  };
  if (runs.runs == 1) {
    ParallelFor(runs.heads, HeadsPerThread(shape), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) walk(i, 0, memory + static_cast<size_t>(i) * size);
    });
    return;
  }
  std::vector<double> states =
      MemoryOfRuns(runs, false, size, memory, [&](size_t index, size_t segment, double* added) {
        const LinearPart<T> part(shape, rule, fourier, mask, static_cast<int64_t>(index), segment,
                                 segment + 1);
        return SumSegment<S>(part, part.Of(k), part.Of(v), added);
      });
  const auto of_head = static_cast<int64_t>(runs.runs);
  ParallelFor(runs.heads * of_head, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      walk(i / of_head, static_cast<size_t>(i % of_head),
           states.data() + static_cast<size_t>(i) * size);
  });
  for (size_t h = 0; h < static_cast<size_t>(runs.heads); ++h)
    std::copy_n(states.data() + ((h + 1) * runs.runs - 1) * size, size, memory + h * size);
}

#define CISTERN_LINEAR(T, Name)                                                            \
  void Linear##Name(const SlotShape& shape, const LinearRule& rule, Rows<const T> q,       \
                    Rows<const T> k, Rows<const T> v, const RowMask& mask, double* memory, \
                    Rows<T> out, Rows<ComputeType<T>> z,                                   \
                    const FourierMap<ComputeType<T>>* fourier) {                           \
    LinearAll<T>(shape, rule, q, k, v, mask, memory, out, z, fourier);                     \
  }
CISTERN_LINEAR(float, Float)
CISTERN_LINEAR(double, Double)
CISTERN_LINEAR(BFloat16, BFloat16)
#undef CISTERN_LINEAR

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(LinearFloat);
HWY_EXPORT(LinearDouble);
HWY_EXPORT(LinearBFloat16);

#define CISTERN_LINEAR(T, Name)                                                             \
  template <>                                                                               \
  void LinearForward(const SlotShape& shape, const LinearRule& rule, Rows<const T> q,       \
                     Rows<const T> k, Rows<const T> v, const RowMask& mask, double* memory, \
                     Rows<T> out, Rows<ComputeType<T>> z,                                   \
                     const FourierMap<ComputeType<T>>* fourier) {                           \
    CISTERN_DISPATCH(Linear##Name)(shape, rule, q, k, v, mask, memory, out, z, fourier);    \
  }
CISTERN_LINEAR(float, Float)
CISTERN_LINEAR(double, Double)
CISTERN_LINEAR(BFloat16, BFloat16)
#undef CISTERN_LINEAR

}  // namespace cistern
#endif  // HWY_ONCE
