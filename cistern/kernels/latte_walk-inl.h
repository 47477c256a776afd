// Latte's walk over a head's tokens, and FAVOR+'s; included once per Highway target.
#if defined(CISTERN_KERNELS_LATTE_WALK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_LATTE_WALK_INL_H_
#undef CISTERN_KERNELS_LATTE_WALK_INL_H_
#else
#define CISTERN_KERNELS_LATTE_WALK_INL_H_
#endif

#include "cistern/kernels/latte_tokens-inl.h"
#include "cistern/kernels/slot_core-inl.h"
#include "cistern/kernels/slot_weights-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Weights: slot_weights-inl.h; Reader: of the tokens (latte_tokens-inl.h).
template <class S, class Weights, class Reader, class T = ComputeType<S>>
struct LatteVisit {
  void Empty() { core.Empty(); }
  void Begin(size_t) {
    core.Begin(chunk);
    weights.Begin(chunk);
  }
  void Note(size_t t, size_t end) const {
    if (t >= from) reader.NoteQueries(t, end);
    NoteRows(v, t, end, core.width());
  }
  void Rows(size_t t) {
    if (t < from) return core.Write(chunk, v, t);
    const auto q = reader.Queries(t, chunk.rows);
    weights.Rows(chunk, q.x, q.t, W);
    core.Rows(chunk, W, v, t, out);
  }
  void Close() { core.Close(chunk); }
  SlotChunk<T>& chunk;
  ReadCore<S>& core;
  Weights& weights;
  Reader& reader;
  Sequence<const S> v;
  Sequence<S> out;
  T* W;
  size_t from;
};

// Source: GivenTokens, or others like them.
template <class Weights, class Source, class S, class T = ComputeType<S>>
HWY_NOINLINE void LatteHead(const ForwardHead<T>& head, const Source& tokens,
                            const Sequence<const S>& v, const Sequence<S>& out, double* memory,
                            double* z) {
  using Reader = typename Source::Reader;
  const size_t n = head.n, width = head.width, np = Padded<T>(n);
  const Sequence<T> none(nullptr, 0);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(
      SlotChunk<T>::Bytes(n) + ReadCore<S>::Bytes(n, width) + Weights::Bytes(n) +
          Reader::Bytes(tokens, n) + sizeof(T) * kChunkRows * np,
      SlotChunk<T>::kPieces + ReadCore<S>::kPieces + Weights::kPieces + Reader::kPieces + 1);
  SlotChunk<T> chunk(n, workspace);
  ReadCore<S> core(n, width, workspace);
  Weights weights(n, workspace);
  Reader reader(tokens, n, workspace);
  T* const W = workspace.Take<T>(kChunkRows * np);
  LatteVisit<S, Weights, Reader> visit{chunk, core, weights, reader, v, out, W, head.from};
  chunk.LoadZ(z);
  core.LoadMemory(memory, z);
  WalkChunks(chunk, LogWeightsOf<Reader>{reader}, head.tokens, head.stop, visit);
  core.StoreMemory(memory);
  head.Finish(chunk, z, out, width, none);
}

// body(head, memory, z) for every head and part of one, with its own state to move on.
template <class T, class Body>
void ForLatteHeads(const SlotShape& shape, const RowMask& mask, double* memory, double* z,
                   const Body& body) {
  const int64_t heads = shape.batch * shape.heads;
  const HeadParts parts(shape);
  PartStates<double> memories(parts, heads, shape.slots * shape.width, memory),
      log_sums(parts, heads, shape.slots, z);
  ForParts(heads, HeadsPerThread(shape), parts, [&](int64_t index, int64_t part) {
    body(ForwardHead<T>(shape, mask, index, parts, part), memories.Of(index, part),
         log_sums.Of(index, part));
  });
  memories.Finish();
  log_sums.Finish();
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
