#include "cistern/base/parallel.h"
#include "cistern/kernels/dispatch.h"
#include "cistern/kernels/slot_attention.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/slot_attention_backward.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/slot_reverse-inl.h"
#include "cistern/kernels/slot_weights-inl.h"
#include "cistern/kernels/staged_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Each head goes twice over its tokens: forward for the gradients of the read weights, which need
// the memory of every position, then in reverse for those of what was written. What the first walk
// leaves for the second one lies where the second one's results go. It has rows of its own where
// results are rounded, and where threads share a head (head_parts.h), because one thread still
// reads it for the state alone where another one has its results.
template <class S, class T>
Sequence<T> RowsBetweenWalks(const HeadParts& parts, const Sequence<S>& result, size_t total,
                             size_t n, Workspace& workspace) {
  if constexpr (std::is_same_v<S, T>) {
    if (parts.count == 1) return result;
  }
  workspace.Start(total * n * sizeof(T), 1);
  return {workspace.Take<T>(total * n), n};
}

// One part of a head in the reverse walk: spans [first, whole) with all results, before that those
// from `whole` on for the state alone.
struct ReversePart {
  ReversePart(const HeadParts& parts, int64_t part, const SpanList& spans, size_t length)
      : first(spans.From(parts.ReverseEnd(part + 1, length))),
        whole(spans.From(parts.ReverseEnd(part, length))) {}
  size_t first, whole;
};

template <class S>
struct LatteTensors {
  Sequence<const S> q, s, v, g;
  Sequence<S> dq, ds, dv;
  Sequence<ComputeType<S>> dr;  // the gradients of the read weights, which may be dq
  SpanList spans = {};
};

// Rows t.. of x as a panel: where they lie, or `scratch` where whole vectors would not fit there,
// or where they must not be written.
template <class T>
struct RowsOrPanel {
  RowsOrPanel(const Sequence<T>& x, size_t t, size_t n, T* scratch, bool may_write = true)
      : data(scratch), ld(Padded<T>(n)) {
    if (!may_write || n != Padded<T>(n)) return;
    data = x.At(t);
    ld = static_cast<size_t>(x.time);
  }
  T* data;
  size_t ld;
};

// Forward: dr_t[l] = g_t . M_t[l].
template <class S, class T = ComputeType<S>>
struct LatteForwardVisit {
  void Empty() { core.Empty(); }
  void Begin(size_t t) {
    core.Begin(chunk);
    spans.Add(t, chunk);
  }
  void Note(size_t t, size_t end) const {
    for (const auto* y : {&x.g, &x.v}) NoteRows(*y, t, end, core.width());
  }
  void Rows(size_t t) {
    if (t < from) return core.Write(chunk, x.v, t);
    const RowsOrPanel<T> dr(x.dr, t, chunk.n, D);
    core.Rows(chunk, x.g, x.v, t, D, dr.data, dr.ld);
    if (dr.data == D) UnpackRows(D, t, chunk.rows, chunk.n, chunk.np, x.dr);
  }
  void Close() { core.Close(chunk); }
  SlotChunk<T>& chunk;
  MatchCore<S>& core;
  SpanList& spans;
  const LatteTensors<S>& x;
  T* D;
  size_t from;
};

// FAVOR+ with the other Weights (slot_weights-inl.h).
template <class S, class Weights, class T = ComputeType<S>>
struct LatteReverseVisit {
  void Scale(const T* factor) { core.Scale(factor); }
  void Note(size_t t, size_t end) const {
    NoteRows(x.q, t, end, walk.chunk.n);
    NoteRows(Const(x.dr), t, end, walk.chunk.n);
    for (const auto* y : {&x.g, &x.v}) NoteRows(*y, t, end, core.width());
  }
  void Rows(size_t t) {
    const SlotChunk<T>& chunk = walk.chunk;
    const RowsOrPanel<T> dr(x.dr, t, chunk.n, D, ResultsOverDr());
    if (dr.data == D) PackRows(Const(x.dr), t, chunk.rows, chunk.n, chunk.np, T{0}, D);
    weights.Gradients(chunk, x.q, t, W, dr.data, dr.ld, ab);
    if (dr.data == D) UnpackRows(D, t, chunk.rows, chunk.n, chunk.np, x.dq);
    core.template Rows<false>(chunk.rows, chunk.E, walk.ET, W, x.g, x.v, t, x.dv, Y);
    walk.Gradients(Y, ab, nullptr);
    UnpackRows(Y, t, chunk.rows, chunk.n, chunk.np, x.ds);
  }
  bool ResultsOverDr() const {
    if constexpr (std::is_same_v<S, T>) return x.dr.data == x.dq.data;
    return false;
  }
  ReverseWalk<T>& walk;
  ReverseCore<S>& core;
  Weights& weights;
  const LatteTensors<S>& x;
  T *W, *D, *ab, *Y;
};

// The same for the state alone.
template <class S, class Weights, class T = ComputeType<S>>
struct LatteStateVisit {
  void Scale(const T* factor) { of.core.Scale(factor); }
  void Note(size_t t, size_t end) const {
    NoteRows(of.x.q, t, end, of.walk.chunk.n);
    NoteRows(Const(of.x.dr), t, end, of.walk.chunk.n);
    NoteRows(of.x.g, t, end, of.core.width());
  }
  void Rows(size_t t) {
    const SlotChunk<T>& chunk = of.walk.chunk;
    PackRows(Const(of.x.dr), t, chunk.rows, chunk.n, chunk.np, T{0}, of.D);
    of.weights.Gradients(chunk, of.x.q, t, of.W, of.D, chunk.np, of.ab);
    of.core.Add(chunk.rows, of.W, of.x.g, t);
    of.walk.AddTerms(of.ab);
  }
  LatteReverseVisit<S, Weights>& of;
};

// The gradients of the state, from G and h at the beginning: an empty slot has none.
template <class T>
void StateGradients(const double* z, size_t n, size_t width, const T* h, T* h_io, T* grad) {
  for (size_t l = 0; l < n; ++l) {
    h_io[l] = z[l] == kEmpty ? T{0} : h[l];
    if (z[l] == kEmpty) std::memset(grad + l * width, 0, width * sizeof(T));
  }
}

// The last part's walk finds all spans.
template <class S, class T = ComputeType<S>>
HWY_NOINLINE void LatteFirstWalk(const ForwardHead<T>& head, LatteTensors<S>& x,
                                 const double* memory, const double* z) {
  const size_t n = head.n, width = head.width;
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(SlotChunk<T>::Bytes(n) + MatchCore<S>::Bytes(n, width) +
                      sizeof(T) * kChunkRows * Padded<T>(n),
                  SlotChunk<T>::kPieces + MatchCore<S>::kPieces + 1);
  SlotChunk<T> chunk(n, workspace);
  MatchCore<S> match(n, width, workspace);
  SpanList ignored;
  LatteForwardVisit<S> visit{
      chunk,    match, head.last ? x.spans : ignored, x, workspace.Take<T>(kChunkRows * chunk.np),
      head.from};
  chunk.LoadZ(z);
  match.LoadMemory(memory, z);
  WalkChunks(chunk, x.s, head.tokens, head.stop, visit);
}

template <class Weights, class S, class T = ComputeType<S>>
HWY_NOINLINE void LatteReverseWalk(const ForwardHead<T>& head, const ReversePart& part,
                                   const LatteTensors<S>& x, const double* z, T* grad, T* h_io) {
  const size_t n = head.n, width = head.width, np = Padded<T>(n);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(ReverseWalk<T>::Bytes(n) + ReverseCore<S>::Bytes(n, width) + Weights::Bytes(n) +
                      sizeof(T) * 4 * kChunkRows * np,
                  ReverseWalk<T>::kPieces + ReverseCore<S>::kPieces + Weights::kPieces + 4);
  ReverseWalk<T> walk(n, workspace);
  ReverseCore<S> reverse(n, width, workspace);
  Weights weights(n, workspace);
  T* panels[4];
  for (T*& panel : panels) panel = workspace.Take<T>(kChunkRows * np);
  LatteReverseVisit<S, Weights> visit{walk,      reverse,   weights,   x,
                                      panels[0], panels[1], panels[2], panels[3]};
  LatteStateVisit<S, Weights> state{visit};
  reverse.Load(grad);
  for (size_t l = 0; l < np; ++l) walk.h[l] = l < n ? h_io[l] : T{0};
  walk.Run(x.s, head.tokens, x.spans, part.whole, x.spans.begins.size(), state);
  walk.Run(x.s, head.tokens, x.spans, part.first, part.whole, visit);
  reverse.Store(grad);
  StateGradients(z, n, width, walk.h, h_io, grad);
  if (!head.last) return;
  ZeroRows(head.tokens.length, head.total, width, x.dv);
  ZeroRows(head.tokens.length, head.total, n, x.dq);
  ZeroRows(head.tokens.length, head.total, n, x.ds);
}

template <class S>
struct AbcTensors {
  Sequence<const S> q, k, v, s;
  Sequence<const ComputeType<S>> x;
  Sequence<const S> g;
  Sequence<S> dq, dk, dv, ds;
  Sequence<ComputeType<S>> dx, terms;  // terms: those of h, which may be ds
  SpanList spans = {};
};

// Forward: dx_t and dq_t; and the terms of h, p_t dp_t + dx_t x_t / scale.
template <class S, class T = ComputeType<S>>
struct AbcForwardVisit {
  void Empty() { keys.Empty(), values.Empty(); }
  void Begin(size_t t) {
    keys.Begin(chunk), values.Begin(chunk);
    spans.Add(t, chunk);
  }
  void Note(size_t t, size_t end) const {
    for (const auto* y : {&x.g, &x.v, &x.k}) NoteRows(*y, t, end, keys.width());
    NoteRows(x.x, t, end, chunk.n);
  }
  void Rows(size_t t) {
    if (t < from) {
      values.Write(chunk, x.v, t);
      keys.Write(chunk, x.k, t);
      return;
    }
    const Tag<T> d;
    const size_t rows = chunk.rows, n = chunk.n, np = chunk.np;
    values.Rows(chunk, x.g, x.v, t, D);
    PackRows(x.x, t, rows, n, np, kMinusInfinity<T>, X);
    SoftmaxRows(rows, np, X, P);
    for (T* panel : {X, D}) FillPadding(rows, n, np, T{0}, panel);
    const Vec<T> factor = hn::Set(d, scale);
    for (size_t i = 0; i < rows * np; i += np) {
      const Vec<T> dot = RowDot(np, P + i, D + i);
      for (size_t l = i; l < i + np; l += kLanes<T>) {
        const Vec<T> p = hn::Load(d, P + l), dp = hn::Load(d, D + l),
                     change = hn::Mul(p, hn::Sub(dp, dot));
        hn::Store(hn::Mul(factor, change), d, D + l);
        hn::Store(hn::MulAdd(p, dp, hn::Mul(change, hn::Load(d, X + l))), d, P + l);
      }
    }
    UnpackRows(D, t, rows, n, np, x.dx);
    UnpackRows(P, t, rows, n, np, x.terms);
    TimesF(chunk, D, D);
    keys.Rows(chunk, D, x.k, t, x.dq);
  }
  void Close() { keys.Close(chunk), values.Close(chunk); }
  SlotChunk<T>& chunk;
  ReadCore<S>& keys;
  MatchCore<S>& values;
  SpanList& spans;
  const AbcTensors<S>& x;
  T scale;
  T *X, *P, *D;
  size_t from;
};

template <class S, class T = ComputeType<S>>
struct AbcReverseVisit {
  void Scale(const T* factor) { keys.Scale(factor), values.Scale(factor); }
  void Note(size_t t, size_t end) const {
    for (const auto* y : {&x.g, &x.v, &x.k, &x.q}) NoteRows(*y, t, end, keys.width());
    NoteOfSlots(t, end);
  }
  void NoteOfSlots(size_t t, size_t end) const {
    const Sequence<const T> dx = Const(x.dx), terms = Const(x.terms);
    for (const auto* y : {&x.x, &dx, &terms}) NoteRows(*y, t, end, walk.chunk.n);
  }
  // P, D and ab of rows t.., times F.
  void Panels(size_t t) {
    const SlotChunk<T>& chunk = walk.chunk;
    const size_t rows = chunk.rows, n = chunk.n, np = chunk.np;
    SoftmaxOfTokens(x.x, t, rows, n, chunk.F, P);
    PackRows(Const(x.dx), t, rows, n, np, T{0}, D);
    PackRows(Const(x.terms), t, rows, n, np, T{0}, ab);
    for (T* panel : {D, ab}) TimesF(chunk, panel, panel);
  }
  void Rows(size_t t) {
    const SlotChunk<T>& chunk = walk.chunk;
    const size_t rows = chunk.rows;
    Panels(t);
    values.template Rows<false>(rows, chunk.E, walk.ET, P, x.g, x.v, t, x.dv, Y);
    keys.template Rows<true>(rows, chunk.E, walk.ET, D, x.q, x.k, t, x.dk, Y);
    walk.Gradients(Y, ab, nullptr);
    UnpackRows(Y, t, rows, chunk.n, chunk.np, x.ds);
  }
  ReverseWalk<T>& walk;
  ReverseCore<S>& keys;
  ReverseCore<S>& values;
  const AbcTensors<S>& x;
  T *P, *D, *ab, *Y;
};

// The same for the state alone.
template <class S, class T = ComputeType<S>>
struct AbcStateVisit {
  void Scale(const T* factor) { of.Scale(factor); }
  void Note(size_t t, size_t end) const {
    for (const auto* y : {&of.x.g, &of.x.q}) NoteRows(*y, t, end, of.keys.width());
    of.NoteOfSlots(t, end);
  }
  void Rows(size_t t) {
    of.Panels(t);
    of.values.Add(of.walk.chunk.rows, of.P, of.x.g, t);
    of.keys.Add(of.walk.chunk.rows, of.D, of.x.q, t);
    of.walk.AddTerms(of.ab);
  }
  AbcReverseVisit<S>& of;
};

// The last part's walk finds all spans.
template <class S, class T = ComputeType<S>>
HWY_NOINLINE void AbcFirstWalk(const ForwardHead<T>& head, T scale, AbcTensors<S>& x,
                               const double* keys, const double* values, const double* z) {
  const size_t n = head.n, width = head.width, np = Padded<T>(n);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(SlotChunk<T>::Bytes(n) + MatchCore<S>::Bytes(n, width) +
                      ReadCore<S>::Bytes(n, width) + sizeof(T) * 3 * kChunkRows * np,
                  SlotChunk<T>::kPieces + MatchCore<S>::kPieces + ReadCore<S>::kPieces + 3);
  SlotChunk<T> chunk(n, workspace);
  MatchCore<S> match(n, width, workspace);
  ReadCore<S> read(n, width, workspace);
  T* panels[3];
  for (T*& panel : panels) panel = workspace.Take<T>(kChunkRows * np);
  SpanList ignored;
  AbcForwardVisit<S> visit{chunk,     read,     match,     head.last ? x.spans : ignored,
                           x,         scale,    panels[0], panels[1],
                           panels[2], head.from};
  chunk.LoadZ(z);
  match.LoadMemory(values, z);
  read.LoadMemory(keys, z);
  WalkChunks(chunk, x.s, head.tokens, head.stop, visit);
}

template <class S, class T = ComputeType<S>>
HWY_NOINLINE void AbcReverseWalk(const ForwardHead<T>& head, const ReversePart& part,
                                 const AbcTensors<S>& x, const double* z, T* grad_keys,
                                 T* grad_values, T* h_io) {
  const size_t n = head.n, width = head.width, np = Padded<T>(n);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(ReverseWalk<T>::Bytes(n) + 2 * ReverseCore<S>::Bytes(n, width) +
                      sizeof(T) * 4 * kChunkRows * np,
                  ReverseWalk<T>::kPieces + 2 * ReverseCore<S>::kPieces + 4);
  ReverseWalk<T> walk(n, workspace);
  ReverseCore<S> key_core(n, width, workspace), value_core(n, width, workspace);
  T* panels[4];
  for (T*& panel : panels) panel = workspace.Take<T>(kChunkRows * np);
  AbcReverseVisit<S> visit{walk,      key_core,  value_core, x,
                           panels[0], panels[1], panels[2],  panels[3]};
  AbcStateVisit<S> state{visit};
  key_core.Load(grad_keys);
  value_core.Load(grad_values);
  for (size_t l = 0; l < np; ++l) walk.h[l] = l < n ? h_io[l] : T{0};
  walk.Run(x.s, head.tokens, x.spans, part.whole, x.spans.begins.size(), state);
  walk.Run(x.s, head.tokens, x.spans, part.first, part.whole, visit);
  key_core.Store(grad_keys);
  value_core.Store(grad_values);
  StateGradients(z, n, width, walk.h, h_io, grad_keys);
  StateGradients(z, n, width, walk.h, h_io, grad_values);
  if (!head.last) return;
  for (const auto* y : {&x.dq, &x.dk, &x.dv}) ZeroRows(head.tokens.length, head.total, width, *y);
  ZeroRows(head.tokens.length, head.total, n, x.ds);
  ZeroRows(head.tokens.length, head.total, n, x.dx);
}

template <class Weights, class S>
void LatteAll(const SlotShape& shape, const Rows<const S>& q, const Rows<const S>& s,
              const Rows<const S>& v, const Rows<const S>& g, const RowMask& mask,
              const double* memory, const double* z, ComputeType<S>* G, ComputeType<S>* h,
              const Rows<S>& dq, const Rows<S>& ds, const Rows<S>& dv) {
  using T = ComputeType<S>;
  const int64_t heads = shape.batch * shape.heads, size = shape.slots * shape.width;
  const HeadParts parts(shape);
  PartStates<T> grads(parts, heads, size, G), terms(parts, heads, shape.slots, h);
  const auto open = [&](int64_t index, Workspace& workspace) -> LatteTensors<S> {
    const int64_t b = index / shape.heads, y = index % shape.heads;
    const Sequence<S> result(dq, b, y);
    return {{q, b, y},
            {s, b, y},
            {v, b, y},
            {g, b, y},
            result,
            {ds, b, y},
            {dv, b, y},
            RowsBetweenWalks<S, T>(parts, result, static_cast<size_t>(shape.length),
                                   static_cast<size_t>(shape.slots), workspace)};
  };
  ForHeads(
      heads, HeadsPerThread(shape), parts, open,
      [&](int64_t index, int64_t part, LatteTensors<S>& x) {
        LatteFirstWalk<S>(ForwardHead<T>(shape, mask, index, parts, part), x, memory + index * size,
                          z + index * shape.slots);
      },
      [&](int64_t index, int64_t part, const LatteTensors<S>& x) {
        const ForwardHead<T> head(shape, mask, index, parts, part);
        LatteReverseWalk<Weights, S>(head, {parts, part, x.spans, head.tokens.length}, x,
                                     z + index * shape.slots, grads.Of(index, part),
                                     terms.Of(index, part));
      });
  grads.Finish();
  terms.Finish();
}

template <class S>
void AbcAll(const SlotShape& shape, double scale, const Rows<const S>& q, const Rows<const S>& k,
            const Rows<const S>& v, const Rows<const S>& s,
            const Rows<const ComputeType<S>>& scores, const Rows<const S>& g, const RowMask& mask,
            const double* keys, const double* values, const double* z, ComputeType<S>* G_keys,
            ComputeType<S>* G_values, ComputeType<S>* h, const Rows<S>& dq, const Rows<S>& dk,
            const Rows<S>& dv, const Rows<S>& ds, const Rows<ComputeType<S>>& dx) {
  using T = ComputeType<S>;
  const int64_t heads = shape.batch * shape.heads, size = shape.slots * shape.width;
  const HeadParts parts(shape);
  PartStates<T> key_grads(parts, heads, size, G_keys), value_grads(parts, heads, size, G_values),
      terms(parts, heads, shape.slots, h);
  const auto open = [&](int64_t index, Workspace& workspace) -> AbcTensors<S> {
    const int64_t b = index / shape.heads, y = index % shape.heads;
    const Sequence<S> result(ds, b, y);
    return {{q, b, y},
            {k, b, y},
            {v, b, y},
            {s, b, y},
            {scores, b, y},
            {g, b, y},
            {dq, b, y},
            {dk, b, y},
            {dv, b, y},
            result,
            {dx, b, y},
            RowsBetweenWalks<S, T>(parts, result, static_cast<size_t>(shape.length),
                                   static_cast<size_t>(shape.slots), workspace)};
  };
  ForHeads(
      heads, HeadsPerThread(shape), parts, open,
      [&](int64_t index, int64_t part, AbcTensors<S>& x) {
        AbcFirstWalk<S>(ForwardHead<T>(shape, mask, index, parts, part), static_cast<T>(scale), x,
                        keys + index * size, values + index * size, z + index * shape.slots);
      },
      [&](int64_t index, int64_t part, const AbcTensors<S>& x) {
        const ForwardHead<T> head(shape, mask, index, parts, part);
        AbcReverseWalk<S>(head, {parts, part, x.spans, head.tokens.length}, x,
                          z + index * shape.slots, key_grads.Of(index, part),
                          value_grads.Of(index, part), terms.Of(index, part));
      });
  key_grads.Finish();
  value_grads.Finish();
  terms.Finish();
}

#define CISTERN_LATTE_ARGUMENTS(T)                                                            \
  const SlotShape &shape, Rows<const T> q, Rows<const T> s, Rows<const T> v, Rows<const T> g, \
      const RowMask &mask, const double *memory, const double *z, ComputeType<T>*G,           \
      ComputeType<T>*h, Rows<T> dq, Rows<T> ds, Rows<T> dv
#define CISTERN_ABC_ARGUMENTS(T)                                                                 \
  const SlotShape &shape, double scale, Rows<const T> q, Rows<const T> k, Rows<const T> v,       \
      Rows<const T> s, Rows<const ComputeType<T>> x, Rows<const T> g, const RowMask &mask,       \
      const double *keys, const double *values, const double *z, ComputeType<T>*G_keys,          \
      ComputeType<T>*G_values, ComputeType<T>*h, Rows<T> dq, Rows<T> dk, Rows<T> dv, Rows<T> ds, \
      Rows<ComputeType<T>> dx
#define CISTERN_SLOT_ATTENTION(T, Name)                                                           \
  void LatteBackward##Name(CISTERN_LATTE_ARGUMENTS(T)) {                                          \
    LatteAll<TokenWeights<ComputeType<T>>, T>(shape, q, s, v, g, mask, memory, z, G, h, dq, ds,   \
                                              dv);                                                \
  }                                                                                               \
  void FavorBackward##Name(CISTERN_LATTE_ARGUMENTS(T)) {                                          \
    LatteAll<FavorWeights<ComputeType<T>>, T>(shape, q, s, v, g, mask, memory, z, G, h, dq, ds,   \
                                              dv);                                                \
  }                                                                                               \
  void AbcBackward##Name(CISTERN_ABC_ARGUMENTS(T)) {                                              \
    AbcAll<T>(shape, scale, q, k, v, s, x, g, mask, keys, values, z, G_keys, G_values, h, dq, dk, \
              dv, ds, dx);                                                                        \
  }
CISTERN_SLOT_ATTENTION(float, Float)
CISTERN_SLOT_ATTENTION(double, Double)
CISTERN_SLOT_ATTENTION(BFloat16, BFloat16)
#undef CISTERN_SLOT_ATTENTION

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(LatteBackwardFloat);
HWY_EXPORT(LatteBackwardDouble);
HWY_EXPORT(LatteBackwardBFloat16);
HWY_EXPORT(FavorBackwardFloat);
HWY_EXPORT(FavorBackwardDouble);
HWY_EXPORT(FavorBackwardBFloat16);
HWY_EXPORT(AbcBackwardFloat);
HWY_EXPORT(AbcBackwardDouble);
HWY_EXPORT(AbcBackwardBFloat16);

#define CISTERN_SLOT_ATTENTION(T, Name)                                                          \
  template <>                                                                                    \
  void LatteBackward(CISTERN_LATTE_ARGUMENTS(T)) {                                               \
    CISTERN_DISPATCH(LatteBackward##Name)                                                        \
    (shape, q, s, v, g, mask, memory, z, G, h, dq, ds, dv);                                      \
  }                                                                                              \
  template <>                                                                                    \
  void FavorBackward(CISTERN_LATTE_ARGUMENTS(T)) {                                               \
    CISTERN_DISPATCH(FavorBackward##Name)                                                        \
    (shape, q, s, v, g, mask, memory, z, G, h, dq, ds, dv);                                      \
  }                                                                                              \
  template <>                                                                                    \
  void AbcBackward(CISTERN_ABC_ARGUMENTS(T)) {                                                   \
    CISTERN_DISPATCH(AbcBackward##Name)                                                          \
    (shape, scale, q, k, v, s, x, g, mask, keys, values, z, G_keys, G_values, h, dq, dk, dv, ds, \
     dx);                                                                                        \
  }
CISTERN_SLOT_ATTENTION(float, Float)
CISTERN_SLOT_ATTENTION(double, Double)
CISTERN_SLOT_ATTENTION(BFloat16, BFloat16)
#undef CISTERN_SLOT_ATTENTION

}  // namespace cistern
#endif  // HWY_ONCE
