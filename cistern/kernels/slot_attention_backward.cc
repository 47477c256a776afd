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
// the memory of every position, then in reverse for those of what was written.
template <class T>
struct LatteTensors {
  Sequence<const T> q, s, v, g;
  Sequence<T> dq, ds, dv;
  Sequence<const T> r_gradient() const { return {dq.data, static_cast<size_t>(dq.time)}; }
};

// Rows t.. of x as a panel: where they lie, or where whole vectors would not fit, `scratch`.
template <class T>
struct RowsOrPanel {
  RowsOrPanel(const Sequence<T>& x, size_t t, size_t n, T* scratch)
      : data(n == Padded<T>(n) ? x.At(t) : scratch),
        ld(n == Padded<T>(n) ? static_cast<size_t>(x.time) : Padded<T>(n)) {}
  T* data;
  size_t ld;
};

// Forward: dq holds the gradient of the read weights, dr_t[l] = g_t . M_t[l].
template <class T>
struct LatteForwardVisit {
  void Empty() { core.Empty(); }
  void Begin(size_t t) {
    core.Begin(chunk);
    spans.Add(t, chunk);
  }
  void Prefetch(size_t t, size_t end) const {
    for (const auto* y : {&x.g, &x.v}) PrefetchRows(*y, t, end, core.width());
  }
  void Rows(size_t t) {
    const RowsOrPanel<T> dr(x.dq, t, chunk.n, D);
    core.Rows(chunk, x.g, x.v, t, D, dr.data, dr.ld);
    if (dr.data == D) UnpackRows(D, t, chunk.rows, chunk.n, chunk.np, x.dq);
  }
  void Close() { core.Close(chunk); }
  SlotChunk<T>& chunk;
  MatchCore<T>& core;
  SpanList& spans;
  const LatteTensors<T>& x;
  T* D;
};

// FAVOR+ with the other Weights (slot_weights-inl.h).
template <class T, class Weights>
struct LatteReverseVisit {
  void Scale(const T* factor) { core.Scale(factor); }
  void Prefetch(size_t t, size_t end) const {
    PrefetchRows(x.q, t, end, walk.chunk.n);
    PrefetchRows(x.r_gradient(), t, end, walk.chunk.n);
    for (const auto* y : {&x.g, &x.v}) PrefetchRows(*y, t, end, core.width());
  }
  void Rows(size_t t) {
    const SlotChunk<T>& chunk = walk.chunk;
    const RowsOrPanel<T> dr(x.dq, t, chunk.n, D);
    if (dr.data == D) PackRows(x.r_gradient(), t, chunk.rows, chunk.n, chunk.np, T{0}, D);
    weights.Gradients(chunk, x.q, t, W, dr.data, dr.ld, ab);
    if (dr.data == D) UnpackRows(D, t, chunk.rows, chunk.n, chunk.np, x.dq);
    core.template Rows<false>(chunk.rows, chunk.E, walk.ET, W, x.g, x.v, t, x.dv, Y);
    walk.Gradients(Y, ab, nullptr);
    UnpackRows(Y, t, chunk.rows, chunk.n, chunk.np, x.ds);
  }
  ReverseWalk<T>& walk;
  ReverseCore<T>& core;
  Weights& weights;
  const LatteTensors<T>& x;
  T *W, *D, *ab, *Y;
};

// The gradients of the state, from G and h at the beginning: an empty slot has none.
template <class T>
void StateGradients(const double* z, size_t n, size_t width, const T* h, T* h_io, T* grad) {
  for (size_t l = 0; l < n; ++l) {
    h_io[l] = z[l] == kEmpty ? T{0} : h[l];
    if (z[l] == kEmpty) std::memset(grad + l * width, 0, width * sizeof(T));
  }
}

template <class Weights, class T>
HWY_NOINLINE void LatteHead(const ForwardHead<T>& head, const LatteTensors<T>& x,
                            const double* memory, const double* z, T* grad, T* h_io) {
  const size_t n = head.n, width = head.width, np = Padded<T>(n);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(ReverseWalk<T>::Bytes(n) + ReverseCore<T>::Bytes(n, width) +
                      MatchCore<T>::Bytes(n, width) + Weights::Bytes(n) +
                      sizeof(T) * 4 * kChunkRows * np,
                  ReverseWalk<T>::kPieces + ReverseCore<T>::kPieces + MatchCore<T>::kPieces +
                      Weights::kPieces + 4);
  ReverseWalk<T> walk(n, workspace);
  MatchCore<T> match(n, width, workspace);
  ReverseCore<T> reverse(n, width, workspace);
  Weights weights(n, workspace);
  T* panels[4];
  for (T*& panel : panels) panel = workspace.Take<T>(kChunkRows * np);

  SpanList spans;
  LatteForwardVisit<T> forward{walk.chunk, match, spans, x, panels[0]};
  walk.chunk.LoadZ(z);
  match.LoadMemory(memory, z);
  WalkChunks(walk.chunk, x.s, head.tokens, forward);

  LatteReverseVisit<T, Weights> backward{walk,      reverse,   weights,   x,
                                         panels[0], panels[1], panels[2], panels[3]};
  reverse.Load(grad);
  for (size_t l = 0; l < np; ++l) walk.h[l] = l < n ? h_io[l] : T{0};
  walk.Run(x.s, head.tokens, spans, backward);
  reverse.Store(grad);
  StateGradients(z, n, width, walk.h, h_io, grad);
  ZeroRows(head.tokens.length, head.total, width, x.dv);
  ZeroRows(head.tokens.length, head.total, n, x.dq);
  ZeroRows(head.tokens.length, head.total, n, x.ds);
}

template <class T>
struct AbcTensors {
  Sequence<const T> q, k, v, s, x, g;
  Sequence<T> dq, dk, dv, ds, dx;
  static Sequence<const T> Const(const Sequence<T>& y) {
    return {y.data, static_cast<size_t>(y.time)};
  }
};

// Forward: dx_t and dq_t; and ds holds the terms of h, p_t dp_t + dx_t x_t / scale.
template <class T>
struct AbcForwardVisit {
  void Empty() { keys.Empty(), values.Empty(); }
  void Begin(size_t t) {
    keys.Begin(chunk), values.Begin(chunk);
    spans.Add(t, chunk);
  }
  void Prefetch(size_t t, size_t end) const {
    for (const auto* y : {&x.g, &x.v, &x.k}) PrefetchRows(*y, t, end, keys.width());
    PrefetchRows(x.x, t, end, chunk.n);
  }
  void Rows(size_t t) {
    const Tag<T> d;
    const size_t rows = chunk.rows, n = chunk.n, np = chunk.np;
    values.Rows(chunk, x.g, x.v, t, D);
    PackRows(x.x, t, rows, n, np, kMinusInfinity<T>, X);
    SoftmaxRows(rows, np, X, P);
    for (size_t i = 0; i < rows; ++i) {
      for (size_t l = n; l < np; ++l) X[i * np + l] = D[i * np + l] = 0;
    }
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
    UnpackRows(P, t, rows, n, np, x.ds);
    TimesF(chunk, D, D);
    keys.Rows(chunk, D, x.k, t, x.dq);
  }
  void Close() { keys.Close(chunk), values.Close(chunk); }
  SlotChunk<T>& chunk;
  ReadCore<T>& keys;
  MatchCore<T>& values;
  SpanList& spans;
  const AbcTensors<T>& x;
  T scale;
  T *X, *P, *D;
};

template <class T>
struct AbcReverseVisit {
  void Scale(const T* factor) { keys.Scale(factor), values.Scale(factor); }
  void Prefetch(size_t t, size_t end) const {
    for (const auto* y : {&x.g, &x.v, &x.k, &x.q}) PrefetchRows(*y, t, end, keys.width());
    const Sequence<const T> dx = AbcTensors<T>::Const(x.dx), ds = AbcTensors<T>::Const(x.ds);
    for (const auto* y : {&x.x, &dx, &ds}) PrefetchRows(*y, t, end, walk.chunk.n);
  }
  void Rows(size_t t) {
    const SlotChunk<T>& chunk = walk.chunk;
    const size_t rows = chunk.rows, n = chunk.n, np = chunk.np;
    PackRows(x.x, t, rows, n, np, kMinusInfinity<T>, P);
    PackRows(AbcTensors<T>::Const(x.dx), t, rows, n, np, T{0}, D);
    PackRows(AbcTensors<T>::Const(x.ds), t, rows, n, np, T{0}, ab);
    SoftmaxRows(rows, np, P, P);
    for (T* panel : {P, D, ab}) TimesF(chunk, panel, panel);
    values.template Rows<false>(rows, chunk.E, walk.ET, P, x.g, x.v, t, x.dv, Y);
    keys.template Rows<true>(rows, chunk.E, walk.ET, D, x.q, x.k, t, x.dk, Y);
    walk.Gradients(Y, ab, nullptr);
    UnpackRows(Y, t, rows, n, np, x.ds);
  }
  ReverseWalk<T>& walk;
  ReverseCore<T>& keys;
  ReverseCore<T>& values;
  const AbcTensors<T>& x;
  T *P, *D, *ab, *Y;
};

template <class T>
HWY_NOINLINE void AbcHead(const ForwardHead<T>& head, T scale, const AbcTensors<T>& x,
                          const double* keys, const double* values, const double* z, T* grad_keys,
                          T* grad_values, T* h_io) {
  const size_t n = head.n, width = head.width, np = Padded<T>(n);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(ReverseWalk<T>::Bytes(n) + 2 * ReverseCore<T>::Bytes(n, width) +
                      MatchCore<T>::Bytes(n, width) + ReadCore<T>::Bytes(n, width) +
                      sizeof(T) * 4 * kChunkRows * np,
                  ReverseWalk<T>::kPieces + 2 * ReverseCore<T>::kPieces + MatchCore<T>::kPieces +
                      ReadCore<T>::kPieces + 4);
  ReverseWalk<T> walk(n, workspace);
  MatchCore<T> match(n, width, workspace);
  ReadCore<T> read(n, width, workspace);
  ReverseCore<T> key_core(n, width, workspace), value_core(n, width, workspace);
  T* panels[4];
  for (T*& panel : panels) panel = workspace.Take<T>(kChunkRows * np);

  SpanList spans;
  AbcForwardVisit<T> forward{walk.chunk, read,      match,     spans,    x,
                             scale,      panels[0], panels[1], panels[2]};
  walk.chunk.LoadZ(z);
  match.LoadMemory(values, z);
  read.LoadMemory(keys, z);
  WalkChunks(walk.chunk, x.s, head.tokens, forward);

  AbcReverseVisit<T> backward{walk,      key_core,  value_core, x,
                              panels[0], panels[1], panels[2],  panels[3]};
  key_core.Load(grad_keys);
  value_core.Load(grad_values);
  for (size_t l = 0; l < np; ++l) walk.h[l] = l < n ? h_io[l] : T{0};
  walk.Run(x.s, head.tokens, spans, backward);
  key_core.Store(grad_keys);
  value_core.Store(grad_values);
  StateGradients(z, n, width, walk.h, h_io, grad_keys);
  StateGradients(z, n, width, walk.h, h_io, grad_values);
  for (const auto* y : {&x.dq, &x.dk, &x.dv}) ZeroRows(head.tokens.length, head.total, width, *y);
  for (const auto* y : {&x.ds, &x.dx}) ZeroRows(head.tokens.length, head.total, n, *y);
}

template <class Weights, class S>
void LatteAll(const SlotShape& shape, const Rows<const S>& q, const Rows<const S>& s,
              const Rows<const S>& v, const Rows<const S>& g, const RowMask& mask,
              const double* memory, const double* z, ComputeType<S>* G, ComputeType<S>* h,
              const Rows<S>& dq, const Rows<S>& ds, const Rows<S>& dv) {
  using T = ComputeType<S>;
  ParallelFor(shape.batch * shape.heads, HeadsPerThread(shape), [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const ForwardHead<T> head(shape, mask, index);
      const int64_t b = head.b, y = head.h, at = index * shape.slots * shape.width;
      const auto run = [&](const LatteTensors<T>& x) {
        LatteHead<Weights>(head, x, memory + at, z + index * shape.slots, G + at,
                           h + index * shape.slots);
      };
      if constexpr (std::is_same_v<S, T>) {
        run({{q, b, y}, {s, b, y}, {v, b, y}, {g, b, y}, {dq, b, y}, {ds, b, y}, {dv, b, y}});
      } else {
        const size_t n = head.n, width = head.width, real = head.tokens.length, all = head.total;
        Staging staging((real + all) * (2 * n + 2 * width), 7);
        const LatteTensors<T> x{staging.Copy({q, b, y}, real, n),
                                staging.Copy({s, b, y}, real, n),
                                staging.Copy({v, b, y}, real, width),
                                staging.Copy({g, b, y}, real, width),
                                staging.Take(all, n),
                                staging.Take(all, n),
                                staging.Take(all, width)};
        run(x);
        ConvertRows<T, S>(x.dq, all, n, {dq, b, y});
        ConvertRows<T, S>(x.ds, all, n, {ds, b, y});
        ConvertRows<T, S>(x.dv, all, width, {dv, b, y});
      }
    }
  });
}

template <class S>
void AbcAll(const SlotShape& shape, double scale, const Rows<const S>& q, const Rows<const S>& k,
            const Rows<const S>& v, const Rows<const S>& s,
            const Rows<const ComputeType<S>>& scores, const Rows<const S>& g, const RowMask& mask,
            const double* keys, const double* values, const double* z, ComputeType<S>* G_keys,
            ComputeType<S>* G_values, ComputeType<S>* h, const Rows<S>& dq, const Rows<S>& dk,
            const Rows<S>& dv, const Rows<S>& ds, const Rows<ComputeType<S>>& dx) {
  using T = ComputeType<S>;
  ParallelFor(shape.batch * shape.heads, HeadsPerThread(shape), [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const ForwardHead<T> head(shape, mask, index);
      const int64_t b = head.b, y = head.h, at = index * shape.slots * shape.width,
                    slot = index * shape.slots;
      const auto run = [&](const AbcTensors<T>& x) {
        AbcHead(head, static_cast<T>(scale), x, keys + at, values + at, z + slot, G_keys + at,
                G_values + at, h + slot);
      };
      if constexpr (std::is_same_v<S, T>) {
        run({{q, b, y},
             {k, b, y},
             {v, b, y},
             {s, b, y},
             {scores, b, y},
             {g, b, y},
             {dq, b, y},
             {dk, b, y},
             {dv, b, y},
             {ds, b, y},
             {dx, b, y}});
      } else {
        const size_t n = head.n, width = head.width, real = head.tokens.length, all = head.total;
        Staging staging(real * (4 * width + n) + all * (3 * width + n), 9);
        const AbcTensors<T> x{staging.Copy({q, b, y}, real, width),
                              staging.Copy({k, b, y}, real, width),
                              staging.Copy({v, b, y}, real, width),
                              staging.Copy({s, b, y}, real, n),
                              {scores, b, y},
                              staging.Copy({g, b, y}, real, width),
                              staging.Take(all, width),
                              staging.Take(all, width),
                              staging.Take(all, width),
                              staging.Take(all, n),
                              {dx, b, y}};
        run(x);
        ConvertRows<T, S>(x.dq, all, width, {dq, b, y});
        ConvertRows<T, S>(x.dk, all, width, {dk, b, y});
        ConvertRows<T, S>(x.dv, all, width, {dv, b, y});
        ConvertRows<T, S>(x.ds, all, n, {ds, b, y});
      }
    }
  });
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
