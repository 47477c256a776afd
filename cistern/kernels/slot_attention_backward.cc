#include "cistern/kernels/dispatch.h"
#include "cistern/kernels/slot_attention.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/slot_attention_backward.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/latte_reverse-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

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

// Latte, and FAVOR+ with the other Weights (slot_weights-inl.h).
template <class Weights, class S>
void LatteAll(const SlotShape& shape, const Rows<const S>& q, const Rows<const S>& s,
              const Rows<const S>& v, const Rows<const S>& g, const RowMask& mask,
              const double* memory, const double* z, ComputeType<S>* G, ComputeType<S>* h,
              const Rows<S>& dq, const Rows<S>& ds, const Rows<S>& dv) {
  const auto source = [&](int64_t b, int64_t y) -> GivenTokens<S> {
    return {{q, b, y}, {s, b, y}, {dq, b, y}, {ds, b, y}};
  };
  LatteBackwardAll<Weights, S>(shape, source, v, g, mask, memory, z, G, h, dv);
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
