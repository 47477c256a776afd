#include "cistern/kernels/slot_memory.h"

#include "cistern/base/parallel.h"
#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/slot_memory.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/gemm-inl.h"
#include "cistern/kernels/slot_chunk-inl.h"
#include "cistern/kernels/slot_step-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// What read and match share: the walk over the chunks of one head.
template <class T>
struct ForwardHead {
  ForwardHead(const SlotShape& shape, const RowMask& mask, int64_t index)
      : b(index / shape.heads),
        h(index % shape.heads),
        n(static_cast<size_t>(shape.slots)),
        width(static_cast<size_t>(shape.width)),
        total(static_cast<size_t>(shape.length)),
        tokens(shape, mask, b) {}

  // The memory of a slot that holds nothing counts as zero, whatever the caller left there.
  void ZeroEmpty(const double* z, double* memory) const {
    for (size_t l = 0; l < n; ++l) {
      if (z[l] == kEmpty) std::memset(memory + l * width, 0, width * sizeof(double));
    }
  }

  // One token: `step` updates memory and z in place.
  template <class Step>
  void One(double* z, double* memory, const Sequence<T>& out, size_t out_width,
           const Sequence<T>& z_out, Step step) const {
    ZeroEmpty(z, memory);
    if (tokens.length > 0) {
      if (tokens.StartsAt(0)) {
        for (size_t l = 0; l < n; ++l) z[l] = kEmpty;
      }
      ZeroEmpty(z, memory);  // again: a document may just have begun
      step();
      if (z_out.data != nullptr) {
        for (size_t l = 0; l < n; ++l) z_out.At(0)[l] = static_cast<T>(z[l]);
      }
    } else {
      ZeroRows(0, 1, out_width, out);
      if (z_out.data != nullptr) ZeroRows(0, 1, n, z_out);
    }
  }

  // All tokens: `compute(t)` does the chunk's outputs and state, `empty()` zeroes the memory.
  template <class Empty, class Compute>
  void Chunks(SlotChunk<T>& chunk, const Sequence<const T>& s, const Sequence<T>& out,
              size_t out_width, const Sequence<T>& z_out, T* z_row, Empty empty,
              Compute compute) const {
    for (size_t t = 0; t < tokens.length; t += chunk.rows) {
      if (tokens.StartsAt(t)) {
        chunk.Empty();
        empty();
      }
      chunk.Gather(s, tokens, t, tokens.length);
      chunk.Exponentials();
      if (z_out.data != nullptr) {
        for (size_t i = 0; i < chunk.rows; ++i) {
          chunk.ZRow(i, z_row);
          std::memcpy(z_out.At(t + i), z_row, n * sizeof(T));
        }
      }
      compute(t);
    }
    ZeroRows(tokens.length, total, out_width, out);
    if (z_out.data != nullptr) ZeroRows(tokens.length, total, n, z_out);
  }

  int64_t b, h;
  size_t n, width, total;
  Tokens tokens;
};

template <class T>
HWY_NOINLINE void ReadHead(const ForwardHead<T>& head, const Sequence<const T>& r,
                           const Sequence<const T>& s, const Sequence<const T>& v, double* memory,
                           double* z, const Sequence<T>& out, const Sequence<T>& z_out) {
  const size_t n = head.n, width = head.width, np = Padded<T>(n), dp = Padded<T>(width);
  constexpr size_t kC = kChunkRows, kCp = kChunkPadded<T>;
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(SlotChunk<T>::Bytes(n) +
                      sizeof(T) * (kC * (np + 2 * dp + kCp) + np * (kCp + 2 * dp + 1)) +
                      sizeof(double) * np * dp,
                  SlotChunk<T>::kPieces + 9);
  SlotChunk<T> chunk(n, workspace);
  T* const W = workspace.Take<T>(kC * np);  // r F
  T* const V = workspace.Take<T>(kC * dp);
  T* const O = workspace.Take<T>(kC * dp);
  T* const A = workspace.Take<T>(kC * kCp);  // tril(W E^T)
  T* const ET = workspace.Take<T>(np * kCp);
  T* const past = workspace.Take<T>(np * dp);  // M, as the rows see it
  T* const P = workspace.Take<T>(np * dp);     // E^T V, or the scaled memory
  T* const z_row = workspace.Take<T>(np);
  double* const M = workspace.Take<double>(np * dp);
  const Tag<T> d;
  const Tag<double> dd;

  chunk.LoadZ(z);
  head.ZeroEmpty(z, memory);
  const auto clear = [&]() HWY_ATTR {
    std::memset(M, 0, np * dp * sizeof(double));
    std::memset(past, 0, np * dp * sizeof(T));
  };
  clear();
  PackRows(Sequence<const double>{memory, width}, 0, n, width, dp, 0.0, M);
  for (size_t i = 0; i < np * dp; i += kLanes<double>) StoreDouble(hn::Load(dd, M + i), past + i);
  head.Chunks(chunk, s, out, width, z_out, z_row, clear, [&](size_t t) HWY_ATTR {
    const size_t rows = chunk.rows;
    PackRows(r, t, rows, n, np, T{0}, W);
    PackRows(v, t, rows, width, dp, T{0}, V);
    for (size_t i = 0; i < rows * np; i += kLanes<T>)
      hn::Store(hn::Mul(hn::Load(d, W + i), hn::Load(d, chunk.F + i)), d, W + i);
    const T* seen = past;
    if (chunk.scaled) {
      for (size_t l = 0; l < np; ++l) {
        for (size_t j = 0; j < dp; ++j) P[l * dp + j] = chunk.carry[l] * past[l * dp + j];
      }
      seen = P;
    }
    Transpose(rows, n, chunk.E, np, ET, kCp);
    LowerProduct<T>(rows, {W, np, 1, ET, kCp, n}, A, kCp);
    Product<Triangle::kLower, T>(rows, width, {W, np, 1, seen, dp, n}, {A, kCp, 1, V, dp, rows}, O,
                                 dp);
    UnpackRows(O, t, rows, width, dp, out);

    Product<T>(n, width, {chunk.E, 1, np, V, dp, rows}, P, dp);
    chunk.Advance();
    for (size_t l = 0; l < n; ++l) {
      if (chunk.sum[l] == 0) continue;
      const Double keep = hn::Set(dd, static_cast<double>(chunk.keep[l])),
                   sub = hn::Set(dd, static_cast<double>(chunk.sub[l])),
                   gain = hn::Set(dd, static_cast<double>(chunk.gain[l]));
      for (size_t j = l * dp; j < (l + 1) * dp; j += kLanes<double>) {
        const Double m = hn::Load(dd, M + j);
        const Double next =
            hn::MulAdd(gain, hn::NegMulAdd(sub, m, LoadAsDouble(P + j)), hn::Mul(keep, m));
        hn::Store(next, dd, M + j);
        StoreDouble(next, past + j);
      }
    }
  });
  UnpackRows(M, 0, n, width, dp, Sequence<double>{memory, width});
  std::memcpy(z, chunk.z, n * sizeof(double));
}

template <class T>
HWY_NOINLINE void MatchHead(const ForwardHead<T>& head, const Sequence<const T>& q,
                            const Sequence<const T>& s, const Sequence<const T>& k, double* memory,
                            double* z, const Sequence<T>& out, const Sequence<T>& z_out) {
  const size_t n = head.n, width = head.width, np = Padded<T>(n), dp = Padded<T>(width);
  constexpr size_t kC = kChunkRows, kCp = kChunkPadded<T>;
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(SlotChunk<T>::Bytes(n) +
                      sizeof(T) * (kC * (np + 2 * dp + kCp) + dp * (kCp + 2 * np) + np) +
                      sizeof(double) * np * dp,
                  SlotChunk<T>::kPieces + 9);
  SlotChunk<T> chunk(n, workspace);
  T* const Q = workspace.Take<T>(kC * dp);
  T* const K = workspace.Take<T>(kC * dp);
  T* const X = workspace.Take<T>(kC * np);
  T* const A = workspace.Take<T>(kC * kCp);  // tril(Q K^T)
  T* const KT = workspace.Take<T>(dp * kCp);
  T* const past = workspace.Take<T>(dp * np);  // MT, as the rows see it
  T* const P = workspace.Take<T>(dp * np);     // K^T E, or the scaled memory
  T* const z_row = workspace.Take<T>(np);
  double* const MT = workspace.Take<double>(dp * np);  // the memory, transposed
  const Tag<T> d;
  const Tag<double> dd;

  chunk.LoadZ(z);
  head.ZeroEmpty(z, memory);
  const auto clear = [&]() HWY_ATTR {
    std::memset(MT, 0, np * dp * sizeof(double));
    std::memset(past, 0, np * dp * sizeof(T));
  };
  clear();
  for (size_t l = 0; l < n; ++l) {
    for (size_t j = 0; j < width; ++j) MT[j * np + l] = memory[l * width + j];
  }
  for (size_t i = 0; i < np * dp; i += kLanes<double>) StoreDouble(hn::Load(dd, MT + i), past + i);
  head.Chunks(chunk, s, out, n, z_out, z_row, clear, [&](size_t t) HWY_ATTR {
    const size_t rows = chunk.rows;
    PackRows(q, t, rows, width, dp, T{0}, Q);
    PackRows(k, t, rows, width, dp, T{0}, K);
    const T* seen = past;
    if (chunk.scaled) {
      for (size_t j = 0; j < dp; ++j) {
        for (size_t l = 0; l < np; ++l) P[j * np + l] = chunk.carry[l] * past[j * np + l];
      }
      seen = P;
    }
    Transpose(rows, width, K, dp, KT, kCp);
    LowerProduct<T>(rows, {Q, dp, 1, KT, kCp, width}, A, kCp);
    Product<Triangle::kLower, T>(rows, n, {Q, dp, 1, seen, np, width},
                                 {A, kCp, 1, chunk.E, np, rows}, X, np);
    for (size_t i = 0; i < rows * np; i += kLanes<T>)
      hn::Store(hn::Mul(hn::Load(d, X + i), hn::Load(d, chunk.F + i)), d, X + i);
    UnpackRows(X, t, rows, n, np, out);

    Product<T>(width, n, {K, 1, dp, chunk.E, np, rows}, P, np);
    chunk.Advance();
    for (size_t l = 0; l < np; l += kLanes<double>) {
      const Double keep = LoadAsDouble(chunk.keep + l), sub = LoadAsDouble(chunk.sub + l),
                   gain = LoadAsDouble(chunk.gain + l);
      const auto skip = hn::Eq(LoadAsDouble(chunk.sum + l), hn::Zero(dd));
      for (size_t j = l; j < width * np; j += np) {
        const Double m = hn::Load(dd, MT + j);
        const Double next = hn::IfThenElse(
            skip, m,
            hn::MulAdd(gain, hn::NegMulAdd(sub, m, LoadAsDouble(P + j)), hn::Mul(keep, m)));
        hn::Store(next, dd, MT + j);
        StoreDouble(next, past + j);
      }
    }
  });
  for (size_t l = 0; l < n; ++l) {
    for (size_t j = 0; j < width; ++j) memory[l * width + j] = MT[j * np + l];
  }
  std::memcpy(z, chunk.z, n * sizeof(double));
}

template <class T>
void ReadAll(const SlotShape& shape, const Rows<const T>& r, const Rows<const T>& s,
             const Rows<const T>& v, const RowMask& mask, double* memory, double* z,
             const Rows<T>& out, const Rows<T>& z_out) {
  ParallelFor(shape.batch * shape.heads, HeadsPerThread(shape), [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const ForwardHead<T> head(shape, mask, index);
      const Sequence<const T> rh(r, head.b, head.h), sh(s, head.b, head.h), vh(v, head.b, head.h);
      const Sequence<T> oh(out, head.b, head.h), zh(z_out, head.b, head.h);
      double* const m = memory + index * shape.slots * shape.width;
      double* const zz = z + index * shape.slots;
      if (shape.length == 1) {
        head.One(zz, m, oh, head.width, zh, [&] {
          StepRead(head.n, head.width, rh.At(0), sh.At(0), vh.At(0), m, zz, oh.At(0));
        });
      } else {
        ReadHead(head, rh, sh, vh, m, zz, oh, zh);
      }
    }
  });
}

template <class T>
void MatchAll(const SlotShape& shape, const Rows<const T>& q, const Rows<const T>& s,
              const Rows<const T>& k, const RowMask& mask, double* memory, double* z,
              const Rows<T>& out, const Rows<T>& z_out) {
  ParallelFor(shape.batch * shape.heads, HeadsPerThread(shape), [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const ForwardHead<T> head(shape, mask, index);
      const Sequence<const T> qh(q, head.b, head.h), sh(s, head.b, head.h), kh(k, head.b, head.h);
      const Sequence<T> oh(out, head.b, head.h), zh(z_out, head.b, head.h);
      double* const m = memory + index * shape.slots * shape.width;
      double* const zz = z + index * shape.slots;
      if (shape.length == 1) {
        head.One(zz, m, oh, head.n, zh, [&] {
          StepMatch(head.n, head.width, qh.At(0), sh.At(0), kh.At(0), m, zz, oh.At(0));
        });
      } else {
        MatchHead(head, qh, sh, kh, m, zz, oh, zh);
      }
    }
  });
}

#define CISTERN_SLOT_FORWARD(Function, name, T)                                           \
  void name(const SlotShape& shape, Rows<const T> a, Rows<const T> s, Rows<const T> u,    \
            const RowMask& mask, double* memory, double* z, Rows<T> out, Rows<T> z_out) { \
    Function<T>(shape, a, s, u, mask, memory, z, out, z_out);                             \
  }
CISTERN_SLOT_FORWARD(ReadAll, SlotReadFloat, float)
CISTERN_SLOT_FORWARD(ReadAll, SlotReadDouble, double)
CISTERN_SLOT_FORWARD(MatchAll, SlotMatchFloat, float)
CISTERN_SLOT_FORWARD(MatchAll, SlotMatchDouble, double)
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
