#pragma once
// Exact attention in bfloat16 with products by pairs; included once, as bfloat16_attention-inl.h.
#include "cistern/kernels/bfloat16_attention-inl.h"

HWY_BEFORE_NAMESPACE();
HWY_PUSH_ATTRIBUTES("avx512bf16")
namespace cistern {
namespace HWY_NAMESPACE {

struct PairsForward {
  Tokens16 q, k, v;
  Sequence<BFloat16> out;
  size_t key_width, value_width;
  float scale;
};

HWY_NOINLINE void AttendBlockByPairs(const AttentionView& view, size_t t, const PairsForward& x,
                                     float* stats) {
  const size_t kp = PairColumns(x.key_width), vp = PairColumns(x.value_width);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(sizeof(float) * (kBlockQueries * (kp + 2 * vp + 2 * kTileKeys) +
                                   kTileKeys * (kp + vp) + OnlineSoftmax<float>::kValues),
                  7 + OnlineSoftmax<float>::kPieces);
  BFloat16* const rows = workspace.Take<BFloat16>(kBlockQueries * kp);
  uint32_t* const Q = workspace.Take<uint32_t>(kBlockQueries * kp / 2);
  BFloat16* const K = workspace.Take<BFloat16>(kTileKeys * kp);
  uint32_t* const V = workspace.Take<uint32_t>(kTileKeys / 2 * vp);
  float* const X = workspace.Take<float>(kBlockQueries * kTileKeys);
  uint32_t* const P = workspace.Take<uint32_t>(kBlockQueries * kTileKeys / 2);
  float* const O = workspace.Take<float>(kBlockQueries * vp);
  float* const panel = workspace.Take<float>(kBlockQueries * vp);

  const QueryBlock<float> block(view, t);
  OnlineSoftmax<float> softmax(block, workspace);
  const size_t vectors = block.vectors();
  LanesOf(x.q, t, block.count, vectors * kPairLanes, x.key_width, rows, Q);
  std::memset(O, 0, sizeof(float) * kBlockQueries * vp);
  const bool drops = view.dropout().Any();
  for (size_t j = block.low; j < block.high; j += kTileKeys) {
    const size_t keys = std::min(kTileKeys, block.high - j);
    const PairedRows of_keys(x.k, j, keys, x.key_width, K);
    MultiplyPairs<PairsTo::kSet>(
        keys, vectors, {of_keys.data, of_keys.row, 2, Q, kBlockQueries, (x.key_width + 1) / 2}, X,
        kBlockQueries, x.scale);
    if (block.Partial(j, j + keys))
      HideUnseen(TileMask<float>(block, j, keys), keys, vectors, kNoScore<float>, X);
    softmax.Weigh(keys, X);
    if (drops) {
      uint64_t kept[kTileKeys];
      view.Draw(t, vectors * kPairLanes, j, keys, kept);
      DropPairs(kept, keys, vectors, kBlockQueries, X);
    }
    PairFloats(keys, vectors, X, kBlockQueries, P);
    const bool finite = PairRows(x.v, j, keys, x.value_width, V);
    MultiplyPairs<PairsTo::kTimes>(
        x.value_width, vectors,
        {reinterpret_cast<const BFloat16*>(V), 2, 2 * vp, P, kBlockQueries, (keys + 1) / 2}, O,
        kBlockQueries, 1, softmax.factor);
    if (!finite) {
      AddLostValues(
          block, x.v, j, keys, x.value_width,
          [X](size_t i, size_t query) { return X[i * kBlockQueries + query]; }, O);
    }
  }
  softmax.Finish(stats);
  ScaleLanes(x.value_width, vectors * kPairLanes, softmax.factor, O);
  Transpose(x.value_width, block.count, O, kBlockQueries, panel, vp);
  for (size_t i = 0; i < block.count; ++i) RoundRow(x.value_width, panel + i * vp, x.out.At(t + i));
}

void AttendByPairs(const AttentionShape& shape, double scale, const Rows<const BFloat16>& q,
                   const Rows<const BFloat16>& k, const Rows<const BFloat16>& v,
                   const AttentionMask& mask, const Rows<BFloat16>& out, float* stats) {
  ForQueryBlocks(shape, mask, [&](const AttentionView& view, size_t begin, size_t end) {
    for (size_t t = begin; t < end; t += kBlockQueries)
      AttendBlockByPairs(view, t,
                         {view.Of(q), view.Of(k), view.Of(v), view.Of(out), size_t(shape.key_width),
                          size_t(shape.value_width), static_cast<float>(scale)},
                         stats);
  });
}

struct PairsBackward {
  Tokens16 q, k, v, out, d_out;
  float *dq, *dk, *dv;  // [tokens, whole pairs of vectors]
  size_t key_width, value_width;
  float scale;
  const float* stats;
};

HWY_NOINLINE void BlockGradientsByPairs(const AttentionView& view, size_t t, size_t begin,
                                        size_t end, const PairsBackward& x) {
  const QueryBlock<float> block(view, t);
  begin = std::max(begin, block.low), end = std::min(end, block.high);
  if (begin >= end) return;
  const Tag<float> d;
  const size_t kw = x.key_width, vw = x.value_width, kp = PairColumns(kw), vp = PairColumns(vw),
               key_vectors = (kw + kPairLanes - 1) / kPairLanes,
               value_vectors = (vw + kPairLanes - 1) / kPairLanes, vectors = block.vectors(),
               count = block.count, widest = std::max(kp, vp);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(sizeof(float) * (kBlockQueries * (3 * kp + 2 * vp + 4 * kTileKeys) +
                                   kTileKeys * 2 * widest + 2 * widest + OfQueries::Scratch(vp)),
                  14 + OfQueries::kPieces);
  BFloat16* const rows = workspace.Take<BFloat16>(kBlockQueries * widest);
  uint32_t* const Q = workspace.Take<uint32_t>(kBlockQueries * kp / 2);
  uint32_t* const q_pairs = workspace.Take<uint32_t>(kBlockQueries / 2 * kp);
  uint32_t* const G = workspace.Take<uint32_t>(kBlockQueries * vp / 2);
  uint32_t* const g_pairs = workspace.Take<uint32_t>(kBlockQueries / 2 * vp);
  float* const dQ = workspace.Take<float>(kBlockQueries * kp);
  BFloat16* const copy = workspace.Take<BFloat16>(kTileKeys * (widest + 1));
  uint32_t* const k_pairs = workspace.Take<uint32_t>(kTileKeys / 2 * kp);
  float* const X = workspace.Take<float>(kBlockQueries * kTileKeys);
  float* const dP = workspace.Take<float>(kBlockQueries * kTileKeys);
  BFloat16* const P = workspace.Take<BFloat16>(kBlockQueries * kTileKeys);
  BFloat16* const dX = workspace.Take<BFloat16>(kBlockQueries * kTileKeys);
  uint32_t* const dX_pairs = workspace.Take<uint32_t>(kBlockQueries * kTileKeys / 2);
  LanesOf(x.q, t, count, vectors * kPairLanes, kw, rows, Q);
  LanesOf(x.d_out, t, count, vectors * kPairLanes, vw, rows, G);
  // A query that is not finite has no finite weights: its keys need no second look.
  PairRows(x.q, t, count, kw, q_pairs);
  const bool finite_g = PairRows(x.d_out, t, count, vw, g_pairs);
  const OfQueries of(view, t, count, x.stats, x.out, x.d_out, vw, workspace);
  std::memset(dQ, 0, sizeof(float) * kBlockQueries * kp);
  const bool drops = view.dropout().Any();
  const float kept_factor = drops ? static_cast<float>(view.dropout().KeptFactor()) : 1.0f;

  for (size_t j = begin; j < end; j += kTileKeys) {
    const size_t keys = std::min(kTileKeys, end - j);
    {
      const PairedRows of_keys(x.k, j, keys, kw, copy);
      MultiplyPairs<PairsTo::kSet>(keys, vectors,
                                   {of_keys.data, of_keys.row, 2, Q, kBlockQueries, (kw + 1) / 2},
                                   X, kBlockQueries);
    }
    {
      const PairedRows of_values(x.v, j, keys, vw, copy);
      MultiplyPairs<PairsTo::kSet>(
          keys, vectors, {of_values.data, of_values.row, 2, G, kBlockQueries, (vw + 1) / 2}, dP,
          kBlockQueries);
    }
    uint64_t kept[kTileKeys];
    if (drops) view.Draw(t, vectors * kPairLanes, j, keys, kept);
    const uint64_t* const draw = drops ? kept : nullptr;
    const Rounded rounded = {P, dX, dX_pairs};
    const TilePart part = {0, keys, 0, vectors * kPairLanes, X, dP, kBlockQueries};
    if (block.Partial(j, j + keys)) {
      const TileMask<float> mask(block, j, keys);
      Differentiate16<true, FloatWeights>(part, x.scale, of, &mask, draw, kept_factor, rounded);
    } else {
      Differentiate16<false, FloatWeights>(part, x.scale, of, nullptr, draw, kept_factor, rounded);
    }
    const size_t query_pairs = (count + 1) / 2;
    MultiplyPairs<PairsTo::kAdd>(
        keys, value_vectors, {P, kBlockQueries, 2, g_pairs, vp, query_pairs}, x.dv + j * vp, vp);
    MultiplyPairs<PairsTo::kAdd>(
        keys, key_vectors, {dX, kBlockQueries, 2, q_pairs, kp, query_pairs}, x.dk + j * kp, kp);
    const bool finite_k = PairRows(x.k, j, keys, kw, k_pairs);
    MultiplyPairs<PairsTo::kAdd>(count, key_vectors,
                                 {reinterpret_cast<const BFloat16*>(dX_pairs), 2, 2 * kBlockQueries,
                                  k_pairs, kp, (keys + 1) / 2},
                                 dQ, kp);
    if (!finite_g) AddLostGradients(block, j, keys, P, x.d_out, vw, x.dv + j * vp, vp);
    if (!finite_k) {
      AddLostKeys(block, j, keys, dX, x.k, kw,
                  [&](size_t query, size_t c) { return dQ + query * kp + c; });
    }
  }

  float* const to = x.dq + t * kp;
  for (size_t i = 0; i < count * kp; i += kPairLanes)
    hn::Store(hn::Add(hn::Load(d, dQ + i), hn::Load(d, to + i)), d, to + i);
}

void GradientsByPairs(const AttentionShape& shape, double scale, const Rows<const BFloat16>& q,
                      const Rows<const BFloat16>& k, const Rows<const BFloat16>& v,
                      const Rows<const BFloat16>& out, const Rows<const BFloat16>& d_out,
                      const AttentionMask& mask, const float* stats, const Gradients16& to,
                      const CallMemory& memory) {
  const FloatGradients sums(shape, memory);
  sums.Zero(mask);
  ForCells(shape, mask,
           [&](const AttentionView& view, size_t first, size_t last, size_t begin, size_t end) {
             for (size_t t = first; t < last; t += kBlockQueries)
               BlockGradientsByPairs(
                   view, t, begin, end,
                   {view.Of(q), view.Of(k), view.Of(v), view.Of(out), view.Of(d_out), sums.Dq(view),
                    sums.Dk(view), sums.Dv(view), size_t(shape.key_width),
                    size_t(shape.value_width), static_cast<float>(scale), stats});
           });
  sums.Round(mask, to, [](const float* block) { return block; });
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_POP_ATTRIBUTES
HWY_AFTER_NAMESPACE();
