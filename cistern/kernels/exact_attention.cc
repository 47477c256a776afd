#include "cistern/kernels/exact_attention.h"

#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/exact_attention.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/attention_softmax-inl.h"
#include "cistern/kernels/attention_step-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

template <class S>
struct ForwardInputs {
  Sequence<const S> q, k, v;
  Sequence<S> out;
  size_t key_width, value_width;
  double scale;
};

// A block of queries on its way over the keys that it sees.
template <class S>
class BlockForward {
  using T = ComputeType<S>;

 public:
  static constexpr size_t kPieces = 2 + OnlineSoftmax<T>::kPieces;
  static size_t Values(size_t kp, size_t vp) {
    return kBlockQueries * (kp + vp) + OnlineSoftmax<T>::kValues;
  }

  // panel: scratch of a block's rows of tokens.
  BlockForward(const AttentionView& view, size_t t, const ForwardInputs<S>& x, T* panel,
               Workspace& workspace)
      : x_(x),
        block_(view, t),
        softmax_(block_, workspace),
        Q_(workspace.Take<T>(kBlockQueries * RoundUp(x.key_width, kLanes<T>))),
        O_(workspace.Take<T>(kBlockQueries * RoundUp(x.value_width, kLanes<T>))),
        next_(block_.low) {
    QueriesInLanes(block_, x.q, x.key_width, x.scale, panel, Q_);
    std::memset(O_, 0, sizeof(T) * kBlockQueries * RoundUp(x.value_width, kLanes<T>));
  }

  size_t Next() const { return next_; }  // the first key that was not taken
  bool Done() const { return next_ >= block_.high; }

  // The next tile of keys; X: scratch of kBlockQueries kTileKeys values.
  void TakeTile(TileTokens<S>* tokens, T* X) {
    const size_t begin = next_;
    next_ = std::min(begin + kTileKeys, block_.high);
    tokens->Take(begin, next_);
    block_.ForTiles(begin, next_, [&](const TileOfPairs& tile) { Take(tile, *tokens, X); });
  }

  void Finish(T* stats, T* panel) {
    softmax_.Finish(stats);
    const Tag<T> d;
    const size_t vp = RoundUp(x_.value_width, kLanes<T>);
    for (size_t c = 0; c < x_.value_width; ++c) {
      for (size_t i = 0; i < block_.vectors() * kLanes<T>; i += kLanes<T>) {
        T* const at = O_ + c * kBlockQueries + i;
        hn::Store(hn::Mul(hn::Load(d, at), hn::Load(d, softmax_.factor + i)), d, at);
      }
    }
    Transpose(x_.value_width, block_.count, O_, kBlockQueries, panel, vp);
    UnpackRows(panel, block_.t, block_.count, x_.value_width, vp, x_.out);
  }

 private:
  void Take(const TileOfPairs& tile, const TileTokens<S>& tokens, T* X) {
    T *const O = O_ + tile.lane, *const factor = softmax_.factor + tile.lane;
    const Sequence<const T> k = tokens.Keys(tile.j), v = tokens.Values(tile.j);
    Multiply<From::kZero, false>(
        tile.keys, tile.vectors,
        Factors<T>{k.data, size_t(k.time), 1, Q_ + tile.lane, kBlockQueries, x_.key_width}, X,
        kBlockQueries);
    const Factors<T> values = {v.data, 1, size_t(v.time), X, kBlockQueries, tile.keys};
    if (!tile.masked) {
      Weigh(tile, X);
      Multiply<From::kTimes, true>(x_.value_width, tile.vectors, values, O, kBlockQueries, factor);
      return;
    }
    const TileMask<T> mask(block_, tile.j, tile.keys, tile.lane);
    HideUnseen(mask, tile.keys, tile.vectors, kNoScore<T>, X);
    Weigh(tile, X);
    if (AreFinite(v, 0, tile.keys, x_.value_width)) {
      Multiply<From::kTimes, true>(x_.value_width, tile.vectors, values, O, kBlockQueries, factor);
    } else {
      MultiplySeen(mask, x_.value_width, tile.vectors, values, O, factor);
    }
  }

  // X: scores become weights, after dropout.
  void Weigh(const TileOfPairs& tile, T* X) {
    softmax_.Weigh(tile.keys, tile.lane, tile.vectors, X);
    if (!block_.view.dropout().Any()) return;
    uint64_t kept[kTileKeys];
    block_.view.Draw(block_.t + tile.lane, tile.vectors * kLanes<T>, tile.j, tile.keys, kept);
    DropPairs(kept, tile.keys, tile.vectors, kBlockQueries, X);
  }

  const ForwardInputs<S>& x_;
  const QueryBlock<T> block_;
  OnlineSoftmax<T> softmax_;
  T *const Q_, *const O_;  // [widths, queries]
  size_t next_;
};

// The queries [begin, end) of a view, up to kBlocksTogether blocks, after which those up to `next`
// come.
template <class S, class T = ComputeType<S>>
HWY_NOINLINE void AttendBlocks(const AttentionView& view, size_t begin, size_t end, size_t next,
                               const ForwardInputs<S>& x, T* stats) {
  const size_t kp = RoundUp(x.key_width, kLanes<T>), vp = RoundUp(x.value_width, kLanes<T>);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(
      sizeof(T) * (kBlocksTogether * BlockForward<S>::Values(kp, vp) +
                   TileTokens<S>::Values(kp, vp) + kBlockQueries * (std::max(kp, vp) + kTileKeys)),
      2 + TileTokens<S>::kPieces + kBlocksTogether * BlockForward<S>::kPieces);
  T* const panel = workspace.Take<T>(kBlockQueries * std::max(kp, vp));
  T* const X = workspace.Take<T>(kBlockQueries * kTileKeys);
  TileTokens<S> tokens(x.k, x.v, x.key_width, x.value_width, workspace);
  BlocksTogether<BlockForward<S>> blocks;
  for (size_t t = begin; t < end; t += kBlockQueries) blocks.Add(view, t, x, panel, workspace);
  RowsAhead& ahead = RowsAhead::OfThisThread();
  ahead.Clear();
  NoteRows(x.q, end, std::min(end + kBlockQueries, next), x.key_width);
  const bool asks = end - begin > kBlockQueries || view.queries <= kBlockQueries;
  const auto note = [&](size_t from, size_t to) {
    if (!asks) return;  // a block before this one has asked for these keys
    ahead.Clear();
    NoteRows(x.k, from, to, x.key_width);
    NoteRows(x.v, from, to, x.value_width);
  };
  blocks.TakeTiles(view.keys, note, &tokens, X);
  blocks.ForEach([&](BlockForward<S>& block) { block.Finish(stats, panel); });
}

template <class S, class T = ComputeType<S>>
void AttendAll(const AttentionShape& shape, double scale, const Rows<const S>& q,
               const Rows<const S>& k, const Rows<const S>& v, const AttentionMask& mask,
               const Rows<S>& out, T* stats) {
  const size_t kw = size_t(shape.key_width), vw = size_t(shape.value_width);
  const auto inputs = [&](const AttentionView& view) {
    return ForwardInputs<S>{view.Of(q), view.Of(k), view.Of(v), view.Of(out), kw, vw, scale};
  };
  const int64_t longest = (shape.queries + shape.dilation - 1) / shape.dilation;
  // Where gradients are wanted, keys that are hidden have no part in the order of sums either.
  if (longest <= kFewQueries && stats == nullptr && !mask.dropout.Any()) {
    StepAll<S>(shape, scale, q, k, v, mask, out);
    return;
  }
  ForQueryBlocks(shape, mask, [&](const AttentionView& view, size_t begin, size_t end) {
    for (size_t t = begin; t < end;) {
      const size_t last = EndOfTogether<T>(view, t, end, kw + vw);
      AttendBlocks<S>(view, t, last, end, inputs(view), stats);
      t = last;
    }
  });
}

#define CISTERN_EXACT_ATTENTION(S, Name)                                                         \
  void Attend##Name(const AttentionShape& shape, double scale, Rows<const S> q, Rows<const S> k, \
                    Rows<const S> v, const AttentionMask& mask, Rows<S> out,                     \
                    ComputeType<S>* stats) {                                                     \
    AttendAll<S>(shape, scale, q, k, v, mask, out, stats);                                       \
  }
CISTERN_EXACT_ATTENTION(float, Float)
CISTERN_EXACT_ATTENTION(double, Double)
CISTERN_EXACT_ATTENTION(BFloat16, BFloat16)
#undef CISTERN_EXACT_ATTENTION

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(AttendFloat);
HWY_EXPORT(AttendDouble);
HWY_EXPORT(AttendBFloat16);

#define CISTERN_EXACT_ATTENTION(S, Name)                                                \
  template <>                                                                           \
  void AttentionForward<S>(const AttentionShape& shape, double scale, Rows<const S> q,  \
                           Rows<const S> k, Rows<const S> v, const AttentionMask& mask, \
                           Rows<S> out, ComputeType<S>* stats) {                        \
    CISTERN_DISPATCH(Attend##Name)(shape, scale, q, k, v, mask, out, stats);            \
  }
CISTERN_EXACT_ATTENTION(float, Float)
CISTERN_EXACT_ATTENTION(double, Double)
CISTERN_EXACT_ATTENTION(BFloat16, BFloat16)
#undef CISTERN_EXACT_ATTENTION

}  // namespace cistern
#endif  // HWY_ONCE
