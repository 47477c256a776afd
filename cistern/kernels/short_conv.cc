#include "cistern/kernels/short_conv.h"

#include <algorithm>
#include <vector>

#include "cistern/base/parallel.h"
#include "cistern/kernels/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cistern/kernels/short_conv.cc"
#include "hwy/foreach_target.h"  // must come before highway.h

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace cistern {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// y[0..count) += w * x
template <class T>
HWY_INLINE void AddProduct(size_t count, const T* w, const T* x, T* y) {
  const hn::ScalableTag<T> d;
  const size_t lanes = hn::Lanes(d);
  size_t c = 0;
  for (; c + lanes <= count; c += lanes) hn::StoreU(hn::MulAdd(hn::LoadU(d, w + c), hn::LoadU(d, x + c), hn::LoadU(d, y + c)), d, y + c);
  for (; c < count; ++c) y[c] += w[c] * x[c];
}

// One batch row seen from the filter. Tap j of token t meets token t - (K-1) + j; negative tokens are rows of the state.
struct ConvTokens {
  ConvTokens(const ConvShape& shape, const RowMask& mask, int64_t b)
      : length(mask.lengths == nullptr ? shape.length : mask.lengths[b]),
        starts(mask.starts == nullptr ? nullptr : mask.starts + b * shape.length),
        reach(shape.taps - 1) {}

  // The earliest token that a tap of t may meet: not before t's document, nor before the state.
  int64_t First(int64_t t) const {
    const int64_t earliest = t - reach;
    if (starts != nullptr) {
      for (int64_t i = t; i >= std::max<int64_t>(earliest, 0); --i) {
        if (starts[i] != 0) return i;
      }
    }
    return earliest;
  }
  int64_t length;
  const uint8_t* starts;
  int64_t reach;  // K - 1
};

template <class T>
void ForwardRows(const ConvShape& shape, const Rows<const T>& x, const T* wt, const T* state, const RowMask& mask, int64_t b, int64_t begin,
                 int64_t end, const Rows<T>& y) {
  const ConvTokens tokens(shape, mask, b);
  const size_t channels = static_cast<size_t>(shape.channels);
  for (int64_t t = begin; t < end; ++t) {
    T* out = y.At(b, 0, t);
    std::fill_n(out, channels, T{0});
    if (t >= tokens.length) continue;
    for (int64_t i = tokens.First(t); i <= t; ++i) {
      const T* in = i >= 0 ? x.At(b, 0, i) : state == nullptr ? nullptr : state + (b * tokens.reach + tokens.reach + i) * shape.channels;
      if (in != nullptr) AddProduct(channels, wt + (i - t + tokens.reach) * shape.channels, in, out);
    }
  }
}

// state_out[i] = token length - (K-1) + i, or zero before the last document start. Ascending, so state_out may be state_in.
template <class T>
void NextState(const ConvShape& shape, const Rows<const T>& x, const T* state_in, const RowMask& mask, int64_t b, T* state_out) {
  const ConvTokens tokens(shape, mask, b);
  const int64_t first = tokens.length > 0 ? tokens.First(tokens.length - 1) : -tokens.reach;
  for (int64_t i = 0; i < tokens.reach; ++i) {
    const int64_t t = tokens.length - tokens.reach + i;
    const T* from = t < first             ? nullptr
                    : t >= 0              ? x.At(b, 0, t)
                    : state_in == nullptr ? nullptr
                                          : state_in + (b * tokens.reach + tokens.reach + t) * shape.channels;
    T* to = state_out + (b * tokens.reach + i) * shape.channels;
    for (int64_t c = 0; c < shape.channels; ++c) to[c] = from == nullptr ? T{0} : from[c];
  }
}

template <class T>
void ConvAll(const ConvShape& shape, const Rows<const T>& x, const T* w, const T* state_in, const RowMask& mask, const Rows<T>& y,
             T* state_out) {
  constexpr int64_t kBlock = 256;                                       // tokens of one job
  std::vector<T> wt(static_cast<size_t>(shape.taps * shape.channels));  // [K, C]
  for (int64_t c = 0; c < shape.channels; ++c) {
    for (int64_t j = 0; j < shape.taps; ++j) wt[j * shape.channels + c] = w[c * shape.taps + j];
  }
  const int64_t blocks = (shape.length + kBlock - 1) / kBlock;
  const int64_t work = std::min(kBlock, shape.length) * shape.taps * shape.channels;
  ParallelFor(shape.batch * blocks, 65536 / (work + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t job = begin; job < end; ++job) {
      const int64_t t = job % blocks * kBlock;
      ForwardRows(shape, x, wt.data(), state_in, mask, job / blocks, t, std::min(t + kBlock, shape.length), y);
    }
  });
  if (state_out == nullptr) return;
  for (int64_t b = 0; b < shape.batch; ++b) NextState(shape, x, state_in, mask, b, state_out);
}

constexpr int64_t kChannels = 64;  // of one backward job, which sees all tokens: dw needs no sum over threads

// Channels [c0, c0 + count) of everything. wt, dwt: [K, kChannels].
template <class T>
void BackwardChannels(const ConvShape& shape, const Rows<const T>& dy, const T* dstate_out, const Rows<const T>& x, const T* w,
                      const T* state_in, const RowMask& mask, const Rows<T>& dx, T* dw, T* dstate_in, int64_t c0, size_t count) {
  constexpr int64_t kBlock = 64;  // dw is summed in T within that many tokens, in double beyond
  const int64_t C = shape.channels, K = shape.taps;
  std::vector<T> wt(static_cast<size_t>(K * kChannels)), part(wt.size());
  std::vector<double> dwt(wt.size());
  for (int64_t j = 0; j < K; ++j) {
    for (size_t c = 0; c < count; ++c) wt[j * kChannels + c] = w[(c0 + c) * K + j];
  }
  const auto flush = [&] {
    for (size_t i = 0; i < part.size(); ++i) dwt[i] += static_cast<double>(part[i]);
    std::fill(part.begin(), part.end(), T{0});
  };
  for (int64_t b = 0; b < shape.batch; ++b) {
    const ConvTokens tokens(shape, mask, b);
    const int64_t reach = tokens.reach;
    const auto state_row = [&](auto* state, int64_t t) { return state + (b * reach + reach + t) * C + c0; };
    for (int64_t t = 0; t < shape.length; ++t) std::fill_n(dx.At(b, 0, t) + c0, count, T{0});
    if (dstate_in != nullptr) {
      for (int64_t t = -reach; t < 0; ++t) std::fill_n(state_row(dstate_in, t), count, T{0});
    }
    if (dstate_out != nullptr) {
      const int64_t first = tokens.length > 0 ? tokens.First(tokens.length - 1) : -reach;
      for (int64_t t = std::max(first, tokens.length - reach); t < tokens.length; ++t) {
        T* to = t >= 0 ? dx.At(b, 0, t) + c0 : dstate_in == nullptr ? nullptr : state_row(dstate_in, t);
        if (to != nullptr) std::copy_n(dstate_out + (b * reach + reach + t - tokens.length) * C + c0, count, to);
      }
    }
    for (int64_t t = 0; t < tokens.length; ++t) {
      const T* g = dy.At(b, 0, t) + c0;
      for (int64_t i = tokens.First(t); i <= t; ++i) {
        const int64_t j = i - t + reach;
        const T* in = i >= 0 ? x.At(b, 0, i) + c0 : state_in == nullptr ? nullptr : state_row(state_in, i);
        T* to = i >= 0 ? dx.At(b, 0, i) + c0 : dstate_in == nullptr ? nullptr : state_row(dstate_in, i);
        if (in != nullptr) AddProduct(count, g, in, part.data() + j * kChannels);
        if (to != nullptr) AddProduct(count, wt.data() + j * kChannels, g, to);
      }
      if (t % kBlock == kBlock - 1) flush();
    }
    flush();
  }
  for (int64_t j = 0; j < K; ++j) {
    for (size_t c = 0; c < count; ++c) dw[(c0 + c) * K + j] = static_cast<T>(dwt[j * kChannels + c]);
  }
}

template <class T>
void ConvBackwardAll(const ConvShape& shape, const Rows<const T>& dy, const T* dstate_out, const Rows<const T>& x, const T* w,
                     const T* state_in, const RowMask& mask, const Rows<T>& dx, T* dw, T* dstate_in) {
  const int64_t work = shape.batch * shape.length * shape.taps * std::min(kChannels, shape.channels);
  ParallelFor((shape.channels + kChannels - 1) / kChannels, 65536 / (work + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t job = begin; job < end; ++job) {
      const int64_t c0 = job * kChannels, count = std::min(kChannels, shape.channels - c0);
      BackwardChannels(shape, dy, dstate_out, x, w, state_in, mask, dx, dw, dstate_in, c0, static_cast<size_t>(count));
    }
  });
}

#define CISTERN_SHORT_CONV(Suffix, T)                                                                                                      \
  void Conv##Suffix(const ConvShape& shape, Rows<const T> x, const T* w, const T* state_in, const RowMask& mask, Rows<T> y,                \
                    T* state_out) {                                                                                                        \
    ConvAll<T>(shape, x, w, state_in, mask, y, state_out);                                                                                 \
  }                                                                                                                                        \
  void ConvBackward##Suffix(const ConvShape& shape, Rows<const T> dy, const T* dstate_out, Rows<const T> x, const T* w, const T* state_in, \
                            const RowMask& mask, Rows<T> dx, T* dw, T* dstate_in) {                                                        \
    ConvBackwardAll<T>(shape, dy, dstate_out, x, w, state_in, mask, dx, dw, dstate_in);                                                    \
  }
CISTERN_SHORT_CONV(Float, float)
CISTERN_SHORT_CONV(Double, double)
#undef CISTERN_SHORT_CONV

}  // namespace HWY_NAMESPACE
}  // namespace cistern
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace cistern {

HWY_EXPORT(ConvFloat);
HWY_EXPORT(ConvDouble);
HWY_EXPORT(ConvBackwardFloat);
HWY_EXPORT(ConvBackwardDouble);

template <>
void ShortConv(const ConvShape& shape, Rows<const float> x, const float* w, const float* state_in, const RowMask& mask, Rows<float> y,
               float* state_out) {
  CISTERN_DISPATCH(ConvFloat)(shape, x, w, state_in, mask, y, state_out);
}
template <>
void ShortConv(const ConvShape& shape, Rows<const double> x, const double* w, const double* state_in, const RowMask& mask, Rows<double> y,
               double* state_out) {
  CISTERN_DISPATCH(ConvDouble)(shape, x, w, state_in, mask, y, state_out);
}
template <>
void ShortConvBackward(const ConvShape& shape, Rows<const float> dy, const float* dstate_out, Rows<const float> x, const float* w,
                       const float* state_in, const RowMask& mask, Rows<float> dx, float* dw, float* dstate_in) {
  CISTERN_DISPATCH(ConvBackwardFloat)(shape, dy, dstate_out, x, w, state_in, mask, dx, dw, dstate_in);
}
template <>
void ShortConvBackward(const ConvShape& shape, Rows<const double> dy, const double* dstate_out, Rows<const double> x, const double* w,
                       const double* state_in, const RowMask& mask, Rows<double> dx, double* dw, double* dstate_in) {
  CISTERN_DISPATCH(ConvBackwardDouble)(shape, dy, dstate_out, x, w, state_in, mask, dx, dw, dstate_in);
}

}  // namespace cistern
#endif  // HWY_ONCE
