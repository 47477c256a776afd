#pragma once
// What exact attention of tokens in bfloat16 shares, whether its products go by pairs
// (exact_attention_pairs-inl.h) or by tiles (exact_attention_amx-inl.h); included once, in the pass
// of the one target that may have them.
//
// What is not finite is 0 where it is the factor of weights, of which those of unseen pairs are 0;
// then what it gives to those that see it is added.
#include "cistern/kernels/attention_rounds-inl.h"
#include "cistern/kernels/attention_softmax-inl.h"
#include "cistern/kernels/bfloat16-inl.h"
#include "cistern/kernels/bfloat16_pairs-inl.h"

HWY_BEFORE_NAMESPACE();
HWY_PUSH_ATTRIBUTES("avx512bf16")
namespace cistern {
namespace HWY_NAMESPACE {

using Tokens16 = Sequence<const BFloat16>;

bool IsFinite(BFloat16 x) { return (x.bits & 0x7f80) != 0x7f80; }

// Queries of a block in the lanes: L[PairColumns(width) / 2, queries], pairs along the width; zeros
// in the lanes beyond the queries. lanes: whole vectors. rows: scratch of kBlockQueries
// PairColumns(width) values.
void LanesOf(const Tokens16& x, size_t t, size_t count, size_t lanes, size_t width, BFloat16* rows,
             uint32_t* L) {
  const size_t ld = PairColumns(width);
  CopyRows(x, t, count, width, ld, rows);
  std::memset(rows + count * ld, 0, (lanes - count) * ld * sizeof(BFloat16));
  // Pairs move as floats do.
  Transpose(lanes, ld / 2, reinterpret_cast<const float*>(rows), ld / 2,
            reinterpret_cast<float*>(L), kBlockQueries);
}

// O[rows, queries] times a factor for each query, where one of them is not 1.
HWY_NOINLINE void ScaleLanes(size_t rows, size_t lanes, const float* factor, float* O) {
  const Tag<float> d;
  const Vec<float> one = hn::Set(d, 1.0f);
  bool ones = true;
  for (size_t i = 0; i < lanes; i += kPairLanes)
    ones = ones && hn::AllTrue(d, hn::Eq(hn::Load(d, factor + i), one));
  if (ones) return;
  for (size_t c = 0; c < rows; ++c, O += kBlockQueries) {
    for (size_t i = 0; i < lanes; i += kPairLanes)
      hn::Store(hn::Mul(hn::Load(d, O + i), hn::Load(d, factor + i)), d, O + i);
  }
}

// to[0, width) = from, rounded.
HWY_INLINE void RoundRow(size_t width, const float* from, BFloat16* to) {
  for (size_t c = 0; c < width; c += 32) {
    const auto some = [&](size_t first) {
      return static_cast<__mmask16>(width >= first + 16 ? 0xffff
                                    : width > first     ? (1u << (width - first)) - 1
                                                        : 0);
    };
    const __m512i rounded = RoundTwo(_mm512_maskz_loadu_ps(some(c), from + c),
                                     _mm512_maskz_loadu_ps(some(c + 16), from + c + 16));
    _mm512_mask_storeu_epi16(to + c, uint32_t{some(c + 16)} << 16 | some(c), rounded);
  }
}

// Memory of one call that threads share, not initialised.
class SharedMemory {
 public:
  SharedMemory(size_t bytes, const CallMemory& memory) : next_(memory(bytes)) {}
  // The next piece; sizes are multiples of 64 bytes, but for the last.
  template <class T>
  T* Take(size_t count) {
    T* const piece = reinterpret_cast<T*>(next_);
    next_ += count * sizeof(T);
    return piece;
  }

 private:
  std::byte* next_;
};

struct Gradients16 {
  Rows<BFloat16> dq, dk, dv;
};

// Sums of gradients, those of one view's tokens after another. Tokens are whole blocks of queries,
// widths whole pairs of vectors.
class FloatGradients {
 public:
  FloatGradients(const AttentionShape& shape, const CallMemory& memory)
      : queries(Tokens(shape.queries, shape)),
        keys(Tokens(shape.keys, shape)),
        key_width(PairColumns(size_t(shape.key_width))),
        value_width(PairColumns(size_t(shape.value_width))),
        shape_(shape),
        views_(size_t(AttentionView::Number(shape))),
        memory_(sizeof(float) * views_ * (queries * key_width + keys * (key_width + value_width)),
                memory),
        dq_(memory_.Take<float>(views_ * queries * key_width)),
        dk_(memory_.Take<float>(views_ * keys * key_width)),
        dv_(memory_.Take<float>(views_ * keys * value_width)) {}

  float* Dq(const AttentionView& view) const { return dq_ + Index(view) * queries * key_width; }
  float* Dk(const AttentionView& view) const { return dk_ + Index(view) * keys * key_width; }
  float* Dv(const AttentionView& view) const { return dv_ + Index(view) * keys * value_width; }

  void Zero(const AttentionMask& mask) const {
    ForViews(shape_, mask, [&](const AttentionView& view) {
      std::memset(Dq(view), 0, sizeof(float) * queries * key_width);
      std::memset(Dk(view), 0, sizeof(float) * keys * key_width);
      std::memset(Dv(view), 0, sizeof(float) * keys * value_width);
    });
  }
  // rows(block): dQ of a view's block of queries, as rows of key_width.
  template <class RowsOfBlock>
  void Round(const AttentionMask& mask, const Gradients16& to, RowsOfBlock&& rows) const {
    ForViews(shape_, mask, [&](const AttentionView& view) {
      const auto round = [](const float* x, size_t ld, size_t count, size_t width,
                            const Sequence<BFloat16>& y, size_t t) {
        for (size_t i = 0; i < count; ++i) RoundRow(width, x + i * ld, y.At(t + i));
      };
      const size_t kw = size_t(shape_.key_width), vw = size_t(shape_.value_width);
      round(Dk(view), key_width, view.keys, kw, view.Of(to.dk), 0);
      round(Dv(view), value_width, view.keys, vw, view.Of(to.dv), 0);
      for (size_t t = 0; t < view.queries; t += kBlockQueries) {
        round(rows(Dq(view) + t * key_width), key_width, std::min(kBlockQueries, view.queries - t),
              kw, view.Of(to.dq), t);
      }
    });
  }

  static size_t Tokens(int64_t count, const AttentionShape& shape) {
    return RoundUp(size_t((count + shape.dilation - 1) / shape.dilation), kBlockQueries);
  }
  const size_t queries, keys, key_width, value_width;

 private:
  static size_t Index(const AttentionView& view) { return size_t(view.index); }
  const AttentionShape& shape_;
  size_t views_;
  SharedMemory memory_;
  float *dq_, *dk_, *dv_;
};

// O[c, queries] += weight(i, query) v_(j + i)[c] of the values that are not finite, of pairs that
// see each other.
template <class Weight>
HWY_NOINLINE void AddLostValues(const QueryBlock<float>& block, const Tokens16& v, size_t j,
                                size_t keys, size_t width, Weight&& weight, float* O) {
  for (size_t i = 0; i < keys; ++i) {
    for (size_t c = 0; c < width; ++c) {
      const BFloat16 value = v.At(j + i)[c];
      if (IsFinite(value)) continue;
      for (size_t t = 0; t < block.count; ++t) {
        if (block.Sees(t, j + i))
          O[c * kBlockQueries + t] += weight(i, t) * static_cast<float>(value);
      }
    }
  }
}

// dv_(j + i) += A[i, query] g_query of what is not finite in g, likewise; dv[keys, ld].
HWY_NOINLINE void AddLostGradients(const QueryBlock<float>& block, size_t j, size_t keys,
                                   const BFloat16* A, const Tokens16& g, size_t width, float* dv,
                                   size_t ld) {
  for (size_t t = 0; t < block.count; ++t) {
    for (size_t c = 0; c < width; ++c) {
      const BFloat16 value = g.At(block.t + t)[c];
      if (IsFinite(value)) continue;
      for (size_t i = 0; i < keys; ++i) {
        if (block.Sees(t, j + i))
          dv[i * ld + c] +=
              static_cast<float>(A[i * kBlockQueries + t]) * static_cast<float>(value);
      }
    }
  }
}

// *dq(query, c) += A[i, query] k_(j + i)[c], likewise.
template <class Gradient>
HWY_NOINLINE void AddLostKeys(const QueryBlock<float>& block, size_t j, size_t keys,
                              const BFloat16* A, const Tokens16& k, size_t width, Gradient&& dq) {
  for (size_t i = 0; i < keys; ++i) {
    for (size_t c = 0; c < width; ++c) {
      const BFloat16 value = k.At(j + i)[c];
      if (IsFinite(value)) continue;
      for (size_t t = 0; t < block.count; ++t) {
        if (block.Sees(t, j + i))
          *dq(t, c) += static_cast<float>(A[i * kBlockQueries + t]) * static_cast<float>(value);
      }
    }
  }
}

// What the backward has of each query of a block: the largest score and 1 / sum of the weights, and
// D = g . out. Lanes beyond the queries have no weights.
struct OfQueries {
  static constexpr size_t kPieces = 5;
  static constexpr size_t Scratch(size_t value_columns) {  // in floats
    return 3 * kBlockQueries + 2 * value_columns;
  }
  OfQueries(const AttentionView& view, size_t t, size_t count, const float* stats,
            const Tokens16& out, const Tokens16& g, size_t width, Workspace& workspace)
      : high(workspace.Take<float>(kBlockQueries)),
        share(workspace.Take<float>(kBlockQueries)),
        less(workspace.Take<float>(kBlockQueries)) {
    float* const g_row = workspace.Take<float>(PairColumns(width));
    float* const out_row = workspace.Take<float>(PairColumns(width));
    for (size_t i = 0; i < kBlockQueries; ++i) {
      high[i] = share[i] = less[i] = 0;
      if (i >= count) continue;
      const float* const of = view.Stats(stats, t + i);
      high[i] = of[0], share[i] = of[1];
      ConvertRow(width, g.At(t + i), g_row);
      ConvertRow(width, out.At(t + i), out_row);
      less[i] = static_cast<float>(DotInDouble(width, g_row, out_row));
    }
  }
  float *high, *share, *less;
};

// Weights and their gradients of a tile, rounded: P, dX [keys, queries] as rows, and dX_pairs,
// those of dX and the next row. dX has the factor of scores, P that of kept pairs.
struct Rounded {
  BFloat16 *P, *dX;
  uint32_t* dX_pairs;
};

HWY_INLINE void StoreRows(__m512i rounded, bool two, BFloat16* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(rounded));
  if (two)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + kBlockQueries),
                        _mm512_extracti64x4_epi64(rounded, 1));
}

// e^(scale x - high) of products x, given ReferenceOf(high).
struct FloatWeights {
  explicit FloatWeights(float scale) : times(hn::Set(Tag<float>(), scale)) {}
  HWY_INLINE Vec<float> operator()(Vec<float> x, Vec<float> reference) const {
    return WeightOf(hn::Mul(x, times), reference);
  }
  Vec<float> times;
};

// The same where the scores lose `far` first (FarScore).
HWY_INLINE Vec<float> FarWeight(Vec<float> x, Vec<float> scale, Vec<float> far,
                                Vec<float> reference) {
  return WeightOf(hn::Sub(hn::Mul(x, scale), far), reference);
}

// As FloatWeights in fewer instructions, to 3e-6: all of them are rounded to 8 bits. While tiles
// multiply, vectors have one of the two units for floats.
struct ShortWeights {
  explicit ShortWeights(float scale) : factor(_mm512_set1_ps(scale * 1.44269504088896341f)) {}
  HWY_INLINE Vec<float> operator()(Vec<float> x, Vec<float> reference) const {
    // 2^y: y less the next whole number below, a polynomial of the rest, minimax in relative error,
    // 1 at 0. 0 below -64 as TileExp.
    const __m512 y = _mm512_fmsub_ps(x.raw, factor, reference.raw);
    const __m512 rest = _mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF);
    __m512 p = _mm512_set1_ps(0.0134266866f);
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.0522424690f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.241280213f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(0.693044841f));
    p = _mm512_fmadd_ps(p, rest, _mm512_set1_ps(1.0f));
    const __mmask16 some = _mm512_cmp_ps_mask(y, _mm512_set1_ps(-64.0f), _CMP_NLT_UQ);
    return Vec<float>{_mm512_maskz_scalef_ps(some, p, y)};
  }
  __m512 factor;
};

// Of the keys [first, last) of a tile and the queries [lane, end) of a block, whole vectors of
// them. X, dP[keys, queries], from the first of both on: products of keys and queries, of values
// and gradients. mask: null where all that a tile holds is seen; kept: null where nothing is
// dropped.
struct TilePart {
  size_t first, last, lane, end;
  const float *X, *dP;
  size_t ld;
};
template <bool kMasked, class Weights>
HWY_NOINLINE void Differentiate16(const TilePart& part, float scale, const OfQueries& of,
                                  const TileMask<float>* mask, const uint64_t* kept,
                                  float kept_factor, const Rounded& to) {
  const Tag<float> d;
  const Weights weights(scale);
  const Vec<float> times = hn::Set(d, scale), kept_times = hn::Set(d, scale * kept_factor),
                   factor = hn::Set(d, kept_factor);
  for (size_t lane = part.lane; lane < part.end; lane += kPairLanes) {
    const Vec<float> high = hn::Load(d, of.high + lane), far = FarScore(high),
                     reference = ReferenceOf(hn::Sub(high, far)),
                     share = hn::Load(d, of.share + lane),
                     less = hn::Mul(hn::Load(d, of.less + lane), times);
    const bool is_far = !IsZero(far);
    for (size_t j = part.first; j < part.last; j += 2) {
      const bool two = j + 1 < part.last;
      Vec<float> e[2], dx[2];
#pragma GCC unroll 2
      for (size_t i = 0; i < 2; ++i) {
        if (i == 1 && !two) {
          e[i] = dx[i] = hn::Zero(d);
          break;
        }
        const size_t from = (j + i - part.first) * part.ld + lane - part.lane;
        const Vec<float> x = hn::Load(d, part.X + from);
        e[i] = HWY_UNLIKELY(is_far) ? FarWeight(x, times, far, reference) : weights(x, reference);
        e[i] = hn::Mul(e[i], share);
        const Vec<float> dp = hn::Load(d, part.dP + from);
        if (kept == nullptr) {
          dx[i] = hn::Mul(e[i], hn::MulSub(dp, times, less));
        } else {
          const auto stays = static_cast<__mmask16>(kept[j + i] >> lane);
          Vec<float> some;
          some.raw = _mm512_maskz_mul_ps(stays, dp.raw, kept_times.raw);
          dx[i] = hn::Mul(e[i], hn::Sub(some, less));
          e[i].raw = _mm512_maskz_mul_ps(stays, e[i].raw, factor.raw);
        }
        if constexpr (kMasked) {
          const auto seen = mask->Lanes(lane, j + i);
          e[i] = hn::IfThenElseZero(seen, e[i]), dx[i] = hn::IfThenElseZero(seen, dx[i]);
          if (!mask->Valid(j + i)) e[i] = dx[i] = hn::Zero(d);
        }
      }
      const size_t at = j * kBlockQueries + lane;
      StoreRows(RoundTwo(e[0].raw, e[1].raw), two, to.P + at);
      const __m512i rounded = RoundTwo(dx[0].raw, dx[1].raw);
      StoreRows(rounded, two, to.dX + at);
      _mm512_storeu_si512(to.dX_pairs + j / 2 * kBlockQueries + lane, PairTwo(rounded));
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_POP_ATTRIBUTES
HWY_AFTER_NAMESPACE();
