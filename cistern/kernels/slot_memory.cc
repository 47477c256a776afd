#include "cistern/kernels/slot_memory.h"

#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/slot_memory.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/gemm-inl.h"
#include "cistern/kernels/slot_core-inl.h"
#include "cistern/kernels/slot_step-inl.h"

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

template <class T>
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
  ReadCore<T>& core;
  Sequence<const T> r, v;
  Sequence<T> out, z_out;
  T* W;
  size_t from;
};

template <class T>
HWY_NOINLINE void ReadHead(const ForwardHead<T>& head, const Sequence<const T>& r,
                           const Sequence<const T>& s, const Sequence<const T>& v, double* memory,
                           double* z, const Sequence<T>& out, const Sequence<T>& z_out) {
  const size_t n = head.n, width = head.width;
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(
      SlotChunk<T>::Bytes(n) + ReadCore<T>::Bytes(n, width) + sizeof(T) * kChunkRows * Padded<T>(n),
      SlotChunk<T>::kPieces + ReadCore<T>::kPieces + 1);
  SlotChunk<T> chunk(n, workspace);
  ReadCore<T> core(n, width, workspace);
  ReadVisit<T> visit{chunk,    core, r, v, out, z_out, workspace.Take<T>(kChunkRows * chunk.np),
                     head.from};
  chunk.LoadZ(z);
  core.LoadMemory(memory, z);
  WalkChunks(chunk, s, head.tokens, head.stop, visit);
  core.StoreMemory(memory);
  head.Finish(chunk, z, out, width, z_out);
}

template <class T>
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
  MatchCore<T>& core;
  Sequence<const T> q, k;
  Sequence<T> out, z_out;
  T* X;
  size_t from;
};

template <class T>
HWY_NOINLINE void MatchHead(const ForwardHead<T>& head, const Sequence<const T>& q,
                            const Sequence<const T>& s, const Sequence<const T>& k, double* memory,
                            double* z, const Sequence<T>& out, const Sequence<T>& z_out) {
  const size_t n = head.n, width = head.width;
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(SlotChunk<T>::Bytes(n) + MatchCore<T>::Bytes(n, width) +
                      sizeof(T) * kChunkRows * Padded<T>(n),
                  SlotChunk<T>::kPieces + MatchCore<T>::kPieces + 1);
  SlotChunk<T> chunk(n, workspace);
  MatchCore<T> core(n, width, workspace);
  MatchVisit<T> visit{chunk,    core, q, k, out, z_out, workspace.Take<T>(kChunkRows * chunk.np),
                      head.from};
  chunk.LoadZ(z);
  core.LoadMemory(memory, z);
  WalkChunks(chunk, s, head.tokens, head.stop, visit);
  core.StoreMemory(memory);
  head.Finish(chunk, z, out, n, z_out);
}

// One token of a head; a: r of a read, q of a match.
template <bool kMatch, class T>
HWY_NOINLINE void OneToken(const ForwardHead<T>& head, const Sequence<const T>& a,
                           const Sequence<const T>& s, const Sequence<const T>& u, double* memory,
                           double* z, const Sequence<T>& out, const Sequence<T>& z_out) {
  const size_t n = head.n, width = head.width;
  if (!StepBegin(head, z, {memory})) {
    ZeroRows(0, 1, kMatch ? n : width, out);
    if (z_out.data != nullptr) ZeroRows(0, 1, n, z_out);
    return;
  }
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(StepScratch::Bytes(n, width), StepScratch::kPieces);
  const StepScratch scratch(n, width, workspace);
  StepWeights(n, s.At(0), z, scratch.w);
  if constexpr (kMatch) {
    StepMatch(n, width, a.At(0), scratch.w, u.At(0), scratch.wide, memory, out.At(0));
  } else {
    StepRead(n, width, a.At(0), scratch.w, u.At(0), scratch.wide, memory, out.At(0));
  }
  if (z_out.data == nullptr) return;
  for (size_t l = 0; l < n; ++l) z_out.At(0)[l] = static_cast<T>(z[l]);
}

template <bool kMatch, class T>
void ForwardAll(const SlotShape& shape, const Rows<const T>& a, const Rows<const T>& s,
                const Rows<const T>& u, const RowMask& mask, double* memory, double* z,
                const Rows<T>& out, const Rows<T>& z_out) {
  const int64_t heads = shape.batch * shape.heads;
  const HeadParts parts(shape);
  PartStates<double> memories(parts, heads, shape.slots * shape.width, memory),
      zs(parts, heads, shape.slots, z);
  ForParts(heads, HeadsPerThread(shape), parts, [&](int64_t index, int64_t part) {
    const ForwardHead<T> head(shape, mask, index, parts, part);
    const Sequence<const T> ah(a, head.b, head.h), sh(s, head.b, head.h), uh(u, head.b, head.h);
    const Sequence<T> oh(out, head.b, head.h), zh(z_out, head.b, head.h);
    double *const m = memories.Of(index, part), *const zz = zs.Of(index, part);
    if (shape.length == 1) {
      OneToken<kMatch, T>(head, ah, sh, uh, m, zz, oh, zh);
    } else if constexpr (kMatch) {
      MatchHead(head, ah, sh, uh, m, zz, oh, zh);
    } else {
      ReadHead(head, ah, sh, uh, m, zz, oh, zh);
    }
  });
  memories.Finish();
  zs.Finish();
}

#define CISTERN_SLOT_FORWARD(kMatch, name, T)                                             \
  void name(const SlotShape& shape, Rows<const T> a, Rows<const T> s, Rows<const T> u,    \
            const RowMask& mask, double* memory, double* z, Rows<T> out, Rows<T> z_out) { \
    ForwardAll<kMatch, T>(shape, a, s, u, mask, memory, z, out, z_out);                   \
  }
CISTERN_SLOT_FORWARD(false, SlotReadFloat, float)
CISTERN_SLOT_FORWARD(false, SlotReadDouble, double)
CISTERN_SLOT_FORWARD(true, SlotMatchFloat, float)
CISTERN_SLOT_FORWARD(true, SlotMatchDouble, double)
#undef CISTERN_SLOT_FORWARD

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(SlotReadFloat);
HWY_EXPORT(SlotReadDouble);
HWY_EXPORT(SlotMatchFloat);
HWY_EXPORT(SlotMatchDouble);

template <>
void SlotRead(const SlotShape& shape, Rows<const float> r, Rows<const float> s, Rows<const float> v,
              const RowMask& mask, double* memory, double* z, Rows<float> out, Rows<float> z_out) {
  CISTERN_DISPATCH(SlotReadFloat)(shape, r, s, v, mask, memory, z, out, z_out);
}
template <>
void SlotRead(const SlotShape& shape, Rows<const double> r, Rows<const double> s,
              Rows<const double> v, const RowMask& mask, double* memory, double* z,
              Rows<double> out, Rows<double> z_out) {
  CISTERN_DISPATCH(SlotReadDouble)(shape, r, s, v, mask, memory, z, out, z_out);
}
template <>
void SlotMatch(const SlotShape& shape, Rows<const float> q, Rows<const float> s,
               Rows<const float> k, const RowMask& mask, double* memory, double* z, Rows<float> out,
               Rows<float> z_out) {
  CISTERN_DISPATCH(SlotMatchFloat)(shape, q, s, k, mask, memory, z, out, z_out);
}
template <>
void SlotMatch(const SlotShape& shape, Rows<const double> q, Rows<const double> s,
               Rows<const double> k, const RowMask& mask, double* memory, double* z,
               Rows<double> out, Rows<double> z_out) {
  CISTERN_DISPATCH(SlotMatchDouble)(shape, q, s, k, mask, memory, z, out, z_out);
}

}  // namespace cistern
#endif  // HWY_ONCE
