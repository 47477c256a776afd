#include "cistern/base/parallel.h"
#include "cistern/kernels/dispatch.h"
#include "cistern/kernels/slot_memory.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/slot_adjoint.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/slot_reverse-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

template <class T>
struct AdjointHead {
  Sequence<const T> a, g, s, u, b, dz;
  Sequence<T> du, ds;
  Tokens tokens;
  size_t n, width, total;
};

template <class T>
struct AdjointVisit {
  void Scale(const T* factor) { core.Scale(factor); }
  void Prefetch(size_t t, size_t end) const {
    for (const auto* x : {&head.a, &head.b}) PrefetchRows(*x, t, end, head.n);
    for (const auto* x : {&head.g, &head.u}) PrefetchRows(*x, t, end, head.width);
  }
  void Rows(size_t t) {
    const Tag<T> d;
    const SlotChunk<T>& chunk = walk.chunk;
    const size_t rows = chunk.rows, np = chunk.np;
    PackRows(head.a, t, rows, head.n, np, T{0}, W);
    PackRows(head.b, t, rows, head.n, np, T{0}, ab);
    if (dz != nullptr) PackRows(head.dz, t, rows, head.n, np, T{0}, dz);
    TimesF(chunk, W, W);
    for (size_t i = 0; i < rows * np; i += kLanes<T>)
      hn::Store(hn::Mul(hn::Load(d, W + i), hn::Load(d, ab + i)), d, ab + i);
    core.template Rows<false>(rows, chunk.E, walk.ET, W, head.g, head.u, t, head.du, Y);
    walk.Gradients(Y, ab, dz);
    UnpackRows(Y, t, rows, head.n, np, head.ds);
  }
  const AdjointHead<T>& head;
  ReverseWalk<T>& walk;
  ReverseCore<T>& core;
  T *W, *Y, *ab, *dz;
};

// grad [n, width] and h_io [n] in place.
template <class T>
HWY_NOINLINE void AdjointOfHead(const AdjointHead<T>& head, const double* z0, T* grad, T* h_io) {
  const size_t n = head.n, width = head.width, np = Padded<T>(n);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(
      ReverseWalk<T>::Bytes(n) + ReverseCore<T>::Bytes(n, width) + sizeof(T) * 4 * kChunkRows * np,
      ReverseWalk<T>::kPieces + ReverseCore<T>::kPieces + 4);
  ReverseWalk<T> walk(n, workspace);
  ReverseCore<T> core(n, width, workspace);
  AdjointVisit<T> visit{head, walk, core, nullptr, nullptr, nullptr, nullptr};
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
  walk.Run(head.s, head.tokens, spans, 0, spans.begins.size(), visit);
  core.Store(grad);
  std::memcpy(h_io, walk.h, n * sizeof(T));
  for (size_t l = 0; l < n; ++l) {  // the memory of an empty slot counts as zero, whatever it holds
    if (z0[l] != kEmpty) continue;
    h_io[l] = 0;
    std::memset(grad + l * width, 0, width * sizeof(T));
  }
  ZeroRows(head.tokens.length, head.total, width, head.du);
  ZeroRows(head.tokens.length, head.total, n, head.ds);
}

template <class T>
void AdjointOfAll(const SlotShape& shape, const Rows<const T>& a, const Rows<const T>& g,
                  const Rows<const T>& s, const Rows<const T>& u, const Rows<const T>& b,
                  const Rows<const T>& dz, const RowMask& mask, const double* z0, T* G, T* h,
                  const Rows<T>& du, const Rows<T>& ds) {
  ParallelFor(shape.batch * shape.heads, HeadsPerThread(shape), [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t x = index / shape.heads, y = index % shape.heads;
      const AdjointHead<T> head{{a, x, y},
                                {g, x, y},
                                {s, x, y},
                                {u, x, y},
                                {b, x, y},
                                {dz, x, y},
                                {du, x, y},
                                {ds, x, y},
                                Tokens(shape, mask, x),
                                static_cast<size_t>(shape.slots),
                                static_cast<size_t>(shape.width),
                                static_cast<size_t>(shape.length)};
      AdjointOfHead(head, z0 + index * shape.slots, G + index * shape.slots * shape.width,
                    h + index * shape.slots);
    }
  });
}

#define CISTERN_SLOT_ADJOINT(name, T)                                                  \
  void name(const SlotShape& shape, Rows<const T> a, Rows<const T> g, Rows<const T> s, \
            Rows<const T> u, Rows<const T> b, Rows<const T> dz, const RowMask& mask,   \
            const double* z0, T* G, T* h, Rows<T> du, Rows<T> ds) {                    \
    AdjointOfAll<T>(shape, a, g, s, u, b, dz, mask, z0, G, h, du, ds);                 \
  }
CISTERN_SLOT_ADJOINT(SlotAdjointFloat, float)
CISTERN_SLOT_ADJOINT(SlotAdjointDouble, double)
#undef CISTERN_SLOT_ADJOINT

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(SlotAdjointFloat);
HWY_EXPORT(SlotAdjointDouble);

template <>
void SlotAdjoint(const SlotShape& shape, Rows<const float> a, Rows<const float> g,
                 Rows<const float> s, Rows<const float> u, Rows<const float> b,
                 Rows<const float> dz, const RowMask& mask, const double* z0, float* G, float* h,
                 Rows<float> du, Rows<float> ds) {
  CISTERN_DISPATCH(SlotAdjointFloat)
  (shape, a, g, s, u, b, dz, mask, z0, G, h, du, ds);
}
template <>
void SlotAdjoint(const SlotShape& shape, Rows<const double> a, Rows<const double> g,
                 Rows<const double> s, Rows<const double> u, Rows<const double> b,
                 Rows<const double> dz, const RowMask& mask, const double* z0, double* G, double* h,
                 Rows<double> du, Rows<double> ds) {
  CISTERN_DISPATCH(SlotAdjointDouble)
  (shape, a, g, s, u, b, dz, mask, z0, G, h, du, ds);
}

}  // namespace cistern
#endif  // HWY_ONCE
