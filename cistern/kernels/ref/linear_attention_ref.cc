#include "cistern/kernels/ref/linear_attention_ref.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace cistern::ref {
namespace {

double Phi(const LinearRule& rule, double x) {
  if (rule.map == FeatureMap::kNone) return x;
  return (x > 0 ? x + 1 : std::exp(x)) + rule.map_eps;
}
double PhiSlope(const LinearRule& rule, double x) {
  return rule.map == FeatureMap::kNone || x > 0 ? 1 : std::exp(x);
}

// 1 / divisor, and the derivative of the divisor.
struct Division {
  double factor, slope;
};
Division DivisionBy(const LinearRule& rule, double z) {
  const double least = rule.value, size = std::abs(z);
  switch (rule.divisor) {
    case DivisorRule::kPlus:
      return {1 / (z + least), 1};
    case DivisorRule::kAtLeast:
      return z < least ? Division{1 / least, 0} : Division{1 / z, 1};
    case DivisorRule::kMagnitude:
      return size < least ? Division{1 / least, 0} : Division{1 / size, z < 0 ? -1.0 : 1.0};
    case DivisorRule::kSignSafe:
      return size < least ? Division{z < 0 ? -1 / least : 1 / least, 0} : Division{1 / z, 1};
    case DivisorRule::kNone:
      break;
  }
  return {rule.value, 0};
}

// One head: values with the column of ones, c columns of the memory.
struct Head {
  Head(const SlotShape& shape, const LinearRule& given, const RowMask& mask, int64_t index,
       const double* q_all, const double* k_all, const double* v_all)
      : rule(given),
        n(shape.slots),
        d(shape.width),
        c(given.Columns(shape.width)),
        T(shape.length),
        length(mask.lengths == nullptr ? T : mask.lengths[index / shape.heads]),
        starts(mask.starts == nullptr ? nullptr : mask.starts + index / shape.heads * T),
        q(q_all + index * T * n),
        k(k_all + index * T * n),
        v(v_all + index * T * d) {}

  bool StartsAt(int64_t t) const { return starts != nullptr && starts[t] != 0; }
  double Value(int64_t t, int64_t j) const { return j < d ? v[t * d + j] : 1; }
  void Write(int64_t t, double* M) const {
    if (StartsAt(t)) std::fill_n(M, n * c, 0.0);
    for (int64_t l = 0; l < n; ++l) {
      for (int64_t j = 0; j < c; ++j) M[l * c + j] += Phi(rule, k[t * n + l]) * Value(t, j);
    }
  }
  // phi(q_t) M, [c]
  std::vector<double> Read(int64_t t, const double* M) const {
    std::vector<double> sums(static_cast<size_t>(c));
    for (int64_t l = 0; l < n; ++l) {
      for (int64_t j = 0; j < c; ++j) sums[size_t(j)] += Phi(rule, q[t * n + l]) * M[l * c + j];
    }
    return sums;
  }

  LinearRule rule;
  int64_t n, d, c, T, length;
  const uint8_t* starts;
  const double *q, *k, *v;
};

}  // namespace

void LinearForward(const SlotShape& shape, const LinearRule& rule, const double* q, const double* k,
                   const double* v, const RowMask& mask, double* memory, double* out) {
  for (int64_t index = 0; index < shape.batch * shape.heads; ++index) {
    const Head head(shape, rule, mask, index, q, k, v);
    double* M = memory + index * head.n * head.c;
    for (int64_t t = 0; t < head.T; ++t) {
      double* const row = out + (index * head.T + t) * head.d;
      std::fill_n(row, head.d, 0.0);
      if (t >= head.length) continue;
      head.Write(t, M);
      const std::vector<double> sums = head.Read(t, M);
      for (int64_t j = 0; j < head.d; ++j)
        row[j] = sums[size_t(j)] * DivisionBy(rule, sums.back()).factor;
    }
  }
}

void LinearBackward(const SlotShape& shape, const LinearRule& rule, const double* q,
                    const double* k, const double* v, const RowMask& mask, const double* memory0,
                    const double* dout, const double* dmemory_T, double* dq, double* dk, double* dv,
                    double* dmemory0) {
  for (int64_t index = 0; index < shape.batch * shape.heads; ++index) {
    const Head head(shape, rule, mask, index, q, k, v);
    const int64_t n = head.n, d = head.d, c = head.c, size = n * c, first = index * head.T;
    std::fill_n(dq + first * n, head.T * n, 0.0);
    std::fill_n(dk + first * n, head.T * n, 0.0);
    std::fill_n(dv + first * d, head.T * d, 0.0);
    std::vector<double> M(memory0 + index * size, memory0 + (index + 1) * size), after;
    for (int64_t t = 0; t < head.length; ++t) {
      head.Write(t, M.data());
      after.insert(after.end(), M.begin(), M.end());
    }
    std::vector<double> G(static_cast<size_t>(size), 0.0);
    if (dmemory_T != nullptr) std::copy_n(dmemory_T + index * size, size, G.begin());
    for (int64_t t = head.length - 1; t >= 0; --t) {
      const double* const at = after.data() + t * size;
      const std::vector<double> sums = head.Read(t, at);
      const Division division = DivisionBy(rule, sums.back());
      std::vector<double> dsums(static_cast<size_t>(c));
      double along = 0;
      for (int64_t j = 0; j < d; ++j) {
        const double g = dout[(first + t) * d + j] * division.factor;
        dsums[size_t(j)] = g;
        along += g * sums[size_t(j)] * division.factor;
      }
      if (c > d) dsums.back() = -along * division.slope;
      for (int64_t l = 0; l < n; ++l) {
        const int64_t here = (first + t) * n + l;
        const double fq = Phi(rule, q[here]), fk = Phi(rule, k[here]);
        double to_q = 0, to_k = 0;
        for (int64_t j = 0; j < c; ++j) {
          double& grad = G[size_t(l * c + j)];
          to_q += at[l * c + j] * dsums[size_t(j)];
          grad += fq * dsums[size_t(j)];
          to_k += grad * head.Value(t, j);
          if (j < d) dv[(first + t) * d + j] += fk * grad;
        }
        dq[here] = to_q * PhiSlope(rule, q[here]);
        dk[here] = to_k * PhiSlope(rule, k[here]);
      }
      if (head.StartsAt(t)) std::fill(G.begin(), G.end(), 0.0);
    }
    std::copy(G.begin(), G.end(), dmemory0 + index * size);
  }
}

}  // namespace cistern::ref
