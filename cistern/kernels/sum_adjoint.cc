#include <vector>

#include "cistern/kernels/dispatch.h"
#include "cistern/kernels/sum_memory.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/sum_adjoint.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/head_parts.h"
#include "cistern/kernels/staged_rows-inl.h"
#include "cistern/kernels/sum_core-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Of one head's walk, the share that goes into G and h alone (head_parts.h).
constexpr double kAdjointStateShare = 0.3, kGatedAdjointStateShare = 0.7;

// One part of a head: the chunks that begin at first .. whole - 1, after those behind them for G
// and h alone. last: of the tokens.
template <class S>
struct SumAdjointHead {
  using T = ComputeType<S>;
  Sequence<const T> a;
  Sequence<const S> g;
  Sequence<const T> w;
  Sequence<const S> u;
  Sequence<const T> b, log_gate;
  Sequence<S> du;
  Sequence<T> dw, dlog_gate;
  Tokens tokens;
  size_t n, width, total, gates, first, whole;
  bool last;
};

// One gate for all slots: h [1], their sum; and ab [rows] becomes dlg.
template <class T>
HWY_NOINLINE void GateGradients(const SumChunk<Gating::kShared, T>& chunk, bool starts, const T* Y,
                                T* ab, double* h) {
  const Tag<double> d;
  T dlg[kChunkRows];
  for (size_t i = chunk.rows; i-- > 0;) {
    Double sum = hn::Zero(d);
    for (size_t at = i * chunk.np; at < (i + 1) * chunk.np; at += kLanes<double>) {
      sum = hn::Add(sum, hn::NegMulAdd(LoadAsDouble(chunk.E + at), LoadAsDouble(Y + at),
                                       LoadAsDouble(ab + at)));
    }
    *h += hn::GetLane(hn::SumOfLanes(d, sum));
    if (i == 0 && (starts || *chunk.first == 0)) *h = 0;
    dlg[i] = static_cast<T>(*h);
  }
  std::memcpy(ab, dlg, chunk.rows * sizeof(T));
}

// grad [n, width] and h [n] in place.
template <Gating kGating, class S, class T = ComputeType<S>>
HWY_NOINLINE void SumAdjointOfHead(const SumAdjointHead<S>& head, double* grad,
                                   const double* h_io) {
  using Core = SumReverseCore<kGating, T>;
  constexpr bool kGated = kGating != Gating::kNone;
  const size_t n = head.n, width = head.width, np = Padded<T>(n), dp = Padded<T>(width);
  constexpr size_t kC = kChunkRows, kCp = kChunkPadded<T>;
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(SumChunk<kGating, T>::Bytes(n) + Core::Bytes(n, width) +
                      sizeof(T) * (kC * (3 * np + 3 * dp) + np * kCp) + sizeof(double) * np,
                  SumChunk<kGating, T>::kPieces + Core::kPieces + 8);
  SumChunk<kGating, T> chunk(n, workspace);
  Core core(n, width, workspace);
  T* const W = workspace.Take<T>(kC * np);
  T* const Y = workspace.Take<T>(kC * np);   // F dw
  T* const ab = workspace.Take<T>(kC * np);  // a b, then dlg
  T* const g = workspace.Take<T>(kC * dp);
  T* const u = workspace.Take<T>(kC * dp);
  T* const D = workspace.Take<T>(kC * dp);  // du
  T* const ET = workspace.Take<T>(np * kCp);
  double* const h = workspace.Take<double>(np);
  const Tag<T> dt;

  // Forward over the gates: where the chunks begin.
  std::vector<size_t> begins;
  for (size_t t = 0; t < head.tokens.length; t += chunk.rows) {
    begins.push_back(t);
    chunk.Begin(head.log_gate, head.tokens, t, head.tokens.length, false);
  }

  core.Load(grad);
  if constexpr (kGated) {
    std::memset(h, 0, np * sizeof(double));
    for (size_t l = 0; l < n; ++l) h[kGating == Gating::kShared ? 0 : l] += h_io[l];
  }

  for (size_t c = begins.size(); c-- > 0 && begins[c] >= head.first;) {
    const size_t t = begins[c], end = c + 1 < begins.size() ? begins[c + 1] : head.tokens.length;
    const bool starts = head.tokens.StartsAt(t), results = t < head.whole;
    chunk.Begin(head.log_gate, head.tokens, t, end);
    const size_t rows = chunk.rows, before = t < kC ? 0 : t - kC;
    RowsAhead::OfThisThread().Clear();
    NoteRows(head.a, before, t, n);
    NoteRows(head.g, before, t, width);
    if constexpr (kGated) NoteRows(head.b, before, t, n);
    NoteRows(head.w, before, t, n);
    NoteRows(head.u, before, t, width);
    PackRows(head.a, t, rows, n, np, T{0}, W);
    PackRows(head.g, t, rows, width, dp, T{0}, g);
    if constexpr (kGated) {
      PackRows(head.b, t, rows, n, np, T{0}, ab);
      for (size_t i = 0; i < rows * np; i += kLanes<T>)
        hn::Store(hn::Mul(hn::Load(dt, W + i), hn::Load(dt, ab + i)), dt, ab + i);
      chunk.TimesF(W);
    }
    if (kGated || results) {  // h goes on with dw
      chunk.Weights(head.w, t);
      PackRows(head.u, t, rows, width, dp, T{0}, u);
      core.template Weights<false>(chunk, W, g, u, Y);
    }
    if constexpr (kGated) {
      // The product writes whole vectors: what lies behind them in a padded row is not set, and one
      // gate sums over all of the row.
      FillPadding(rows, n, np, T{0}, Y);
      GateGradients(chunk, starts, Y, ab, h);
    }
    if (results) {
      Transpose(rows, n, chunk.E, np, ET, kCp);
      core.Du(chunk, ET, W, g, D);
      UnpackRows(D, t, rows, width, dp, head.du);
      if constexpr (kGated) {
        UnpackRows(ab, t, rows, head.gates, kGating == Gating::kShared ? 1 : np, head.dlog_gate);
        for (size_t i = 0; i < rows * np; i += kLanes<T>)
          hn::Store(hn::Div(hn::Load(dt, Y + i), hn::Load(dt, chunk.F + i)), dt, Y + i);
      }
      UnpackRows(Y, t, rows, n, np, head.dw);
    }
    if (starts) {
      core.Clear();
    } else {
      core.Add(chunk, W, g);
    }
  }

  core.Store(grad);
  if (!head.last) return;
  ZeroRows(head.tokens.length, head.total, width, head.du);
  ZeroRows(head.tokens.length, head.total, n, head.dw);
  if constexpr (kGated) ZeroRows(head.tokens.length, head.total, head.gates, head.dlog_gate);
}

template <class S, class T = ComputeType<S>>
void SumAdjointOfAll(const SlotShape& shape, const Rows<const T>& a, const Rows<const S>& g,
                     const Rows<const T>& w, const Rows<const S>& u, const Rows<const T>& b,
                     const LogGates<T>& log_gate, const RowMask& mask, double* G, double* h,
                     const Rows<S>& du, const Rows<T>& dw, const Rows<T>& dlog_gate) {
  const int64_t heads = shape.batch * shape.heads;
  const HeadParts parts(shape, log_gate.width > 0 ? kGatedAdjointStateShare : kAdjointStateShare);
  PartStates<double> grads(parts, heads, shape.slots * shape.width, G);
  ForParts(heads, HeadsPerThread(shape), parts, [&](int64_t index, int64_t part) {
    const int64_t x = index / shape.heads, y = index % shape.heads;
    const Tokens tokens(shape, mask, x);
    const SumAdjointHead<S> head{{a, x, y},
                                 {g, x, y},
                                 {w, x, y},
                                 {u, x, y},
                                 {b, x, y},
                                 {log_gate.rows, x, y},
                                 {du, x, y},
                                 {dw, x, y},
                                 {dlog_gate, x, y},
                                 tokens,
                                 static_cast<size_t>(shape.slots),
                                 static_cast<size_t>(shape.width),
                                 static_cast<size_t>(shape.length),
                                 static_cast<size_t>(log_gate.width),
                                 parts.ReverseEnd(part + 1, tokens.length),
                                 parts.ReverseEnd(part, tokens.length),
                                 part == 0};
    double* const grad = grads.Of(index, part);
    if (log_gate.width == 0) {
      SumAdjointOfHead<Gating::kNone>(head, grad, nullptr);
    } else if (log_gate.width == 1) {
      SumAdjointOfHead<Gating::kShared>(head, grad, h + index * shape.slots);
    } else {
      SumAdjointOfHead<Gating::kSlots>(head, grad, h + index * shape.slots);
    }
  });
  grads.Finish();
}

#define CISTERN_SUM_ARGUMENTS(S)                                                                \
  const SlotShape &shape, Rows<const ComputeType<S>> a, Rows<const S> g,                        \
      Rows<const ComputeType<S>> w, Rows<const S> u, Rows<const ComputeType<S>> b,              \
      LogGates<ComputeType<S>> log_gate, const RowMask &mask, double *G, double *h, Rows<S> du, \
      Rows<ComputeType<S>> dw, Rows<ComputeType<S>> dlog_gate
#define CISTERN_SUM_ADJOINT(S, Name)                                                   \
  void SumAdjoint##Name(CISTERN_SUM_ARGUMENTS(S)) {                                    \
    SumAdjointOfAll<S>(shape, a, g, w, u, b, log_gate, mask, G, h, du, dw, dlog_gate); \
  }
CISTERN_SUM_ADJOINT(float, Float)
CISTERN_SUM_ADJOINT(double, Double)
CISTERN_SUM_ADJOINT(BFloat16, BFloat16)
#undef CISTERN_SUM_ADJOINT

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(SumAdjointFloat);
HWY_EXPORT(SumAdjointDouble);
HWY_EXPORT(SumAdjointBFloat16);

#define CISTERN_SUM_ADJOINT(S, Name)                                 \
  template <>                                                        \
  void SumAdjoint<S>(CISTERN_SUM_ARGUMENTS(S)) {                     \
    CISTERN_DISPATCH(SumAdjoint##Name)                               \
    (shape, a, g, w, u, b, log_gate, mask, G, h, du, dw, dlog_gate); \
  }
CISTERN_SUM_ADJOINT(float, Float)
CISTERN_SUM_ADJOINT(double, Double)
CISTERN_SUM_ADJOINT(BFloat16, BFloat16)
#undef CISTERN_SUM_ADJOINT

}  // namespace cistern
#endif  // HWY_ONCE
