#include "cistern/kernels/ref/exact_attention_ref.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

namespace cistern::ref {
namespace {

struct Probability {
  int64_t key;
  double p, factor;  // of dropout
};

// Where row t of a [B,H,rows,width] array begins, head index i = b H + h.
int64_t At(int64_t i, int64_t rows, int64_t t, int64_t width) { return (i * rows + t) * width; }

// The keys that a query sees, with their probabilities.
std::vector<Probability> Probabilities(const AttentionShape& shape, double scale, const double* q,
                                       const double* k, const AttentionMask& mask, int64_t i,
                                       int64_t t) {
  const int64_t b = i / shape.heads;
  const KeyRange range =
      mask.ranges == nullptr ? KeyRange{0, shape.keys, 0} : mask.ranges[b * mask.range_batch + t];
  std::vector<double> factors(mask.dropout.Any() ? size_t(shape.keys) : 0);
  if (mask.dropout.Any()) {
    const int64_t head = mask.dropout.first_row * shape.heads + i;
    mask.dropout.Factors(uint64_t(head), t, shape.keys, factors.data());
  }
  std::vector<Probability> seen;
  double high = range.empty > 0 ? 0.0 : -std::numeric_limits<double>::infinity();
  for (int64_t j = range.begin; j < range.end; ++j) {
    if ((j - t) % shape.dilation != 0) continue;
    if (mask.valid != nullptr && mask.valid[b * shape.keys + j] == 0) continue;
    double score = 0;
    for (int64_t c = 0; c < shape.key_width; ++c) {
      score += q[At(i, shape.queries, t, shape.key_width) + c] *
               k[At(i, shape.keys, j, shape.key_width) + c];
    }
    seen.push_back({j, scale * score, factors.empty() ? 1.0 : factors[size_t(j)]});
    high = std::max(high, scale * score);
  }
  double sum = double(range.empty) * std::exp(-high);
  if (range.empty == 0) sum = 0;
  for (Probability& one : seen) sum += one.p = std::exp(one.p - high);
  for (Probability& one : seen) one.p /= sum;
  return seen;
}

}  // namespace

void AttentionForward(const AttentionShape& shape, double scale, const double* q, const double* k,
                      const double* v, const AttentionMask& mask, double* out) {
  const int64_t width = shape.value_width;
  for (int64_t i = 0; i < shape.batch * shape.heads; ++i) {
    for (int64_t t = 0; t < shape.queries; ++t) {
      double* const row = out + At(i, shape.queries, t, width);
      std::fill_n(row, width, 0.0);
      for (const Probability& seen : Probabilities(shape, scale, q, k, mask, i, t)) {
        for (int64_t c = 0; c < width; ++c)
          row[c] += seen.factor * seen.p * v[At(i, shape.keys, seen.key, width) + c];
      }
    }
  }
}

void AttentionBackward(const AttentionShape& shape, double scale, const double* q, const double* k,
                       const double* v, const double* d_out, const AttentionMask& mask, double* dq,
                       double* dk, double* dv) {
  const int64_t kw = shape.key_width, vw = shape.value_width, heads = shape.batch * shape.heads;
  std::fill_n(dq, heads * shape.queries * kw, 0.0);
  std::fill_n(dk, heads * shape.keys * kw, 0.0);
  std::fill_n(dv, heads * shape.keys * vw, 0.0);
  for (int64_t i = 0; i < heads; ++i) {
    for (int64_t t = 0; t < shape.queries; ++t) {
      const std::vector<Probability> seen = Probabilities(shape, scale, q, k, mask, i, t);
      const double* const g = d_out + At(i, shape.queries, t, vw);
      std::vector<double> dp(seen.size(), 0.0);
      double mean = 0;
      for (size_t n = 0; n < seen.size(); ++n) {
        const int64_t row = At(i, shape.keys, seen[n].key, vw);
        for (int64_t c = 0; c < vw; ++c) {
          dp[n] += g[c] * v[row + c];
          dv[row + c] += seen[n].factor * seen[n].p * g[c];
        }
        dp[n] *= seen[n].factor;
        mean += seen[n].p * dp[n];
      }
      for (size_t n = 0; n < seen.size(); ++n) {
        const double ds = scale * seen[n].p * (dp[n] - mean);
        const int64_t from = At(i, shape.queries, t, kw), to = At(i, shape.keys, seen[n].key, kw);
        for (int64_t c = 0; c < kw; ++c) {
          dq[from + c] += ds * k[to + c];
          dk[to + c] += ds * q[from + c];
        }
      }
    }
  }
}

}  // namespace cistern::ref
