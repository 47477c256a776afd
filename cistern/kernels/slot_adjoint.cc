#include "cistern/kernels/dispatch.h"
#include "cistern/kernels/slot_memory.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/slot_adjoint.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/slot_reverse-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

template <class S>
struct AdjointHead {
  using T = ComputeType<S>;
  Sequence<const T> a;
  Sequence<const S> g;
  Sequence<const T> s;
  Sequence<const S> u;
  Sequence<const T> b, dz;
  Sequence<S> du;
  Sequence<T> ds;
  Tokens tokens;
  size_t n, width, total;
  // A part of the head: spans that begin at first .. whole - 1, after those behind them for the
  // state alone. last: of the tokens.
  size_t first, whole;
  bool last;
};

template <class S, class T = ComputeType<S>>
struct AdjointVisit {
  void Scale(const T* factor) { core.Scale(factor); }
  void Note(size_t t, size_t end) const {
    for (const auto* x : {&head.a, &head.b}) NoteRows(*x, t, end, head.n);
    for (const auto* x : {&head.g, &head.u}) NoteRows(*x, t, end, head.width);
  }
  // W = a F, and ab = W b.
  void Panels(size_t t) {
    const Tag<T> d;
    const SlotChunk<T>& chunk = walk.chunk;
    const size_t rows = chunk.rows, np = chunk.np;
    PackRows(head.a, t, rows, head.n, np, T{0}, W);
    PackRows(head.b, t, rows, head.n, np, T{0}, ab);
    if (dz != nullptr) PackRows(head.dz, t, rows, head.n, np, T{0}, dz);
    TimesF(chunk, W, W);
    for (size_t i = 0; i < rows * np; i += kLanes<T>)
      hn::Store(hn::Mul(hn::Load(d, W + i), hn::Load(d, ab + i)), d, ab + i);
  }
  void Rows(size_t t) {
    const SlotChunk<T>& chunk = walk.chunk;
    const size_t rows = chunk.rows, np = chunk.np;
    Panels(t);
    core.template Rows<false>(rows, chunk.E, walk.ET, W, head.g, head.u, t, head.du, Y);
    walk.Gradients(Y, ab, dz);
    UnpackRows(Y, t, rows, head.n, np, head.ds);
  }
  const AdjointHead<S>& head;
  ReverseWalk<T>& walk;
  ReverseCore<S>& core;
  T *W, *Y, *ab, *dz;
};

// The same for the state alone.
template <class S, class T = ComputeType<S>>
struct AdjointStateVisit {
  void Scale(const T* factor) { of.core.Scale(factor); }
  void Note(size_t t, size_t end) const { of.Note(t, end); }
  void Rows(size_t t) {
    of.Panels(t);
    of.core.Add(of.walk.chunk.rows, of.W, of.head.g, t);
    of.walk.AddTerms(of.ab, of.dz);
  }
  AdjointVisit<S>& of;
};

// grad [n, width] and h_io [n] in place.
template <class S, class T = ComputeType<S>>
HWY_NOINLINE void AdjointOfHead(const AdjointHead<S>& head, const double* z0, T* grad, T* h_io) {
  const size_t n = head.n, width = head.width, np = Padded<T>(n);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(
      ReverseWalk<T>::Bytes(n) + ReverseCore<S>::Bytes(n, width) + sizeof(T) * 4 * kChunkRows * np,
      ReverseWalk<T>::kPieces + ReverseCore<S>::kPieces + 4);
  ReverseWalk<T> walk(n, workspace);
  ReverseCore<S> core(n, width, workspace);
  AdjointVisit<S> visit{head, walk, core, nullptr, nullptr, nullptr, nullptr};
  for (T** panel : {&visit.W, &visit.Y, &visit.ab, &visit.dz})
    *panel = workspace.Take<T>(kChunkRows * np);
  if (head.dz.data == nullptr) visit.dz = nullptr;

  // Forward over the log-weights: where the spans begin and each slot's z there.
  SpanList spans;
  SpanVisit<T> finder{walk.chunk, spans};
  walk.chunk.LoadZ(z0);
  WalkChunks(walk.chunk, head.s, head.tokens, head.tokens.length, finder);

  core.Load(grad);
  for (size_t l = 0; l < np; ++l) walk.h[l] = l < n ? h_io[l] : T{0};
  AdjointStateVisit<S> state{visit};
  const size_t whole = spans.From(head.whole);
  walk.Run(head.s, head.tokens, spans, whole, spans.begins.size(), state);
  walk.Run(head.s, head.tokens, spans, spans.From(head.first), whole, visit);
  core.Store(grad);
  std::memcpy(h_io, walk.h, n * sizeof(T));
  for (size_t l = 0; l < n; ++l) {  // the memory of an empty slot counts as zero, whatever it holds
    if (z0[l] != kEmpty) continue;
    h_io[l] = 0;
    std::memset(grad + l * width, 0, width * sizeof(T));
  }
  if (!head.last) return;
  ZeroRows(head.tokens.length, head.total, width, head.du);
  ZeroRows(head.tokens.length, head.total, n, head.ds);
}

template <class S, class T = ComputeType<S>>
void AdjointOfAll(const SlotShape& shape, const Rows<const T>& a, const Rows<const S>& g,
                  const Rows<const T>& s, const Rows<const S>& u, const Rows<const T>& b,
                  const Rows<const T>& dz, const RowMask& mask, const double* z0, T* G, T* h,
                  const Rows<S>& du, const Rows<T>& ds) {
  const int64_t heads = shape.batch * shape.heads;
  const HeadParts parts(shape);
  PartStates<T> grads(parts, heads, shape.slots * shape.width, G),
      terms(parts, heads, shape.slots, h);
  ForParts(heads, HeadsPerThread(shape), parts, [&](int64_t index, int64_t part) {
    const int64_t x = index / shape.heads, y = index % shape.heads;
    const Tokens tokens(shape, mask, x);
    const AdjointHead<S> head{{a, x, y},
                              {g, x, y},
                              {s, x, y},
                              {u, x, y},
                              {b, x, y},
                              {dz, x, y},
                              {du, x, y},
                              {ds, x, y},
                              tokens,
                              static_cast<size_t>(shape.slots),
                              static_cast<size_t>(shape.width),
                              static_cast<size_t>(shape.length),
                              parts.ReverseEnd(part + 1, tokens.length),
                              parts.ReverseEnd(part, tokens.length),
                              part == 0};
    AdjointOfHead(head, z0 + index * shape.slots, grads.Of(index, part), terms.Of(index, part));
  });
  grads.Finish();
  terms.Finish();
}

#define CISTERN_SLOT_ARGUMENTS(S)                                                             \
  const SlotShape &shape, Rows<const ComputeType<S>> a, Rows<const S> g,                      \
      Rows<const ComputeType<S>> s, Rows<const S> u, Rows<const ComputeType<S>> b,            \
      Rows<const ComputeType<S>> dz, const RowMask &mask, const double *z0, ComputeType<S>*G, \
      ComputeType<S>*h, Rows<S> du, Rows<ComputeType<S>> ds
#define CISTERN_SLOT_ADJOINT(S, Name)                                  \
  void SlotAdjoint##Name(CISTERN_SLOT_ARGUMENTS(S)) {                  \
    AdjointOfAll<S>(shape, a, g, s, u, b, dz, mask, z0, G, h, du, ds); \
  }
CISTERN_SLOT_ADJOINT(float, Float)
CISTERN_SLOT_ADJOINT(double, Double)
CISTERN_SLOT_ADJOINT(BFloat16, BFloat16)
#undef CISTERN_SLOT_ADJOINT

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(SlotAdjointFloat);
HWY_EXPORT(SlotAdjointDouble);
HWY_EXPORT(SlotAdjointBFloat16);

#define CISTERN_SLOT_ADJOINT(S, Name)                                                      \
  template <>                                                                              \
  void SlotAdjoint<S>(CISTERN_SLOT_ARGUMENTS(S)) {                                         \
    CISTERN_DISPATCH(SlotAdjoint##Name)(shape, a, g, s, u, b, dz, mask, z0, G, h, du, ds); \
  }
CISTERN_SLOT_ADJOINT(float, Float)
CISTERN_SLOT_ADJOINT(double, Double)
CISTERN_SLOT_ADJOINT(BFloat16, BFloat16)
#undef CISTERN_SLOT_ADJOINT

}  // namespace cistern
#endif  // HWY_ONCE
