#include "cistern/kernels/slot_attention.h"

#include <limits>

#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/slot_attention.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/latte_walk-inl.h"
#include "cistern/kernels/slot_token-inl.h"
#include "cistern/kernels/staged_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

template <class S, class T = ComputeType<S>>
struct AbcVisit {
  void Empty() { keys.Empty(), values.Empty(); }
  void Begin(size_t) { keys.Begin(chunk), values.Begin(chunk); }
  void Note(size_t t, size_t end) const {
    if (t >= from) NoteRows(a.q, t, end, keys.width());
    for (const auto* x : {&a.k, &a.v}) NoteRows(*x, t, end, keys.width());
  }
  void Rows(size_t t) {
    if (t < from) {
      keys.Write(chunk, a.k, t);
      values.Write(chunk, a.v, t);
      return;
    }
    keys.Rows(chunk, a.q, a.k, t, X, scale);
    Scores(t);
    SoftmaxRows(chunk.rows, chunk.np, X, chunk.np, chunk.F, X);
    values.Rows(chunk, X, a.v, t, a.out);
  }
  void Close() { keys.Close(chunk), values.Close(chunk); }

  // Keeps X where the backward pass asks for it; -inf in its padding.
  void Scores(size_t t) {
    const size_t n = chunk.n, np = chunk.np;
    if (masked) MaskEmpty();
    if (a.x.data != nullptr) UnpackRows(X, t, chunk.rows, n, np, a.x);
    FillPadding(chunk.rows, n, np, kMinusInfinity<T>, X);
  }

  // A slot's factor is 0 in rows up to which nothing was written to it.
  void MaskEmpty() {
    const Tag<T> d;
    const Vec<T> lowest = hn::Set(d, std::numeric_limits<T>::lowest());
    for (size_t i = 0; i < chunk.rows * chunk.np; i += kLanes<T>) {
      const auto empty = hn::Eq(hn::Load(d, chunk.F + i), hn::Zero(d));
      hn::Store(hn::IfThenElse(empty, lowest, hn::Load(d, X + i)), d, X + i);
    }
  }

  SlotChunk<T>& chunk;
  MatchCore<S>& keys;
  ReadCore<S>& values;
  T scale;
  bool masked;
  const AbcTensors<S>& a;
  T* X;
  size_t from;
};

template <class S, class T = ComputeType<S>>
HWY_NOINLINE void AbcHead(const ForwardHead<T>& head, T scale, bool masked, const AbcTensors<S>& a,
                          double* keys, double* values, double* z) {
  const size_t n = head.n, width = head.width, np = Padded<T>(n);
  const Sequence<T> none(nullptr, 0);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(SlotChunk<T>::Bytes(n) + MatchCore<S>::Bytes(n, width) +
                      ReadCore<S>::Bytes(n, width) + sizeof(T) * kChunkRows * np,
                  SlotChunk<T>::kPieces + MatchCore<S>::kPieces + ReadCore<S>::kPieces + 1);
  SlotChunk<T> chunk(n, workspace);
  MatchCore<S> key_core(n, width, workspace);
  ReadCore<S> value_core(n, width, workspace);
  AbcVisit<S> visit{
      chunk, key_core, value_core, scale, masked, a, workspace.Take<T>(kChunkRows * np), head.from};
  chunk.LoadZ(z);
  key_core.LoadMemory(keys, z);
  value_core.LoadMemory(values, z);
  WalkChunks(chunk, a.s, head.tokens, head.stop, visit);
  key_core.StoreMemory(keys);
  value_core.StoreMemory(values);
  head.Finish(chunk, z, a.out, width, none);
  if (head.last && a.x.data != nullptr) ZeroRows(head.tokens.length, head.total, n, a.x);
}

// Latte, and FAVOR+ with the other Weights (slot_weights-inl.h).
template <class Weights, class S>
void LatteAll(const SlotShape& shape, const Rows<const S>& q, const Rows<const S>& s,
              const Rows<const S>& v, const RowMask& mask, double* memory, double* z,
              const Rows<S>& out) {
  using T = ComputeType<S>;
  ForLatteHeads<T>(shape, mask, memory, z,
                   [&](const ForwardHead<T>& head, double* of_memory, double* of_z) {
                     const int64_t b = head.b, h = head.h;
                     const LatteTensors<S> x = {{q, b, h}, {s, b, h}, {v, b, h}, {out, b, h}};
                     if (shape.length == 1) return LatteToken<Weights, S>(head, x, of_memory, of_z);
                     const GivenTokens<S> tokens = {x.q, x.s, {nullptr, 0}, {nullptr, 0}};
                     LatteHead<Weights>(head, tokens, x.v, x.out, of_memory, of_z);
                   });
}

template <class S>
void AbcAll(const SlotShape& shape, double scale, bool masked, const Rows<const S>& q,
            const Rows<const S>& k, const Rows<const S>& v, const Rows<const S>& s,
            const RowMask& mask, double* keys, double* values, double* z, const Rows<S>& out,
            const Rows<ComputeType<S>>& x) {
  using T = ComputeType<S>;
  const int64_t heads = shape.batch * shape.heads, size = shape.slots * shape.width;
  const HeadParts parts(shape);
  PartStates<double> key_memories(parts, heads, size, keys),
      value_memories(parts, heads, size, values), log_sums(parts, heads, shape.slots, z);
  ForParts(heads, HeadsPerThread(shape), parts, [&](int64_t index, int64_t part) {
    const ForwardHead<T> head(shape, mask, index, parts, part);
    const int64_t b = head.b, y = head.h;
    const AbcTensors<S> a = {{q, b, y}, {k, b, y}, {v, b, y}, {s, b, y}, {out, b, y}, {x, b, y}};
    (shape.length == 1 ? AbcToken<S> : AbcHead<S>)(head, static_cast<T>(scale), masked, a,
                                                   key_memories.Of(index, part),
                                                   value_memories.Of(index, part),
                                                   log_sums.Of(index, part));
  });
  key_memories.Finish();
  value_memories.Finish();
  log_sums.Finish();
}

#define CISTERN_SLOT_ATTENTION(T, Name)                                                          \
  void Latte##Name(const SlotShape& shape, Rows<const T> q, Rows<const T> s, Rows<const T> v,    \
                   const RowMask& mask, double* memory, double* z, Rows<T> out) {                \
    LatteAll<TokenWeights<ComputeType<T>>, T>(shape, q, s, v, mask, memory, z, out);             \
  }                                                                                              \
  void Favor##Name(const SlotShape& shape, Rows<const T> x, Rows<const T> s, Rows<const T> v,    \
                   const RowMask& mask, double* memory, double* z, Rows<T> out) {                \
    LatteAll<FavorWeights<ComputeType<T>>, T>(shape, x, s, v, mask, memory, z, out);             \
  }                                                                                              \
  void Abc##Name(const SlotShape& shape, double scale, bool masked, Rows<const T> q,             \
                 Rows<const T> k, Rows<const T> v, Rows<const T> s, const RowMask& mask,         \
                 double* keys, double* values, double* z, Rows<T> out, Rows<ComputeType<T>> x) { \
    AbcAll<T>(shape, scale, masked, q, k, v, s, mask, keys, values, z, out, x);                  \
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

HWY_EXPORT(LatteFloat);
HWY_EXPORT(LatteDouble);
HWY_EXPORT(LatteBFloat16);
HWY_EXPORT(FavorFloat);
HWY_EXPORT(FavorDouble);
HWY_EXPORT(FavorBFloat16);
HWY_EXPORT(AbcFloat);
HWY_EXPORT(AbcDouble);
HWY_EXPORT(AbcBFloat16);

#define CISTERN_SLOT_ATTENTION(T, Name)                                                           \
  template <>                                                                                     \
  void LatteForward(const SlotShape& shape, Rows<const T> q, Rows<const T> s, Rows<const T> v,    \
                    const RowMask& mask, double* memory, double* z, Rows<T> out) {                \
    CISTERN_DISPATCH(Latte##Name)(shape, q, s, v, mask, memory, z, out);                          \
  }                                                                                               \
  template <>                                                                                     \
  void FavorForward(const SlotShape& shape, Rows<const T> x, Rows<const T> s, Rows<const T> v,    \
                    const RowMask& mask, double* memory, double* z, Rows<T> out) {                \
    CISTERN_DISPATCH(Favor##Name)(shape, x, s, v, mask, memory, z, out);                          \
  }                                                                                               \
  template <>                                                                                     \
  void AbcForward(const SlotShape& shape, double scale, bool masked, Rows<const T> q,             \
                  Rows<const T> k, Rows<const T> v, Rows<const T> s, const RowMask& mask,         \
                  double* keys, double* values, double* z, Rows<T> out, Rows<ComputeType<T>> x) { \
    CISTERN_DISPATCH(Abc##Name)(shape, scale, masked, q, k, v, s, mask, keys, values, z, out, x); \
  }
CISTERN_SLOT_ATTENTION(float, Float)
CISTERN_SLOT_ATTENTION(double, Double)
CISTERN_SLOT_ATTENTION(BFloat16, BFloat16)
#undef CISTERN_SLOT_ATTENTION

}  // namespace cistern
#endif  // HWY_ONCE
