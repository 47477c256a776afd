#include "cistern/kernels/slot_memory.h"

#include <type_traits>

#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/slot_memory.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/gemm-inl.h"
#include "cistern/kernels/slot_core-inl.h"
#include "cistern/kernels/slot_step-inl.h"
#include "cistern/kernels/staged_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// The z of a chunk's rows, where it is asked for.
template <class T>
void PutZ(const SlotChunk<T>& chunk, size_t t, T* row, const Sequence<T>& z_out) {
  if (z_out.data == nullptr) return;
  for (size_t i = 0; i < chunk.rows; ++i) {
    chunk.ZRow(i, row);
    std::memcpy(z_out.At(t + i), row, chunk.n * sizeof(T));
  }
}

template <class S, class T = ComputeType<S>>
struct ReadVisit {
  void Empty() { core.Empty(); }
  void Begin(size_t) { core.Begin(chunk); }
  void Rows(size_t t) {
    if (t < from) return core.Write(chunk, v, t);
    PutZ(chunk, t, W, z_out);
    PackRows(r, t, chunk.rows, chunk.n, chunk.np, T{0}, W);
    TimesF(chunk, W, W);
    core.Rows(chunk, W, v, t, out);
  }
  void Close() { core.Close(chunk); }
  void Note(size_t t, size_t end) {
    NoteRows(r, t, end, chunk.n);
    NoteRows(v, t, end, core.width());
  }
  SlotChunk<T>& chunk;
  ReadCore<S>& core;
  Sequence<const T> r;
  Sequence<const S> v;
  Sequence<S> out;
  Sequence<T> z_out;
  T* W;
  size_t from;
};

template <class S, class T = ComputeType<S>>
HWY_NOINLINE void ReadHead(const ForwardHead<T>& head, const Sequence<const T>& r,
                           const Sequence<const T>& s, const Sequence<const S>& v, double* memory,
                           double* z, const Sequence<S>& out, const Sequence<T>& z_out) {
  const size_t n = head.n, width = head.width;
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(
      SlotChunk<T>::Bytes(n) + ReadCore<S>::Bytes(n, width) + sizeof(T) * kChunkRows * Padded<T>(n),
      SlotChunk<T>::kPieces + ReadCore<S>::kPieces + 1);
  SlotChunk<T> chunk(n, workspace);
  ReadCore<S> core(n, width, workspace);
  ReadVisit<S> visit{chunk,    core, r, v, out, z_out, workspace.Take<T>(kChunkRows * chunk.np),
                     head.from};
  chunk.LoadZ(z);
  core.LoadMemory(memory, z);
  WalkChunks(chunk, s, head.tokens, head.stop, visit);
  core.StoreMemory(memory);
  head.Finish(chunk, z, out, width, z_out);
}

template <class S, class T = ComputeType<S>>
struct MatchVisit {
  void Empty() { core.Empty(); }
  void Begin(size_t) { core.Begin(chunk); }
  void Rows(size_t t) {
    if (t < from) return core.Write(chunk, k, t);
    PutZ(chunk, t, X, z_out);
    core.Rows(chunk, q, k, t, X);
    UnpackRows(X, t, chunk.rows, chunk.n, chunk.np, out);
  }
  void Close() { core.Close(chunk); }
  void Note(size_t t, size_t end) {
    NoteRows(q, t, end, core.width());
    NoteRows(k, t, end, core.width());
  }
  SlotChunk<T>& chunk;
  MatchCore<S>& core;
  Sequence<const S> q, k;
  Sequence<T> out, z_out;
  T* X;
  size_t from;
};

template <class S, class T = ComputeType<S>>
HWY_NOINLINE void MatchHead(const ForwardHead<T>& head, const Sequence<const S>& q,
                            const Sequence<const T>& s, const Sequence<const S>& k, double* memory,
                            double* z, const Sequence<T>& out, const Sequence<T>& z_out) {
  const size_t n = head.n, width = head.width;
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(SlotChunk<T>::Bytes(n) + MatchCore<S>::Bytes(n, width) +
                      sizeof(T) * kChunkRows * Padded<T>(n),
                  SlotChunk<T>::kPieces + MatchCore<S>::kPieces + 1);
  SlotChunk<T> chunk(n, workspace);
  MatchCore<S> core(n, width, workspace);
  MatchVisit<S> visit{chunk,    core, q, k, out, z_out, workspace.Take<T>(kChunkRows * chunk.np),
                      head.from};
  chunk.LoadZ(z);
  core.LoadMemory(memory, z);
  WalkChunks(chunk, s, head.tokens, head.stop, visit);
  core.StoreMemory(memory);
  head.Finish(chunk, z, out, n, z_out);
}

// What a read and a match give: a of the one, out of the other.
template <bool kMatch, class S>
using OfToken = std::conditional_t<kMatch, S, ComputeType<S>>;

// One token of a head; a: r of a read, q of a match.
template <bool kMatch, class S, class T = ComputeType<S>>
HWY_NOINLINE void OneToken(const ForwardHead<T>& head, const Sequence<const OfToken<kMatch, S>>& a,
                           const Sequence<const T>& s, const Sequence<const S>& u, double* memory,
                           double* z, const Sequence<OfToken<!kMatch, S>>& out,
                           const Sequence<T>& z_out) {
  const size_t n = head.n, width = head.width;
  if (!StepBegin(head, z, {memory})) {
    ZeroRows(0, 1, kMatch ? n : width, out);
    if (z_out.data != nullptr) ZeroRows(0, 1, n, z_out);
    return;
  }
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(StepScratch::Bytes(n, width) + 2 * width * sizeof(T), StepScratch::kPieces + 2);
  const StepScratch scratch(n, width, workspace);
  T *const row = workspace.Take<T>(width), *const other = workspace.Take<T>(width);
  StepWeights(n, s.At(0), z, scratch.w);
  if constexpr (kMatch) {
    StepMatch(n, width, FirstRow(a, width, other), scratch.w, FirstRow(u, width, row), scratch.wide,
              memory, out.At(0));
  } else {
    T* const read = RoomForRow(out, other);
    StepRead(n, width, a.At(0), scratch.w, FirstRow(u, width, row), scratch.wide, memory, read);
    PutRow(read, width, out);
  }
  if (z_out.data == nullptr) return;
  for (size_t l = 0; l < n; ++l) z_out.At(0)[l] = static_cast<T>(z[l]);
}

template <bool kMatch, class S, class T = ComputeType<S>>
void ForwardAll(const SlotShape& shape, const Rows<const OfToken<kMatch, S>>& a,
                const Rows<const T>& s, const Rows<const S>& u, const RowMask& mask, double* memory,
                double* z, const Rows<OfToken<!kMatch, S>>& out, const Rows<T>& z_out) {
  const int64_t heads = shape.batch * shape.heads;
  const HeadParts parts(shape);
  PartStates<double> memories(parts, heads, shape.slots * shape.width, memory),
      zs(parts, heads, shape.slots, z);
  ForParts(heads, HeadsPerThread(shape), parts, [&](int64_t index, int64_t part) {
    const ForwardHead<T> head(shape, mask, index, parts, part);
    const int64_t b = head.b, h = head.h;
    const Sequence<const OfToken<kMatch, S>> ah(a, b, h);
    const Sequence<const T> sh(s, b, h);
    const Sequence<const S> uh(u, b, h);
    const Sequence<OfToken<!kMatch, S>> oh(out, b, h);
    const Sequence<T> zh(z_out, b, h);
    double *const m = memories.Of(index, part), *const zz = zs.Of(index, part);
    if (shape.length == 1) {
      OneToken<kMatch, S>(head, ah, sh, uh, m, zz, oh, zh);
    } else if constexpr (kMatch) {
      MatchHead<S>(head, ah, sh, uh, m, zz, oh, zh);
    } else {
      ReadHead<S>(head, ah, sh, uh, m, zz, oh, zh);
    }
  });
  memories.Finish();
  zs.Finish();
}

#define CISTERN_READ_ARGUMENTS(S)                                                     \
  const SlotShape &shape, Rows<const ComputeType<S>> r, Rows<const ComputeType<S>> s, \
      Rows<const S> v, const RowMask &mask, double *memory, double *z, Rows<S> out,   \
      Rows<ComputeType<S>> z_out
#define CISTERN_MATCH_ARGUMENTS(S)                                                        \
  const SlotShape &shape, Rows<const S> q, Rows<const ComputeType<S>> s, Rows<const S> k, \
      const RowMask &mask, double *memory, double *z, Rows<ComputeType<S>> out,           \
      Rows<ComputeType<S>> z_out
#define CISTERN_SLOT_FORWARD(S, Name)                                  \
  void SlotRead##Name(CISTERN_READ_ARGUMENTS(S)) {                     \
    ForwardAll<false, S>(shape, r, s, v, mask, memory, z, out, z_out); \
  }                                                                    \
  void SlotMatch##Name(CISTERN_MATCH_ARGUMENTS(S)) {                   \
    ForwardAll<true, S>(shape, q, s, k, mask, memory, z, out, z_out);  \
  }
CISTERN_SLOT_FORWARD(float, Float)
CISTERN_SLOT_FORWARD(double, Double)
CISTERN_SLOT_FORWARD(BFloat16, BFloat16)
#undef CISTERN_SLOT_FORWARD

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(SlotReadFloat);
HWY_EXPORT(SlotReadDouble);
HWY_EXPORT(SlotReadBFloat16);
HWY_EXPORT(SlotMatchFloat);
HWY_EXPORT(SlotMatchDouble);
HWY_EXPORT(SlotMatchBFloat16);

#define CISTERN_SLOT_FORWARD(S, Name)                                               \
  template <>                                                                       \
  void SlotRead<S>(CISTERN_READ_ARGUMENTS(S)) {                                     \
    CISTERN_DISPATCH(SlotRead##Name)(shape, r, s, v, mask, memory, z, out, z_out);  \
  }                                                                                 \
  template <>                                                                       \
  void SlotMatch<S>(CISTERN_MATCH_ARGUMENTS(S)) {                                   \
    CISTERN_DISPATCH(SlotMatch##Name)(shape, q, s, k, mask, memory, z, out, z_out); \
  }
CISTERN_SLOT_FORWARD(float, Float)
CISTERN_SLOT_FORWARD(double, Double)
CISTERN_SLOT_FORWARD(BFloat16, BFloat16)
#undef CISTERN_SLOT_FORWARD

}  // namespace cistern
#endif  // HWY_ONCE
