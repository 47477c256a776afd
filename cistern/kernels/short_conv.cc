#include "cistern/kernels/short_conv.h"

#include <algorithm>
#include <vector>

#include "cistern/base/parallel.h"
#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/short_conv.cc"
#include "hwy/foreach_target.h"  // must come before highway.h

#include "cistern/kernels/staged_rows-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

// Tokens of a batch row, from token `first` on: those of the tensor itself, or copies.
template <class T>
struct ConvTokens {
  T* At(int64_t t) const { return data + (t - first) * time; }
  T* data;
  int64_t time, first = 0;
};

// One batch row seen from the filter. Tap j of token t meets token t - (K-1) + j + ahead; negative
// tokens are rows of the state.
template <class T>
struct ConvRow {
  ConvRow(const ConvShape& shape, const RowMask& mask, int64_t b)
      : b(b),
        channels(shape.channels),
        taps(shape.taps),
        ahead(shape.ahead),
        length(mask.lengths == nullptr ? shape.length : std::min(mask.lengths[b], shape.length)),
        starts(mask.starts == nullptr ? nullptr : mask.starts + b * shape.length) {}

  int64_t reach() const { return taps - 1; }
  // The last document start in (from, to], or -K where there is none.
  int64_t LastStart(int64_t from, int64_t to) const {
    if (starts == nullptr) return -taps;
    for (int64_t i = std::min(to, length - 1); i > std::max<int64_t>(from, -1); --i) {
      if (starts[i] != 0) return i;
    }
    return -taps;
  }
  // The first document start in (from, to], or length.
  int64_t NextStart(int64_t from, int64_t to) const {
    if (starts == nullptr) return length;
    for (int64_t i = std::max<int64_t>(from + 1, 0); i <= std::min(to, length - 1); ++i) {
      if (starts[i] != 0) return i;
    }
    return length;
  }
  template <class U>
  U* StateRow(U* state, int64_t t) const {
    return state == nullptr ? nullptr : state + (b * reach() + reach() + t) * channels;
  }
  // Token t of x, or of the state; null where there is none.
  const T* Token(const ConvTokens<const T>& x, const T* state, int64_t t) const {
    return t >= length ? nullptr : t >= 0 ? x.At(t) : StateRow(state, t);
  }

  int64_t b, channels, taps, ahead, length;
  const uint8_t* starts;
};

// A vector of channels from the first on: all of its lanes, or what is left of them.
template <class T, bool kWhole>
struct Lanes {
  int64_t first, left;
  HWY_INLINE Vec<T> Load(const T* from) const {
    const Tag<T> d;
    if constexpr (kWhole) return hn::LoadU(d, from + first);
    HWY_ALIGN T part[HWY_MAX_BYTES / sizeof(T)] = {};
    std::copy_n(from + first, left, part);
    return hn::Load(d, part);
  }
  HWY_INLINE void Store(Vec<T> v, T* to) const {
    const Tag<T> d;
    if constexpr (kWhole) {
      hn::StoreU(v, d, to + first);
    } else {
      HWY_ALIGN T part[HWY_MAX_BYTES / sizeof(T)];
      hn::Store(v, d, part);
      std::copy_n(part, left, to + first);
    }
  }
};

template <class T, class Body>
HWY_INLINE void ForEachVector(int64_t channels, const Body& body) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(Tag<T>()));
  int64_t c = 0;
  for (; c + lanes <= channels; c += lanes) body(Lanes<T, true>{c, lanes});
  if (c < channels) body(Lanes<T, false>{c, channels - c});
}

// Tokens whose sums are kept in registers, with as many taps or more. A narrower filter is bound by
// memory, which is fastest row by row.
constexpr int64_t kTile = 8;

// out[r] = sum_p w[p - r] * rows[p] for R neighbours r, w: [K, C]; p ascends, so a token's bits do
// not depend on its neighbours. Null rows are left out.
template <class T, int64_t R>
void Correlate(int64_t channels, int64_t taps, const T* const* rows, const T* w, T* const* out) {
  ForEachVector<T>(channels, [&](auto at) HWY_ATTR {
    Vec<T> sum[R];
    for (int64_t r = 0; r < R; ++r) sum[r] = hn::Zero(Tag<T>());
    for (int64_t p = 0; p < taps + R - 1; ++p) {
      if (rows[p] == nullptr) continue;
      const Vec<T> x = at.Load(rows[p]);
      const T* tap = w + p * channels;
      if (p >= R - 1 && p < taps) {
        for (int64_t r = 0; r < R; ++r) sum[r] = hn::MulAdd(at.Load(tap - r * channels), x, sum[r]);
      } else {
        for (int64_t r = 0; r < R; ++r) {
          if (r <= p && p - r < taps) sum[r] = hn::MulAdd(at.Load(tap - r * channels), x, sum[r]);
        }
      }
    }
    for (int64_t r = 0; r < R; ++r) at.Store(sum[r], out[r]);
  });
}

// dw[j] += sum_r g[r] * rows[j + r], dw: [K, C]
template <class T, int64_t R>
void AddOuter(int64_t channels, int64_t taps, const T* const* g, const T* const* rows, T* dw) {
  const bool whole =
      std::none_of(rows, rows + taps + R - 1, [](const T* row) { return row == nullptr; });
  ForEachVector<T>(channels, [&](auto at) HWY_ATTR {
    Vec<T> gv[R];
    for (int64_t r = 0; r < R; ++r) gv[r] = at.Load(g[r]);
    for (int64_t j = 0; j < taps; ++j) {
      T* to = dw + j * channels;
      Vec<T> sum = at.Load(to);
      if (whole) {
        for (int64_t r = 0; r < R; ++r) sum = hn::MulAdd(gv[r], at.Load(rows[j + r]), sum);
      } else {
        for (int64_t r = 0; r < R; ++r) {
          if (rows[j + r] != nullptr) sum = hn::MulAdd(gv[r], at.Load(rows[j + r]), sum);
        }
      }
      at.Store(sum, to);
    }
  });
}

// y of tokens [begin, end) of one batch row.
template <class T>
void ForwardTokens(const ConvRow<T>& row, const ConvTokens<const T>& x, const T* wt, const T* state,
                   int64_t begin, int64_t end, const ConvTokens<T>& y) {
  std::vector<const T*> rows(static_cast<size_t>(row.taps + kTile - 1));
  T* out[kTile];
  const int64_t real = std::min(end, row.length);
  for (int64_t t = begin; t < real;) {
    const int64_t first = t - row.reach() + row.ahead;
    const int64_t last = std::min(t + kTile, real) - 1;
    // A tile is cut where a document starts inside it, or within reach before it: those tokens go
    // one by one.
    const bool tile = row.taps >= kTile && t + kTile <= real && row.LastStart(first, last) < 0;
    const int64_t cut = tile ? -row.taps : row.LastStart(first, t), count = tile ? kTile : 1;
    for (int64_t p = 0; p < row.taps + count - 1; ++p)
      rows[p] = first + p < cut ? nullptr : row.Token(x, state, first + p);
    for (int64_t r = 0; r < count; ++r) out[r] = y.At(t + r);
    (tile ? Correlate<T, kTile> : Correlate<T, 1>)(row.channels, row.taps, rows.data(), wt, out);
    t += count;
  }
  for (int64_t t = std::max(begin, row.length); t < end; ++t)
    std::fill_n(y.At(t), row.channels, T{0});
}

// dx of tokens [begin, end) of one batch row; negative ones are rows of dstate_in. reversed: the
// filter's taps in reversed order.
template <class T>
void BackwardTokens(const ConvRow<T>& row, const ConvTokens<const T>& dy, const T* dstate_out,
                    const T* reversed, int64_t begin, int64_t end, const ConvTokens<T>& dx,
                    T* dstate_in) {
  std::vector<const T*> rows(static_cast<size_t>(row.taps + kTile - 1));
  T* out[kTile];
  const auto gradient = [&](int64_t i) { return i >= 0 ? dx.At(i) : row.StateRow(dstate_in, i); };
  const int64_t real = std::min(end, row.length);
  for (int64_t i = begin; i < real;) {
    const int64_t first = i - row.ahead, reach = row.reach();  // the first token that meets i
    const bool tile = row.taps >= kTile && i + kTile <= real &&
                      row.NextStart(i, i + kTile - 1 + reach) == row.length;
    const int64_t cut = tile ? row.length : row.NextStart(i, i + reach), count = tile ? kTile : 1;
    for (int64_t q = 0; q < row.taps + count - 1; ++q) {
      const int64_t t = first + q;
      rows[q] = t >= 0 && t < cut ? dy.At(t) : nullptr;
    }
    for (int64_t r = 0; r < count; ++r) out[r] = gradient(i + r);
    (tile ? Correlate<T, kTile> : Correlate<T, 1>)(row.channels, row.taps, rows.data(), reversed,
                                                   out);
    i += count;
  }
  for (int64_t t = std::max(begin, row.length); t < end; ++t)
    std::fill_n(gradient(t), row.channels, T{0});
  if (dstate_out == nullptr) return;
  for (int64_t i = std::max({begin, row.length - row.reach(),
                             row.LastStart(row.length - 1 - row.reach(), row.length - 1)});
       i < real; ++i) {
    T* to = gradient(i);
    const T* from = row.StateRow(dstate_out, i - row.length);
    for (int64_t c = 0; c < row.channels; ++c) to[c] += from[c];
  }
}

// dw [K, C] += what tokens [begin, end) of one batch row give it.
template <class T>
void BackwardFilter(const ConvRow<T>& row, const ConvTokens<const T>& dy,
                    const ConvTokens<const T>& x, const T* state, int64_t begin, int64_t end,
                    double* dw) {
  constexpr int64_t kFlush = 64;  // tokens summed in T, beyond in double
  std::vector<const T*> rows(static_cast<size_t>(row.taps + kTile - 1));
  std::vector<T> part(static_cast<size_t>(row.taps * row.channels));
  const T* g[kTile];
  const int64_t real = std::min(end, row.length);
  const auto flush = [&] {
    for (size_t i = 0; i < part.size(); ++i) dw[i] += static_cast<double>(part[i]);
    std::fill(part.begin(), part.end(), T{0});
  };
  int64_t flushed = begin;
  for (int64_t t = begin; t < real;) {
    const int64_t first = t - row.reach() + row.ahead;
    const int64_t last = std::min(t + kTile, real) - 1;
    const bool tile = t + kTile <= real && row.LastStart(first, last) < 0;
    const int64_t cut = tile ? -row.taps : row.LastStart(first, t), count = tile ? kTile : 1;
    for (int64_t p = 0; p < row.taps + count - 1; ++p)
      rows[p] = first + p < cut ? nullptr : row.Token(x, state, first + p);
    for (int64_t r = 0; r < count; ++r) g[r] = dy.At(t + r);
    (tile ? AddOuter<T, kTile> : AddOuter<T, 1>)(row.channels, row.taps, g, rows.data(),
                                                 part.data());
    t += count;
    if (t - flushed >= kFlush) flush(), flushed = t;
  }
  flush();
}

// state_out[i] = token length - (K-1) + i, or zero before the last document start. Ascending, so
// state_out may be state_in.
template <class T>
void NextState(const ConvRow<T>& row, const ConvTokens<const T>& x, const T* state_in,
               T* state_out) {
  const int64_t reach = row.reach(), first = row.LastStart(row.length - 1 - reach, row.length - 1);
  for (int64_t i = 0; i < reach; ++i) {
    const int64_t t = row.length - reach + i;
    const T* from = t < first ? nullptr : row.Token(x, state_in, t);
    T* to = row.StateRow(state_out, i - reach);
    for (int64_t c = 0; c < row.channels; ++c) to[c] = from == nullptr ? T{0} : from[c];
  }
}

// w [C, K] as [K, C], the taps in order or reversed.
template <class T>
std::vector<T> TapsFirst(const ConvShape& shape, const T* w, bool reversed) {
  std::vector<T> wt(static_cast<size_t>(shape.taps * shape.channels));
  for (int64_t c = 0; c < shape.channels; ++c) {
    for (int64_t j = 0; j < shape.taps; ++j)
      wt[(reversed ? shape.taps - 1 - j : j) * shape.channels + c] = w[c * shape.taps + j];
  }
  return wt;
}

// Calls job(batch row, begin, end, number) for blocks of tokens, on all threads.
template <class T, class Job>
void ForEachBlock(const ConvShape& shape, const RowMask& mask, int64_t block, const Job& job) {
  const int64_t blocks = std::max<int64_t>(1, (shape.length + block - 1) / block);
  const int64_t work = std::min(block, shape.length) * shape.taps * shape.channels;
  ParallelFor(shape.batch * blocks, 65536 / (work + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const int64_t t = n % blocks * block;
      job(ConvRow<T>(shape, mask, n / blocks), t, std::min(t + block, shape.length), n);
    }
  });
}

// Tokens [begin, end) of a row, as far as it has them: where they lie, or copies in float.
template <class S>
ConvTokens<const ComputeType<S>> Given(const ConvRow<ComputeType<S>>& row, const Rows<const S>& x,
                                       int64_t begin, int64_t end, Staging* staging) {
  if constexpr (std::is_same_v<S, BFloat16>) {
    begin = std::max<int64_t>(begin, 0);
    end = std::max(begin, std::min(end, row.length));
    const auto width = static_cast<size_t>(row.channels);
    const Sequence<const float> copy =
        staging->Copy({begin < end ? x.At(row.b, 0, begin) : nullptr, static_cast<size_t>(x.time)},
                      static_cast<size_t>(end - begin), width);
    return {copy.data, copy.time, begin};
  } else {
    return {x.At(row.b, 0, 0), x.time};
  }
}

// Tokens [begin, end) for results: in their place, or to be rounded there by Put.
template <class S>
ConvTokens<ComputeType<S>> Wanted(const ConvRow<ComputeType<S>>& row, const Rows<S>& y,
                                  int64_t begin, int64_t end, Staging* staging) {
  if constexpr (std::is_same_v<S, BFloat16>) {
    begin = std::max<int64_t>(begin, 0);
    const Sequence<float> room =
        staging->Take(static_cast<size_t>(end - begin), static_cast<size_t>(row.channels));
    return {room.data, room.time, begin};
  } else {
    return {y.At(row.b, 0, 0), y.time};
  }
}
template <class S>
void Put(const ConvRow<ComputeType<S>>& row, const ConvTokens<ComputeType<S>>& from, int64_t begin,
         int64_t end, const Rows<S>& y) {
  if constexpr (std::is_same_v<S, BFloat16>) {
    for (int64_t t = std::max<int64_t>(begin, 0); t < end; ++t)
      ConvertRow(static_cast<size_t>(row.channels), from.At(t), y.At(row.b, 0, t));
  }
}

// Room for copies of `tensors` tensors' tokens of a block, with their neighbours.
template <class S>
Staging ConvStaging(const ConvShape& shape, int64_t block, int64_t tensors) {
  const bool copies = std::is_same_v<S, BFloat16>;
  return {copies ? static_cast<size_t>(tensors * (std::min(block, shape.length) + 2 * shape.taps) *
                                       shape.channels)
                 : 0,
          static_cast<size_t>(tensors)};
}

template <class S>
void ConvAll(const ConvShape& shape, const Rows<const S>& x, const ComputeType<S>* w,
             const ComputeType<S>* state_in, const RowMask& mask, const Rows<S>& y,
             ComputeType<S>* state_out) {
  using T = ComputeType<S>;
  constexpr int64_t kBlock = std::is_same_v<S, T> ? 256 : 64;
  const std::vector<T> wt = TapsFirst(shape, w, false);
  ForEachBlock<T>(
      shape, mask, kBlock, [&](const ConvRow<T>& row, int64_t begin, int64_t end, int64_t) {
        Staging staging = ConvStaging<S>(shape, kBlock, 2);
        const auto from =
            Given<S>(row, x, begin - row.reach() + row.ahead, end + row.ahead, &staging);
        const auto to = Wanted<S>(row, y, begin, end, &staging);
        ForwardTokens(row, from, wt.data(), state_in, begin, end, to);
        Put<S>(row, to, begin, end, y);
      });
  if (state_out == nullptr) return;
  for (int64_t b = 0; b < shape.batch; ++b) {
    const ConvRow<T> row(shape, mask, b);
    Staging staging = ConvStaging<S>(shape, shape.taps, 1);
    NextState(row, Given<S>(row, x, row.length - row.reach(), row.length, &staging), state_in,
              state_out);
  }
}

template <class S>
void ConvBackwardAll(const ConvShape& shape, const Rows<const S>& dy,
                     const ComputeType<S>* dstate_out, const Rows<const S>& x,
                     const ComputeType<S>* w, const ComputeType<S>* state_in, const RowMask& mask,
                     const Rows<S>& dx, ComputeType<S>* dw, ComputeType<S>* dstate_in) {
  using T = ComputeType<S>;
  constexpr int64_t kBlock = 1024, kPart = std::is_same_v<S, T> ? kBlock : 64;
  const std::vector<T> reversed = TapsFirst(shape, w, true);
  const size_t size = static_cast<size_t>(shape.taps * shape.channels);
  const int64_t parts = shape.batch * std::max<int64_t>(1, (shape.length + kBlock - 1) / kBlock);
  std::vector<double> part(
      static_cast<size_t>(parts) *
      size);  // each block's dw, added in their order: the same for any threads
  ForEachBlock<T>(
      shape, mask, kBlock, [&](const ConvRow<T>& row, int64_t begin, int64_t end, int64_t n) {
        for (int64_t t = begin; t == begin || t < end; t += kPart) {
          const int64_t last = std::min(t + kPart, end),
                        first = t == 0 && dstate_in != nullptr ? -row.reach() : t;
          Staging staging = ConvStaging<S>(shape, kPart, 3);
          const auto g = Given<S>(row, dy, first - row.ahead, last + row.reach(), &staging);
          const auto from =
              Given<S>(row, x, t - row.reach() + row.ahead, last + row.ahead, &staging);
          const auto to = Wanted<S>(row, dx, t, last, &staging);
          BackwardTokens(row, g, dstate_out, reversed.data(), first, last, to, dstate_in);
          BackwardFilter(row, g, from, state_in, t, last,
                         part.data() + static_cast<size_t>(n) * size);
          Put<S>(row, to, t, last, dx);
        }
      });
  for (int64_t n = 1; n < parts; ++n) {
    for (size_t i = 0; i < size; ++i) part[i] += part[static_cast<size_t>(n) * size + i];
  }
  for (int64_t j = 0; j < shape.taps; ++j) {
    for (int64_t c = 0; c < shape.channels; ++c)
      dw[c * shape.taps + j] = static_cast<T>(part.empty() ? 0.0 : part[j * shape.channels + c]);
  }
}

#define CISTERN_CONV_ARGUMENTS(T)                                                                 \
  const ConvShape &shape, Rows<const T> x, const ComputeType<T>*w, const ComputeType<T>*state_in, \
      const RowMask &mask, Rows<T> y, ComputeType<T>*state_out
#define CISTERN_CONV_BACKWARD_ARGUMENTS(T)                                                    \
  const ConvShape &shape, Rows<const T> dy, const ComputeType<T>*dstate_out, Rows<const T> x, \
      const ComputeType<T>*w, const ComputeType<T>*state_in, const RowMask &mask, Rows<T> dx, \
      ComputeType<T>*dw, ComputeType<T>*dstate_in
#define CISTERN_SHORT_CONV(T, Suffix)                                                   \
  void Conv##Suffix(CISTERN_CONV_ARGUMENTS(T)) {                                        \
    ConvAll<T>(shape, x, w, state_in, mask, y, state_out);                              \
  }                                                                                     \
  void ConvBackward##Suffix(CISTERN_CONV_BACKWARD_ARGUMENTS(T)) {                       \
    ConvBackwardAll<T>(shape, dy, dstate_out, x, w, state_in, mask, dx, dw, dstate_in); \
  }
CISTERN_SHORT_CONV(float, Float)
CISTERN_SHORT_CONV(double, Double)
CISTERN_SHORT_CONV(BFloat16, BFloat16)
#undef CISTERN_SHORT_CONV

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(ConvFloat);
HWY_EXPORT(ConvDouble);
HWY_EXPORT(ConvBFloat16);
HWY_EXPORT(ConvBackwardFloat);
HWY_EXPORT(ConvBackwardDouble);
HWY_EXPORT(ConvBackwardBFloat16);

#define CISTERN_SHORT_CONV(T, Suffix)                                          \
  template <>                                                                  \
  void ShortConv(CISTERN_CONV_ARGUMENTS(T)) {                                  \
    CISTERN_DISPATCH(Conv##Suffix)(shape, x, w, state_in, mask, y, state_out); \
  }                                                                            \
  template <>                                                                  \
  void ShortConvBackward(CISTERN_CONV_BACKWARD_ARGUMENTS(T)) {                 \
    CISTERN_DISPATCH(ConvBackward##Suffix)                                     \
    (shape, dy, dstate_out, x, w, state_in, mask, dx, dw, dstate_in);          \
  }
CISTERN_SHORT_CONV(float, Float)
CISTERN_SHORT_CONV(double, Double)
CISTERN_SHORT_CONV(BFloat16, BFloat16)
#undef CISTERN_SHORT_CONV

}  // namespace cistern
#endif  // HWY_ONCE
