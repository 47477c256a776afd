#include <vector>

#include "cistern/kernels/dispatch.h"
#include "cistern/kernels/gated_slots.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/gated_slots_backward.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/gated_slots-inl.h"
#include "cistern/kernels/head_parts.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Of one head's walks, the shares that go into the memories, and into G and h, alone
// (head_parts.h).
constexpr double kFirstStateShare = 0.4, kReverseStateShare = 0.7;

// Each head goes twice over its tokens: forward for what needs the memories of every position (dq,
// and the gradients of the scores), then in reverse for the gradients of what was written.
template <class S>
struct GatedTensors {
  using T = ComputeType<S>;
  Sequence<const S> q, k, v, x, g;
  Sequence<const T> y;
  Sequence<S> dq, dk, dv, dx;
  Sequence<T> dy, terms;  // terms: p_t dp_t + dy_t y_t, those of h
  T scale, rate;
  std::vector<size_t> begins = {};  // where the chunks begin
};

// dp_t[l] = g_t . V_t[l] and, with dy of the softmax, dq_t = scale sum_l dy_t[l] K_t[l]. The last
// part's walk finds all chunks.
template <class S>
HWY_NOINLINE void GatedFirstWalk(const ForwardHead<ComputeType<S>>& head, GatedTensors<S>& x,
                                 const double* keys, const double* values) {
  using T = ComputeType<S>;
  using Chunks = GatedChunks<S, T>;
  using Keys = SumCore<false, Gating::kSlots, T>;
  using Values = SumCore<true, Gating::kSlots, T>;
  const size_t n = head.n, width = head.width, np = Padded<T>(n), dp = Padded<T>(width);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(Chunks::Bytes(n) + Keys::Bytes(n, width) + Values::Bytes(n, width) +
                      sizeof(T) * kChunkRows * (3 * dp + 3 * np),
                  Chunks::kPieces + Keys::kPieces + Values::kPieces + 6);
  Chunks chunks(n, x.rate, x.x, head.tokens, workspace);
  Keys key_core(n, width, workspace);
  Values value_core(n, width, workspace);
  T* const g = workspace.Take<T>(kChunkRows * dp);  // then dq
  T* const k = workspace.Take<T>(kChunkRows * dp);
  T* const v = workspace.Take<T>(kChunkRows * dp);
  T* const Y = workspace.Take<T>(kChunkRows * np);
  T* const P = workspace.Take<T>(kChunkRows * np);  // then the terms
  T* const D = workspace.Take<T>(kChunkRows * np);  // dp, then dy
  const auto& chunk = chunks.chunk;
  const Tag<T> d;

  const auto read = [&](size_t t) HWY_ATTR {
    const size_t rows = chunk.rows;
    PackRows(x.g, t, rows, width, dp, T{0}, g);
    value_core.Read(chunk, g, v, chunk.E, D);
    PackRows(x.y, t, rows, n, np, kMinusInfinity<T>, Y);
    SoftmaxRows(rows, np, Y, P);
    FillPadding(rows, n, np, T{0}, Y);
    FillPadding(rows, n, np, T{0}, D);
    chunk.TimesF(D);
    for (size_t i = 0; i < rows * np; i += np) {
      const Vec<T> dot = RowDot(np, P + i, D + i);
      for (size_t l = i; l < i + np; l += kLanes<T>) {
        const Vec<T> p = hn::Load(d, P + l), dp_l = hn::Load(d, D + l),
                     dy = hn::Mul(p, hn::Sub(dp_l, dot));
        hn::Store(dy, d, D + l);
        hn::Store(hn::MulAdd(p, dp_l, hn::Mul(dy, hn::Load(d, Y + l))), d, P + l);
      }
    }
    UnpackRows(P, t, rows, n, np, x.terms);
    const Vec<T> scale = hn::Set(d, x.scale);
    for (size_t i = 0; i < rows * np; i += kLanes<T>)
      hn::Store(hn::Mul(scale, hn::Load(d, D + i)), d, D + i);
    UnpackRows(D, t, rows, n, np, x.dy);
    chunk.TimesF(D);
    key_core.Read(chunk, D, chunk.E, k, g);
    UnpackRows(g, t, rows, width, dp, x.dq);
  };

  key_core.Load(keys);
  value_core.Load(values);
  for (size_t t = 0; t < head.stop; t += chunk.rows) {
    if (head.last) x.begins.push_back(t);
    if (head.tokens.StartsAt(t)) key_core.Clear(), value_core.Clear();
    chunks.Begin(t, head.tokens.length);
    const size_t next = t + chunk.rows, end = std::min(next + kChunkRows, head.tokens.length);
    RowsAhead::OfThisThread().Clear();
    chunks.NoteAfter(t);
    for (const auto* y : {&x.k, &x.v, &x.g}) NoteRows(*y, next, end, width);
    NoteRows(x.y, next, end, n);
    PackRows(x.k, t, chunk.rows, width, dp, T{0}, k);
    PackRows(x.v, t, chunk.rows, width, dp, T{0}, v);
    if (t >= head.from) read(t);
    key_core.Write(chunk, chunk.E, k);
    value_core.Write(chunk, v, chunk.E);
  }
  if (head.last) ZeroRows(head.tokens.length, head.total, width, x.dq);
}

// The gradient of the gates' logits of one chunk, to Y: (dlg - g dw) dlg/dx, where dw = Y / F.
template <class S, class T>
HWY_NOINLINE void LogitGradients(const GatedChunks<S, T>& chunks, const GatedTensors<S>& x,
                                 size_t t, const T* dlg, T* logits, T* Y) {
  const auto& chunk = chunks.chunk;
  const size_t np = chunk.np;
  const Tag<T> d;
  const Vec<T> rate = hn::Set(d, x.rate);
  PackRows(x.x, t, chunk.rows, chunk.n, np, T{0}, logits);
  for (size_t r = 0; r < chunk.rows; ++r) {
    const T* log_gate = chunks.LogGates(t + r);
    for (size_t l = 0; l < np; l += kLanes<T>) {
      const size_t i = r * np + l;
      const Vec<T> gate = WeightExp(hn::Load(d, log_gate + l)),
                   dw = hn::Div(hn::Load(d, Y + i), hn::Load(d, chunk.F + i)),
                   grad = hn::NegMulAdd(gate, dw, hn::Load(d, dlg + i));
      hn::Store(hn::Mul(grad, GateSlope<T>(hn::Load(d, logits + i), rate)), d, Y + i);
    }
  }
}

// The chunks that begin at first .. whole - 1, after those behind them for G and h alone.
template <class S>
HWY_NOINLINE void GatedReverseWalk(const ForwardHead<ComputeType<S>>& head, size_t first,
                                   size_t whole, const GatedTensors<S>& x, double* G_keys,
                                   double* G_values, const double* h_io) {
  using T = ComputeType<S>;
  using Chunks = GatedChunks<S, T>;
  using Core = SumReverseCore<Gating::kSlots, T>;
  const size_t n = head.n, width = head.width, np = Padded<T>(n), dp = Padded<T>(width);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(
      Chunks::Bytes(n) + 2 * Core::Bytes(n, width) +
          sizeof(T) * (kChunkRows * (5 * dp + 4 * np) + np * kChunkPadded<T>)+sizeof(double) * np,
      Chunks::kPieces + 2 * Core::kPieces + 11);
  Chunks chunks(n, x.rate, x.x, head.tokens, workspace);
  Core key_core(n, width, workspace), value_core(n, width, workspace);
  T *q, *k, *v, *g, *du;
  for (T** panel : {&q, &k, &v, &g, &du}) *panel = workspace.Take<T>(kChunkRows * dp);
  T *P, *D, *Y, *terms;
  for (T** panel : {&P, &D, &Y, &terms}) *panel = workspace.Take<T>(kChunkRows * np);
  T* const ET = workspace.Take<T>(np * kChunkPadded<T>);
  double* const h = workspace.Take<double>(np);
  const auto& chunk = chunks.chunk;

  key_core.Load(G_keys);
  value_core.Load(G_values);
  for (size_t l = 0; l < np; ++l) h[l] = l < n ? h_io[l] : 0;
  for (size_t c = x.begins.size(); c-- > 0 && x.begins[c] >= first;) {
    const size_t t = x.begins[c];
    const bool starts = head.tokens.StartsAt(t);
    chunks.Begin(t, c + 1 < x.begins.size() ? x.begins[c + 1] : head.tokens.length);
    const size_t rows = chunk.rows, before = t < kChunkRows ? 0 : t - kChunkRows;
    RowsAhead::OfThisThread().Clear();
    chunks.NoteBefore(t);
    for (const auto* y : {&x.q, &x.k, &x.v, &x.g}) NoteRows(*y, before, t, width);
    NoteRows(x.y, before, t, n);
    for (const auto* y : {&x.dy, &x.terms}) NoteRows(Const(*y), before, t, n);
    PackRows(x.q, t, rows, width, dp, T{0}, q);
    PackRows(x.k, t, rows, width, dp, T{0}, k);
    PackRows(x.v, t, rows, width, dp, T{0}, v);
    PackRows(x.g, t, rows, width, dp, T{0}, g);
    SoftmaxOfTokens(x.y, t, rows, n, chunk.F, P);
    PackRows(Const(x.dy), t, rows, n, np, T{0}, D);
    PackRows(Const(x.terms), t, rows, n, np, T{0}, terms);
    chunk.TimesF(D);
    value_core.template Weights<false>(chunk, P, g, v, Y);
    key_core.template Weights<true>(chunk, D, q, k, Y);
    FillPadding(rows, n, np, T{0}, Y);
    GateGradients(chunk, starts, Y, terms, h);
    if (t < whole) {
      Transpose(rows, n, chunk.E, np, ET, kChunkPadded<T>);
      value_core.Du(chunk, ET, P, g, du);
      UnpackRows(du, t, rows, width, dp, x.dv);
      key_core.Du(chunk, ET, D, q, du);
      UnpackRows(du, t, rows, width, dp, x.dk);
    }
    if (starts) {
      key_core.Clear(), value_core.Clear();
    } else {
      key_core.Add(chunk, D, q);
      value_core.Add(chunk, P, g);
    }
    if (t < whole) {  // last, because P is room for the logits
      LogitGradients(chunks, x, t, terms, P, Y);
      UnpackRows(Y, t, rows, n, np, x.dx);
    }
  }
  key_core.Store(G_keys);
  value_core.Store(G_values);
  if (!head.last) return;
  for (const auto* y : {&x.dk, &x.dv}) ZeroRows(head.tokens.length, head.total, width, *y);
  ZeroRows(head.tokens.length, head.total, n, x.dx);
}

template <class S>
void GatedSlotsAll(const SlotShape& shape, const GatedSlotsOptions& options,
                   const GatedSlotsInputs<S>& in, const Rows<const ComputeType<S>>& y,
                   const Rows<const S>& d_out, const RowMask& mask, const double* keys,
                   const double* values, double* G_keys, double* G_values, const double* h,
                   const Rows<S>& dq, const Rows<S>& dk, const Rows<S>& dv, const Rows<S>& dx,
                   const Rows<ComputeType<S>>& dy, const Rows<ComputeType<S>>& terms) {
  using T = ComputeType<S>;
  const int64_t heads = shape.batch * shape.heads, size = shape.slots * shape.width;
  const auto open = [&](int64_t index, Workspace&) -> GatedTensors<S> {
    const int64_t b = index / shape.heads, z = index % shape.heads;
    return {{in.q, b, z},
            {in.k, b, z},
            {in.v, b, z},
            {in.x, b, z},
            {d_out, b, z},
            {y, b, z},
            {dq, b, z},
            {dk, b, z},
            {dv, b, z},
            {dx, b, z},
            {dy, b, z},
            {terms, b, z},
            static_cast<T>(options.scale),
            static_cast<T>(1 / options.temperature)};
  };
  const HeadParts ahead(shape, kFirstStateShare), back(shape, kReverseStateShare);
  PartStates<double> key_grads(back, heads, size, G_keys), value_grads(back, heads, size, G_values);
  ForHeads(
      heads, HeadsPerThread(shape), ahead, open,
      [&](int64_t index, int64_t part, GatedTensors<S>& x) {
        GatedFirstWalk(ForwardHead<T>(shape, mask, index, ahead, part), x, keys + index * size,
                       values + index * size);
      },
      [&](int64_t index, int64_t part, const GatedTensors<S>& x) {
        const ForwardHead<T> head(shape, mask, index, back, part);
        GatedReverseWalk(head, back.ReverseEnd(part + 1, head.tokens.length),
                         back.ReverseEnd(part, head.tokens.length), x, key_grads.Of(index, part),
                         value_grads.Of(index, part), h + index * shape.slots);
      });
  key_grads.Finish();
  value_grads.Finish();
}

#define CISTERN_GATED_SLOTS_ARGUMENTS(T)                                                          \
  const SlotShape &shape, const GatedSlotsOptions &options, const GatedSlotsInputs<T>&in,         \
      Rows<const ComputeType<T>> y, Rows<const T> d_out, const RowMask &mask, const double *keys, \
      const double *values, double *G_keys, double *G_values, double *h, Rows<T> dq, Rows<T> dk,  \
      Rows<T> dv, Rows<T> dx, Rows<ComputeType<T>> dy, Rows<ComputeType<T>> terms
#define CISTERN_GATED_SLOTS(T, Name)                                                            \
  void GatedSlotsBackward##Name(CISTERN_GATED_SLOTS_ARGUMENTS(T)) {                             \
    GatedSlotsAll<T>(shape, options, in, y, d_out, mask, keys, values, G_keys, G_values, h, dq, \
                     dk, dv, dx, dy, terms);                                                    \
  }
CISTERN_GATED_SLOTS(float, Float)
CISTERN_GATED_SLOTS(double, Double)
CISTERN_GATED_SLOTS(BFloat16, BFloat16)
#undef CISTERN_GATED_SLOTS

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(GatedSlotsBackwardFloat);
HWY_EXPORT(GatedSlotsBackwardDouble);
HWY_EXPORT(GatedSlotsBackwardBFloat16);

#define CISTERN_GATED_SLOTS(T, Name)                                                            \
  template <>                                                                                   \
  void GatedSlotsBackward(CISTERN_GATED_SLOTS_ARGUMENTS(T)) {                                   \
    CISTERN_DISPATCH(GatedSlotsBackward##Name)                                                  \
    (shape, options, in, y, d_out, mask, keys, values, G_keys, G_values, h, dq, dk, dv, dx, dy, \
     terms);                                                                                    \
  }
CISTERN_GATED_SLOTS(float, Float)
CISTERN_GATED_SLOTS(double, Double)
CISTERN_GATED_SLOTS(BFloat16, BFloat16)
#undef CISTERN_GATED_SLOTS

}  // namespace cistern
#endif  // HWY_ONCE
