#include "cistern/kernels/ref/short_conv_ref.h"

#include <algorithm>
#include <vector>

namespace cistern::ref {
namespace {

// Calls tap(t, j, i) for every token t, tap j and padded token i (state rows first: i = t + j +
// ahead) that meet; i < K-1 is the state. A document start cuts a tap off when it lies after the
// token the tap meets, up to and including t.
template <class Tap>
void ForEachTap(const ConvShape& shape, const RowMask& mask, int64_t b, Tap tap) {
  const int64_t T = shape.length, K = shape.taps,
                length = mask.lengths == nullptr ? T : mask.lengths[b];
  for (int64_t t = 0; t < length; ++t) {
    for (int64_t j = 0; j < K; ++j) {
      bool cut = t - (K - 1) + j + shape.ahead >= length;
      for (int64_t i = std::max<int64_t>(t - (K - 1) + j + 1, 0); mask.starts != nullptr && i <= t;
           ++i)
        cut |= mask.starts[b * T + i] != 0;
      if (!cut) tap(t, j, t + j + shape.ahead);
    }
  }
}

// Calls keep(i, p) for every row i of the new state that holds padded token p and no zeros.
template <class Keep>
void ForEachKept(const ConvShape& shape, const RowMask& mask, int64_t b, Keep keep) {
  const int64_t T = shape.length, K = shape.taps,
                length = mask.lengths == nullptr ? T : mask.lengths[b];
  int64_t last_start = -K;
  for (int64_t t = 0; mask.starts != nullptr && t < length; ++t) {
    if (mask.starts[b * T + t] != 0) last_start = t;
  }
  for (int64_t i = 0; i < K - 1; ++i) {
    if (length - (K - 1) + i >= last_start) keep(i, length + i);
  }
}

// The state, then the tokens: [K-1+T, C] of batch row b.
std::vector<double> WithState(const ConvShape& shape, const double* x, const double* state,
                              int64_t b) {
  const int64_t C = shape.channels, before = (shape.taps - 1) * C, own = shape.length * C;
  std::vector<double> padded(before + own);
  if (state != nullptr) std::copy_n(state + b * before, before, padded.begin());
  std::copy_n(x + b * own, own, padded.begin() + before);
  return padded;
}

}  // namespace

void ShortConv(const ConvShape& shape, const double* x, const double* w, const double* state_in,
               const RowMask& mask, double* y, double* state_out) {
  const int64_t C = shape.channels, K = shape.taps;
  std::fill_n(y, shape.batch * shape.length * C, 0.0);
  for (int64_t b = 0; b < shape.batch; ++b) {
    const std::vector<double> in = WithState(shape, x, state_in, b);
    ForEachTap(shape, mask, b, [&](int64_t t, int64_t j, int64_t i) {
      for (int64_t c = 0; c < C; ++c)
        y[(b * shape.length + t) * C + c] += w[c * K + j] * in[i * C + c];
    });
    if (state_out == nullptr) continue;
    std::fill_n(state_out + b * (K - 1) * C, (K - 1) * C, 0.0);
    ForEachKept(shape, mask, b, [&](int64_t i, int64_t p) {
      std::copy_n(&in[p * C], C, state_out + (b * (K - 1) + i) * C);
    });
  }
}

void ShortConvBackward(const ConvShape& shape, const double* dy, const double* dstate_out,
                       const double* x, const double* w, const double* state_in,
                       const RowMask& mask, double* dx, double* dw, double* dstate_in) {
  const int64_t C = shape.channels, K = shape.taps, T = shape.length;
  std::fill_n(dw, C * K, 0.0);
  for (int64_t b = 0; b < shape.batch; ++b) {
    const std::vector<double> in = WithState(shape, x, state_in, b);
    std::vector<double> din(in.size());
    ForEachTap(shape, mask, b, [&](int64_t t, int64_t j, int64_t i) {
      for (int64_t c = 0; c < C; ++c) {
        const double g = dy[(b * T + t) * C + c];
        din[i * C + c] += w[c * K + j] * g;
        dw[c * K + j] += in[i * C + c] * g;
      }
    });
    if (dstate_out != nullptr) {
      ForEachKept(shape, mask, b, [&](int64_t i, int64_t p) {
        for (int64_t c = 0; c < C; ++c) din[p * C + c] += dstate_out[(b * (K - 1) + i) * C + c];
      });
    }
    if (dstate_in != nullptr) std::copy_n(din.begin(), (K - 1) * C, dstate_in + b * (K - 1) * C);
    std::copy(din.begin() + (K - 1) * C, din.end(), dx + b * T * C);
  }
}

}  // namespace cistern::ref
