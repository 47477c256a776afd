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

template <class T>
struct ForwardInputs {
  Sequence<const T> q, k, v;
  Sequence<T> out;
  size_t key_width, value_width;
  double scale;
};

// Queries t .. of a view, after which those from `next` on come.
template <class T>
HWY_NOINLINE void AttendBlock(const AttentionView& view, size_t t, size_t next,
                              const ForwardInputs<T>& x, T* stats) {
  const size_t kp = RoundUp(x.key_width, kLanes<T>), vp = RoundUp(x.value_width, kLanes<T>);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(
      sizeof(T) * (kBlockQueries * (2 * kp + 2 * vp + kTileKeys) + OnlineSoftmax<T>::kValues),
      5 + OnlineSoftmax<T>::kPieces);
  T* const panel = workspace.Take<T>(kBlockQueries * std::max(kp, vp));
  T* const Q = workspace.Take<T>(kBlockQueries * kp);
  T* const X = workspace.Take<T>(kBlockQueries * kTileKeys);
  T* const O = workspace.Take<T>(kBlockQueries * vp);

  const QueryBlock<T> block(view, t);
  OnlineSoftmax<T> softmax(block, workspace);
  const size_t vectors = block.vectors();
  QueriesInLanes(block, x.q, x.key_width, x.scale, panel, Q);
  std::memset(O, 0, sizeof(T) * kBlockQueries * vp);
  const bool drops = view.dropout().Any();
  const auto drop = [&](size_t j, size_t keys) {
    if (!drops) return;
    uint64_t kept[kTileKeys];
    view.Draw(t, vectors * kLanes<T>, j, keys, kept);
    DropPairs(kept, keys, vectors, kBlockQueries, X);
  };
  RowsAhead& ahead = RowsAhead::OfThisThread();
  ahead.Clear();
  NoteRows(x.q, next, std::min(next + kBlockQueries, view.queries), x.key_width);
  const bool alone = view.queries <= kBlockQueries;  // no other block has asked for these keys
  for (size_t j = block.low; j < block.high; j += kTileKeys) {
    const size_t keys = std::min(kTileKeys, block.high - j);
    if (alone) {
      ahead.Clear();
      NoteRows(x.k, j + keys, std::min(j + keys + kTileKeys, block.high), x.key_width);
      NoteRows(x.v, j + keys, std::min(j + keys + kTileKeys, block.high), x.value_width);
    }
    Multiply<From::kZero, false>(
        keys, vectors, Factors<T>{x.k.At(j), size_t(x.k.time), 1, Q, kBlockQueries, x.key_width}, X,
        kBlockQueries);
    const Factors<T> values = {x.v.At(j), 1, size_t(x.v.time), X, kBlockQueries, keys};
    if (!block.Partial(j, j + keys)) {
      softmax.Weigh(keys, X);
      drop(j, keys);
      Multiply<From::kTimes, true>(x.value_width, vectors, values, O, kBlockQueries,
                                   softmax.factor);
      continue;
    }
    const TileMask<T> mask(block, j, keys);
    HideUnseen(mask, keys, vectors, kNoScore<T>, X);
    softmax.Weigh(keys, X);
    drop(j, keys);
    if (AreFinite(x.v, j, keys, x.value_width)) {
      Multiply<From::kTimes, true>(x.value_width, vectors, values, O, kBlockQueries,
                                   softmax.factor);
    } else {
      MultiplySeen(mask, x.value_width, vectors, values, O, softmax.factor);
    }
  }
  softmax.Finish(stats);
  const Tag<T> d;
  for (size_t c = 0; c < x.value_width; ++c) {
    for (size_t i = 0; i < vectors * kLanes<T>; i += kLanes<T>) {
      T* const at = O + c * kBlockQueries + i;
      hn::Store(hn::Mul(hn::Load(d, at), hn::Load(d, softmax.factor + i)), d, at);
    }
  }
  Transpose(x.value_width, block.count, O, kBlockQueries, panel, vp);
  UnpackRows(panel, t, block.count, x.value_width, vp, x.out);
}

template <class T>
void AttendAll(const AttentionShape& shape, double scale, const Rows<const T>& q,
               const Rows<const T>& k, const Rows<const T>& v, const AttentionMask& mask,
               const Rows<T>& out, T* stats) {
  const size_t kw = size_t(shape.key_width), vw = size_t(shape.value_width);
  const auto inputs = [&](const AttentionView& view) {
    return ForwardInputs<T>{view.Of(q), view.Of(k), view.Of(v), view.Of(out), kw, vw, scale};
  };
  const int64_t longest = (shape.queries + shape.dilation - 1) / shape.dilation;
  // Where gradients are wanted, keys that are hidden have no part in the order of sums either.
  if (longest <= kFewQueries && stats == nullptr && !mask.dropout.Any()) {
    StepAll<T>(shape, scale, q, k, v, mask, out);
    return;
  }
  ForQueryBlocks(shape, mask, [&](const AttentionView& view, size_t t, size_t next) {
    AttendBlock<T>(view, t, next, inputs(view), stats);
  });
}

void AttendFewBFloat16(const AttentionShape& shape, double scale, Rows<const BFloat16> q,
                       Rows<const BFloat16> k, Rows<const BFloat16> v, const AttentionMask& mask,
                       Rows<BFloat16> out) {
  StepAll<BFloat16>(shape, scale, q, k, v, mask, out);
}

void AttendFloat(const AttentionShape& shape, double scale, Rows<const float> q,
                 Rows<const float> k, Rows<const float> v, const AttentionMask& mask,
                 Rows<float> out, float* stats) {
  AttendAll<float>(shape, scale, q, k, v, mask, out, stats);
}
void AttendDouble(const AttentionShape& shape, double scale, Rows<const double> q,
                  Rows<const double> k, Rows<const double> v, const AttentionMask& mask,
                  Rows<double> out, double* stats) {
  AttendAll<double>(shape, scale, q, k, v, mask, out, stats);
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(AttendFewBFloat16);
HWY_EXPORT(AttendFloat);
HWY_EXPORT(AttendDouble);

void AttentionOfFew(const AttentionShape& shape, double scale, Rows<const BFloat16> q,
                    Rows<const BFloat16> k, Rows<const BFloat16> v, const AttentionMask& mask,
                    Rows<BFloat16> out) {
  CISTERN_DISPATCH(AttendFewBFloat16)(shape, scale, q, k, v, mask, out);
}
template <>
void AttentionForward(const AttentionShape& shape, double scale, Rows<const float> q,
                      Rows<const float> k, Rows<const float> v, const AttentionMask& mask,
                      Rows<float> out, float* stats) {
  CISTERN_DISPATCH(AttendFloat)(shape, scale, q, k, v, mask, out, stats);
}
template <>
void AttentionForward(const AttentionShape& shape, double scale, Rows<const double> q,
                      Rows<const double> k, Rows<const double> v, const AttentionMask& mask,
                      Rows<double> out, double* stats) {
  CISTERN_DISPATCH(AttendDouble)(shape, scale, q, k, v, mask, out, stats);
}

}  // namespace cistern
#endif  // HWY_ONCE
