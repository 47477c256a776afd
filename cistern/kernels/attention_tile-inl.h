// What the two directions of exact attention share: exponentials, the queries of a block and what
// they see; included once per Highway target.
//
// The lanes of a vector are queries: scores stand as [keys, queries], so that maxima and sums over
// keys are sums of vectors, and keys and values are the scalars of a product, read where they lie.
#if defined(CISTERN_KERNELS_ATTENTION_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_ATTENTION_TILE_INL_H_
#undef CISTERN_KERNELS_ATTENTION_TILE_INL_H_
#else
#define CISTERN_KERNELS_ATTENTION_TILE_INL_H_
#endif

#include <algorithm>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>

#include "cistern/kernels/attention_dropout-inl.h"
#include "cistern/kernels/exact_attention.h"
#include "cistern/kernels/exponentials-inl.h"
#include "cistern/kernels/staged_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

constexpr size_t kBlockQueries = 64;  // leading dimension of panels with queries in the lanes
constexpr size_t kTileKeys = 96;      // whole register tiles

// C[rows, columns] = A B (kFrom kZero) or += that (kSum), where C has no room beyond its columns;
// scratch of rows vectors.
template <From kFrom, class T>
void ProductToRows(size_t rows, size_t columns, Factors<T> x, T* c, size_t ldc, T* scratch) {
  constexpr size_t kN = kLanes<T>;
  const size_t whole = columns / kN, rest = columns % kN;
  Multiply<kFrom, false>(rows, whole, x, c, ldc);
  if (rest == 0) return;
  x.b += whole * kN;
  Multiply<From::kZero, false>(rows, 1, x, scratch, kN);
  for (size_t i = 0; i < rows; ++i) {
    for (size_t j = 0; j < rest; ++j) {
      T& to = c[i * ldc + whole * kN + j];
      to = (kFrom == From::kSum ? to : T{0}) + scratch[i * kN + j];
    }
  }
}

// e^(x - reference) of scores; the reference in the unit of TileExp's argument. In float it is a
// whole number near the largest score's, so that going on to another reference is exact.
HWY_INLINE Vec<float> ReferenceOf(Vec<float> high) {
  return hn::Round(hn::Mul(high, hn::Set(Tag<float>(), 1.44269504088896341f)));
}
HWY_INLINE Vec<double> ReferenceOf(Vec<double> high) { return high; }

// The largest score where no float is near its multiple by log2(e), else 0. Then scores lose it
// before they are weighed, and the reference is 0.
HWY_INLINE Vec<float> FarScore(Vec<float> high) {
  const Tag<float> d;
  const Vec<float> size = hn::Abs(high);
  const auto far = hn::And(hn::Ge(size, hn::Set(d, 0x1p24f)),
                           hn::Lt(size, hn::Set(d, std::numeric_limits<float>::infinity())));
  return hn::IfThenElseZero(far, high);
}
HWY_INLINE Vec<double> FarScore(Vec<double>) { return hn::Zero(Tag<double>()); }
template <class V>
HWY_INLINE bool IsZero(V x) {
  return hn::AllTrue(hn::DFromV<V>(), hn::Eq(x, hn::Zero(hn::DFromV<V>())));
}
template <int kCount>
HWY_INLINE void WeightsOf(Vec<float>* x, const Vec<float>* reference) {
  ForVectors<kCount>([&](int j) HWY_ATTR {
    x[j] = hn::MulSub(x[j], hn::Set(Tag<float>(), 1.44269504088896341f), reference[j]);
  });
  TileExps<kCount>(x);
}
template <int kCount>
HWY_INLINE void WeightsOf(Vec<double>* x, const Vec<double>* reference) {
  ForVectors<kCount>([&](int j) HWY_ATTR { x[j] = hn::Sub(x[j], reference[j]); });
  TileExps<kCount>(x);
}
template <class V>
HWY_INLINE V WeightOf(V x, V reference) {
  WeightsOf<1>(&x, &reference);
  return x;
}
// e^(from - to), both the largest scores of something: what weights relative to `from` have to be
// multiplied by.
HWY_INLINE Vec<double> RescaleOf(Vec<double> from, Vec<double> to) {
  return TileExp(hn::Sub(from, to));
}
HWY_INLINE Vec<float> RescaleOf(Vec<float> from, Vec<float> to) {
  const Vec<float> far_from = FarScore(from), far_to = FarScore(to),
                   near_from = ReferenceOf(hn::Sub(from, far_from)),
                   near_to = ReferenceOf(hn::Sub(to, far_to));
  Vec<float> bits = hn::Sub(near_from, near_to);
  if (HWY_UNLIKELY(!IsZero(far_from) || !IsZero(far_to))) {
    const Vec<float> log2e = hn::Set(Tag<float>(), 1.44269504088896341f);
    bits = hn::MulAdd(hn::Sub(far_from, far_to), log2e, bits);
  }
  return TileExp(bits);
}
template <class T>
HWY_INLINE T Rescale(T from, T to) {
  const Tag<T> d;
  return hn::GetLane(RescaleOf(hn::Set(d, from), hn::Set(d, to)));
}

template <class T>
constexpr T kNoScore = -std::numeric_limits<T>::infinity();

// The tokens of one row and head that can see each other: all, or those of one remainder modulo the
// dilation.
class AttentionView {
 public:
  AttentionView(const AttentionShape& shape, const AttentionMask& mask, int64_t number)
      : index(number),
        first_(index % shape.dilation),
        step_(shape.dilation),
        h_(index / shape.dilation % shape.heads),
        b_(index / shape.dilation / shape.heads),
        head_(index / shape.dilation + mask.dropout.first_row * shape.heads),
        dropout_(mask.dropout) {
    queries = Count(shape.queries), keys = Count(shape.keys);
    if (mask.ranges != nullptr) ranges_ = mask.ranges + b_ * mask.range_batch + first_;
    if (mask.valid != nullptr) valid_ = mask.valid + b_ * shape.keys + first_;
    stats_ = 2 * ((b_ * shape.heads + h_) * shape.queries + first_);
  }
  static int64_t Number(const AttentionShape& shape) {
    return shape.batch * shape.heads * shape.dilation;
  }

  template <class T>
  Sequence<T> Of(const Rows<T>& x) const {
    return {x.At(b_, h_, first_), size_t(step_ * x.time)};
  }
  // The two numbers of query t.
  template <class T>
  T* Stats(T* stats, size_t t) const {
    return stats + stats_ + 2 * step_ * int64_t(t);
  }
  KeyRange Range(size_t t) const {
    if (ranges_ == nullptr) return {0, int64_t(keys), 0};
    KeyRange range = ranges_[int64_t(t) * step_];
    if (step_ > 1) range.begin = Ceil(range.begin - first_), range.end = Ceil(range.end - first_);
    if (range.begin >= range.end) range.begin = range.end = 0;
    return range;
  }
  bool Valid(size_t j) const { return valid_ == nullptr || valid_[int64_t(j) * step_] != 0; }
  bool AllValid(size_t begin, size_t end) const {
    if (valid_ == nullptr) return true;
    for (; begin < end; ++begin) {
      if (!Valid(begin)) return false;
    }
    return true;
  }

  const DropoutDraw& dropout() const { return dropout_; }
  // Bits as DrawKept's, of `count` queries from t on and the keys from j on.
  void Draw(size_t t, size_t count, size_t j, size_t number, uint64_t* kept) const {
    DrawKept(dropout_, uint64_t(head_), uint64_t(first_ + int64_t(t) * step_),
             uint64_t(first_ + int64_t(j) * step_), uint64_t(step_), count, number, kept);
  }

  const int64_t index;  // among all views
  size_t queries, keys;

 private:
  int64_t Ceil(int64_t x) const { return x <= 0 ? 0 : (x + step_ - 1) / step_; }
  size_t Count(int64_t tokens) const {
    return tokens <= first_ ? 0 : size_t((tokens - first_ + step_ - 1) / step_);
  }
  int64_t first_, step_, h_, b_, head_, stats_;
  DropoutDraw dropout_;
  const KeyRange* ranges_ = nullptr;
  const uint8_t* valid_ = nullptr;
};

// Which keys some and all of several queries see: some see keys of [low, high) and no other, all
// see every valid key of [all_low, all_high).
struct SeenKeys {
  size_t low, high, all_low, all_high;
  void Join(size_t begin, size_t end) {
    all_low = std::max(all_low, begin), all_high = std::min(all_high, end);
    if (begin < end) low = std::min(low, begin), high = std::max(high, end);
  }
};

// Of a tile of keys and a block of queries: `keys` keys from key j on, and `vectors` vectors of
// queries from `lane` on; masked: some pairs of them do not see each other.
struct TileOfPairs {
  size_t j, keys, lane, vectors;
  bool masked;
};

// Up to kBlockQueries queries and the keys that they see.
template <class T>
struct QueryBlock {
  static constexpr size_t kHalf = kBlockQueries / 2;
  QueryBlock(const AttentionView& seen_by, size_t first)
      : view(seen_by), t(first), count(std::min(kBlockQueries, seen_by.queries - first)) {
    for (SeenKeys& half : halves) half = {view.keys, 0, 0, view.keys};
    for (size_t i = 0; i < kBlockQueries; ++i) {
      // Lanes beyond the queries see what the last one sees; nothing reads what they give.
      ranges[i] = view.Range(t + std::min(i, count - 1));
      halves[i / kHalf].Join(size_t(ranges[i].begin), size_t(ranges[i].end));
    }
    const auto& [a, b] = halves;
    low = std::min(a.low, b.low), high = std::max(a.high, b.high);
    all_low = std::max(a.all_low, b.all_low), all_high = std::min(a.all_high, b.all_high);
  }
  size_t vectors() const { return (count + kLanes<T> - 1) / kLanes<T>; }
  // Whether some query does not see some key of [begin, end).
  bool Partial(size_t begin, size_t end) const {
    return begin < all_low || end > all_high || !view.AllValid(begin, end);
  }
  // visit(TileOfPairs): the block's pairs with the keys [begin, end). Where some see each other and
  // some do not, each half of the queries has its own keys: of the pairs of a causal block with its
  // last 64 keys, a quarter is left out.
  template <class Visit>
  void ForTiles(size_t begin, size_t end, Visit&& visit) const {
    if (!Partial(begin, end)) return visit(TileOfPairs{begin, end - begin, 0, vectors(), false});
    for (size_t lane = 0; lane < count; lane += kHalf) {
      const SeenKeys& seen = halves[lane / kHalf];
      const size_t first = std::max(begin, seen.low), last = std::min(end, seen.high);
      if (first >= last) continue;
      visit(TileOfPairs{
          first, last - first, lane, std::min(vectors() - lane / kLanes<T>, kHalf / kLanes<T>),
          first < seen.all_low || last > seen.all_high || !view.AllValid(first, last)});
    }
  }
  bool Sees(size_t i, size_t j) const {
    return int64_t(j) >= ranges[i].begin && int64_t(j) < ranges[i].end && view.Valid(j);
  }
  bool SeesNothing(size_t i) const {
    for (int64_t j = ranges[i].begin; j < ranges[i].end; ++j) {
      if (view.Valid(size_t(j))) return false;
    }
    return true;
  }

  const AttentionView& view;
  size_t t, count;
  size_t low, high;          // some query sees some key of [low, high) and no other
  size_t all_low, all_high;  // every query sees all valid ones of these
  SeenKeys halves[2];
  KeyRange ranges[kBlockQueries];
};

// Which lanes, from `lane` of a block on, see which keys of a tile that is seen in part.
template <class T>
struct TileMask {
  TileMask(const QueryBlock<T>& queries, size_t first, size_t keys, size_t lane = 0)
      : block(queries), begin(first) {
    const auto inside = [&](int64_t j) {
      return static_cast<T>(std::clamp<int64_t>(j - int64_t(begin), 0, int64_t(keys)));
    };
    for (size_t i = lane; i < kBlockQueries; ++i)
      from[i - lane] = inside(block.ranges[i].begin), to[i - lane] = inside(block.ranges[i].end);
  }
  // Of the vector of queries from i on, key begin + j.
  HWY_INLINE hn::Mask<Tag<T>> Lanes(size_t i, size_t j) const {
    const Tag<T> d;
    const Vec<T> key = hn::Set(d, static_cast<T>(j));
    return hn::And(hn::Le(hn::Load(d, from + i), key), hn::Lt(key, hn::Load(d, to + i)));
  }
  bool Valid(size_t j) const { return block.view.Valid(begin + j); }

  const QueryBlock<T>& block;
  size_t begin;
  HWY_ALIGN T from[kBlockQueries];
  HWY_ALIGN T to[kBlockQueries];
};

// X[keys, queries] = `value` where a key is not seen.
template <class T>
HWY_NOINLINE void HideUnseen(const TileMask<T>& mask, size_t keys, size_t vectors, T value, T* X) {
  const Tag<T> d;
  const Vec<T> hidden = hn::Set(d, value);
  for (size_t j = 0; j < keys; ++j, X += kBlockQueries) {
    const bool valid = mask.Valid(j);
    for (size_t v = 0; v < vectors; ++v) {
      const size_t i = v * kLanes<T>;
      const Vec<T> x =
          valid ? hn::IfThenElse(mask.Lanes(i, j), hn::Load(d, X + i), hidden) : hidden;
      hn::Store(x, d, X + i);
    }
  }
}

// C[c, queries] = C factor + sum_j A(c, j) P[j, queries] over the keys that each query sees, for a
// tile that holds what is not finite: 0 times NaN is NaN, so what is not seen is left out. The
// bits of the others are those of Multiply. factor: null for ones.
template <class T>
HWY_NOINLINE void MultiplySeen(const TileMask<T>& mask, size_t rows, size_t vectors,
                               const Factors<T>& x, T* C, const T* factor) {
  const Tag<T> d;
  for (size_t c = 0; c < rows; ++c, C += kBlockQueries) {
    for (size_t i = 0; i < vectors * kLanes<T>; i += kLanes<T>) {
      Vec<T> sum = hn::Load(d, C + i);
      if (factor != nullptr) sum = hn::Mul(sum, hn::Load(d, factor + i));
      for (size_t j = 0; j < x.depth; ++j) {
        if (!mask.Valid(j)) continue;
        const Vec<T> more = hn::MulAdd(hn::Set(d, x.a[c * x.row + j * x.step]),
                                       hn::Load(d, x.b + j * x.ldb + i), sum);
        sum = hn::IfThenElse(mask.Lanes(i, j), more, sum);
      }
      hn::Store(sum, d, C + i);
    }
  }
}

// Whether `count` rows from row t on hold neither NaN nor infinities.
template <class T>
HWY_NOINLINE bool AreFinite(const Sequence<const T>& x, size_t t, size_t count, size_t width) {
  const Tag<T> d;
  const size_t whole = width / kLanes<T> * kLanes<T>;
  const Vec<T> zero = hn::Zero(d);
  Vec<T> sum = zero;
  T rest = 0;
  for (size_t i = t; i < t + count; ++i) {
    const T* row = x.At(i);
    for (size_t j = 0; j < whole; j += kLanes<T>)
      sum = hn::MulAdd(hn::LoadU(d, row + j), zero, sum);
    for (size_t j = whole; j < width; ++j) rest += row[j] * T{0};
  }
  return hn::AllTrue(d, hn::Eq(sum, zero)) && rest == T{0};
}

// panel[0..count, ld] = rows t.. of x times factor, 0 in what is beyond the width; rows count ..
// rounded up to a whole vector are 0.
template <class S, class T = ComputeType<S>>
HWY_NOINLINE void PackScaled(const Sequence<const S>& x, size_t t, size_t count, size_t width,
                             size_t ld, T factor, T* panel) {
  const Tag<T> d;
  PackRows(x, t, count, width, ld, T{0}, panel);
  const Vec<T> times = hn::Set(d, factor);
  for (size_t i = 0; i < count * ld; i += kLanes<T>)
    hn::Store(hn::Mul(hn::Load(d, panel + i), times), d, panel + i);
  std::memset(panel + count * ld, 0, (RoundUp(count, kLanes<T>) - count) * ld * sizeof(T));
}

// The queries of a block times `scale` as rows [queries, dk] and as [dk, queries].
template <class S, class T = ComputeType<S>>
void QueriesInLanes(const QueryBlock<T>& block, const Sequence<const S>& q, size_t width,
                    double scale, T* rows, T* lanes) {
  const size_t ld = RoundUp(width, kLanes<T>);
  PackScaled(q, block.t, block.count, width, ld, static_cast<T>(scale), rows);
  Transpose(block.count, width, rows, ld, lanes, kBlockQueries);
}

// Keys and values in the type that is computed in: where they lie, or, where they are stored in
// another one, copies of the tile at hand, which blocks share that take it one after another.
template <class S>
class TileTokens {
  using T = ComputeType<S>;
  static constexpr bool kInPlace = std::is_same_v<S, T>;

 public:
  static constexpr size_t kPieces = kInPlace ? 0 : 2;
  static size_t Values(size_t kp, size_t vp) { return kInPlace ? 0 : kTileKeys * (kp + vp); }

  TileTokens(const Sequence<const S>& k, const Sequence<const S>& v, size_t key_width,
             size_t value_width, Workspace& workspace)
      : k_(k),
        v_(v),
        kw_(key_width),
        vw_(value_width),
        kp_(RoundUp(key_width, kLanes<T>)),
        vp_(RoundUp(value_width, kLanes<T>)) {
    if constexpr (!kInPlace) {
      K_ = workspace.Take<T>(kTileKeys * kp_);
      V_ = workspace.Take<T>(kTileKeys * vp_);
    }
  }

  // Keys [begin, end), at most kTileKeys: the ones that Keys and Values give until the next call.
  void Take(size_t begin, size_t end) {
    if constexpr (!kInPlace) {
      if (begin >= begin_ && end <= end_) return;
      PackRows(k_, begin, end - begin, kw_, kp_, T{0}, K_);
      PackRows(v_, begin, end - begin, vw_, vp_, T{0}, V_);
      begin_ = begin, end_ = end;
    }
  }
  // Rows j.. of them.
  Sequence<const T> Keys(size_t j) const { return From(k_, j, K_, kp_); }
  Sequence<const T> Values(size_t j) const { return From(v_, j, V_, vp_); }

 private:
  Sequence<const T> From(const Sequence<const S>& x, size_t j, const T* panel, size_t ld) const {
    if constexpr (kInPlace) {
      return {x.At(j), size_t(x.time)};
    } else {
      return {panel + (j - begin_) * ld, ld};
    }
  }
  const Sequence<const S> k_, v_;
  const size_t kw_, vw_, kp_, vp_;
  T *K_ = nullptr, *V_ = nullptr;
  size_t begin_ = 0, end_ = 0;  // what the copies hold
};

// Blocks of queries that go over their keys together, tile by tile, so that keys and values that
// lie beyond the second-level cache are read once for all of them.
constexpr size_t kBlocksTogether = 4;

// The end of the queries of [t, end), whole blocks, that go together: kBlocksTogether blocks where
// the keys and values that they see, `width` numbers each, are too many for that cache, else one.
template <class T>
size_t EndOfTogether(const AttentionView& view, size_t t, size_t end, size_t width) {
  const size_t several = std::min(t + kBlocksTogether * kBlockQueries, end);
  const KeyRange seen = view.Range(several - 1);
  const bool far = size_t(seen.end - seen.begin) * width * sizeof(T) > size_t{1} << 19;
  return far ? several : std::min(t + kBlockQueries, end);
}

// Block: Next(), the first key that it did not take; Done(); TakeTile(scratch...).
template <class Block>
class BlocksTogether {
 public:
  template <class... Arguments>
  void Add(Arguments&&... arguments) {
    blocks_[count_++].emplace(std::forward<Arguments>(arguments)...);
  }
  template <class Visit>
  void ForEach(Visit&& visit) {
    for (size_t i = 0; i < count_; ++i) visit(*blocks_[i]);
  }
  // A tile of each block after another, until all are done; note(begin, end): before each round but
  // the last, with the keys of the next.
  template <class Note, class... Scratch>
  void TakeTiles(size_t end_of_keys, Note&& note, Scratch... scratch) {
    for (bool done = false; !done;) {
      done = true;
      ForEach([&](Block& block) {
        if (block.Done()) return;
        const size_t next = block.Next() + kTileKeys;
        if (done && next < end_of_keys) note(next, std::min(next + kTileKeys, end_of_keys));
        done = false;
        block.TakeTile(scratch...);
      });
    }
  }

 private:
  std::optional<Block> blocks_[kBlocksTogether];
  size_t count_ = 0;
};

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
