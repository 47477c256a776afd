#include "cistern/kernels/ref/slot_memory_ref.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace cistern::ref {
namespace {

constexpr double kEmpty = -std::numeric_limits<double>::infinity();

double LogAddExp(double a, double b) {
  if (a < b) std::swap(a, b);
  return b == kEmpty ? a : a + std::log1p(std::exp(b - a));
}

struct Head {
  Head(const SlotShape& shape, const RowMask& mask, int64_t index)
      : n(shape.slots),
        d(shape.width),
        T(shape.length),
        length(mask.lengths == nullptr ? T : mask.lengths[index / shape.heads]),
        starts(mask.starts == nullptr ? nullptr : mask.starts + index / shape.heads * T) {}
  bool StartsAt(int64_t t) const { return starts != nullptr && starts[t] != 0; }
  int64_t n, d, T, length;
  const uint8_t* starts;
};

// The state of one head: M [n,d], z [n].
struct State {
  State(const Head& head, const double* memory, const double* z)
      : n(head.n), d(head.d), M(memory, memory + head.n * head.d), z(z, z + head.n) {
    for (int64_t l = 0; l < n; ++l) {
      if (z[l] == kEmpty) std::fill_n(&M[l * d], d, 0.0);
    }
  }

  void Empty() {
    std::fill(M.begin(), M.end(), 0.0);
    std::fill(z.begin(), z.end(), kEmpty);
  }

  // z' = logaddexp(z, s), M' = M + e^{s - z'} (u - M).
  void Write(const double* s, const double* u) {
    for (int64_t l = 0; l < n; ++l) {
      if (s[l] == kEmpty) continue;
      z[l] = LogAddExp(z[l], s[l]);
      const double w = std::exp(s[l] - z[l]);
      for (int64_t j = 0; j < d; ++j) M[l * d + j] += w * (u[j] - M[l * d + j]);
    }
  }

  // out[j] = sum_l r[l] M[l,j]
  void Read(const double* r, double* out) const {
    std::fill_n(out, d, 0.0);
    for (int64_t l = 0; l < n; ++l) {
      for (int64_t j = 0; j < d; ++j) out[j] += r[l] * M[l * d + j];
    }
  }

  // out[l] = sum_j q[j] M[l,j]
  void Match(const double* q, double* out) const {
    for (int64_t l = 0; l < n; ++l) {
      out[l] = 0;
      for (int64_t j = 0; j < d; ++j) out[l] += q[j] * M[l * d + j];
    }
  }

  int64_t n, d;
  std::vector<double> M, z;
};

// Runs one head forward. `use(t, state)` sees the state after token t was written.
template <class Use>
void Forward(const Head& head, State& state, const double* s, const double* u, Use use) {
  for (int64_t t = 0; t < head.length; ++t) {
    if (head.StartsAt(t)) state.Empty();
    state.Write(s + t * head.n, u + t * head.d);
    use(t);
  }
}

// The reverse recurrence of spec 2.19. a, b [T,n]: read has r and dr, match has dx and x. g [T,d]:
// read has dout, match has q. G [n,d] and h [n] start as gradients of the state after all tokens
// and end as those of the state before.
void Reverse(const Head& head, const double* a, const double* b, const double* g, const double* s,
             const double* u, const double* dz, const double* z0, const std::vector<double>& z,
             std::vector<double>& G, std::vector<double>& h, double* ds, double* du) {
  const int64_t n = head.n, d = head.d;
  for (int64_t t = head.length - 1; t >= 0; --t) {
    std::fill_n(du + t * d, d, 0.0);
    for (int64_t l = 0; l < n; ++l) {
      const int64_t at = t * n + l;
      const double before = head.StartsAt(t) ? kEmpty : t > 0 ? z[at - n] : z0[l];
      ds[at] = 0;
      if (z[at] != kEmpty) {
        for (int64_t j = 0; j < d; ++j) G[l * d + j] += a[at] * g[t * d + j];
        h[l] += a[at] * b[at] - (dz == nullptr ? 0.0 : dz[at]);
      }
      if (s[at] != kEmpty) {
        const double w = std::exp(s[at] - z[at]);
        double dot = 0;
        for (int64_t j = 0; j < d; ++j) {
          du[t * d + j] += w * G[l * d + j];
          dot += G[l * d + j] * u[t * d + j];
        }
        ds[at] = w * (dot - h[l]);
      }
      const double c = before == kEmpty ? 0.0 : std::exp(before - z[at]);
      for (int64_t j = 0; j < d; ++j) G[l * d + j] *= c;
      h[l] *= c;
    }
  }
}

struct Problem {
  const double *s, *u, *memory0, *z0, *dz_out, *dmemory_T, *dz_T;
  double *ds, *du, *dmemory0, *dz0;
};

// One head backward. `fill(t, state)` computes the forward's part: read's dr, match's x (into b)
// and dq.
template <class Fill>
void Backward(const SlotShape& shape, const RowMask& mask, int64_t index, const Problem& p,
              const double* a, const double* b, const double* g, Fill fill) {
  const Head head(shape, mask, index);
  const int64_t n = head.n, d = head.d, N = index * n, ND = N * d, TN = N * head.T,
                TD = index * head.T * d;
  State state(head, p.memory0 + ND, p.z0 + N);
  std::vector<double> z(head.T * n);
  Forward(head, state, p.s + TN, p.u + TD, [&](int64_t t) {
    std::copy(state.z.begin(), state.z.end(), z.begin() + t * n);
    fill(t, state);
  });
  std::vector<double> G(n * d), h(n);
  for (int64_t l = 0; l < n; ++l) {
    if (p.dz_T != nullptr) h[l] = -p.dz_T[N + l];
    if (p.dmemory_T == nullptr) continue;
    for (int64_t j = 0; j < d; ++j) {
      G[l * d + j] = p.dmemory_T[ND + l * d + j];
      h[l] += G[l * d + j] * state.M[l * d + j];
    }
  }
  Reverse(head, a, b, g, p.s + TN, p.u + TD, p.dz_out == nullptr ? nullptr : p.dz_out + TN,
          p.z0 + N, z, G, h, p.ds + TN, p.du + TD);
  std::fill(p.ds + TN + head.length * n, p.ds + TN + head.T * n, 0.0);
  std::fill(p.du + TD + head.length * d, p.du + TD + head.T * d, 0.0);
  for (int64_t l = 0; l < n; ++l) {
    const bool empty = p.z0[N + l] == kEmpty;
    double dz0 = -h[l];
    for (int64_t j = 0; j < d; ++j) {
      const double grad = empty ? 0.0 : G[l * d + j];
      if (p.dmemory0 != nullptr) p.dmemory0[ND + l * d + j] = grad;
      if (!empty) dz0 += grad * p.memory0[ND + l * d + j];
    }
    if (p.dz0 != nullptr) p.dz0[N + l] = empty ? 0.0 : dz0;
  }
}

// One head forward; `width` columns of out per token, computed by use(t, state).
template <class Use>
void Run(const SlotShape& shape, const RowMask& mask, int64_t index, const double* s,
         const double* u, double* memory, double* z, double* out, int64_t width, double* z_out,
         Use use) {
  const Head head(shape, mask, index);
  const int64_t n = head.n, d = head.d;
  State state(head, memory + index * n * d, z + index * n);
  std::fill_n(out + index * head.T * width, head.T * width, 0.0);
  if (z_out != nullptr) std::fill_n(z_out + index * head.T * n, head.T * n, 0.0);
  Forward(head, state, s + index * head.T * n, u + index * head.T * d, [&](int64_t t) {
    use(t, state, out + (index * head.T + t) * width);
    if (z_out != nullptr)
      std::copy(state.z.begin(), state.z.end(), z_out + (index * head.T + t) * n);
  });
  std::copy(state.M.begin(), state.M.end(), memory + index * n * d);
  std::copy(state.z.begin(), state.z.end(), z + index * n);
}

// r = softmax(x + z) over the slots that hold something; zeros where none has x > -inf.
void FavorWeights(int64_t n, const double* x, const double* z, double* r) {
  double most = kEmpty, sum = 0;
  for (int64_t l = 0; l < n; ++l) {
    if (z[l] != kEmpty) most = std::max(most, x[l] + z[l]);
  }
  for (int64_t l = 0; l < n; ++l) {
    r[l] = z[l] == kEmpty || most == kEmpty ? 0.0 : std::exp(x[l] + z[l] - most);
    sum += r[l];
  }
  for (int64_t l = 0; l < n && sum != 0; ++l) r[l] /= sum;
}

}  // namespace

void SlotRead(const SlotShape& shape, const double* r, const double* s, const double* v,
              const RowMask& mask, double* memory, double* z, double* out, double* z_out) {
  for (int64_t i = 0; i < shape.batch * shape.heads; ++i) {
    Run(shape, mask, i, s, v, memory, z, out, shape.width, z_out,
        [&](int64_t t, const State& state, double* row) {
          state.Read(r + (i * shape.length + t) * shape.slots, row);
        });
  }
}

void SlotMatch(const SlotShape& shape, const double* q, const double* s, const double* k,
               const RowMask& mask, double* memory, double* z, double* out, double* z_out) {
  for (int64_t i = 0; i < shape.batch * shape.heads; ++i) {
    Run(shape, mask, i, s, k, memory, z, out, shape.slots, z_out,
        [&](int64_t t, const State& state, double* row) {
          state.Match(q + (i * shape.length + t) * shape.width, row);
        });
  }
}

void SlotReadBackward(const SlotShape& shape, const double* r, const double* s, const double* v,
                      const RowMask& mask, const double* memory0, const double* z0,
                      const double* dout, const double* dz_out, const double* dmemory_T,
                      const double* dz_T, double* dr, double* ds, double* dv, double* dmemory0,
                      double* dz0) {
  const Problem p{s, v, memory0, z0, dz_out, dmemory_T, dz_T, ds, dv, dmemory0, dz0};
  const int64_t n = shape.slots, d = shape.width;
  std::fill_n(dr, shape.batch * shape.heads * shape.length * n, 0.0);
  for (int64_t i = 0; i < shape.batch * shape.heads; ++i) {
    const int64_t first = i * shape.length;
    Backward(shape, mask, i, p, r + first * n, dr + first * n, dout + first * d,
             [&](int64_t t, const State& state) {
               state.Match(dout + (first + t) * d, dr + (first + t) * n);
             });
  }
}

void SlotMatchBackward(const SlotShape& shape, const double* q, const double* s, const double* k,
                       const RowMask& mask, const double* memory0, const double* z0,
                       const double* dout, const double* dz_out, const double* dmemory_T,
                       const double* dz_T, double* dq, double* ds, double* dk, double* dmemory0,
                       double* dz0) {
  const Problem p{s, k, memory0, z0, dz_out, dmemory_T, dz_T, ds, dk, dmemory0, dz0};
  const int64_t n = shape.slots, d = shape.width;
  std::fill_n(dq, shape.batch * shape.heads * shape.length * d, 0.0);
  std::vector<double> x(shape.length * n);
  for (int64_t i = 0; i < shape.batch * shape.heads; ++i) {
    const int64_t first = i * shape.length;
    Backward(shape, mask, i, p, dout + first * n, x.data(), q + first * d,
             [&](int64_t t, const State& state) {
               state.Match(q + (first + t) * d, x.data() + t * n);
               state.Read(dout + (first + t) * n, dq + (first + t) * d);
             });
  }
}

void FavorRead(const SlotShape& shape, const double* x, const double* s, const double* v,
               const RowMask& mask, double* memory, double* z, double* out) {
  const int64_t n = shape.slots;
  std::vector<double> r(n);
  for (int64_t i = 0; i < shape.batch * shape.heads; ++i) {
    Run(shape, mask, i, s, v, memory, z, out, shape.width, nullptr,
        [&](int64_t t, const State& state, double* row) {
          FavorWeights(n, x + (i * shape.length + t) * n, state.z.data(), r.data());
          state.Read(r.data(), row);
        });
  }
}

void FavorReadBackward(const SlotShape& shape, const double* x, const double* s, const double* v,
                       const RowMask& mask, const double* memory0, const double* z0,
                       const double* dout, const double* dmemory_T, const double* dz_T, double* dx,
                       double* ds, double* dv, double* dmemory0, double* dz0) {
  // z enters the softmax beside x, so the gradient of each position's z is dx there.
  const Problem p{s, v, memory0, z0, dx, dmemory_T, dz_T, ds, dv, dmemory0, dz0};
  const int64_t n = shape.slots, d = shape.width, T = shape.length;
  std::fill_n(dx, shape.batch * shape.heads * T * n, 0.0);
  std::vector<double> r(T * n), dr(T * n);
  for (int64_t i = 0; i < shape.batch * shape.heads; ++i) {
    const int64_t first = i * T;
    Backward(shape, mask, i, p, r.data(), dr.data(), dout + first * d,
             [&](int64_t t, const State& state) {
               double *rt = r.data() + t * n, *drt = dr.data() + t * n, dot = 0;
               FavorWeights(n, x + (first + t) * n, state.z.data(), rt);
               state.Match(dout + (first + t) * d, drt);
               for (int64_t l = 0; l < n; ++l) dot += rt[l] * drt[l];
               for (int64_t l = 0; l < n; ++l)
                 dx[(first + t) * n + l] = rt[l] == 0 ? 0 : rt[l] * (drt[l] - dot);
             });
  }
}

}  // namespace cistern::ref
