// The gradients of exact attention, from weights that are computed again:
//
//   p_tj = e^(x_tj - high_t) / sum_t        D_t = do_t . o_t
//   dv_j = sum_t p_tj do_t                  dx_tj = p_tj (do_t . v_j - D_t)
//   dk_j = scale sum_t dx_tj q_t            dq_t = scale sum_j dx_tj k_j
//
// 1 / sum_t goes with do_t and D_t, so that no weight is divided. With dropout's factors f_tj, dv
// takes f_tj p_tj in the place of p_tj, and dx takes f_tj (do_t . v_j) in that of do_t . v_j; what
// is kept is multiplied by 1 / (1 - rate), which goes with do_t.
#include "cistern/base/parallel.h"
#include "cistern/kernels/dispatch.h"
#include "cistern/kernels/exact_attention.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/exact_attention_backward.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/attention_rounds-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

template <class T>
struct BackwardInputs {
  Sequence<const T> q, k, v, out, d_out;
  Sequence<T> dq, dk, dv;
  size_t key_width, value_width;
  double scale;
  const T* stats;
  // Where a block of queries meets all keys at once, its dq is written; where it is the only block,
  // dk and dv are. Others are added to.
  bool writes_dq, writes_dk;
};

// E[keys, queries] = e^(X - high), 0 where a key is not seen; dX = E (dP - D), likewise.
template <bool kMasked, int kVectors, class T>
HWY_INLINE void Differentiate(size_t keys, size_t lane, T* X, T* dP, const T* high, const T* D,
                              const TileMask<T>* mask) {
  const Tag<T> d;
  constexpr size_t kN = kLanes<T>;
  Vec<T> most[kVectors], less[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v)
    most[v] = ReferenceOf(hn::Load(d, high + lane + v * kN)),
    less[v] = hn::Load(d, D + lane + v * kN);
  for (size_t j = 0; j < keys; ++j) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const size_t at = j * kBlockQueries + lane + v * kN;
      Vec<T> e = WeightOf(hn::Load(d, X + at), most[v]);
      Vec<T> dx = hn::Mul(e, hn::Sub(hn::Load(d, dP + at), less[v]));
      if constexpr (kMasked) {
        const auto seen = mask->Lanes(lane + v * kN, j);
        e = hn::IfThenElseZero(seen, e), dx = hn::IfThenElseZero(seen, dx);
        if (!mask->Valid(j)) e = dx = hn::Zero(d);
      }
      hn::Store(e, d, X + at);
      hn::Store(dx, d, dP + at);
    }
  }
}

template <bool kMasked, class T>
HWY_NOINLINE void DifferentiateAll(size_t keys, size_t vectors, T* X, T* dP, const T* high,
                                   const T* D, const TileMask<T>* mask) {
  size_t lane = 0;
  const auto some = [&]<int kVectors>(std::integral_constant<int, kVectors>) HWY_ATTR {
    constexpr size_t kStep = kVectors * kLanes<T>;
    for (; lane + kStep <= vectors * kLanes<T>; lane += kStep)
      Differentiate<kMasked, kVectors>(keys, lane, X, dP, high, D, mask);
  };
  some(std::integral_constant<int, 4>());
  some(std::integral_constant<int, 2>());
  some(std::integral_constant<int, 1>());
}

// C[keys, width] += A rows, of pairs that see each other alone: where `rows` hold what is not
// finite. A[keys, queries] holds 0 where they do not.
template <class T>
HWY_NOINLINE void AddRowsSeen(const QueryBlock<T>& block, size_t j, size_t keys, size_t width,
                              const T* A, const T* rows, size_t ld, const Sequence<T>& to) {
  for (size_t i = j; i < j + keys; ++i, A += kBlockQueries) {
    T* const row = to.At(i);
    for (size_t t = 0; t < block.count; ++t) {
      if (!block.Sees(t, i)) continue;
      for (size_t c = 0; c < width; ++c) row[c] += A[t] * rows[t * ld + c];
    }
  }
}

template <class T>
void ZeroKeys(size_t begin, size_t end, const BackwardInputs<T>& x) {
  ZeroRows(begin, end, x.key_width, x.dk);
  ZeroRows(begin, end, x.value_width, x.dv);
}

// The pairs of the block of queries from t on with the keys of [begin, end).
template <class T>
HWY_NOINLINE void BlockGradients(const AttentionView& view, size_t t, size_t begin, size_t end,
                                 const BackwardInputs<T>& x) {
  const QueryBlock<T> block(view, t);
  begin = std::max(begin, block.low), end = std::min(end, block.high);
  if (begin >= end) {
    if (x.writes_dq) ZeroRows(t, t + block.count, x.key_width, x.dq);
    if (x.writes_dk) ZeroKeys(0, view.keys, x);
    return;
  }
  if (x.writes_dk) ZeroKeys(0, begin, x), ZeroKeys(end, view.keys, x);
  RowsAhead::OfThisThread().Clear();
  const size_t next = std::min(t + kBlockQueries, view.queries),
               last = std::min(next + kBlockQueries, view.queries);
  NoteRows(x.q, next, last, x.key_width);
  NoteRows(x.d_out, next, last, x.value_width);
  NoteRows(x.out, next, last, x.value_width);
  const Tag<T> d;
  constexpr size_t kN = kLanes<T>;
  const size_t kw = x.key_width, vw = x.value_width, kp = RoundUp(kw, kN), vp = RoundUp(vw, kN),
               vectors = block.vectors(), count = block.count;
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(
      sizeof(T) * (kBlockQueries * (3 * kp + 2 * vp + 2 * kTileKeys + 2) + kTileKeys * kN), 10);
  T* const q_rows = workspace.Take<T>(kBlockQueries * kp);
  T* const Q = workspace.Take<T>(kBlockQueries * kp);
  T* const dQ = workspace.Take<T>(kBlockQueries * kp);
  T* const g_rows = workspace.Take<T>(kBlockQueries * vp);
  T* const G = workspace.Take<T>(kBlockQueries * vp);
  T* const X = workspace.Take<T>(kBlockQueries * kTileKeys);
  T* const dP = workspace.Take<T>(kBlockQueries * kTileKeys);
  T* const high = workspace.Take<T>(kBlockQueries);
  T* const D = workspace.Take<T>(kBlockQueries);
  T* const scratch = workspace.Take<T>(kTileKeys * kN);

  QueriesInLanes(block, x.q, kw, x.scale, q_rows, Q);
  PackScaled(x.d_out, t, count, vw, vp, T{1}, g_rows);
  for (size_t i = 0; i < kBlockQueries; ++i) high[i] = 0, D[i] = 0;
  const bool drops = view.dropout().Any();
  const T kept_factor = static_cast<T>(view.dropout().KeptFactor());
  for (size_t i = 0; i < count; ++i) {
    const T* const of = view.Stats(x.stats, t + i);
    const T* const out = x.out.At(t + i);
    T* const row = g_rows + i * vp;
    high[i] = of[0];
    for (size_t c = 0; c < vw; ++c) row[c] *= of[1];
    D[i] = static_cast<T>(DotInDouble(vw, row, out));
    if (drops) {
      for (size_t c = 0; c < vw; ++c) row[c] *= kept_factor;
    }
  }
  Transpose(count, vw, g_rows, vp, G, kBlockQueries);
  std::memset(dQ, 0, sizeof(T) * kBlockQueries * kp);
  const bool finite_q = AreFinite(Sequence<const T>(q_rows, kp), 0, count, kw),
             finite_g = AreFinite(Sequence<const T>(g_rows, vp), 0, count, vw);

  for (size_t j = begin; j < end; j += kTileKeys) {
    const size_t keys = std::min(kTileKeys, end - j);
    if (x.writes_dk) {
      RowsAhead::OfThisThread().Clear();
      NoteRows(x.k, j + keys, std::min(j + keys + kTileKeys, end), kw);
      NoteRows(x.v, j + keys, std::min(j + keys + kTileKeys, end), vw);
    }
    Multiply<From::kZero, false>(keys, vectors,
                                 Factors<T>{x.k.At(j), size_t(x.k.time), 1, Q, kBlockQueries, kw},
                                 X, kBlockQueries);
    Multiply<From::kZero, false>(keys, vectors,
                                 Factors<T>{x.v.At(j), size_t(x.v.time), 1, G, kBlockQueries, vw},
                                 dP, kBlockQueries);
    uint64_t kept[kTileKeys];
    if (drops) {
      view.Draw(t, vectors * kN, j, keys, kept);
      DropPairs(kept, keys, vectors, kBlockQueries, dP);
    }
    const Factors<T> of_values = {X, kBlockQueries, 1, g_rows, vp, count},
                     of_keys = {dP, kBlockQueries, 1, q_rows, kp, count},
                     of_queries = {x.k.At(j), 1, size_t(x.k.time), dP, kBlockQueries, keys};
    bool all_finite = true;
    if (block.Partial(j, j + keys)) {
      const TileMask<T> mask(block, j, keys);
      DifferentiateAll<true>(keys, vectors, X, dP, high, D, &mask);
      if (drops) DropPairs(kept, keys, vectors, kBlockQueries, X);
      all_finite = finite_q && finite_g && AreFinite(x.k, j, keys, kw);
      if (!all_finite) {
        if (x.writes_dk) ZeroKeys(j, j + keys, x);
        AddRowsSeen(block, j, keys, vw, X, g_rows, vp, x.dv);
        AddRowsSeen(block, j, keys, kw, dP, q_rows, kp, x.dk);
        MultiplySeen<T>(mask, kw, vectors, of_queries, dQ, nullptr);
      }
    } else {
      DifferentiateAll<false, T>(keys, vectors, X, dP, high, D, nullptr);
      if (drops) DropPairs(kept, keys, vectors, kBlockQueries, X);
    }
    if (!all_finite) continue;
    const auto put = [&]<From kFrom>(std::integral_constant<From, kFrom>) HWY_ATTR {
      ProductToRows<kFrom>(keys, vw, of_values, x.dv.At(j), size_t(x.dv.time), scratch);
      ProductToRows<kFrom>(keys, kw, of_keys, x.dk.At(j), size_t(x.dk.time), scratch);
    };
    x.writes_dk ? put(std::integral_constant<From, From::kZero>())
                : put(std::integral_constant<From, From::kSum>());
    Multiply<From::kSum, true>(kw, vectors, of_queries, dQ, kBlockQueries);
  }

  Transpose(kw, count, dQ, kBlockQueries, q_rows, kp);
  const T scale = static_cast<T>(x.scale);
  for (size_t i = 0; i < count; ++i) {
    T* const row = x.dq.At(t + i);
    const T* const sum = q_rows + i * kp;
    size_t c = 0;
    if (x.writes_dq) {
      for (; c + kN <= kw; c += kN)
        hn::StoreU(hn::Mul(hn::Set(d, scale), hn::Load(d, sum + c)), d, row + c);
      for (; c < kw; ++c) row[c] = scale * sum[c];
    }
    for (; c + kN <= kw; c += kN)
      hn::StoreU(hn::MulAdd(hn::Set(d, scale), hn::Load(d, sum + c), hn::LoadU(d, row + c)), d,
                 row + c);
    for (; c < kw; ++c) row[c] += scale * sum[c];
  }
}

template <class T>
void GradientsAll(const AttentionShape& shape, double scale, const Rows<const T>& q,
                  const Rows<const T>& k, const Rows<const T>& v, const Rows<const T>& out,
                  const Rows<const T>& d_out, const AttentionMask& mask, const T* stats,
                  const Rows<T>& dq, const Rows<T>& dk, const Rows<T>& dv) {
  const size_t kw = size_t(shape.key_width), vw = size_t(shape.value_width);
  const Rounds rounds(shape, AttentionView::Number(shape), kMostCells);
  const bool writes_dq = rounds.groups == 1, writes_dk = writes_dq && rounds.blocks == 1;
  ForViews(shape, mask, [&](const AttentionView& view) {
    if (!writes_dq) ZeroRows(0, view.queries, kw, view.Of(dq));
    if (writes_dk && view.queries > 0) return;
    ZeroRows(0, view.keys, kw, view.Of(dk));
    ZeroRows(0, view.keys, vw, view.Of(dv));
  });
  ForCells(shape, mask, [&](const AttentionView& view, size_t t, size_t begin, size_t end) {
    const BackwardInputs<T> x = {
        view.Of(q),  view.Of(k), view.Of(v), view.Of(out), view.Of(d_out), view.Of(dq), view.Of(dk),
        view.Of(dv), kw,         vw,         scale,        stats,          writes_dq,   writes_dk};
    BlockGradients(view, t, begin, end, x);
  });
}

#define CISTERN_EXACT_ATTENTION(T, Name)                                                         \
  void Gradients##Name(const AttentionShape& shape, double scale, Rows<const T> q,               \
                       Rows<const T> k, Rows<const T> v, Rows<const T> out, Rows<const T> d_out, \
                       const AttentionMask& mask, const T* stats, Rows<T> dq, Rows<T> dk,        \
                       Rows<T> dv) {                                                             \
    GradientsAll<T>(shape, scale, q, k, v, out, d_out, mask, stats, dq, dk, dv);                 \
  }
CISTERN_EXACT_ATTENTION(float, Float)
CISTERN_EXACT_ATTENTION(double, Double)
#undef CISTERN_EXACT_ATTENTION

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(GradientsFloat);
HWY_EXPORT(GradientsDouble);

#define CISTERN_EXACT_ATTENTION(T, Name)                                                           \
  template <>                                                                                      \
  void AttentionBackward(const AttentionShape& shape, double scale, Rows<const T> q,               \
                         Rows<const T> k, Rows<const T> v, Rows<const T> out, Rows<const T> d_out, \
                         const AttentionMask& mask, const T* stats, Rows<T> dq, Rows<T> dk,        \
                         Rows<T> dv) {                                                             \
    CISTERN_DISPATCH(Gradients##Name)                                                              \
    (shape, scale, q, k, v, out, d_out, mask, stats, dq, dk, dv);                                  \
  }
CISTERN_EXACT_ATTENTION(float, Float)
CISTERN_EXACT_ATTENTION(double, Double)
#undef CISTERN_EXACT_ATTENTION

}  // namespace cistern
#endif  // HWY_ONCE
