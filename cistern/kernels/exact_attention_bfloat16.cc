// The two directions as in exact_attention.cc and exact_attention_backward.cc, which say what is
// computed. Here products go by pairs (bfloat16_pairs-inl.h), and what is not finite is 0 where it
// is the factor of weights, of which those of unseen pairs are 0; then what it gives to those that
// see it is added.
#include "cistern/kernels/exact_attention_bfloat16.h"

#include "cistern/base/error.h"
#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/exact_attention_bfloat16.cc"
#include "hwy/foreach_target.h"  // must come before the headers below

#include "cistern/kernels/attention_rounds-inl.h"
#include "cistern/kernels/attention_softmax-inl.h"
#include "cistern/kernels/bfloat16-inl.h"

// What AVX512-BF16 adds comes with the attribute below: Highway has no target of its own for it.
#if HWY_TARGET == HWY_AVX3

#include "cistern/kernels/bfloat16_pairs-inl.h"

HWY_BEFORE_NAMESPACE();
HWY_PUSH_ATTRIBUTES("avx512bf16")
namespace cistern {
namespace HWY_NAMESPACE {

using Tokens16 = Sequence<const BFloat16>;

bool IsFinite(BFloat16 x) { return (x.bits & 0x7f80) != 0x7f80; }

// Queries of a block in the lanes: L[ceil(width / 2), queries], pairs along the width. rows:
// scratch of kBlockQueries PairColumns(width) values.
void LanesOf(const Tokens16& x, size_t t, size_t count, size_t width, BFloat16* rows, uint32_t* L) {
  const size_t ld = PairColumns(width);
  CopyRows(x, t, count, width, ld, rows);
  std::memset(rows + count * ld, 0, (RoundUp(count, kPairLanes) - count) * ld * sizeof(BFloat16));
  // Pairs move as floats do.
  Transpose(count, ld / 2, reinterpret_cast<const float*>(rows), ld / 2,
            reinterpret_cast<float*>(L), kBlockQueries);
}

struct Forward16 {
  Tokens16 q, k, v;
  Sequence<BFloat16> out;
  size_t key_width, value_width;
  float scale;
};

// O[c, queries] += X[j, queries] v_j[c] of the values that are not finite, of pairs that see each
// other.
HWY_NOINLINE void AddLostValues(const QueryBlock<float>& block, const Forward16& x, size_t j,
                                size_t keys, const float* X, float* O) {
  for (size_t i = j; i < j + keys; ++i, X += kBlockQueries) {
    for (size_t c = 0; c < x.value_width; ++c) {
      const BFloat16 value = x.v.At(i)[c];
      if (IsFinite(value)) continue;
      for (size_t t = 0; t < block.count; ++t) {
        if (block.Sees(t, i)) O[c * kBlockQueries + t] += X[t] * static_cast<float>(value);
      }
    }
  }
}

HWY_NOINLINE void AttendBlock16(const AttentionView& view, size_t t, const Forward16& x,
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
  LanesOf(x.q, t, block.count, x.key_width, rows, Q);
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
    if (!finite) AddLostValues(block, x, j, keys, X, O);
  }
  softmax.Finish(stats);
  const Tag<float> d;
  for (size_t c = 0; c < x.value_width; ++c) {
    for (size_t i = 0; i < vectors * kPairLanes; i += kPairLanes) {
      float* const at = O + c * kBlockQueries + i;
      hn::Store(hn::Mul(hn::Load(d, at), hn::Load(d, softmax.factor + i)), d, at);
    }
  }
  Transpose(x.value_width, block.count, O, kBlockQueries, panel, vp);
  for (size_t i = 0; i < block.count; ++i)
    ConvertRow(x.value_width, panel + i * vp, x.out.At(t + i));
}

void Attend16(const AttentionShape& shape, double scale, const Rows<const BFloat16>& q,
              const Rows<const BFloat16>& k, const Rows<const BFloat16>& v,
              const AttentionMask& mask, const Rows<BFloat16>& out, float* stats) {
  ForQueryBlocks(shape, mask, [&](const AttentionView& view, size_t t) {
    AttendBlock16(view, t,
                  {view.Of(q), view.Of(k), view.Of(v), view.Of(out), size_t(shape.key_width),
                   size_t(shape.value_width), static_cast<float>(scale)},
                  stats);
  });
}

struct Backward16 {
  Tokens16 q, k, v, out, d_out;
  Sequence<float> dq, dk, dv;
  size_t key_width, value_width;
  float scale;
  const float* stats;
};

// Weights and their gradients of a tile, rounded: P, dX [keys, queries] as rows, and dX_pairs,
// those of dX and the next row. less, high, share: D, the largest score and 1 / sum of each query.
struct Rounded {
  BFloat16 *P, *dX;
  uint32_t* dX_pairs;
  const float *high, *share, *less;
};

HWY_INLINE void StoreRows(__m512i rounded, bool two, BFloat16* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(rounded));
  if (two)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + kBlockQueries),
                        _mm512_extracti64x4_epi64(rounded, 1));
}

// mask: null where all that a tile holds is seen; kept: null where nothing is dropped.
template <bool kMasked>
HWY_NOINLINE void Differentiate16(size_t keys, size_t vectors, const float* X, const float* dP,
                                  const TileMask<float>* mask, const uint64_t* kept,
                                  const Rounded& to) {
  const Tag<float> d;
  for (size_t lane = 0; lane < vectors * kPairLanes; lane += kPairLanes) {
    const Vec<float> reference = ReferenceOf(hn::Load(d, to.high + lane)),
                     share = hn::Load(d, to.share + lane), less = hn::Load(d, to.less + lane);
    for (size_t j = 0; j < keys; j += 2) {
      const bool two = j + 1 < keys;
      Vec<float> e[2], dx[2];
#pragma GCC unroll 2
      for (size_t i = 0; i < 2; ++i) {
        if (i == 1 && !two) {
          e[i] = dx[i] = hn::Zero(d);
          break;
        }
        const size_t at = (j + i) * kBlockQueries + lane;
        e[i] = hn::Mul(WeightOf(hn::Load(d, X + at), reference), share);
        dx[i] = hn::Mul(e[i], hn::Sub(hn::Load(d, dP + at), less));
        if constexpr (kMasked) {
          const auto seen = mask->Lanes(lane, j + i);
          e[i] = hn::IfThenElseZero(seen, e[i]), dx[i] = hn::IfThenElseZero(seen, dx[i]);
          if (!mask->Valid(j + i)) e[i] = dx[i] = hn::Zero(d);
        }
        if (kept != nullptr)
          e[i].raw = _mm512_maskz_mov_ps(static_cast<__mmask16>(kept[j + i] >> lane), e[i].raw);
      }
      const size_t at = j * kBlockQueries + lane;
      StoreRows(RoundTwo(e[0].raw, e[1].raw), two, to.P + at);
      const __m512i rounded = RoundTwo(dx[0].raw, dx[1].raw);
      StoreRows(rounded, two, to.dX + at);
      _mm512_storeu_si512(to.dX_pairs + j / 2 * kBlockQueries + lane, PairTwo(rounded));
    }
  }
}

// dv_j += factor sum_t A[j, queries] g_t of what is not finite in g, of pairs that see each other.
HWY_NOINLINE void AddLostGradients(const QueryBlock<float>& block, size_t j, size_t keys,
                                   const BFloat16* A, const Tokens16& g, size_t width, float factor,
                                   const Sequence<float>& dv) {
  for (size_t t = 0; t < block.count; ++t) {
    for (size_t c = 0; c < width; ++c) {
      const BFloat16 value = g.At(block.t + t)[c];
      if (IsFinite(value)) continue;
      for (size_t i = 0; i < keys; ++i) {
        if (block.Sees(t, j + i))
          dv.At(j + i)[c] +=
              factor * static_cast<float>(A[i * kBlockQueries + t]) * static_cast<float>(value);
      }
    }
  }
}

// dQ[queries, ld] += sum_j A[j, queries] k_j, likewise.
HWY_NOINLINE void AddLostKeys(const QueryBlock<float>& block, size_t j, size_t keys,
                              const BFloat16* A, const Tokens16& k, size_t width, float* dQ,
                              size_t ld) {
  for (size_t i = 0; i < keys; ++i) {
    for (size_t c = 0; c < width; ++c) {
      const BFloat16 value = k.At(j + i)[c];
      if (IsFinite(value)) continue;
      for (size_t t = 0; t < block.count; ++t) {
        if (block.Sees(t, j + i))
          dQ[t * ld + c] +=
              static_cast<float>(A[i * kBlockQueries + t]) * static_cast<float>(value);
      }
    }
  }
}

HWY_NOINLINE void BlockGradients16(const AttentionView& view, size_t t, size_t begin, size_t end,
                                   const Backward16& x) {
  const QueryBlock<float> block(view, t);
  begin = std::max(begin, block.low), end = std::min(end, block.high);
  if (begin >= end) return;
  const Tag<float> d;
  const size_t kw = x.key_width, vw = x.value_width, kp = PairColumns(kw), vp = PairColumns(vw),
               key_vectors = (kw + kPairLanes - 1) / kPairLanes,
               value_vectors = (vw + kPairLanes - 1) / kPairLanes, vectors = block.vectors(),
               count = block.count, widest = std::max(kp, vp);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(sizeof(float) * (kBlockQueries * (3 * kp + 2 * vp + 4 * kTileKeys + 5) +
                                   kTileKeys * 2 * widest + 2 * widest),
                  18);
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
  float* const high = workspace.Take<float>(kBlockQueries);
  float* const share = workspace.Take<float>(kBlockQueries);
  float* const less = workspace.Take<float>(kBlockQueries);
  float* const g_row = workspace.Take<float>(vp);
  float* const out_row = workspace.Take<float>(vp);

  LanesOf(x.q, t, count, kw, rows, Q);
  LanesOf(x.d_out, t, count, vw, rows, G);
  // A query that is not finite has no finite weights: its keys need no second look.
  PairRows(x.q, t, count, kw, q_pairs);
  const bool finite_g = PairRows(x.d_out, t, count, vw, g_pairs);
  for (size_t i = 0; i < kBlockQueries; ++i) {
    high[i] = share[i] = less[i] = 0;  // lanes beyond the queries have no weights
    if (i >= count) continue;
    const float* const of = view.Stats(x.stats, t + i);
    high[i] = of[0], share[i] = of[1];
    ConvertRow(vw, x.d_out.At(t + i), g_row);
    ConvertRow(vw, x.out.At(t + i), out_row);
    less[i] = static_cast<float>(DotInDouble(vw, g_row, out_row));
  }
  std::memset(dQ, 0, sizeof(float) * kBlockQueries * kp);
  const bool drops = view.dropout().Any();
  const float kept_factor = drops ? static_cast<float>(view.dropout().KeptFactor()) : 1.0f;

  for (size_t j = begin; j < end; j += kTileKeys) {
    const size_t keys = std::min(kTileKeys, end - j);
    {
      const PairedRows of_keys(x.k, j, keys, kw, copy);
      MultiplyPairs<PairsTo::kSet>(keys, vectors,
                                   {of_keys.data, of_keys.row, 2, Q, kBlockQueries, (kw + 1) / 2},
                                   X, kBlockQueries, x.scale);
    }
    {
      const PairedRows of_values(x.v, j, keys, vw, copy);
      MultiplyPairs<PairsTo::kSet>(
          keys, vectors, {of_values.data, of_values.row, 2, G, kBlockQueries, (vw + 1) / 2}, dP,
          kBlockQueries, kept_factor);
    }
    uint64_t kept[kTileKeys];
    if (drops) {
      view.Draw(t, vectors * kPairLanes, j, keys, kept);
      DropPairs(kept, keys, vectors, kBlockQueries, dP);
    }
    const Rounded rounded = {P, dX, dX_pairs, high, share, less};
    if (block.Partial(j, j + keys)) {
      const TileMask<float> mask(block, j, keys);
      Differentiate16<true>(keys, vectors, X, dP, &mask, drops ? kept : nullptr, rounded);
    } else {
      Differentiate16<false>(keys, vectors, X, dP, nullptr, drops ? kept : nullptr, rounded);
    }
    const size_t query_pairs = (count + 1) / 2;
    MultiplyPairs<PairsTo::kAdd>(keys, value_vectors,
                                 {P, kBlockQueries, 2, g_pairs, vp, query_pairs}, x.dv.At(j),
                                 size_t(x.dv.time), kept_factor);
    MultiplyPairs<PairsTo::kAdd>(keys, key_vectors,
                                 {dX, kBlockQueries, 2, q_pairs, kp, query_pairs}, x.dk.At(j),
                                 size_t(x.dk.time), x.scale);
    const bool finite_k = PairRows(x.k, j, keys, kw, k_pairs);
    MultiplyPairs<PairsTo::kAdd>(count, key_vectors,
                                 {reinterpret_cast<const BFloat16*>(dX_pairs), 2, 2 * kBlockQueries,
                                  k_pairs, kp, (keys + 1) / 2},
                                 dQ, kp);
    if (!finite_g) AddLostGradients(block, j, keys, P, x.d_out, vw, kept_factor, x.dv);
    if (!finite_k) AddLostKeys(block, j, keys, dX, x.k, kw, dQ, kp);
  }

  for (size_t i = 0; i < count; ++i) {
    float* const row = x.dq.At(t + i);
    for (size_t c = 0; c < key_vectors * kPairLanes; c += kPairLanes)
      hn::StoreU(
          hn::MulAdd(hn::Set(d, x.scale), hn::Load(d, dQ + i * kp + c), hn::LoadU(d, row + c)), d,
          row + c);
  }
}

void Gradients16(const AttentionShape& shape, double scale, const Rows<const BFloat16>& q,
                 const Rows<const BFloat16>& k, const Rows<const BFloat16>& v,
                 const Rows<const BFloat16>& out, const Rows<const BFloat16>& d_out,
                 const AttentionMask& mask, const float* stats, const Rows<float>& dq,
                 const Rows<float>& dk, const Rows<float>& dv) {
  const size_t kw = size_t(shape.key_width), vw = size_t(shape.value_width),
               padded_kw = RoundUp(kw, kPairLanes), padded_vw = RoundUp(vw, kPairLanes);
  ForViews(shape, mask, [&](const AttentionView& view) {
    ZeroRows(0, view.queries, padded_kw, view.Of(dq));
    ZeroRows(0, view.keys, padded_kw, view.Of(dk));
    ZeroRows(0, view.keys, padded_vw, view.Of(dv));
  });
  ForCells(shape, mask, [&](const AttentionView& view, size_t t, size_t begin, size_t end) {
    BlockGradients16(view, t, begin, end,
                     {view.Of(q), view.Of(k), view.Of(v), view.Of(out), view.Of(d_out), view.Of(dq),
                      view.Of(dk), view.Of(dv), kw, vw, static_cast<float>(scale), stats});
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_POP_ATTRIBUTES
HWY_AFTER_NAMESPACE();

#endif  // HWY_AVX3

#if HWY_ONCE
namespace cistern {

#if HWY_TARGETS & HWY_AVX3

bool CanAttendBFloat16() { return HasBFloat16() && ActiveIsa().starts_with("avx512"); }

void AttentionForward(const AttentionShape& shape, double scale, Rows<const BFloat16> q,
                      Rows<const BFloat16> k, Rows<const BFloat16> v, const AttentionMask& mask,
                      Rows<BFloat16> out, float* stats) {
  N_AVX3::Attend16(shape, scale, q, k, v, mask, out, stats);
}

void AttentionBackward(const AttentionShape& shape, double scale, Rows<const BFloat16> q,
                       Rows<const BFloat16> k, Rows<const BFloat16> v, Rows<const BFloat16> out,
                       Rows<const BFloat16> d_out, const AttentionMask& mask, const float* stats,
                       Rows<float> dq, Rows<float> dk, Rows<float> dv) {
  N_AVX3::Gradients16(shape, scale, q, k, v, out, d_out, mask, stats, dq, dk, dv);
}

#else

bool CanAttendBFloat16() { return false; }

void AttentionForward(const AttentionShape&, double, Rows<const BFloat16>, Rows<const BFloat16>,
                      Rows<const BFloat16>, const AttentionMask&, Rows<BFloat16>, float*) {
  Fail("this build has no attention of bfloat16 products");
}

void AttentionBackward(const AttentionShape&, double, Rows<const BFloat16>, Rows<const BFloat16>,
                       Rows<const BFloat16>, Rows<const BFloat16>, Rows<const BFloat16>,
                       const AttentionMask&, const float*, Rows<float>, Rows<float>, Rows<float>) {
  Fail("this build has no attention of bfloat16 products");
}

#endif

}  // namespace cistern
#endif  // HWY_ONCE
