#include "cistern/kernels/sum_memory.h"

#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/sum_memory.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/gemm-inl.h"
#include "cistern/kernels/head_parts.h"
#include "cistern/kernels/sum_chunk-inl.h"
#include "cistern/kernels/sum_step-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Of one head's walk, the share that goes into the memory alone (head_parts.h).
constexpr double kSumStateShare = 0.5;

// One part of a head of a read (a = r, u = v) or a match (a = q, u = k): the chunks that begin at
// from .. stop - 1, after those before them for the memory alone.
template <class T>
struct SumHead {
  Sequence<const T> a, w, u, log_gate;
  Sequence<T> out;
  Tokens tokens;
  size_t n, width, total, gates, from, stop;
  bool last;
};

// Both are one product with the memory S [height, across], S_t = S_{t-1} + b_t (x) x_t and out_t =
// a_t S_t:
//   read:  S = M [n, width],    b = E, x = v, gates scale the rows of S and the columns of a
//   match: S = M^T [width, n],  b = k, x = E, gates scale the columns of S and of out
template <bool kMatch, Gating kGating, class T>
HWY_NOINLINE void SumOfHead(const SumHead<T>& head, double* memory) {
  constexpr bool kGated = kGating != Gating::kNone;
  constexpr size_t kC = kChunkRows, kCp = kChunkPadded<T>;
  const size_t n = head.n, width = head.width, np = Padded<T>(n), dp = Padded<T>(width);
  const size_t height = kMatch ? width : n, across = kMatch ? n : width, hp = kMatch ? dp : np,
               ap = kMatch ? np : dp;
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(SumChunk<kGating, T>::Bytes(n) +
                      sizeof(T) * (kC * (hp + dp + ap + kCp) + hp * kCp + 2 * hp * ap) +
                      sizeof(double) * hp * ap,
                  SumChunk<kGating, T>::kPieces + 8);
  SumChunk<kGating, T> chunk(n, workspace);
  T* const a = workspace.Take<T>(kC * hp);
  T* const u = workspace.Take<T>(kC * dp);
  T* const O = workspace.Take<T>(kC * ap);
  T* const A = workspace.Take<T>(kC * kCp);  // tril(a b^T)
  T* const BT = workspace.Take<T>(hp * kCp);
  T* const P = workspace.Take<T>(hp * ap);     // b^T x
  T* const past = workspace.Take<T>(hp * ap);  // what the chunk's rows see of S
  double* const S = workspace.Take<double>(hp * ap);
  const Tag<double> d;

  const auto clear = [&]() HWY_ATTR {
    std::memset(S, 0, hp * ap * sizeof(double));
    std::memset(past, 0, hp * ap * sizeof(T));
  };
  clear();
  for (size_t l = 0; l < n; ++l) {
    for (size_t j = 0; j < width; ++j) S[kMatch ? j * ap + l : l * ap + j] = memory[l * width + j];
  }
  for (size_t i = 0; i < height * ap; i += kLanes<double>)
    StoreDouble(hn::Load(d, S + i), past + i);

  // The chunk's rows of out.
  const auto read = [&](size_t t, const T* b, const T* x) HWY_ATTR {
    const size_t rows = chunk.rows;
    PackRows(head.a, t, rows, height, hp, T{0}, a);
    if constexpr (kGated) {
      if constexpr (!kMatch) chunk.TimesF(a);
      for (size_t i = 0; i < height; ++i) {
        for (size_t j = 0; j < ap; j += kLanes<double>) {
          const Double gate = kMatch ? hn::Load(d, chunk.first + j) : hn::Set(d, chunk.first[i]);
          StoreDouble(Keep(gate, hn::Load(d, S + i * ap + j)), past + i * ap + j);
        }
      }
    }
    Transpose(rows, height, b, hp, BT, kCp);
    LowerProduct<T>(rows, {a, hp, 1, BT, kCp, height}, A, kCp);
    Product<Triangle::kLower, T>(rows, across, {a, hp, 1, past, ap, height},
                                 {A, kCp, 1, x, ap, rows}, O, ap);
    if constexpr (kGated && kMatch) chunk.TimesF(O);
    UnpackRows(O, t, rows, across, ap, head.out);
  };

  for (size_t t = 0; t < head.stop; t += chunk.rows) {
    if (head.tokens.StartsAt(t)) clear();
    chunk.Begin(head.log_gate, head.tokens, t, head.tokens.length);
    chunk.Weights(head.w, t);
    const size_t rows = chunk.rows;
    const T *const b = kMatch ? u : chunk.E, *const x = kMatch ? chunk.E : u;
    PackRows(head.u, t, rows, width, dp, T{0}, u);
    if (t >= head.from) read(t, b, x);

    Product<T>(height, across, {b, 1, hp, x, ap, rows}, P, ap);
    for (size_t i = 0; i < height; ++i) {
      for (size_t j = 0; j < ap; j += kLanes<double>) {
        const size_t at = i * ap + j;
        Double sum = hn::Load(d, S + at);
        if constexpr (kGated) {
          const Double gate = kMatch ? hn::Load(d, chunk.first + j) : hn::Set(d, chunk.first[i]);
          const Double last = kMatch ? hn::Load(d, chunk.last + j) : hn::Set(d, chunk.last[i]);
          sum = hn::Mul(last, hn::Add(Keep(gate, sum), LoadAsDouble(P + at)));
        } else {
          sum = hn::Add(sum, LoadAsDouble(P + at));
          StoreDouble(sum, past + at);
        }
        hn::Store(sum, d, S + at);
      }
    }
  }
  for (size_t l = 0; l < n; ++l) {
    for (size_t j = 0; j < width; ++j) memory[l * width + j] = S[kMatch ? j * ap + l : l * ap + j];
  }
  if (head.last) ZeroRows(head.tokens.length, head.total, across, head.out);
}

template <bool kMatch, class T>
HWY_NOINLINE void SumOfToken(const SumHead<T>& head, double* memory) {
  if (head.tokens.length == 0) return ZeroRows(0, 1, kMatch ? head.n : head.width, head.out);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(sizeof(double) * Padded<double>(head.n), 1);
  double* const gate = workspace.Take<double>(Padded<double>(head.n));
  StepGates(head.n, head.gates, head.gates > 0 ? head.log_gate.At(0) : nullptr,
            head.tokens.StartsAt(0), gate);
  if constexpr (kMatch) {
    StepSumMatch(head.n, head.width, head.a.At(0), head.w.At(0), head.u.At(0), gate, memory,
                 head.out.At(0));
  } else {
    StepSumRead(head.n, head.width, head.a.At(0), head.w.At(0), head.u.At(0), gate, memory,
                head.out.At(0));
  }
}

template <bool kMatch, class T>
void SumOfAll(const SlotShape& shape, const Rows<const T>& a, const Rows<const T>& w,
              const Rows<const T>& u, const LogGates<T>& log_gate, const RowMask& mask,
              double* memory, const Rows<T>& out) {
  const int64_t heads = shape.batch * shape.heads;
  const HeadParts parts(shape, kSumStateShare);
  PartStates<double> memories(parts, heads, shape.slots * shape.width, memory);
  ForParts(heads, HeadsPerThread(shape), parts, [&](int64_t index, int64_t part) {
    const int64_t x = index / shape.heads, y = index % shape.heads;
    const Tokens tokens(shape, mask, x);
    const SumHead<T> head{{a, x, y},
                          {w, x, y},
                          {u, x, y},
                          {log_gate.rows, x, y},
                          {out, x, y},
                          tokens,
                          static_cast<size_t>(shape.slots),
                          static_cast<size_t>(shape.width),
                          static_cast<size_t>(shape.length),
                          static_cast<size_t>(log_gate.width),
                          parts.Begin(part, tokens.length),
                          parts.Begin(part + 1, tokens.length),
                          part + 1 == parts.count};
    double* const m = memories.Of(index, part);
    if (shape.length == 1) {
      SumOfToken<kMatch>(head, m);
    } else if (log_gate.width == 0) {
      SumOfHead<kMatch, Gating::kNone>(head, m);
    } else if (log_gate.width == 1) {
      SumOfHead<kMatch, Gating::kShared>(head, m);
    } else {
      SumOfHead<kMatch, Gating::kSlots>(head, m);
    }
  });
  memories.Finish();
}

#define CISTERN_SUM_FORWARD(name, match, T)                                            \
  void name(const SlotShape& shape, Rows<const T> a, Rows<const T> w, Rows<const T> u, \
            LogGates<T> log_gate, const RowMask& mask, double* memory, Rows<T> out) {  \
    SumOfAll<match, T>(shape, a, w, u, log_gate, mask, memory, out);                   \
  }
CISTERN_SUM_FORWARD(SumReadFloat, false, float)
CISTERN_SUM_FORWARD(SumReadDouble, false, double)
CISTERN_SUM_FORWARD(SumMatchFloat, true, float)
CISTERN_SUM_FORWARD(SumMatchDouble, true, double)
#undef CISTERN_SUM_FORWARD

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(SumReadFloat);
HWY_EXPORT(SumReadDouble);
HWY_EXPORT(SumMatchFloat);
HWY_EXPORT(SumMatchDouble);

template <>
void SumRead(const SlotShape& shape, Rows<const float> r, Rows<const float> w, Rows<const float> v,
             LogGates<float> log_gate, const RowMask& mask, double* memory, Rows<float> out) {
  CISTERN_DISPATCH(SumReadFloat)(shape, r, w, v, log_gate, mask, memory, out);
}
template <>
void SumRead(const SlotShape& shape, Rows<const double> r, Rows<const double> w,
             Rows<const double> v, LogGates<double> log_gate, const RowMask& mask, double* memory,
             Rows<double> out) {
  CISTERN_DISPATCH(SumReadDouble)(shape, r, w, v, log_gate, mask, memory, out);
}
template <>
void SumMatch(const SlotShape& shape, Rows<const float> q, Rows<const float> w, Rows<const float> k,
              LogGates<float> log_gate, const RowMask& mask, double* memory, Rows<float> out) {
  CISTERN_DISPATCH(SumMatchFloat)(shape, q, w, k, log_gate, mask, memory, out);
}
template <>
void SumMatch(const SlotShape& shape, Rows<const double> q, Rows<const double> w,
              Rows<const double> k, LogGates<double> log_gate, const RowMask& mask, double* memory,
              Rows<double> out) {
  CISTERN_DISPATCH(SumMatchDouble)(shape, q, w, k, log_gate, mask, memory, out);
}

}  // namespace cistern
#endif  // HWY_ONCE
