#pragma once
// Exact attention in bfloat16 with products by tiles (AMX); included once, as
// bfloat16_attention-inl.h.
//
// Products are so fast that what stands between them decides. So keys and values are laid out once
// for all queries, in tiles of 64 tokens; what lies behind the keys is hidden by the mask. Weights
// are rounded where they are made, and sums go on from where they lie.
#include "cistern/kernels/amx_product-inl.h"
#include "cistern/kernels/bfloat16_attention-inl.h"

HWY_BEFORE_NAMESPACE();
HWY_PUSH_ATTRIBUTES("avx512bf16,amx-tile,amx-bf16")
namespace cistern {
namespace HWY_NAMESPACE {

constexpr size_t kAmxKeys = 64;  // of a tile; a segment (attention_rounds-inl.h) has whole ones
static_assert(kSegmentKeys % kAmxKeys == 0 && kAmxKeys == 2 * kAmxStrip &&
              kBlockQueries == 2 * kAmxStrip);

// Keys or values of all views, by tiles of kAmxKeys tokens.
class PackedTokens {
 public:
  PackedTokens(size_t tiles, size_t width, bool rows, bool columns, const CallMemory& memory)
      : tile_(kAmxKeys * PairColumns(width)),
        width_(width),
        memory_(tiles * (tile_ * sizeof(BFloat16) * (size_t{rows} + size_t{columns}) + 1), memory),
        rows_(rows ? memory_.Take<BFloat16>(tiles * tile_) : nullptr),
        columns_(columns ? memory_.Take<BFloat16>(tiles * tile_) : nullptr),
        lost_(memory_.Take<uint8_t>(tiles)) {}

  // [kAmxKeys, PairColumns(width)]; rows behind the tokens hold anything.
  const BFloat16* Rows(size_t tile) const { return rows_ + tile * tile_; }
  // [PairColumns(width), kAmxKeys]; what is not finite, and what is behind the tokens, is 0.
  const BFloat16* Columns(size_t tile) const { return columns_ + tile * tile_; }
  // Whether anything in the columns was not finite.
  bool Lost(size_t tile) const { return lost_[tile] != 0; }

  // Tokens t.. of x, `count` of them.
  void Pack(size_t tile, const Tokens16& x, size_t t, size_t count) {
    const size_t ld = PairColumns(width_), pairs = (count + 1) / 2;
    if (rows_ != nullptr) CopyRows(x, t, count, width_, ld, rows_ + tile * tile_);
    if (columns_ == nullptr) return;
    Workspace& workspace = Workspace::OfThisThread();
    workspace.Start(sizeof(uint32_t) * kAmxKeys / 2 * ld, 1);
    uint32_t* const paired = workspace.Take<uint32_t>(kAmxKeys / 2 * ld);
    lost_[tile] = !PairRows(x, t, count, width_, paired);
    std::memset(paired + pairs * ld, 0, (kAmxKeys / 2 - pairs) * ld * sizeof(uint32_t));
    // Pairs move as floats do.
    Transpose(kAmxKeys / 2, ld, reinterpret_cast<const float*>(paired), ld,
              reinterpret_cast<float*>(columns_ + tile * tile_), kAmxKeys / 2);
  }

 private:
  size_t tile_, width_;
  SharedMemory memory_;
  BFloat16 *rows_, *columns_;
  uint8_t* lost_;
};

// What the blocks of queries of one call share.
struct AmxTokens {
  // backward: values as rows and keys as columns, too; else values as columns alone.
  AmxTokens(const AttentionShape& shape, const AttentionMask& mask, const Rows<const BFloat16>& k,
            const Rows<const BFloat16>& v, bool backward, const CallMemory& memory)
      : tiles(FloatGradients::Tokens(shape.keys, shape) / kAmxKeys),
        keys(Views(shape) * tiles, size_t(shape.key_width), true, backward, memory),
        values(Views(shape) * tiles, size_t(shape.value_width), backward, !backward, memory) {
    const int64_t width = shape.key_width + shape.value_width;
    ParallelFor(int64_t(Views(shape) * tiles), 32768 / (int64_t{kAmxKeys} * width + 1) + 1,
                [&](int64_t begin, int64_t end) {
                  for (int64_t i = begin; i < end; ++i) {
                    const AttentionView view(shape, mask, i / int64_t(tiles));
                    const size_t j = size_t(i) % tiles * kAmxKeys;
                    const size_t count = j < view.keys ? std::min(kAmxKeys, view.keys - j) : 0;
                    keys.Pack(size_t(i), view.Of(k), j, count);
                    values.Pack(size_t(i), view.Of(v), j, count);
                  }
                });
  }
  static size_t Views(const AttentionShape& shape) { return size_t(AttentionView::Number(shape)); }
  size_t Tile(const AttentionView& view, size_t j) const {
    return size_t(view.index) * tiles + j / kAmxKeys;
  }
  size_t tiles;  // of a view
  PackedTokens keys, values;
};

// Pairs of all queries of a block (PairRows), zeros behind the queries.
bool AllPairsOf(const Tokens16& x, size_t t, size_t count, size_t width, uint32_t* pairs) {
  const size_t ld = PairColumns(width), used = (count + 1) / 2;
  std::memset(pairs + used * ld, 0, (kBlockQueries / 2 - used) * ld * sizeof(uint32_t));
  return PairRows(x, t, count, width, pairs);
}

// C[rows, columns] = A B, or C += A B, of multiples of 32.
template <bool kAdd>
HWY_NOINLINE void MultiplyAmxAll(size_t rows, size_t columns, size_t depth, const BFloat16* a,
                                 size_t lda, const uint32_t* b, size_t ldb, float* c, size_t ldc) {
  for (size_t r = 0; r < rows; r += kAmxStrip) {
    for (size_t n = 0; n < columns; n += kAmxStrip)
      MultiplyAmx<kAdd>(depth, a + r * lda, lda, b + n, ldb, c + r * ldc + n, ldc);
  }
}

// Products X[keys, queries] of a tile become weights, rounded: P, pairs of a key and the next one.
// high, sum, factor as in attention_softmax-inl.h; kept: null where nothing is dropped.
HWY_NOINLINE void WeighPairs(const float* X, float scale, const uint64_t* kept, float* high,
                             float* sum, float* factor, uint32_t* P) {
  constexpr size_t kVectors = kBlockQueries / kPairLanes;
  const Tag<float> d;
  const ShortWeights weights(scale);
  const Vec<float> times = hn::Set(d, scale);
  Vec<float> most[kVectors], total[kVectors], far[kVectors];
  for (Vec<float>& x : most) x = hn::Set(d, kNoScore<float>);
  for (size_t j = 0; j < kAmxKeys; ++j) {
#pragma GCC unroll 4
    for (size_t v = 0; v < kVectors; ++v)
      most[v] = hn::Max(most[v], hn::Load(d, X + j * kBlockQueries + v * kPairLanes));
  }
  bool any_far = false;
#pragma GCC unroll 4
  for (size_t v = 0; v < kVectors; ++v) {
    const size_t at = v * kPairLanes;
    // Rounding keeps the order, so the largest score is that of the largest product.
    most[v] = hn::Max(hn::Load(d, high + at), hn::Mul(most[v], times));
    far[v] = FarScore(most[v]), any_far = any_far || !IsZero(far[v]);
    most[v] = NextReference(most[v], high + at, sum + at, factor + at, total[v]);
  }
  for (size_t j = 0; j < kAmxKeys; j += 2) {
#pragma GCC unroll 4
    for (size_t v = 0; v < kVectors; ++v) {
      const size_t at = v * kPairLanes;
      const float* const x = X + j * kBlockQueries + at;
      Vec<float> even = hn::Load(d, x), odd = hn::Load(d, x + kBlockQueries);
      for (Vec<float>* const e : {&even, &odd})
        *e = HWY_UNLIKELY(any_far) ? FarWeight(*e, times, far[v], most[v]) : weights(*e, most[v]);
      total[v] = hn::Add(total[v], hn::Add(even, odd));
      if (kept != nullptr) {
        even.raw = _mm512_maskz_mov_ps(static_cast<__mmask16>(kept[j] >> at), even.raw);
        odd.raw = _mm512_maskz_mov_ps(static_cast<__mmask16>(kept[j + 1] >> at), odd.raw);
      }
      _mm512_store_si512(P + j / 2 * kBlockQueries + at, PairTwo(RoundTwo(even.raw, odd.raw)));
    }
  }
#pragma GCC unroll 4
  for (size_t v = 0; v < kVectors; ++v) hn::Store(total[v], d, sum + v * kPairLanes);
}

HWY_NOINLINE void AttendBlockByAmx(const AttentionView& view, size_t t, const AmxTokens& packed,
                                   const Tokens16& q, const Tokens16& v, size_t key_width,
                                   size_t value_width, float scale, const Sequence<BFloat16>& out,
                                   float* stats) {
  const size_t kp = PairColumns(key_width), vp = PairColumns(value_width);
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(sizeof(float) * (kBlockQueries * (kp + 2 * vp + kAmxKeys + kAmxKeys / 2) +
                                   OnlineSoftmax<float>::kValues),
                  6 + OnlineSoftmax<float>::kPieces);
  BFloat16* const rows = workspace.Take<BFloat16>(kBlockQueries * kp);
  uint32_t* const Q = workspace.Take<uint32_t>(kBlockQueries * kp / 2);
  float* const X = workspace.Take<float>(kBlockQueries * kAmxKeys);
  uint32_t* const P = workspace.Take<uint32_t>(kBlockQueries * kAmxKeys / 2);
  float* const O = workspace.Take<float>(kBlockQueries * vp);
  float* const panel = workspace.Take<float>(kBlockQueries * vp);

  const QueryBlock<float> block(view, t);
  OnlineSoftmax<float> softmax(block, workspace);
  LanesOf(q, t, block.count, kBlockQueries, key_width, rows, Q);
  std::memset(O, 0, sizeof(float) * kBlockQueries * vp);
  const bool drops = view.dropout().Any();
  const AmxTiles tiles;
  for (size_t j = block.low / kAmxKeys * kAmxKeys; j < block.high; j += kAmxKeys) {
    const size_t tile = packed.Tile(view, j), keys = std::min(kAmxKeys, view.keys - j);
    MultiplyAmxAll<false>(kAmxKeys, kBlockQueries, kp / 2, packed.keys.Rows(tile), kp, Q,
                          kBlockQueries, X, kBlockQueries);
    if (keys < kAmxKeys || block.Partial(j, j + keys)) {
      HideUnseen(TileMask<float>(block, j, keys), keys, kBlockQueries / kPairLanes, kNoScore<float>,
                 X);
      std::fill(X + keys * kBlockQueries, X + kAmxKeys * kBlockQueries, kNoScore<float>);
    }
    uint64_t kept[kAmxKeys];
    if (drops) view.Draw(t, kBlockQueries, j, kAmxKeys, kept);
    WeighPairs(X, scale, drops ? kept : nullptr, softmax.high, softmax.sum, softmax.factor, P);
    ScaleLanes(value_width, kBlockQueries, softmax.factor, O);
    MultiplyAmxAll<true>(vp, kBlockQueries, kAmxKeys / 2, packed.values.Columns(tile), kAmxKeys, P,
                         kBlockQueries, O, kBlockQueries);
    if (packed.values.Lost(tile)) {
      const auto weight = [P](size_t i, size_t query) {
        const uint32_t pair = P[i / 2 * kBlockQueries + query];
        BFloat16 rounded;
        rounded.bits = static_cast<uint16_t>(i % 2 == 0 ? pair : pair >> 16);
        return static_cast<float>(rounded);
      };
      AddLostValues(block, v, j, keys, value_width, weight, O);
    }
  }
  softmax.Finish(stats);
  ScaleLanes(value_width, kBlockQueries, softmax.factor, O);
  Transpose(vp, kBlockQueries, O, kBlockQueries, panel, vp);
  for (size_t i = 0; i < block.count; ++i) RoundRow(value_width, panel + i * vp, out.At(t + i));
}

// scale: above 0.
void AttendByAmx(const AttentionShape& shape, double scale, const Rows<const BFloat16>& q,
                 const Rows<const BFloat16>& k, const Rows<const BFloat16>& v,
                 const AttentionMask& mask, const Rows<BFloat16>& out, float* stats,
                 const CallMemory& memory) {
  const AmxTokens packed(shape, mask, k, v, false, memory);
  ForQueryBlocks(shape, mask, [&](const AttentionView& view, size_t begin, size_t end) {
    for (size_t t = begin; t < end; t += kBlockQueries)
      AttendBlockByAmx(view, t, packed, view.Of(q), view.Of(v), size_t(shape.key_width),
                       size_t(shape.value_width), static_cast<float>(scale), view.Of(out), stats);
  });
}

struct AmxBackward {
  Tokens16 q, k, out, d_out;
  float *dq, *dk, *dv;  // dq: each block of queries as [key width, queries]
  size_t key_width, value_width;
  float scale;
  const float* stats;
};

HWY_NOINLINE void BlockGradientsByAmx(const AttentionView& view, size_t t, size_t begin, size_t end,
                                      const AmxTokens& packed, const AmxBackward& x) {
  const QueryBlock<float> block(view, t);
  begin = std::max(begin, block.low), end = std::min(end, block.high);
  if (begin >= end) return;
  const size_t kw = x.key_width, vw = x.value_width, kp = PairColumns(kw), vp = PairColumns(vw),
               widest = std::max(kp, vp);
  // Products of a tile's halves of keys with halves of the queries stay in the first-level cache.
  constexpr size_t kPart = kAmxStrip * kAmxStrip, kTile = kBlockQueries * kAmxKeys;
  Workspace& workspace = Workspace::OfThisThread();
  workspace.Start(sizeof(float) * (kBlockQueries * (kp + vp + widest / 2) + 2 * kPart +
                                   3 * kTile / 2 + OfQueries::Scratch(vp)),
                  10 + OfQueries::kPieces);
  BFloat16* const rows = workspace.Take<BFloat16>(kBlockQueries * widest);
  uint32_t* const Q = workspace.Take<uint32_t>(kBlockQueries * kp / 2);
  uint32_t* const q_pairs = workspace.Take<uint32_t>(kBlockQueries / 2 * kp);
  uint32_t* const G = workspace.Take<uint32_t>(kBlockQueries * vp / 2);
  uint32_t* const g_pairs = workspace.Take<uint32_t>(kBlockQueries / 2 * vp);
  float* const X = workspace.Take<float>(kPart);
  float* const dP = workspace.Take<float>(kPart);
  BFloat16* const P = workspace.Take<BFloat16>(kTile);
  BFloat16* const dX = workspace.Take<BFloat16>(kTile);
  uint32_t* const dX_pairs = workspace.Take<uint32_t>(kTile / 2);

  LanesOf(x.q, t, block.count, kBlockQueries, kw, rows, Q);
  LanesOf(x.d_out, t, block.count, kBlockQueries, vw, rows, G);
  // A query that is not finite has no finite weights: its keys need no second look.
  AllPairsOf(x.q, t, block.count, kw, q_pairs);
  const bool finite_g = AllPairsOf(x.d_out, t, block.count, vw, g_pairs);
  const OfQueries of(view, t, block.count, x.stats, x.out, x.d_out, vw, workspace);
  float* const dq = x.dq + t * kp;
  const bool drops = view.dropout().Any();
  const float kept_factor = drops ? static_cast<float>(view.dropout().KeptFactor()) : 1.0f;
  const AmxTiles tiles;
  for (size_t j = begin / kAmxKeys * kAmxKeys; j < end; j += kAmxKeys) {
    const size_t tile = packed.Tile(view, j), keys = std::min(kAmxKeys, view.keys - j);
    const bool partial = keys < kAmxKeys || block.Partial(j, j + keys);
    const TileMask<float> mask(block, j, keys);
    uint64_t kept[kAmxKeys];
    if (drops) view.Draw(t, kBlockQueries, j, kAmxKeys, kept);
    const uint64_t* const draw = drops ? kept : nullptr;
    const Rounded rounded = {P, dX, dX_pairs};
    for (size_t first = 0; first < keys; first += kAmxStrip) {
      for (size_t lane = 0; lane < kBlockQueries; lane += kAmxStrip) {
        MultiplyAmx<false>(kp / 2, packed.keys.Rows(tile) + first * kp, kp, Q + lane, kBlockQueries,
                           X, kAmxStrip);
        MultiplyAmx<false>(vp / 2, packed.values.Rows(tile) + first * vp, vp, G + lane,
                           kBlockQueries, dP, kAmxStrip);
        const TilePart part = {
            first, std::min(first + kAmxStrip, keys), lane, lane + kAmxStrip, X, dP, kAmxStrip};
        partial ? Differentiate16<true, ShortWeights>(part, x.scale, of, &mask, draw, kept_factor,
                                                      rounded)
                : Differentiate16<false, ShortWeights>(part, x.scale, of, nullptr, draw,
                                                       kept_factor, rounded);
      }
    }
    // Behind the keys P and dX add to rows of sums that nobody reads.
    const size_t pairs = (keys + 1) / 2;
    std::memset(dX_pairs + pairs * kBlockQueries, 0,
                (kAmxKeys / 2 - pairs) * kBlockQueries * sizeof(uint32_t));
    float *const dk = x.dk + j * kp, *const dv = x.dv + j * vp;
    MultiplyAmxAll<true>(kAmxKeys, vp, kBlockQueries / 2, P, kBlockQueries, g_pairs, vp, dv, vp);
    MultiplyAmxAll<true>(kAmxKeys, kp, kBlockQueries / 2, dX, kBlockQueries, q_pairs, kp, dk, kp);
    MultiplyAmxAll<true>(kp, kBlockQueries, kAmxKeys / 2, packed.keys.Columns(tile), kAmxKeys,
                         dX_pairs, kBlockQueries, dq, kBlockQueries);
    if (!finite_g) AddLostGradients(block, j, keys, P, x.d_out, vw, dv, vp);
    if (packed.keys.Lost(tile)) {
      AddLostKeys(block, j, keys, dX, x.k, kw,
                  [dq](size_t query, size_t c) { return dq + c * kBlockQueries + query; });
    }
  }
}

void GradientsByAmx(const AttentionShape& shape, double scale, const Rows<const BFloat16>& q,
                    const Rows<const BFloat16>& k, const Rows<const BFloat16>& v,
                    const Rows<const BFloat16>& out, const Rows<const BFloat16>& d_out,
                    const AttentionMask& mask, const float* stats, const Gradients16& to,
                    const CallMemory& memory) {
  const AmxTokens packed(shape, mask, k, v, true, memory);
  const FloatGradients sums(shape, memory);
  sums.Zero(mask);
  // Each cell lays out its queries anew, which takes as long as a tile of keys.
  constexpr int64_t kCells = 16;
  ForCells(
      shape, mask,
      [&](const AttentionView& view, size_t first, size_t last, size_t begin, size_t end) {
        for (size_t t = first; t < last; t += kBlockQueries)
          BlockGradientsByAmx(view, t, begin, end, packed,
                              {view.Of(q), view.Of(k), view.Of(out), view.Of(d_out), sums.Dq(view),
                               sums.Dk(view), sums.Dv(view), size_t(shape.key_width),
                               size_t(shape.value_width), static_cast<float>(scale), stats});
      },
      kCells);
  sums.Round(mask, to, [&](const float* block) {
    Workspace& workspace = Workspace::OfThisThread();
    workspace.Start(sizeof(float) * kBlockQueries * sums.key_width, 1);
    float* const rows = workspace.Take<float>(kBlockQueries * sums.key_width);
    Transpose(sums.key_width, kBlockQueries, block, kBlockQueries, rows, sums.key_width);
    return static_cast<const float*>(rows);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_POP_ATTRIBUTES
HWY_AFTER_NAMESPACE();
