#include "cistern/kernels/slot_attention.h"

#include "cistern/base/parallel.h"
#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/slot_attention.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/slot_step-inl.h"
#include "cistern/kernels/slot_weights-inl.h"
#include "cistern/kernels/staged_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Latte, and FAVOR+ with the other Weights (slot_weights-inl.h).
template <class T, class Weights>
struct LatteVisit {
  void Empty() { core.Empty(); }
  void Begin(size_t) {
    core.Begin(chunk);
    weights.Begin(chunk);
  }
  void Prefetch(size_t t, size_t end) const {
    PrefetchRows(q, t, end, chunk.n);
    PrefetchRows(v, t, end, core.width());
  }
  void Rows(size_t t) {
    weights.Rows(chunk, q, t, W);
    core.Rows(chunk, W, v, t, out);
  }
  void Close() { core.Close(chunk); }
  SlotChunk<T>& chunk;
  ReadCore<T>& core;
  Weights& weights;
  Sequence<const T> q, v;
  Sequence<T> out;
  T* W;
};

template <class Weights, class T>
HWY_NOINLINE void LatteHead(const ForwardHead<T>& head, const Sequence<const T>& q,
                            const Sequence<const T>& s, const Sequence<const T>& v, double* memory,
                            double* z, const Sequence<T>& out) {
  const size_t n = head.n, width = head.width, np = Padded<T>(n);
  const Sequence<T> none(nullptr, 0);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(SlotChunk<T>::Bytes(n) + ReadCore<T>::Bytes(n, width) + Weights::Bytes(n) +
                      sizeof(T) * kChunkRows * np,
                  SlotChunk<T>::kPieces + ReadCore<T>::kPieces + Weights::kPieces + 1);
  SlotChunk<T> chunk(n, workspace);
  ReadCore<T> core(n, width, workspace);
  Weights weights(n, workspace);
  T* const W = workspace.Take<T>(kChunkRows * np);
  LatteVisit<T, Weights> visit{chunk, core, weights, q, v, out, W};
  chunk.LoadZ(z);
  core.LoadMemory(memory, z);
  WalkChunks(chunk, s, head.tokens, visit);
  core.StoreMemory(memory);
  head.Finish(chunk, z, out, width, none);
}

template <class T>
struct AbcVisit {
  void Empty() { keys.Empty(), values.Empty(); }
  void Begin(size_t) { keys.Begin(chunk), values.Begin(chunk); }
  void Prefetch(size_t t, size_t end) const {
    for (const auto* x : {&q, &k, &v}) PrefetchRows(*x, t, end, keys.width());
  }
  void Rows(size_t t) {
    keys.Rows(chunk, q, k, t, X);
    Scores(t);
    SoftmaxRows(chunk.rows, chunk.np, X, X);
    TimesF(chunk, X, X);
    values.Rows(chunk, X, v, t, out);
  }
  void Close() { keys.Close(chunk), values.Close(chunk); }

  // X = scale X, -inf in its padding.
  void Scores(size_t t) {
    const Tag<T> d;
    const size_t n = chunk.n, np = chunk.np;
    for (size_t i = 0; i < chunk.rows * np; i += kLanes<T>)
      hn::Store(hn::Mul(hn::Set(d, scale), hn::Load(d, X + i)), d, X + i);
    if (x.data != nullptr) UnpackRows(X, t, chunk.rows, n, np, x);
    for (size_t i = 0; i < chunk.rows; ++i) {
      for (size_t l = n; l < np; ++l) X[i * np + l] = kMinusInfinity<T>;
    }
  }

  SlotChunk<T>& chunk;
  MatchCore<T>& keys;
  ReadCore<T>& values;
  T scale;
  Sequence<const T> q, k, v;
  Sequence<T> out, x;
  T* X;
};

template <class T>
HWY_NOINLINE void AbcHead(const ForwardHead<T>& head, T scale, const Sequence<const T>& q,
                          const Sequence<const T>& k, const Sequence<const T>& v,
                          const Sequence<const T>& s, double* keys, double* values, double* z,
                          const Sequence<T>& out, const Sequence<T>& x) {
  const size_t n = head.n, width = head.width, np = Padded<T>(n);
  const Sequence<T> none(nullptr, 0);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(SlotChunk<T>::Bytes(n) + MatchCore<T>::Bytes(n, width) +
                      ReadCore<T>::Bytes(n, width) + sizeof(T) * kChunkRows * np,
                  SlotChunk<T>::kPieces + MatchCore<T>::kPieces + ReadCore<T>::kPieces + 1);
  SlotChunk<T> chunk(n, workspace);
  MatchCore<T> key_core(n, width, workspace);
  ReadCore<T> value_core(n, width, workspace);
  AbcVisit<T> visit{chunk, key_core, value_core, scale, q,
                    k,     v,        out,        x,     workspace.Take<T>(kChunkRows * np)};
  chunk.LoadZ(z);
  key_core.LoadMemory(keys, z);
  value_core.LoadMemory(values, z);
  WalkChunks(chunk, s, head.tokens, visit);
  key_core.StoreMemory(keys);
  value_core.StoreMemory(values);
  head.Finish(chunk, z, out, width, none);
  if (x.data != nullptr) ZeroRows(head.tokens.length, head.total, n, x);
}

// One token of a head.
template <class Weights, class T>
HWY_NOINLINE void LatteToken(const ForwardHead<T>& head, const Sequence<const T>& q,
                             const Sequence<const T>& s, const Sequence<const T>& v, double* memory,
                             double* z, const Sequence<T>& out) {
  const size_t n = head.n, width = head.width, np = Padded<T>(n);
  if (!StepBegin(head, z, {memory})) return ZeroRows(0, 1, width, out);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(StepScratch::Bytes(n, width) + np * sizeof(T), StepScratch::kPieces + 1);
  const StepScratch scratch(n, width, workspace);
  T* const r = workspace.Take<T>(np);
  StepWeights(n, s.At(0), z, scratch.w);
  Weights::OfToken(n, q.At(0), z, r);
  StepRead(n, width, r, scratch.w, v.At(0), scratch.wide, memory, out.At(0));
}

template <class T>
HWY_NOINLINE void AbcToken(const ForwardHead<T>& head, T scale, const Sequence<const T>& q,
                           const Sequence<const T>& k, const Sequence<const T>& v,
                           const Sequence<const T>& s, double* keys, double* values, double* z,
                           const Sequence<T>& out, const Sequence<T>& x) {
  const size_t n = head.n, width = head.width, np = Padded<T>(n);
  if (!StepBegin(head, z, {keys, values})) {
    ZeroRows(0, 1, width, out);
    if (x.data != nullptr) ZeroRows(0, 1, n, x);
    return;
  }
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(StepScratch::Bytes(n, width) + np * sizeof(T), StepScratch::kPieces + 1);
  const StepScratch scratch(n, width, workspace);
  T* const X = workspace.Take<T>(np);
  StepWeights(n, s.At(0), z, scratch.w);
  StepMatch(n, width, q.At(0), scratch.w, k.At(0), scratch.wide, keys, X);
  for (size_t l = 0; l < n; ++l) X[l] *= scale;
  if (x.data != nullptr) std::memcpy(x.At(0), X, n * sizeof(T));
  for (size_t l = n; l < np; ++l) X[l] = kMinusInfinity<T>;
  SoftmaxRows(1, np, X, X);
  StepRead(n, width, X, scratch.w, v.At(0), scratch.wide, values, out.At(0));
}

template <class Weights, class S>
void LatteAll(const SlotShape& shape, const Rows<const S>& q, const Rows<const S>& s,
              const Rows<const S>& v, const RowMask& mask, double* memory, double* z,
              const Rows<S>& out) {
  using T = ComputeType<S>;
  ParallelFor(shape.batch * shape.heads, HeadsPerThread(shape), [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const ForwardHead<T> head(shape, mask, index);
      const auto run = [&](const Sequence<const T>& qh, const Sequence<const T>& sh,
                           const Sequence<const T>& vh, const Sequence<T>& oh) {
        (shape.length == 1 ? LatteToken<Weights, T>
                           : LatteHead<Weights, T>)(head, qh, sh, vh,
                                                    memory + index * shape.slots * shape.width,
                                                    z + index * shape.slots, oh);
      };
      const Sequence<const S> qs(q, head.b, head.h), ss(s, head.b, head.h), vs(v, head.b, head.h);
      const Sequence<S> os(out, head.b, head.h);
      if constexpr (std::is_same_v<S, T>) {
        run(qs, ss, vs, os);
      } else {
        const size_t n = head.n, width = head.width, real = head.tokens.length;
        Staging staging(real * (2 * n + width) + head.total * width, 4);
        const Sequence<const T> qh = staging.Copy(qs, real, n), sh = staging.Copy(ss, real, n),
                                vh = staging.Copy(vs, real, width);
        const Sequence<T> oh = staging.Take(head.total, width);
        run(qh, sh, vh, oh);
        ConvertRows(oh, head.total, width, os);
      }
    }
  });
}

template <class S>
void AbcAll(const SlotShape& shape, double scale, const Rows<const S>& q, const Rows<const S>& k,
            const Rows<const S>& v, const Rows<const S>& s, const RowMask& mask, double* keys,
            double* values, double* z, const Rows<S>& out, const Rows<ComputeType<S>>& x) {
  using T = ComputeType<S>;
  ParallelFor(shape.batch * shape.heads, HeadsPerThread(shape), [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const ForwardHead<T> head(shape, mask, index);
      const int64_t at = index * shape.slots * shape.width;
      const auto run = [&](const Sequence<const T>& qh, const Sequence<const T>& kh,
                           const Sequence<const T>& vh, const Sequence<const T>& sh,
                           const Sequence<T>& oh) {
        (shape.length == 1 ? AbcToken<T> : AbcHead<T>)(head, static_cast<T>(scale), qh, kh, vh, sh,
                                                       keys + at, values + at,
                                                       z + index * shape.slots, oh,
                                                       {x, head.b, head.h});
      };
      const Sequence<const S> qs(q, head.b, head.h), ks(k, head.b, head.h), vs(v, head.b, head.h),
          ss(s, head.b, head.h);
      const Sequence<S> os(out, head.b, head.h);
      if constexpr (std::is_same_v<S, T>) {
        run(qs, ks, vs, ss, os);
      } else {
        const size_t n = head.n, width = head.width, real = head.tokens.length;
        Staging staging(real * (n + 3 * width) + head.total * width, 5);
        const Sequence<const T> qh = staging.Copy(qs, real, width),
                                kh = staging.Copy(ks, real, width),
                                vh = staging.Copy(vs, real, width), sh = staging.Copy(ss, real, n);
        const Sequence<T> oh = staging.Take(head.total, width);
        run(qh, kh, vh, sh, oh);
        ConvertRows(oh, head.total, width, os);
      }
    }
  });
}

#define CISTERN_SLOT_ATTENTION(T, Name)                                                       \
  void Latte##Name(const SlotShape& shape, Rows<const T> q, Rows<const T> s, Rows<const T> v, \
                   const RowMask& mask, double* memory, double* z, Rows<T> out) {             \
    LatteAll<TokenWeights<ComputeType<T>>, T>(shape, q, s, v, mask, memory, z, out);          \
  }                                                                                           \
  void Favor##Name(const SlotShape& shape, Rows<const T> x, Rows<const T> s, Rows<const T> v, \
                   const RowMask& mask, double* memory, double* z, Rows<T> out) {             \
    LatteAll<FavorWeights<ComputeType<T>>, T>(shape, x, s, v, mask, memory, z, out);          \
  }                                                                                           \
  void Abc##Name(const SlotShape& shape, double scale, Rows<const T> q, Rows<const T> k,      \
                 Rows<const T> v, Rows<const T> s, const RowMask& mask, double* keys,         \
                 double* values, double* z, Rows<T> out, Rows<ComputeType<T>> x) {            \
    AbcAll<T>(shape, scale, q, k, v, s, mask, keys, values, z, out, x);                       \
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

#define CISTERN_SLOT_ATTENTION(T, Name)                                                        \
  template <>                                                                                  \
  void LatteForward(const SlotShape& shape, Rows<const T> q, Rows<const T> s, Rows<const T> v, \
                    const RowMask& mask, double* memory, double* z, Rows<T> out) {             \
    CISTERN_DISPATCH(Latte##Name)(shape, q, s, v, mask, memory, z, out);                       \
  }                                                                                            \
  template <>                                                                                  \
  void FavorForward(const SlotShape& shape, Rows<const T> x, Rows<const T> s, Rows<const T> v, \
                    const RowMask& mask, double* memory, double* z, Rows<T> out) {             \
    CISTERN_DISPATCH(Favor##Name)(shape, x, s, v, mask, memory, z, out);                       \
  }                                                                                            \
  template <>                                                                                  \
  void AbcForward(const SlotShape& shape, double scale, Rows<const T> q, Rows<const T> k,      \
                  Rows<const T> v, Rows<const T> s, const RowMask& mask, double* keys,         \
                  double* values, double* z, Rows<T> out, Rows<ComputeType<T>> x) {            \
    CISTERN_DISPATCH(Abc##Name)(shape, scale, q, k, v, s, mask, keys, values, z, out, x);      \
  }
CISTERN_SLOT_ATTENTION(float, Float)
CISTERN_SLOT_ATTENTION(double, Double)
CISTERN_SLOT_ATTENTION(BFloat16, BFloat16)
#undef CISTERN_SLOT_ATTENTION

}  // namespace cistern
#endif  // HWY_ONCE
