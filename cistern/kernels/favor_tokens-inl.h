// Tokens of FAVOR+ whose features' logarithms are formed where a walk reads them, some rows at a
// time; included once per Highway target.
#if defined(CISTERN_KERNELS_FAVOR_TOKENS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_FAVOR_TOKENS_INL_H_
#undef CISTERN_KERNELS_FAVOR_TOKENS_INL_H_
#else
#define CISTERN_KERNELS_FAVOR_TOKENS_INL_H_
#endif

#include <algorithm>

#include "cistern/kernels/favor_attention.h"
#include "cistern/kernels/latte_tokens-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// As GivenTokens: q and log-weights are x' matrix^T, less |x'|^2 / 2 for keys, x' = scale x, of
// queries and keys [T, width].
template <class S>
struct FavorTokens {
  using T = ComputeType<S>;
  const FavorMap<T>& map;
  Sequence<const S> queries, keys;
  Sequence<S> dq, dk;
  // One side alone.
  static FavorTokens OfQueries(const FavorMap<T>& map, const Sequence<const S>& queries,
                               const Sequence<S>& dq) {
    return {map, queries, {nullptr, 0}, dq, {nullptr, 0}};
  }
  static FavorTokens OfKeys(const FavorMap<T>& map, const Sequence<const S>& keys,
                            const Sequence<S>& dk) {
    return {map, {nullptr, 0}, keys, {nullptr, 0}, dk};
  }

  Sequence<T> RowsBetween(const HeadParts&, size_t total, size_t slots,
                          Workspace& workspace) const {
    const size_t rows = RoundUp(total, kTileRows);  // as a product reads them
    workspace.Start(rows * slots * sizeof(T), 1);
    return {workspace.Take<T>(rows * slots), slots};
  }

  class Reader {
   public:
    static size_t Bytes(const FavorTokens& x, size_t slots) { return Bytes(x.map, slots); }
    static size_t Bytes(const FavorMap<T>& map, size_t slots) {
      const size_t np = Padded<T>(slots), cp = Channels(map);
      return sizeof(T) * (2 * np * cp + (kSpanRows + kChunkRows) * np + 2 * kChunkRows * cp);
    }
    static constexpr size_t kPieces = 6;

    Reader(const FavorTokens& x, size_t slots, Workspace& workspace)
        : x_(x),
          n_(slots),
          np_(Padded<T>(slots)),
          width_(static_cast<size_t>(x.map.width)),
          cp_(Channels(x.map)),
          scale_(static_cast<T>(x.map.scale)) {
      matrix_ = workspace.Take<T>(np_ * cp_);
      turned_ = workspace.Take<T>(cp_ * np_);
      of_keys_ = workspace.Take<T>(kSpanRows * np_);
      of_queries_ = workspace.Take<T>(kChunkRows * np_);
      P_ = workspace.Take<T>(kChunkRows * cp_);
      D_ = workspace.Take<T>(kChunkRows * cp_);
      // Half of a key's square is one more channel of it, by which every row of the matrix has -1.
      PackRows(Sequence<const T>(x.map.matrix, width_), 0, n_, width_, cp_, T{0}, matrix_);
      std::fill(matrix_ + n_ * cp_, matrix_ + np_ * cp_, T{0});
      for (size_t l = 0; l < n_; ++l) matrix_[l * cp_ + width_] = -1;
      Transpose(np_, cp_, matrix_, cp_, turned_, np_);
    }

    TokenRows<T> Queries(size_t t, size_t count) {
      Form(x_.queries, t, count, width_, of_queries_);
      return {{of_queries_, np_}, 0};
    }
    TokenRows<T> LogWeights(size_t t, size_t count) {
      if (t < begin_ || t + count > end_) {
        Form(x_.keys, t, count, width_ + 1, of_keys_);
        begin_ = t, end_ = t + count;
      }
      return {{of_keys_, np_}, t - begin_};
    }
    void NoteQueries(size_t t, size_t end) const { NoteRows(x_.queries, t, end, width_); }
    void NoteLogWeights(size_t t, size_t end) const { NoteRows(x_.keys, t, end, width_); }

    void PutQueries(const T* panel, size_t ld, size_t t, size_t count) {
      Back<false>(panel, ld, t, count, x_.queries, x_.dq);
    }
    void PutLogWeights(const T* panel, size_t t, size_t count) {
      Back<true>(panel, np_, t, count, x_.keys, x_.dk);
    }
    void ZeroGradients(size_t t, size_t end) const {
      for (const auto* y : {&x_.dq, &x_.dk}) ZeroRows(t, end, width_, *y);
    }

   private:
    static size_t Channels(const FavorMap<T>& map) {
      return Padded<T>(static_cast<size_t>(map.width) + 1);
    }

    // to [count, np]: those of tokens t.., by this many of their channels.
    HWY_NOINLINE void Form(const Sequence<const S>& x, size_t t, size_t count, size_t channels,
                           T* to) {
      const Tag<T> d;
      const Vec<T> scale = hn::Set(d, scale_);
      for (size_t done = 0; done < count; done += kChunkRows) {
        const size_t rows = std::min(kChunkRows, count - done);
        PackRows(x, t + done, rows, width_, cp_, T{0}, P_);
        for (size_t i = 0; i < rows; ++i) {
          T* const row = P_ + i * cp_;
          Vec<T> square = hn::Zero(d);
          for (size_t j = 0; j < cp_; j += kLanes<T>) {
            const Vec<T> v = hn::Mul(scale, hn::Load(d, row + j));
            square = hn::MulAdd(v, v, square);
            hn::Store(v, d, row + j);
          }
          row[width_] = hn::GetLane(hn::SumOfLanes(d, square)) / 2;
        }
        Product<T>(rows, n_, {P_, cp_, 1, turned_, np_, channels}, to + done * np_, np_);
      }
    }

    // dx rows t.. = scale D matrix, less scale^2 x sum(D) for keys, from D [count, n].
    template <bool kOfKeys>
    HWY_NOINLINE void Back(const T* D, size_t ld, size_t t, size_t count,
                           const Sequence<const S>& x, const Sequence<S>& dx) {
      const Tag<T> d;
      const Vec<T> scale = hn::Set(d, scale_), square = hn::Set(d, -scale_ * scale_);
      Product<T>(count, width_, {D, ld, 1, matrix_, cp_, n_}, D_, cp_);
      for (size_t i = 0; i < count; ++i, D += ld) {
        Vec<T> sum = hn::Zero(d);
        if constexpr (kOfKeys) {
          for (size_t l = 0; l < n_; l += kLanes<T>) sum = hn::Add(sum, LoadPart(D, l, n_));
          sum = hn::Mul(square, hn::SumOfLanes(d, sum));
        }
        const S* const from = x.At(t + i);
        for (size_t j = 0; j < width_; j += kLanes<T>) {
          Vec<T> y = hn::Mul(scale, hn::Load(d, D_ + i * cp_ + j));
          if constexpr (kOfKeys) y = hn::MulAdd(sum, LoadPart(from, j, width_), y);
          StorePart(y, j, width_, dx.At(t + i));
        }
      }
    }

    const FavorTokens& x_;
    const size_t n_, np_, width_, cp_;
    const T scale_;
    size_t begin_ = 0, end_ = 0;  // the keys at hand
    T *matrix_, *turned_, *of_keys_, *of_queries_, *P_, *D_;
  };
};

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
