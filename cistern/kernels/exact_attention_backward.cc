// The gradients of exact attention, from weights that are computed again:
//
//   p_tj = e^(x_tj - high_t) / sum_t        D_t = do_t . o_t
//   dv_j = sum_t p_tj do_t                  dx_tj = p_tj (do_t . v_j - D_t)
//   dk_j = scale sum_t dx_tj q_t            dq_t = scale sum_j dx_tj k_j
//
// 1 / sum_t goes with do_t and D_t, so that no weight is divided. With dropout's factors f_tj, dv
// takes f_tj p_tj in the place of p_tj, and dx takes f_tj (do_t . v_j) in that of do_t . v_j; what
// is kept is multiplied by 1 / (1 - rate), which goes with do_t.
#include "cistern/kernels/dispatch.h"
#include "cistern/kernels/exact_attention.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/exact_attention_backward.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/attention_rounds-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

template <class S>
struct BackwardInputs {
  using T = ComputeType<S>;
  Sequence<const S> q, k, v, out, d_out;
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
  Vec<T> most[kVectors], less[kVectors], far[kVectors];
  bool any_far = false;
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    most[v] = hn::Load(d, high + lane + v * kN);
    far[v] = FarScore(most[v]), any_far = any_far || !IsZero(far[v]);
    most[v] = ReferenceOf(hn::Sub(most[v], far[v]));
    less[v] = hn::Load(d, D + lane + v * kN);
  }
  for (size_t j = 0; j < keys; ++j) {
    const size_t first = j * kBlockQueries + lane;
    Vec<T> e[kVectors];
    ForVectors<kVectors>([&](int v) HWY_ATTR { e[v] = hn::Load(d, X + first + v * kN); });
    if (HWY_UNLIKELY(any_far))
      ForVectors<kVectors>([&](int v) HWY_ATTR { e[v] = hn::Sub(e[v], far[v]); });
    WeightsOf<kVectors>(e, most);
    ForVectors<kVectors>([&](int v) HWY_ATTR {
      const size_t at = first + v * kN;
      Vec<T> dx = hn::Mul(e[v], hn::Sub(hn::Load(d, dP + at), less[v]));
      if constexpr (kMasked) {
        const auto seen = mask->Lanes(lane + v * kN, j);
        e[v] = hn::IfThenElseZero(seen, e[v]), dx = hn::IfThenElseZero(seen, dx);
        if (!mask->Valid(j)) e[v] = dx = hn::Zero(d);
      }
      hn::Store(e[v], d, X + at);
      hn::Store(dx, d, dP + at);
    });
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
// finite. A[keys, queries of the tile] holds 0 where they do not; rows: those of the block.
template <class T>
HWY_NOINLINE void AddRowsSeen(const QueryBlock<T>& block, const TileOfPairs& tile, size_t width,
                              const T* A, const T* rows, size_t ld, const Sequence<T>& to) {
  const size_t end = std::min(block.count, tile.lane + tile.vectors * kLanes<T>);
  for (size_t j = tile.j; j < tile.j + tile.keys; ++j, A += kBlockQueries) {
    T* const row = to.At(j);
    for (size_t i = tile.lane; i < end; ++i) {
      if (!block.Sees(i, j)) continue;
      for (size_t c = 0; c < width; ++c) row[c] += A[i - tile.lane] * rows[i * ld + c];
    }
  }
}

template <class S>
void ZeroKeys(size_t begin, size_t end, const BackwardInputs<S>& x) {
  ZeroRows(begin, end, x.key_width, x.dk);
  ZeroRows(begin, end, x.value_width, x.dv);
}

// What a tile of keys needs beside its blocks.
template <class S>
struct TileScratch {
  using T = ComputeType<S>;
  TileTokens<S>* tokens;
  T *X, *dP;  // [keys, queries]
  T* edge;    // [keys, lanes]
};

// The pairs of a block of queries with the keys of [begin, end).
template <class S>
class BlockBackward {
  using T = ComputeType<S>;

 public:
  static constexpr size_t kPieces = 7;
  static size_t Values(size_t kp, size_t vp) { return kBlockQueries * (3 * kp + 2 * vp + 2); }

  BlockBackward(const AttentionView& view, size_t t, size_t begin, size_t end,
                const BackwardInputs<S>& x, Workspace& workspace)
      : x_(x),
        block_(view, t),
        kp_(RoundUp(x.key_width, kLanes<T>)),
        vp_(RoundUp(x.value_width, kLanes<T>)),
        next_(std::max(begin, block_.low)),
        end_(std::min(end, block_.high)) {
    if (Done()) {
      if (x.writes_dq) ZeroRows(t, t + block_.count, x.key_width, x.dq);
      if (x.writes_dk) ZeroKeys(0, view.keys, x);
      return;
    }
    if (x.writes_dk) ZeroKeys(0, next_, x), ZeroKeys(end_, view.keys, x);
    for (T** panel : {&q_rows_, &Q_, &dQ_}) *panel = workspace.Take<T>(kBlockQueries * kp_);
    for (T** panel : {&g_rows_, &G_}) *panel = workspace.Take<T>(kBlockQueries * vp_);
    for (T** numbers : {&high_, &D_}) *numbers = workspace.Take<T>(kBlockQueries);
    Prepare();
  }

  size_t Next() const { return next_; }
  bool Done() const { return next_ >= end_; }

  void TakeTile(const TileScratch<S>& scratch) {
    const size_t begin = next_;
    next_ = std::min(begin + kTileKeys, end_);
    scratch.tokens->Take(begin, next_);
    // What halves of the queries give is added up.
    const bool whole = !block_.Partial(begin, next_);
    if (x_.writes_dk && !whole) ZeroKeys(begin, next_, x_);
    block_.ForTiles(begin, next_, [&](const TileOfPairs& tile) {
      if (x_.writes_dk && whole) {
        Take<From::kZero>(tile, scratch);
      } else {
        Take<From::kSum>(tile, scratch);
      }
    });
  }

  // Writes dq, or adds to it.
  void Finish() {
    if (dQ_ == nullptr) return;
    const Tag<T> d;
    constexpr size_t kN = kLanes<T>;
    const size_t kw = x_.key_width;
    Transpose(kw, block_.count, dQ_, kBlockQueries, q_rows_, kp_);
    const T scale = static_cast<T>(x_.scale);
    for (size_t i = 0; i < block_.count; ++i) {
      T* const row = x_.dq.At(block_.t + i);
      const T* const sum = q_rows_ + i * kp_;
      size_t c = 0;
      if (x_.writes_dq) {
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

 private:
  // kKeys: what the gradients of keys and values come from.
  template <From kKeys>
  void Take(const TileOfPairs& tile, const TileScratch<S>& scratch) {
    const size_t j = tile.j, keys = tile.keys, lane = tile.lane, vectors = tile.vectors,
                 kw = x_.key_width, vw = x_.value_width,
                 count = std::min(block_.count - lane, vectors * kLanes<T>);
    T *const X = scratch.X, *const dP = scratch.dP, *const dQ = dQ_ + lane;
    const Sequence<const T> k = scratch.tokens->Keys(j), v = scratch.tokens->Values(j);
    Multiply<From::kZero, false>(
        keys, vectors, Factors<T>{k.data, size_t(k.time), 1, Q_ + lane, kBlockQueries, kw}, X,
        kBlockQueries);
    Multiply<From::kZero, false>(
        keys, vectors, Factors<T>{v.data, size_t(v.time), 1, G_ + lane, kBlockQueries, vw}, dP,
        kBlockQueries);
    const bool drops = block_.view.dropout().Any();
    uint64_t kept[kTileKeys];
    if (drops) {
      block_.view.Draw(block_.t + lane, vectors * kLanes<T>, j, keys, kept);
      DropPairs(kept, keys, vectors, kBlockQueries, dP);
    }
    const Factors<T> of_values = {X, kBlockQueries, 1, g_rows_ + lane * vp_, vp_, count},
                     of_keys = {dP, kBlockQueries, 1, q_rows_ + lane * kp_, kp_, count},
                     of_queries = {k.data, 1, size_t(k.time), dP, kBlockQueries, keys};
    if (tile.masked) {
      const TileMask<T> mask(block_, j, keys, lane);
      DifferentiateAll<true>(keys, vectors, X, dP, high_ + lane, D_ + lane, &mask);
      if (drops) DropPairs(kept, keys, vectors, kBlockQueries, X);
      if (!finite_ || !AreFinite(k, 0, keys, kw)) {
        AddRowsSeen(block_, tile, vw, X, g_rows_, vp_, x_.dv);
        AddRowsSeen(block_, tile, kw, dP, q_rows_, kp_, x_.dk);
        MultiplySeen<T>(mask, kw, vectors, of_queries, dQ, nullptr);
        return;
      }
    } else {
      DifferentiateAll<false, T>(keys, vectors, X, dP, high_ + lane, D_ + lane, nullptr);
      if (drops) DropPairs(kept, keys, vectors, kBlockQueries, X);
    }
    ProductToRows<kKeys>(keys, vw, of_values, x_.dv.At(j), size_t(x_.dv.time), scratch.edge);
    ProductToRows<kKeys>(keys, kw, of_keys, x_.dk.At(j), size_t(x_.dk.time), scratch.edge);
    Multiply<From::kSum, true>(kw, vectors, of_queries, dQ, kBlockQueries);
  }

  // The block's queries, gradients, references and D.
  void Prepare() {
    const AttentionView& view = block_.view;
    const size_t t = block_.t, count = block_.count, vw = x_.value_width;
    QueriesInLanes(block_, x_.q, x_.key_width, x_.scale, q_rows_, Q_);
    PackScaled(x_.d_out, t, count, vw, vp_, T{1}, g_rows_);
    for (size_t i = 0; i < kBlockQueries; ++i) high_[i] = 0, D_[i] = 0;
    const T kept_factor = static_cast<T>(view.dropout().KeptFactor());
    for (size_t i = 0; i < count; ++i) {
      const T* const of = view.Stats(x_.stats, t + i);
      const Sequence<const S> of_query(x_.out.At(t + i), size_t(x_.out.time));
      const T* const out = FirstRow(of_query, vw, G_);  // which is filled behind this loop
      T* const row = g_rows_ + i * vp_;
      high_[i] = of[0];
      for (size_t c = 0; c < vw; ++c) row[c] *= of[1];
      D_[i] = static_cast<T>(DotInDouble(vw, row, out));
      if (view.dropout().Any()) {
        for (size_t c = 0; c < vw; ++c) row[c] *= kept_factor;
      }
    }
    Transpose(count, vw, g_rows_, vp_, G_, kBlockQueries);
    std::memset(dQ_, 0, sizeof(T) * kBlockQueries * kp_);
    finite_ = AreFinite(Sequence<const T>(q_rows_, kp_), 0, count, x_.key_width) &&
              AreFinite(Sequence<const T>(g_rows_, vp_), 0, count, vw);
  }

  const BackwardInputs<S>& x_;
  const QueryBlock<T> block_;
  const size_t kp_, vp_;
  size_t next_;
  const size_t end_;
  T *q_rows_ = nullptr, *Q_ = nullptr;  // the queries as rows and in lanes
  T *g_rows_ = nullptr, *G_ = nullptr;  // the outputs' gradients likewise
  T* dQ_ = nullptr;                     // in lanes; null where no key is seen
  T *high_ = nullptr, *D_ = nullptr;
  bool finite_ = true;  // the queries and gradients
};

// The queries [first, last) of a view, up to kBlocksTogether blocks, with the keys [begin, end);
// after those queries the ones up to `next` come.
template <class S, class T = ComputeType<S>>
HWY_NOINLINE void BlocksBackward(const AttentionView& view, size_t first, size_t last, size_t next,
                                 size_t begin, size_t end, const BackwardInputs<S>& x) {
  const size_t kw = x.key_width, vw = x.value_width, kp = RoundUp(kw, kLanes<T>),
               vp = RoundUp(vw, kLanes<T>);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(sizeof(T) * (kBlocksTogether * BlockBackward<S>::Values(kp, vp) +
                               TileTokens<S>::Values(kp, vp) + 2 * kBlockQueries * kTileKeys +
                               kTileKeys * kLanes<T>),
                  3 + TileTokens<S>::kPieces + kBlocksTogether * BlockBackward<S>::kPieces);
  TileTokens<S> tokens(x.k, x.v, kw, vw, workspace);
  const TileScratch<S> tile = {&tokens, workspace.Take<T>(kBlockQueries * kTileKeys),
                               workspace.Take<T>(kBlockQueries * kTileKeys),
                               workspace.Take<T>(kTileKeys * kLanes<T>)};
  BlocksTogether<BlockBackward<S>> blocks;
  for (size_t t = first; t < last; t += kBlockQueries)
    blocks.Add(view, t, begin, end, x, workspace);
  RowsAhead& ahead = RowsAhead::OfThisThread();
  ahead.Clear();
  const size_t after = std::min(last + kBlockQueries, next);
  NoteRows(x.q, last, after, kw);
  NoteRows(x.d_out, last, after, vw);
  NoteRows(x.out, last, after, vw);
  const bool asks = last - first > kBlockQueries || x.writes_dk;
  const auto note = [&](size_t from, size_t to) {
    if (!asks) return;  // a block before this one has asked for these keys
    ahead.Clear();
    NoteRows(x.k, from, to, kw);
    NoteRows(x.v, from, to, vw);
  };
  blocks.TakeTiles(end, note, tile);
  blocks.ForEach([](BlockBackward<S>& block) { block.Finish(); });
}

template <class S, class T = ComputeType<S>>
void GradientsAll(const AttentionShape& shape, double scale, const Rows<const S>& q,
                  const Rows<const S>& k, const Rows<const S>& v, const Rows<const S>& out,
                  const Rows<const S>& d_out, const AttentionMask& mask, const T* stats,
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
  ForCells(shape, mask,
           [&](const AttentionView& view, size_t first, size_t last, size_t begin, size_t end) {
             const BackwardInputs<S> x = {
                 view.Of(q),  view.Of(k),  view.Of(v),  view.Of(out), view.Of(d_out),
                 view.Of(dq), view.Of(dk), view.Of(dv), kw,           vw,
                 scale,       stats,       writes_dq,   writes_dk};
             for (size_t t = first; t < last;) {
               const size_t some = EndOfTogether<T>(view, t, last, 2 * (kw + vw));
               BlocksBackward(view, t, some, last, begin, end, x);
               t = some;
             }
           });
}

#define CISTERN_GRADIENTS_ARGUMENTS(S)                                                          \
  const AttentionShape &shape, double scale, Rows<const S> q, Rows<const S> k, Rows<const S> v, \
      Rows<const S> out, Rows<const S> d_out, const AttentionMask &mask,                        \
      const ComputeType<S>*stats, Rows<ComputeType<S>> dq, Rows<ComputeType<S>> dk,             \
      Rows<ComputeType<S>> dv
#define CISTERN_GRADIENTS(S, Name)                                               \
  void Gradients##Name(CISTERN_GRADIENTS_ARGUMENTS(S)) {                         \
    GradientsAll<S>(shape, scale, q, k, v, out, d_out, mask, stats, dq, dk, dv); \
  }
CISTERN_GRADIENTS(float, Float)
CISTERN_GRADIENTS(double, Double)
CISTERN_GRADIENTS(BFloat16, BFloat16)
#undef CISTERN_GRADIENTS

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(GradientsFloat);
HWY_EXPORT(GradientsDouble);
HWY_EXPORT(GradientsBFloat16);

#define CISTERN_GRADIENTS(S, Name)                                \
  template <>                                                     \
  void AttentionBackward<S>(CISTERN_GRADIENTS_ARGUMENTS(S)) {     \
    CISTERN_DISPATCH(Gradients##Name)                             \
    (shape, scale, q, k, v, out, d_out, mask, stats, dq, dk, dv); \
  }
CISTERN_GRADIENTS(float, Float)
CISTERN_GRADIENTS(double, Double)
CISTERN_GRADIENTS(BFloat16, BFloat16)
#undef CISTERN_GRADIENTS

}  // namespace cistern
#endif  // HWY_ONCE
