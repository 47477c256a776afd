// One head of slot_decoding.h: where it lies, what it reads, and how it moves on; included once per
// Highway target.
#if defined(CISTERN_KERNELS_SLOT_DECODING_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CISTERN_KERNELS_SLOT_DECODING_INL_H_
#undef CISTERN_KERNELS_SLOT_DECODING_INL_H_
#else
#define CISTERN_KERNELS_SLOT_DECODING_INL_H_
#endif

#include <bit>
#include <cmath>

#include "cistern/base/parallel.h"
#include "cistern/kernels/gated_token-inl.h"
#include "cistern/kernels/slot_decoding.h"
#include "cistern/kernels/slot_token-inl.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// A matrix [rows, columns] in two floats, and what the tokens since then add to it: the sum of
// a_j (x) b_j.
struct DeferredSum {
  size_t rows, columns;
  float *high, *low;
  const float *a, *b;
  size_t lda, ldb;
};

// sum_i x_i y_i of whole vectors.
HWY_INLINE float RowProduct(size_t padded, const float* x, const float* y) {
  const Tag<float> d;
  Vec<float> sum = hn::Zero(d);
  for (size_t i = 0; i < padded; i += kLanes<float>)
    sum = hn::MulAdd(hn::Load(d, x + i), hn::Load(d, y + i), sum);
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// kVectors vectors of r^T high + sum_j shares_j b_j, from column c on.
template <int kVectors>
HWY_INLINE void ReadColumns(const DeferredSum& m, const float* r, size_t c, size_t count,
                            const float* shares, float* out) {
  const Tag<float> d;
  Vec<float> even[kVectors], odd[kVectors];
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) even[j] = odd[j] = hn::Zero(d);
  const auto add = [d](float factor, const float* row, Vec<float>* to) HWY_ATTR {
    const Vec<float> f = hn::Set(d, factor);
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j)
      to[j] = hn::MulAdd(f, hn::Load(d, row + j * kLanes<float>), to[j]);
  };
  const auto add_all = [&](size_t rows, const float* factors, const float* row, size_t ld)
                           HWY_ATTR {
                             size_t i = 0;
                             for (; i + 2 <= rows; i += 2, row += 2 * ld)
                               add(factors[i], row, even), add(factors[i + 1], row + ld, odd);
                             if (i < rows) add(factors[i], row, even);
                           };
  add_all(m.rows, r, m.high + c, m.columns);
  add_all(count, shares, m.b + c, m.ldb);
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j)
    hn::Store(hn::Add(even[j], odd[j]), d, out + c + j * kLanes<float>);
}

// out [columns] = r^T (high + sum of the `count` tokens); r [lda], with zeros behind its rows.
HWY_NOINLINE inline void ReadDeferred(const DeferredSum& m, const float* r, size_t count,
                                      float* out) {
  HWY_ALIGN float shares[kDeferredTokens];
  for (size_t j = 0; j < count; ++j) shares[j] = RowProduct(m.lda, r, m.a + j * m.lda);
  size_t c = 0;
  for (; c + 4 * kLanes<float> <= m.columns; c += 4 * kLanes<float>)
    ReadColumns<4>(m, r, c, count, shares, out);
  for (; c < m.columns; c += kLanes<float>) ReadColumns<1>(m, r, c, count, shares, out);
}

// The tokens join rows i.. of the matrix, which is then multiplied by powers of two: by[i] each
// row, or by[c] each column.
template <bool kRowScale, int kRows, int kVectors>
HWY_INLINE void JoinTile(const DeferredSum& m, size_t i, size_t c, size_t count, const float* by) {
  const Tag<float> d;
  constexpr size_t kN = kLanes<float>;
  Vec<float> sum[kRows][kVectors];
#pragma GCC unroll 2
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sum[r][j] = hn::Zero(d);
  }
  for (size_t t = 0; t < count; ++t) {
    Vec<float> b[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) b[j] = hn::Load(d, m.b + t * m.ldb + c + j * kN);
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
      const Vec<float> a = hn::Set(d, m.a[t * m.lda + i + r]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[r][j] = hn::MulAdd(a, b[j], sum[r][j]);
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < kRows; ++r) {
    float *const high = m.high + (i + r) * m.columns + c, *const low =
                                                              m.low + (i + r) * m.columns + c;
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      const Vec<float> factor = kRowScale ? hn::Set(d, by[i + r]) : hn::Load(d, by + c + j * kN);
      // Two sums without loss (Knuth's, then Dekker's).
      const Vec<float> h = hn::Load(d, high + j * kN), s = sum[r][j], x = hn::Add(h, s),
                       back = hn::Sub(x, h),
                       lost = hn::Add(hn::Sub(h, hn::Sub(x, back)), hn::Sub(s, back)),
                       l = hn::Add(hn::Load(d, low + j * kN), lost), y = hn::Add(x, l),
                       rest = hn::Sub(l, hn::Sub(y, x));
      hn::Store(hn::Mul(y, factor), d, high + j * kN);
      hn::Store(hn::Mul(rest, factor), d, low + j * kN);
    }
  }
}

template <bool kRowScale>
HWY_NOINLINE void JoinDeferred(const DeferredSum& m, size_t count, const float* by) {
  const auto rows = [&]<int kRows>(size_t i) HWY_ATTR {
    size_t c = 0;
    for (; c + 4 * kLanes<float> <= m.columns; c += 4 * kLanes<float>)
      JoinTile<kRowScale, kRows, 4>(m, i, c, count, by);
    for (; c < m.columns; c += kLanes<float>) JoinTile<kRowScale, kRows, 1>(m, i, c, count, by);
  };
  size_t i = 0;
  for (; i + 2 <= m.rows; i += 2) rows.template operator()<2>(i);
  if (i < m.rows) rows.template operator()<1>(i);
}

// One head, where it lies. Rows are padded with zeros to whole vectors of every instruction set.
class DecodingHead {
 public:
  static constexpr size_t kTokens = static_cast<size_t>(kDeferredTokens);
  static size_t PaddedTo16(size_t count) { return (count + 15) / 16 * 16; }
  static size_t Bytes(size_t n, size_t width, bool keys) {
    const size_t np = PaddedTo16(n), dp = PaddedTo16(width);
    return 64 + 2 * np * sizeof(double) + sizeof(float) * kTokens * (np + dp) +
           sizeof(float) * 2 * n * dp +
           (keys ? sizeof(float) * (kTokens * dp + 2 * width * np) : 0);
  }

  DecodingHead(size_t n, size_t width, bool keys, std::byte* at)
      : n(n), width(width), np(PaddedTo16(n)), dp(PaddedTo16(width)), keys_(keys), begin_(at) {
    const auto take = [&at]<class T>(size_t size, T) {
      T* const from = reinterpret_cast<T*>(at);
      at += size * sizeof(T);
      return from;
    };
    numbers_ = take(8, int64_t());
    c = take(np, double()), W = take(np, double());
    weights_ = take(kTokens * np, float()), values_ = take(kTokens * dp, float());
    float *const high = take(n * dp, float()), *const low = take(n * dp, float());
    values = {n, dp, high, low, weights_, values_, np, dp};
    if (!keys) return;
    tokens_ = take(kTokens * dp, float());
    float *const key_high = take(width * np, float()), *const key_low = take(width * np, float());
    this->keys = {width, np, key_high, key_low, tokens_, weights_, dp, np};
  }

  // A number from a file that is too large reaches nothing outside of this head.
  size_t count() const { return std::min(static_cast<size_t>(numbers_[0]), kTokens); }
  // Those of the token that comes next.
  float* NextWeights() const { return weights_ + count() * np; }
  float* NextValue() const { return values_ + count() * dp; }
  float* NextKey() const { return tokens_ + count() * dp; }

  // Nothing has been written. What no token has reached is zero, too: a state that goes to a file
  // is the same from run to run.
  void Clear() {
    std::memset(begin_, 0, Bytes(n, width, keys_));
    numbers_[1] = static_cast<int64_t>(n), numbers_[2] = static_cast<int64_t>(width);
    std::fill_n(c, np, kEmpty);
  }

  enum class Weighed { kNear, kFar, kNotFinite };
  // The weights e^(s - c) of the next token, s [np] with -inf in its padding. c becomes s where
  // nothing was written. Far: above e^kMost.
  HWY_NOINLINE Weighed Weigh(const float* s) {
    constexpr double kMost = 30;
    const Tag<double> d;
    float* const E = NextWeights();
    const Double empty = hn::Set(d, kEmpty), most = hn::Set(d, kMost);
    auto near = hn::Eq(most, most);
    for (size_t l = 0; l < np; l += kLanes<double>) {
      const Double x = LoadAsDouble(s + l), held = hn::Load(d, c + l);
      const Double from = hn::IfThenElse(hn::Eq(held, empty), x, held);
      const Double far = hn::IfThenElse(hn::Eq(x, empty), empty, hn::Sub(x, from));
      near = hn::And(near, hn::Le(far, most));
      hn::Store(from, d, c + l);
      StoreDouble(far, E + l);
    }
    if (!hn::AllTrue(d, near)) {
      for (size_t l = 0; l < n; ++l)
        if (!(s[l] < std::numeric_limits<float>::infinity())) return Weighed::kNotFinite;
      return Weighed::kFar;
    }
    for (size_t l = 0; l < np; l += kLanes<float>)
      hn::Store(WeightExp(hn::Load(Tag<float>(), E + l)), Tag<float>(), E + l);
    return Weighed::kNear;
  }

  // The token is written: W grows by its weights. shares [np] = 1 / W, 0 for slots that hold
  // nothing.
  HWY_NOINLINE void Write(float* shares) {
    const Tag<double> d;
    const float* const E = NextWeights();
    for (size_t l = 0; l < np; l += kLanes<double>)
      hn::Store(hn::Add(hn::Load(d, W + l), LoadAsDouble(E + l)), d, W + l);
    Shares(shares);
    numbers_[0] = static_cast<int64_t>(count()) + 1;
  }

  // The weights W (1 - g) of gated slots' next token from their logits [np], infinite in its
  // padding; `next` [np], the W after it. Far: above 2^30.
  HWY_NOINLINE Weighed WeighGates(const float* logits, float rate, double* next) {
    const Tag<double> d;
    const Tag<float> f;
    float* const E = NextWeights();
    const Double most = hn::Set(d, 0x1p30), one = hn::Set(d, 1.0), zero = hn::Zero(d);
    HWY_ALIGN float log_gate[kLanes<float>], write[kLanes<float>];
    auto near = hn::Eq(most, most), known = near;
    for (size_t l = 0; l < np; l += kLanes<float>) {
      Vec<float> log, w;
      GateOf<float>(hn::Load(f, logits + l), hn::Set(f, rate), log, w);
      hn::Store(log, f, log_gate), hn::Store(w, f, write);
      for (size_t j = 0; j < kLanes<float>; j += kLanes<double>) {
        const Double held = hn::Load(d, W + l + j), x = LoadAsDouble(log_gate + j),
                     gate = hn::IfThenElse(hn::IsNaN(x), x, StepExp(x)),
                     // What holds nothing begins to count here.
            grown = hn::IfThenElse(hn::Eq(held, zero), one, hn::Div(held, gate));
        near = hn::And(near, hn::Le(grown, most));
        known = hn::And(known, hn::Eq(x, x));
        hn::Store(grown, d, next + l + j);
        StoreDouble(hn::Mul(grown, LoadAsDouble(write + j)), E + l + j);
      }
    }
    if (hn::AllTrue(d, near)) return Weighed::kNear;
    return hn::AllTrue(d, known) ? Weighed::kFar : Weighed::kNotFinite;
  }
  // As Write, for gated slots.
  void WriteGates(const double* next, float* shares) {
    std::copy_n(next, np, W);
    Shares(shares);
    numbers_[0] = static_cast<int64_t>(count()) + 1;
  }

  // Writes that were put off join the memory. Each slot's U and W are divided by a power of two, so
  // that the number of `towards` [np] that is at least 2 comes below it; 0 above 2^126. s: null, or
  // log-weights whose distance from c is to become at most 0.
  HWY_NOINLINE void Join(const double* towards, const float* s, float* by) {
    constexpr double kLn2 = 0.69314718055994530942;
    for (size_t l = 0; l < np; ++l) {
      auto steps = towards[l] < 2 ? int64_t{0} : (std::bit_cast<int64_t>(towards[l]) >> 52) - 1023;
      if (s != nullptr && l < n && W[l] != 0) {
        const double ahead = std::ceil((static_cast<double>(s[l]) - c[l]) / kLn2);
        if (ahead > static_cast<double>(steps))
          steps = static_cast<int64_t>(std::min(ahead, 200.0));
      }
      by[l] = steps > 126
                  ? 0.0f
                  : std::bit_cast<float>(static_cast<uint32_t>(127 - steps) << 23);  // 2^-steps
      W[l] *= static_cast<double>(by[l]);
      c[l] = W[l] == 0 ? kEmpty : c[l] + static_cast<double>(steps) * kLn2;
    }
    JoinDeferred<true>(values, count(), by);
    if (keys_) JoinDeferred<false>(keys, count(), by);
    numbers_[0] = 0;
  }
  void JoinIfFull(float* by) {
    if (count() == kTokens) Join(W, nullptr, by);
  }

  // Sums of linear attention (linear_decoding.h): the token with the features NextWeights [np] is
  // written; W is the sum of the features, c stays unused.
  void WriteFeatures() {
    const Tag<double> d;
    const float* const features = NextWeights();
    for (size_t l = 0; l < np; l += kLanes<double>)
      hn::Store(hn::Add(hn::Load(d, W + l), LoadAsDouble(features + l)), d, W + l);
    numbers_[0] = static_cast<int64_t>(count()) + 1;
  }
  void JoinFeaturesIfFull(float* ones) {
    if (count() < kTokens) return;
    std::fill_n(ones, np, 1.0f);
    JoinDeferred<true>(values, count(), ones);
    numbers_[0] = 0;
  }

  const size_t n, width, np, dp;
  double *c, *W;
  DeferredSum values = {}, keys = {};  // [n, dp], and [width, np]: a match reads it like values

 private:
  void Shares(float* shares) const {
    const Tag<float> f;
    for (size_t l = 0; l < np; l += kLanes<double>)
      StoreDouble(hn::Load(Tag<double>(), W + l), shares + l);
    for (size_t l = 0; l < np; l += kLanes<float>) {
      const Vec<float> sum = hn::Load(f, shares + l);
      hn::Store(hn::IfThenZeroElse(hn::Eq(sum, hn::Zero(f)), hn::Div(hn::Set(f, 1.0f), sum)), f,
                shares + l);
    }
  }

  const bool keys_;
  std::byte* const begin_;
  int64_t* numbers_;  // the tokens put off, the slots, the width
  float *weights_, *values_, *tokens_ = nullptr;
};

// Element i of a memory begins as x, in two floats.
inline void PutSum(double x, const DeferredSum& m, size_t i) {
  m.high[i] = static_cast<float>(x);
  m.low[i] = static_cast<float>(x - static_cast<double>(m.high[i]));
}

// Element (i, j) of the sum, in double.
inline double SumOf(const DeferredSum& m, size_t count, size_t i, size_t j) {
  double sum = static_cast<double>(m.high[i * m.columns + j]) +
               static_cast<double>(m.low[i * m.columns + j]);
  for (size_t t = 0; t < count; ++t)
    sum += static_cast<double>(m.a[t * m.lda + i]) * static_cast<double>(m.b[t * m.ldb + j]);
  return sum;
}

// body(head's index, head) of all heads.
template <class Body>
void ForDecoding(const SlotShape& shape, bool keys, std::byte* decoding, Body&& body) {
  const auto n = static_cast<size_t>(shape.slots), width = static_cast<size_t>(shape.width);
  const size_t bytes = DecodingHead::Bytes(n, width, keys);
  ParallelFor(shape.batch * shape.heads, HeadsPerThread(shape), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      DecodingHead head(n, width, keys, decoding + static_cast<size_t>(i) * bytes);
      body(i, head);
    }
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#endif  // include guard
