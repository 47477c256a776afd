#pragma once
// For tests: small instances of every registered mechanism, and their definitions in plain loops, written from the papers.
#include "cistern/attention/mechanism.h"
#include "cistern/ops/testing.h"

namespace cistern::testing {

inline constexpr int64_t kDim = 10, kHeads = 2, kWidth = kDim / kHeads;

inline Json SmallOptions(const std::string& name) {
  if (name == "latte") return Json{{"latents", 6}};
  if (name == "abc_mlp") return Json{{"slots", 3}};
  return Json::object();
}

inline std::shared_ptr<Mechanism> Small(const MechanismInfo& info) {
  AttentionDims dims;
  dims.dim = kDim, dims.heads = kHeads, dims.max_length = 64;
  return info.make(SmallOptions(info.name), dims);
}

// Projected tensors in declared order, [B,H,T,width/H], doubles that float holds.
inline std::vector<at::Tensor> Inputs(const Mechanism& m, int64_t batch, int64_t length, bool heads_last = false) {
  std::vector<at::Tensor> x;
  for (const Projection& p : m.Projections()) x.push_back(WithLayout(Normal({batch, kHeads, length, p.width / kHeads}), heads_last));
  return x;
}

// The definition for whole rows: token t sees tokens 0..t (causal) or all of them. x in declared order, doubles; queries come from x_query,
// which differs from x in cross attention alone.
inline at::Tensor Definition(const Mechanism& m, const std::vector<at::Tensor>& x_query, const std::vector<at::Tensor>& x, bool causal) {
  const std::string& name = m.info().name;
  const at::Tensor query = x_query[0].contiguous(), key = x[1].contiguous(), value = x[2].contiguous();
  const at::Tensor control = name == "abc_mlp" ? x[3].contiguous() : key;
  const int64_t B = query.size(0), H = query.size(1), T = query.size(2), S = key.size(2), d = value.size(3), n = control.size(3);
  at::Tensor out = at::zeros({B, H, T, d}, at::kDouble);
  auto q = query.accessor<double, 4>(), k = key.accessor<double, 4>(), v = value.accessor<double, 4>(), s = control.accessor<double, 4>(),
       o = out.accessor<double, 4>();
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t h = 0; h < H; ++h) {
      for (int64_t t = 0; t < T; ++t) {
        const int64_t seen = causal ? t + 1 : S;
        auto softmax = [](std::vector<double> e) {
          double sum = 0;
          for (double& x_i : e) sum += x_i = std::exp(x_i);
          for (double& x_i : e) x_i /= sum;
          return e;
        };
        if (name == "softmax") {
          std::vector<double> logits(seen);
          for (int64_t i = 0; i < seen; ++i) {
            for (int64_t j = 0; j < d; ++j) logits[i] += q[b][h][t][j] * k[b][h][i][j] / std::sqrt(double(d));
          }
          const std::vector<double> p = softmax(logits);
          for (int64_t i = 0; i < seen; ++i) {
            for (int64_t j = 0; j < d; ++j) o[b][h][t][j] += p[i] * v[b][h][i][j];
          }
          continue;
        }
        if (name != "latte" && name != "abc_mlp") {
          ADD_FAILURE() << "write the definition of " << name << " here";
          return out;
        }
        std::vector<double> logits(n);               // read weights before their softmax
        std::vector<std::vector<double>> values(n);  // what each slot holds
        for (int64_t l = 0; l < n; ++l) {
          std::vector<double> written(seen);
          for (int64_t i = 0; i < seen; ++i) written[i] = s[b][h][i][l];
          written = softmax(written);
          std::vector<double> slot_key(d);
          values[l].resize(d);
          for (int64_t i = 0; i < seen; ++i) {
            for (int64_t j = 0; j < d; ++j) {
              values[l][j] += written[i] * v[b][h][i][j];
              if (name == "abc_mlp") slot_key[j] += written[i] * k[b][h][i][j];
            }
          }
          if (name == "latte") logits[l] = q[b][h][t][l];
          for (int64_t j = 0; name == "abc_mlp" && j < d; ++j) logits[l] += q[b][h][t][j] * slot_key[j] / std::sqrt(double(d));
        }
        const std::vector<double> p = softmax(logits);
        for (int64_t l = 0; l < n; ++l) {
          for (int64_t j = 0; j < d; ++j) o[b][h][t][j] += p[l] * values[l][j];
        }
      }
    }
  }
  return out;
}

inline std::vector<at::Tensor> Narrow(const std::vector<at::Tensor>& x, int64_t begin, int64_t count) {
  std::vector<at::Tensor> y;
  for (const at::Tensor& t : x) y.push_back(t.narrow(2, begin, count));
  return y;
}
inline std::vector<at::Tensor> Row(const std::vector<at::Tensor>& x, int64_t row) {
  std::vector<at::Tensor> y;
  for (const at::Tensor& t : x) y.push_back(t.narrow(0, row, 1));
  return y;
}
inline std::vector<at::Tensor> To(const std::vector<at::Tensor>& x, at::ScalarType dtype) {
  std::vector<at::Tensor> y;
  for (const at::Tensor& t : x) y.push_back(t.to(dtype));
  return y;
}
inline std::vector<at::Tensor> Leaves(const std::vector<at::Tensor>& x) {
  std::vector<at::Tensor> y;
  for (const at::Tensor& t : x) y.push_back(Leaf(t));
  return y;
}

// Extends piece by piece, from the empty state or a given one; cuts begin with 0 and end with the length.
inline at::Tensor ExtendPieces(Mechanism& m, const std::vector<at::Tensor>& x, const std::vector<int64_t>& cuts, const ops::Mask& mask = {},
                               State* state_out = nullptr) {
  State state = m.EmptyState(x[0].size(0), x[0].options().requires_grad(false));
  std::vector<at::Tensor> outs;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    const int64_t begin = cuts[i], count = cuts[i + 1] - begin;
    ops::Mask piece;
    if (mask.lengths) piece.lengths = (*mask.lengths - begin).clamp(0, count);
    if (mask.starts) piece.starts = mask.starts->narrow(1, begin, count);
    outs.push_back(m.Extend(Narrow(x, begin, count), state, piece));
  }
  if (state_out) *state_out = state;
  return at::cat(outs, 2);
}

inline std::vector<int64_t> EachToken(int64_t length) {
  std::vector<int64_t> cuts;
  for (int64_t t = 0; t <= length; ++t) cuts.push_back(t);
  return cuts;
}

// What a packed batch of the tests holds: (row, first token, length) of each document.
struct Piece {
  int64_t row, begin, count;
};

}  // namespace cistern::testing
