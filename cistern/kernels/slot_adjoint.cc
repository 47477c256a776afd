#include <vector>

#include "cistern/base/parallel.h"
#include "cistern/kernels/dispatch.h"
#include "cistern/kernels/slot_memory.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/slot_adjoint.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/gemm-inl.h"
#include "cistern/kernels/slot_chunk-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

template <class T>
struct AdjointHead {
  Sequence<const T> a, g, s, u, b, dz;
  Sequence<T> du, ds;
  Tokens tokens;
  size_t n, width, total;
  bool accumulate_ds;
};

// Rows [t, t + rows) of ds from the panel `from` [rows, np].
template <class T>
void PutDs(const AdjointHead<T>& head, const T* from, size_t np, size_t t, size_t rows) {
  if (!head.accumulate_ds) return UnpackRows(from, t, rows, head.n, np, head.ds);
  for (size_t i = 0; i < rows; ++i) {
    T* to = head.ds.At(t + i);
    for (size_t l = 0; l < head.n; ++l) to[l] += from[i * np + l];
  }
}

// G [n, width] and h [n] in place. Per chunk, with W = a F, Gs = F_last G, hs = F_last h (the
// gradients at the chunk's reference):
//   du_i = sum_{t>=i} (W_t . E_i) g_t + E_i Gs
//   ds_i = E_i (sum_{t>=i} (g_t . u_i) W_t + Gs u_i - sum_{t>=i} (W_t b_t - F_t dz_t) - hs)
//   G = carry (W^T g + Gs),   h = carry (sum_t (W_t b_t - F_t dz_t) + hs)
template <class T>
HWY_NOINLINE void AdjointOfHead(const AdjointHead<T>& head, const double* z0, T* grad, T* h_io) {
  const size_t n = head.n, width = head.width, np = Padded<T>(n), dp = Padded<T>(width);
  constexpr size_t kC = kChunkRows, kCp = kChunkPadded<T>;
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(SlotChunk<T>::Bytes(n) + sizeof(T) * (kC * (4 * np + 3 * dp + 2 * kCp) +
                                                        (np + dp) * kCp + 3 * np * dp + np),
                  SlotChunk<T>::kPieces + 15);
  SlotChunk<T> chunk(n, workspace);
  T* const W = workspace.Take<T>(kC * np);
  T* const Y = workspace.Take<T>(kC * np);  // ds
  T* const b = workspace.Take<T>(kC * np);
  T* const dz = workspace.Take<T>(kC * np);
  T* const g = workspace.Take<T>(kC * dp);
  T* const u = workspace.Take<T>(kC * dp);
  T* const D = workspace.Take<T>(kC * dp);   // du
  T* const A = workspace.Take<T>(kC * kCp);  // tril(W E^T)
  T* const B = workspace.Take<T>(kC * kCp);  // tril(g u^T)
  T* const ET = workspace.Take<T>(np * kCp);
  T* const UT = workspace.Take<T>(dp * kCp);
  T* const G = workspace.Take<T>(np * dp);
  T* const GT = workspace.Take<T>(dp * np);
  T* const P = workspace.Take<T>(np * dp);  // W^T g
  T* const h = workspace.Take<T>(np);
  const Tag<T> d;

  // Forward over the log-weights: where the chunks begin and each slot's z there.
  std::vector<size_t> begins;
  std::vector<double> z_before;
  chunk.LoadZ(z0);
  for (size_t t = 0; t < head.tokens.length; t += chunk.rows) {
    if (head.tokens.StartsAt(t)) chunk.Empty();
    begins.push_back(t);
    z_before.insert(z_before.end(), chunk.z, chunk.z + n);
    chunk.Gather(head.s, head.tokens, t, head.tokens.length);
    chunk.Exponentials();
    chunk.Advance();
  }

  std::memset(G, 0, np * dp * sizeof(T));
  PackRows(Sequence<const T>(grad, width), 0, n, width, dp, T{0}, G);
  for (size_t l = 0; l < np; ++l) h[l] = l < n ? h_io[l] : T{0};
  std::memset(dz, 0, kC * np * sizeof(T));

  for (size_t c = begins.size(); c-- > 0;) {
    const size_t t = begins[c], end = c + 1 < begins.size() ? begins[c + 1] : head.tokens.length;
    chunk.LoadZ(z_before.data() + c * n);
    chunk.Gather(head.s, head.tokens, t, end);
    chunk.Exponentials();
    const size_t rows = chunk.rows;
    const T* last = chunk.F + (rows - 1) * np;
    PackRows(head.a, t, rows, n, np, T{0}, W);
    PackRows(head.b, t, rows, n, np, T{0}, b);
    PackRows(head.g, t, rows, width, dp, T{0}, g);
    PackRows(head.u, t, rows, width, dp, T{0}, u);
    if (head.dz.data != nullptr) PackRows(head.dz, t, rows, n, np, T{0}, dz);
    for (size_t i = 0; i < rows * np; i += kLanes<T>)
      hn::Store(hn::Mul(hn::Load(d, W + i), hn::Load(d, chunk.F + i)), d, W + i);
    for (size_t l = 0; l < n; ++l) {
      const Vec<T> f = hn::Set(d, last[l]);
      const auto never = hn::Eq(f, hn::Zero(d));
      for (size_t j = l * dp; j < (l + 1) * dp; j += kLanes<T>)
        hn::Store(hn::IfThenZeroElse(never, hn::Mul(f, hn::Load(d, G + j))), d, G + j);
      h[l] = last[l] == 0 ? T{0} : h[l] * last[l];
    }
    Transpose(np, dp, G, dp, GT, np);

    Transpose(rows, n, chunk.E, np, ET, kCp);
    LowerProduct<T>(rows, {W, np, 1, ET, kCp, n}, A, kCp);
    Product<Triangle::kUpper, T>(rows, width, {chunk.E, np, 1, G, dp, n}, {A, 1, kCp, g, dp, rows},
                                 D, dp);
    UnpackRows(D, t, rows, width, dp, head.du);

    Transpose(rows, width, u, dp, UT, kCp);
    LowerProduct<T>(rows, {g, dp, 1, UT, kCp, width}, B, kCp);
    Product<Triangle::kUpper, T>(rows, n, {u, dp, 1, GT, np, width}, {B, 1, kCp, W, np, rows}, Y,
                                 np);
    for (size_t l = 0; l < np; l += kLanes<T>) {
      const Vec<T> zero = hn::Zero(d), empty = hn::Set(d, -std::numeric_limits<T>::infinity());
      Vec<T> sum = hn::Load(d, h + l);
      for (size_t i = rows; i-- > 0;) {
        const size_t at = i * np + l;
        const Vec<T> f = hn::Load(d, chunk.F + at);
        sum = hn::MulAdd(hn::Load(d, W + at), hn::Load(d, b + at), sum);
        sum = hn::Sub(sum, hn::IfThenZeroElse(hn::Eq(f, zero), hn::Mul(f, hn::Load(d, dz + at))));
        const Vec<T> y = hn::Mul(hn::Load(d, chunk.E + at), hn::Sub(hn::Load(d, Y + at), sum));
        hn::Store(hn::IfThenZeroElse(hn::Eq(hn::Load(d, chunk.s + at), empty), y), d, Y + at);
      }
      const Vec<T> carry = hn::Load(d, chunk.carry + l);
      hn::Store(hn::IfThenZeroElse(hn::Eq(carry, zero), hn::Mul(carry, sum)), d, h + l);
    }
    PutDs(head, Y, np, t, rows);

    Product<T>(n, width, {W, 1, np, g, dp, rows}, P, dp);
    for (size_t l = 0; l < n; ++l) {
      const Vec<T> carry = hn::Set(d, chunk.carry[l]);
      const auto forgotten = hn::Eq(carry, hn::Zero(d));
      for (size_t j = l * dp; j < (l + 1) * dp; j += kLanes<T>) {
        const Vec<T> sum = hn::Add(hn::Load(d, G + j), hn::Load(d, P + j));
        hn::Store(hn::IfThenZeroElse(forgotten, hn::Mul(carry, sum)), d, G + j);
      }
    }
  }

  UnpackRows(G, 0, n, width, dp, Sequence<T>(grad, width));
  std::memcpy(h_io, h, n * sizeof(T));
  for (size_t l = 0; l < n; ++l) {  // the memory of an empty slot counts as zero, whatever it holds
    if (z0[l] != kEmpty) continue;
    h_io[l] = 0;
    std::memset(grad + l * width, 0, width * sizeof(T));
  }
  ZeroRows(head.tokens.length, head.total, width, head.du);
  if (!head.accumulate_ds) ZeroRows(head.tokens.length, head.total, n, head.ds);
}

template <class T>
void AdjointOfAll(const SlotShape& shape, const Rows<const T>& a, const Rows<const T>& g,
                  const Rows<const T>& s, const Rows<const T>& u, const Rows<const T>& b,
                  const Rows<const T>& dz, const RowMask& mask, const double* z0, T* G, T* h,
                  const Rows<T>& du, const Rows<T>& ds, bool accumulate_ds) {
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
                                static_cast<size_t>(shape.length),
                                accumulate_ds};
      AdjointOfHead(head, z0 + index * shape.slots, G + index * shape.slots * shape.width,
                    h + index * shape.slots);
    }
  });
}

#define CISTERN_SLOT_ADJOINT(name, T)                                                   \
  void name(const SlotShape& shape, Rows<const T> a, Rows<const T> g, Rows<const T> s,  \
            Rows<const T> u, Rows<const T> b, Rows<const T> dz, const RowMask& mask,    \
            const double* z0, T* G, T* h, Rows<T> du, Rows<T> ds, bool accumulate_ds) { \
    AdjointOfAll<T>(shape, a, g, s, u, b, dz, mask, z0, G, h, du, ds, accumulate_ds);   \
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
                 Rows<float> du, Rows<float> ds, bool accumulate_ds) {
  CISTERN_DISPATCH(SlotAdjointFloat)
  (shape, a, g, s, u, b, dz, mask, z0, G, h, du, ds, accumulate_ds);
}
template <>
void SlotAdjoint(const SlotShape& shape, Rows<const double> a, Rows<const double> g,
                 Rows<const double> s, Rows<const double> u, Rows<const double> b,
                 Rows<const double> dz, const RowMask& mask, const double* z0, double* G, double* h,
                 Rows<double> du, Rows<double> ds, bool accumulate_ds) {
  CISTERN_DISPATCH(SlotAdjointDouble)
  (shape, a, g, s, u, b, dz, mask, z0, G, h, du, ds, accumulate_ds);
}

}  // namespace cistern
#endif  // HWY_ONCE
