#include "cistern/kernels/ref/sum_memory_ref.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace cistern::ref {
namespace {

// One head's tokens and weights, w and log_gate [T,n], u [T,d].
struct SumTokens {
  SumTokens(const SlotShape& shape, const RowMask& mask, int64_t index, const double* w_all,
            const double* u_all, const double* gate_all)
      : n(shape.slots),
        d(shape.width),
        T(shape.length),
        length(mask.lengths == nullptr ? T : mask.lengths[index / shape.heads]),
        starts(mask.starts == nullptr ? nullptr : mask.starts + index / shape.heads * T),
        w(w_all + index * T * n),
        u(u_all + index * T * d),
        log_gate(gate_all == nullptr ? nullptr : gate_all + index * T * n) {}

  // What token t keeps of slot l.
  double Gate(int64_t t, int64_t l) const {
    if (starts != nullptr && starts[t] != 0) return 0;
    return log_gate == nullptr ? 1 : std::exp(log_gate[t * n + l]);
  }

  // M_t from M_{t-1}, in place. A gate of 0 forgets whatever was there.
  void Write(int64_t t, double* M) const {
    for (int64_t l = 0; l < n; ++l) {
      const double gate = Gate(t, l);
      for (int64_t j = 0; j < d; ++j) {
        double& m = M[l * d + j];
        m = (gate == 0 ? 0 : gate * m) + w[t * n + l] * u[t * d + j];
      }
    }
  }

  int64_t n, d, T, length;
  const uint8_t* starts;
  const double *w, *u, *log_gate;
};

// out[j] = sum_l a[l] M[l,j]
void ReadRow(int64_t n, int64_t d, const double* a, const double* M, double* out) {
  std::fill_n(out, d, 0.0);
  for (int64_t l = 0; l < n; ++l) {
    for (int64_t j = 0; j < d; ++j) out[j] += a[l] * M[l * d + j];
  }
}

// out[l] = sum_j a[j] M[l,j]
void MatchRow(int64_t n, int64_t d, const double* a, const double* M, double* out) {
  for (int64_t l = 0; l < n; ++l) {
    out[l] = 0;
    for (int64_t j = 0; j < d; ++j) out[l] += a[j] * M[l * d + j];
  }
}

void ForwardAll(bool match, const SlotShape& shape, const double* a, const double* w,
                const double* u, const double* log_gate, const RowMask& mask, double* memory,
                double* out) {
  const int64_t n = shape.slots, d = shape.width, a_width = match ? d : n,
                out_width = match ? n : d;
  for (int64_t index = 0; index < shape.batch * shape.heads; ++index) {
    const SumTokens tokens(shape, mask, index, w, u, log_gate);
    double* M = memory + index * n * d;
    for (int64_t t = 0; t < tokens.T; ++t) {
      const int64_t row = index * tokens.T + t;
      if (t >= tokens.length) {
        std::fill_n(out + row * out_width, out_width, 0.0);
        continue;
      }
      tokens.Write(t, M);
      (match ? MatchRow : ReadRow)(n, d, a + row * a_width, M, out + row * out_width);
    }
  }
}

// a [B,H,T,n] and g [B,H,T,d] make the gradient G_t = gate_{t+1} G_{t+1} + a_t (x) g_t: (r, dout)
// of a read, (dx, q) of a match. da [B,H,T,n] = dr of a read, or dg [B,H,T,d] = dq of a match; the
// other one is null.
void BackwardAll(const SlotShape& shape, const double* a, const double* g, const double* w,
                 const double* u, const double* log_gate, const RowMask& mask,
                 const double* memory0, const double* dmemory_T, double* da, double* dg, double* dw,
                 double* du, double* dlog_gate, double* dmemory0) {
  const int64_t n = shape.slots, d = shape.width, T = shape.length;
  for (int64_t index = 0; index < shape.batch * shape.heads; ++index) {
    const SumTokens tokens(shape, mask, index, w, u, log_gate);
    const int64_t first = index * T;
    std::vector<double> M(memory0 + index * n * d, memory0 + (index + 1) * n * d),
        before;  // before: M_{t-1} of every t
    for (int64_t t = 0; t < T; ++t) {
      if (da != nullptr) std::fill_n(da + (first + t) * n, n, 0.0);
      if (dg != nullptr) std::fill_n(dg + (first + t) * d, d, 0.0);
      std::fill_n(dw + (first + t) * n, n, 0.0);
      std::fill_n(du + (first + t) * d, d, 0.0);
      if (dlog_gate != nullptr) std::fill_n(dlog_gate + (first + t) * n, n, 0.0);
      if (t >= tokens.length) continue;
      if (dlog_gate != nullptr) before.insert(before.end(), M.begin(), M.end());
      tokens.Write(t, M.data());
      if (da != nullptr) MatchRow(n, d, g + (first + t) * d, M.data(), da + (first + t) * n);
      if (dg != nullptr) ReadRow(n, d, a + (first + t) * n, M.data(), dg + (first + t) * d);
    }
    std::vector<double> G(n * d, 0.0);
    if (dmemory_T != nullptr) std::copy_n(dmemory_T + index * n * d, n * d, G.begin());
    for (int64_t t = tokens.length - 1; t >= 0; --t) {
      for (int64_t l = 0; l < n; ++l) {
        const int64_t at = (first + t) * n + l;
        const double gate = tokens.Gate(t, l);
        for (int64_t j = 0; j < d; ++j) {
          double& grad = G[l * d + j];
          grad += a[at] * g[(first + t) * d + j];
          du[(first + t) * d + j] += w[at] * grad;
          dw[at] += grad * u[(first + t) * d + j];
          grad = gate == 0 ? 0 : gate * grad;
          if (dlog_gate != nullptr && gate != 0)
            dlog_gate[at] += grad * before[(t * n + l) * d + j];
        }
      }
    }
    std::copy(G.begin(), G.end(), dmemory0 + index * n * d);
  }
}

}  // namespace

void SumRead(const SlotShape& shape, const double* r, const double* w, const double* v,
             const double* log_gate, const RowMask& mask, double* memory, double* out) {
  ForwardAll(false, shape, r, w, v, log_gate, mask, memory, out);
}

void SumMatch(const SlotShape& shape, const double* q, const double* w, const double* k,
              const double* log_gate, const RowMask& mask, double* memory, double* out) {
  ForwardAll(true, shape, q, w, k, log_gate, mask, memory, out);
}

void SumReadBackward(const SlotShape& shape, const double* r, const double* w, const double* v,
                     const double* log_gate, const RowMask& mask, const double* memory0,
                     const double* dout, const double* dmemory_T, double* dr, double* dw,
                     double* dv, double* dlog_gate, double* dmemory0) {
  BackwardAll(shape, r, dout, w, v, log_gate, mask, memory0, dmemory_T, dr, nullptr, dw, dv,
              dlog_gate, dmemory0);
}

void SumMatchBackward(const SlotShape& shape, const double* q, const double* w, const double* k,
                      const double* log_gate, const RowMask& mask, const double* memory0,
                      const double* dout, const double* dmemory_T, double* dq, double* dw,
                      double* dk, double* dlog_gate, double* dmemory0) {
  BackwardAll(shape, dout, q, w, k, log_gate, mask, memory0, dmemory_T, nullptr, dq, dw, dk,
              dlog_gate, dmemory0);
}

}  // namespace cistern::ref
