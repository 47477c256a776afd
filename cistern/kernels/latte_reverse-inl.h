// The backward of Latte's walk over a head's tokens, and of FAVOR+'s, and what ABC's shares with
// it; included once per Highway target.
#if defined(CISTERN_KERNELS_LATTE_REVERSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_LATTE_REVERSE_INL_H_
#undef CISTERN_KERNELS_LATTE_REVERSE_INL_H_
#else
#define CISTERN_KERNELS_LATTE_REVERSE_INL_H_
#endif

#include "cistern/kernels/latte_tokens-inl.h"
#include "cistern/kernels/slot_reverse-inl.h"
#include "cistern/kernels/slot_weights-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// One part of a head in the reverse walk: spans [first, whole) with all results, before that those
// from `whole` on for the state alone.
struct ReversePart {
  ReversePart(const HeadParts& parts, int64_t part, const SpanList& spans, size_t length)
      : first(spans.From(parts.ReverseEnd(part + 1, length))),
        whole(spans.From(parts.ReverseEnd(part, length))) {}
  size_t first, whole;
};

// Source: of queries and log-weights (latte_tokens-inl.h).
template <class S, class Source>
struct LatteTensors {
  Source tokens;
  Sequence<const S> v, g;
  Sequence<S> dv;
  Sequence<ComputeType<S>> dr;  // the gradients of the read weights, which may be results
  bool shared;                  // among threads: dr may be read again (head_parts.h)
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
template <class S, class Source, class T = ComputeType<S>>
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
  const LatteTensors<S, Source>& x;
  T* D;
  size_t from;
};

// FAVOR+ with the other Weights (slot_weights-inl.h).
template <class S, class Weights, class Source, class T = ComputeType<S>>
struct LatteReverseVisit {
  void Scale(const T* factor) { core.Scale(factor); }
  void Note(size_t t, size_t end) const {
    reader.NoteQueries(t, end);
    NoteRows(Const(x.dr), t, end, walk.chunk.n);
    for (const auto* y : {&x.g, &x.v}) NoteRows(*y, t, end, core.width());
  }
  void Rows(size_t t) {
    const SlotChunk<T>& chunk = walk.chunk;
    const RowsOrPanel<T> dr(x.dr, t, chunk.n, D, !x.shared);
    const auto q = reader.Queries(t, chunk.rows);
    if (dr.data == D) PackRows(Const(x.dr), t, chunk.rows, chunk.n, chunk.np, T{0}, D);
    weights.Gradients(chunk, q.x, q.t, W, dr.data, dr.ld, ab);
    reader.PutQueries(dr.data, dr.ld, t, chunk.rows);
    core.template Rows<false>(chunk.rows, chunk.E, walk.ET, W, x.g, x.v, t, x.dv, Y);
    walk.Gradients(Y, ab, nullptr);
    reader.PutLogWeights(Y, t, chunk.rows);
  }
  ReverseWalk<T>& walk;
  ReverseCore<S>& core;
  Weights& weights;
  typename Source::Reader& reader;
  const LatteTensors<S, Source>& x;
  T *W, *D, *ab, *Y;
};

// The same for the state alone.
template <class S, class Weights, class Source, class T = ComputeType<S>>
struct LatteStateVisit {
  void Scale(const T* factor) { of.core.Scale(factor); }
  void Note(size_t t, size_t end) const {
    of.reader.NoteQueries(t, end);
    NoteRows(Const(of.x.dr), t, end, of.walk.chunk.n);
    NoteRows(of.x.g, t, end, of.core.width());
  }
  void Rows(size_t t) {
    const SlotChunk<T>& chunk = of.walk.chunk;
    PackRows(Const(of.x.dr), t, chunk.rows, chunk.n, chunk.np, T{0}, of.D);
    const auto q = of.reader.Queries(t, chunk.rows);
    of.weights.Gradients(chunk, q.x, q.t, of.W, of.D, chunk.np, of.ab);
    of.core.Add(chunk.rows, of.W, of.x.g, t);
    of.walk.AddTerms(of.ab);
  }
  LatteReverseVisit<S, Weights, Source>& of;
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
template <class S, class Source, class T = ComputeType<S>>
HWY_NOINLINE void LatteFirstWalk(const ForwardHead<T>& head, LatteTensors<S, Source>& x,
                                 const double* memory, const double* z) {
  using Reader = typename Source::Reader;
  const size_t n = head.n, width = head.width;
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(SlotChunk<T>::Bytes(n) + MatchCore<S>::Bytes(n, width) +
                      Reader::Bytes(x.tokens, n) + sizeof(T) * kChunkRows * Padded<T>(n),
                  SlotChunk<T>::kPieces + MatchCore<S>::kPieces + Reader::kPieces + 1);
  SlotChunk<T> chunk(n, workspace);
  MatchCore<S> match(n, width, workspace);
  Reader reader(x.tokens, n, workspace);
  SpanList ignored;
  LatteForwardVisit<S, Source> visit{
      chunk,    match, head.last ? x.spans : ignored, x, workspace.Take<T>(kChunkRows * chunk.np),
      head.from};
  chunk.LoadZ(z);
  match.LoadMemory(memory, z);
  WalkChunks(chunk, LogWeightsOf<Reader>{reader}, head.tokens, head.stop, visit);
}

template <class Weights, class S, class Source, class T = ComputeType<S>>
HWY_NOINLINE void LatteReverseWalk(const ForwardHead<T>& head, const ReversePart& part,
                                   const LatteTensors<S, Source>& x, const double* z, T* grad,
                                   T* h_io) {
  using Reader = typename Source::Reader;
  const size_t n = head.n, width = head.width, np = Padded<T>(n);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(
      ReverseWalk<T>::Bytes(n) + ReverseCore<S>::Bytes(n, width) + Weights::Bytes(n) +
          Reader::Bytes(x.tokens, n) + sizeof(T) * 4 * kChunkRows * np,
      ReverseWalk<T>::kPieces + ReverseCore<S>::kPieces + Weights::kPieces + Reader::kPieces + 4);
  ReverseWalk<T> walk(n, workspace);
  ReverseCore<S> reverse(n, width, workspace);
  Weights weights(n, workspace);
  Reader reader(x.tokens, n, workspace);
  T* panels[4];
  for (T*& panel : panels) panel = workspace.Take<T>(kChunkRows * np);
  LatteReverseVisit<S, Weights, Source> visit{walk,      reverse,   weights,   reader,   x,
                                              panels[0], panels[1], panels[2], panels[3]};
  LatteStateVisit<S, Weights, Source> state{visit};
  reverse.Load(grad);
  for (size_t l = 0; l < np; ++l) walk.h[l] = l < n ? h_io[l] : T{0};
  const LogWeightsOf<Reader> s{reader};
  walk.Run(s, head.tokens, x.spans, part.whole, x.spans.begins.size(), state);
  walk.Run(s, head.tokens, x.spans, part.first, part.whole, visit);
  reverse.Store(grad);
  StateGradients(z, n, width, walk.h, h_io, grad);
  if (!head.last) return;
  ZeroRows(head.tokens.length, head.total, width, x.dv);
  reader.ZeroGradients(head.tokens.length, head.total);
}

// source(b, h): of a head's tokens.
template <class Weights, class S, class MakeSource>
void LatteBackwardAll(const SlotShape& shape, const MakeSource& source, const Rows<const S>& v,
                      const Rows<const S>& g, const RowMask& mask, const double* memory,
                      const double* z, ComputeType<S>* G, ComputeType<S>* h, const Rows<S>& dv) {
  using T = ComputeType<S>;
  using Source = decltype(source(int64_t{0}, int64_t{0}));
  const int64_t heads = shape.batch * shape.heads, size = shape.slots * shape.width;
  const HeadParts parts(shape);
  PartStates<T> grads(parts, heads, size, G), terms(parts, heads, shape.slots, h);
  const auto open = [&](int64_t index, Workspace& workspace) -> LatteTensors<S, Source> {
    const int64_t b = index / shape.heads, y = index % shape.heads;
    const Source tokens = source(b, y);
    return {tokens,
            {v, b, y},
            {g, b, y},
            {dv, b, y},
            tokens.RowsBetween(parts, static_cast<size_t>(shape.length),
                               static_cast<size_t>(shape.slots), workspace),
            parts.count > 1};
  };
  ForHeads(
      heads, HeadsPerThread(shape), parts, open,
      [&](int64_t index, int64_t part, LatteTensors<S, Source>& x) {
        LatteFirstWalk<S>(ForwardHead<T>(shape, mask, index, parts, part), x, memory + index * size,
                          z + index * shape.slots);
      },
      [&](int64_t index, int64_t part, const LatteTensors<S, Source>& x) {
        const ForwardHead<T> head(shape, mask, index, parts, part);
        LatteReverseWalk<Weights, S>(head, {parts, part, x.spans, head.tokens.length}, x,
                                     z + index * shape.slots, grads.Of(index, part),
                                     terms.Of(index, part));
      });
  grads.Finish();
  terms.Finish();
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
