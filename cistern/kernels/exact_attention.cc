#include "cistern/kernels/exact_attention.h"

#include "cistern/base/parallel.h"
#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/exact_attention.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/attention_step-inl.h"
#include "cistern/kernels/attention_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Scores X[keys, queries] become weights e^(x - high): high is the maximum over this tile and those
// before; sum, factor: what e^-high of before has to be multiplied by.
template <int kVectors, class T>
HWY_INLINE void Weigh(size_t keys, T* X, T* high, T* sum, T* factor) {
  const Tag<T> d;
  constexpr size_t kN = kLanes<T>;
  Vec<T> most[kVectors], total[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) most[v] = hn::Load(d, high + v * kN);
  for (size_t j = 0; j < keys; ++j) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      most[v] = hn::Max(most[v], hn::Load(d, X + j * kBlockQueries + v * kN));
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const Vec<T> before = hn::Load(d, high + v * kN);
    hn::Store(most[v], d, high + v * kN);
    // What has seen nothing yet has the weights e^-inf = 0, not e^(inf - inf).
    most[v] = ReferenceOf(hn::IfThenZeroElse(hn::Eq(most[v], hn::Set(d, kNoScore<T>)), most[v]));
    const Vec<T> less = TileExp(hn::Sub(ReferenceOf(before), most[v]));
    hn::Store(less, d, factor + v * kN);
    total[v] = hn::Mul(less, hn::Load(d, sum + v * kN));
  }
  for (size_t j = 0; j < keys; ++j) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      T* const x = X + j * kBlockQueries + v * kN;
      const Vec<T> e = WeightOf(hn::Load(d, x), most[v]);
      total[v] = hn::Add(total[v], e);
      hn::Store(e, d, x);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) hn::Store(total[v], d, sum + v * kN);
}

template <class T>
HWY_NOINLINE void WeighAll(size_t keys, size_t vectors, T* X, T* high, T* sum, T* factor) {
  const auto some = [&]<int kVectors>(std::integral_constant<int, kVectors>) HWY_ATTR {
    for (; vectors >= size_t{kVectors}; vectors -= kVectors) {
      Weigh<kVectors>(keys, X, high, sum, factor);
      constexpr size_t kStep = kVectors * kLanes<T>;
      X += kStep, high += kStep, sum += kStep, factor += kStep;
    }
  };
  some(std::integral_constant<int, 4>());
  some(std::integral_constant<int, 2>());
  some(std::integral_constant<int, 1>());
}

template <class T>
struct ForwardInputs {
  Sequence<const T> q, k, v;
  Sequence<T> out;
  size_t key_width, value_width;
  double scale;
};

// Queries t .. of a view.
template <class T>
HWY_NOINLINE void AttendBlock(const AttentionView& view, size_t t, const ForwardInputs<T>& x,
                              T* stats) {
  const size_t kp = RoundUp(x.key_width, kLanes<T>), vp = RoundUp(x.value_width, kLanes<T>);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(sizeof(T) * kBlockQueries * (2 * kp + 2 * vp + kTileKeys + 3), 8);
  T* const panel = workspace.Take<T>(kBlockQueries * std::max(kp, vp));
  T* const Q = workspace.Take<T>(kBlockQueries * kp);
  T* const X = workspace.Take<T>(kBlockQueries * kTileKeys);
  T* const O = workspace.Take<T>(kBlockQueries * vp);
  T* const high = workspace.Take<T>(kBlockQueries);
  T* const sum = workspace.Take<T>(kBlockQueries);
  T* const factor = workspace.Take<T>(kBlockQueries);

  const QueryBlock<T> block(view, t);
  const size_t vectors = block.vectors();
  QueriesInLanes(block, x.q, x.key_width, x.scale, panel, Q);
  std::memset(O, 0, sizeof(T) * kBlockQueries * vp);
  for (size_t i = 0; i < kBlockQueries; ++i) {
    const int64_t empty = block.ranges[i].empty;
    high[i] = empty > 0 ? T{0} : kNoScore<T>, sum[i] = static_cast<T>(empty);
  }
  const bool drops = view.dropout().Any();
  const auto drop = [&](size_t j, size_t keys) {
    if (!drops) return;
    uint64_t kept[kTileKeys];
    view.Draw(t, vectors * kLanes<T>, j, keys, kept);
    DropPairs(kept, keys, vectors, kBlockQueries, X);
  };
  for (size_t j = block.low; j < block.high; j += kTileKeys) {
    const size_t keys = std::min(kTileKeys, block.high - j);
    Multiply<From::kZero, false>(
        keys, vectors, Factors<T>{x.k.At(j), size_t(x.k.time), 1, Q, kBlockQueries, x.key_width}, X,
        kBlockQueries);
    const Factors<T> values = {x.v.At(j), 1, size_t(x.v.time), X, kBlockQueries, keys};
    if (!block.Partial(j, j + keys)) {
      WeighAll(keys, vectors, X, high, sum, factor);
      drop(j, keys);
      Multiply<From::kTimes, true>(x.value_width, vectors, values, O, kBlockQueries, factor);
      continue;
    }
    const TileMask<T> mask(block, j, keys);
    HideUnseen(mask, keys, vectors, kNoScore<T>, X);
    WeighAll(keys, vectors, X, high, sum, factor);
    drop(j, keys);
    if (AreFinite(x.v, j, keys, x.value_width)) {
      Multiply<From::kTimes, true>(x.value_width, vectors, values, O, kBlockQueries, factor);
    } else {
      MultiplySeen(mask, x.value_width, vectors, values, O, factor);
    }
  }
  for (size_t i = 0; i < block.count; ++i) {
    // Scores of -inf alone have no softmax; no scores have the result 0.
    const bool nothing = sum[i] == T{0} && block.SeesNothing(i);
    factor[i] = nothing ? T{0} : T{1} / sum[i];
    if (stats != nullptr) {
      T* const of = view.Stats(stats, t + i);
      of[0] = high[i] == kNoScore<T> ? T{0} : high[i], of[1] = factor[i];
    }
    if (drops) factor[i] *= static_cast<T>(view.dropout().KeptFactor());
  }
  const Tag<T> d;
  for (size_t c = 0; c < x.value_width; ++c) {
    for (size_t i = 0; i < vectors * kLanes<T>; i += kLanes<T>) {
      T* const at = O + c * kBlockQueries + i;
      hn::Store(hn::Mul(hn::Load(d, at), hn::Load(d, factor + i)), d, at);
    }
  }
  Transpose(x.value_width, block.count, O, kBlockQueries, panel, vp);
  UnpackRows(panel, t, block.count, x.value_width, vp, x.out);
}

// Blocks of a view from both ends in turn: parts of them have about the same work, causal or not.
inline size_t FromBothEnds(size_t i, size_t count) {
  return i % 2 == 0 ? i / 2 : count - 1 - i / 2;
}

template <class T>
void AttendAll(const AttentionShape& shape, double scale, const Rows<const T>& q,
               const Rows<const T>& k, const Rows<const T>& v, const AttentionMask& mask,
               const Rows<T>& out, T* stats) {
  const size_t kw = size_t(shape.key_width), vw = size_t(shape.value_width);
  const auto inputs = [&](const AttentionView& view) {
    return ForwardInputs<T>{view.Of(q), view.Of(k), view.Of(v), view.Of(out), kw, vw, scale};
  };
  const int64_t views = AttentionView::Number(shape);
  const int64_t longest = (shape.queries + shape.dilation - 1) / shape.dilation;
  // Where gradients are wanted, keys that are hidden have no part in the order of sums either.
  if (longest <= kFewQueries && stats == nullptr && !mask.dropout.Any()) {
    StepAll<T>(shape, mask, inputs);
    return;
  }
  const int64_t blocks = (longest + int64_t{kBlockQueries} - 1) / int64_t{kBlockQueries};
  const int64_t work = shape.keys / shape.dilation * (shape.key_width + shape.value_width);
  ParallelFor(views * blocks, work > 4096 ? 1 : 4096 / (work + 1) + 1,
              [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; ++i) {
                  const AttentionView view(shape, mask, i / blocks);
                  const size_t t = FromBothEnds(size_t(i % blocks), size_t(blocks)) * kBlockQueries;
                  if (t < view.queries) AttendBlock<T>(view, t, inputs(view), stats);
                }
              });
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

HWY_EXPORT(AttendFloat);
HWY_EXPORT(AttendDouble);

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
