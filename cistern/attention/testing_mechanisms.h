#pragma once
// For tests: small instances of every registered mechanism.
#include "cistern/attention/mechanism.h"
#include "cistern/ops/testing.h"

namespace cistern::testing {

inline constexpr int64_t kDim = 10, kHeads = 2, kWidth = kDim / kHeads;

// In evaluation and in double; To(m, kFloat) rounds nothing, because the parameters are made in
// float.
inline std::shared_ptr<Mechanism> Small(const MechanismInfo& info, size_t number = 0) {
  AttentionDims dims;
  dims.dim = kDim, dims.heads = kHeads, dims.max_length = 256;
  const auto m = info.Make(info.cases.at(number), dims);
  m->eval();
  m->to(at::kDouble);
  return m;
}

// Projected tensors in declared order, [B,H,T,width/H], doubles that float holds.
inline std::vector<at::Tensor> Inputs(const Mechanism& m, int64_t batch, int64_t length,
                                      bool heads_last = false) {
  std::vector<at::Tensor> x;
  for (const Projection& p : m.Projections()) {
    if (!p.OfTokens()) continue;
    const int64_t heads = p.heads > 0 ? p.heads : kHeads;
    x.push_back(WithLayout(Normal({batch, heads, length, p.width / heads}), heads_last));
  }
  return x;
}

inline std::vector<at::Tensor> Narrow(const std::vector<at::Tensor>& x, int64_t begin,
                                      int64_t count) {
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

// Extends piece by piece, from the empty state or a given one; cuts begin with 0 and end with the
// length.
inline at::Tensor ExtendPieces(Mechanism& m, const std::vector<at::Tensor>& x,
                               const std::vector<int64_t>& cuts, const ops::Mask& mask = {},
                               State* state_out = nullptr) {
  State state = m.EmptyState(x[0].size(0), x[0].options().requires_grad(false));
  std::vector<at::Tensor> outs;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    const int64_t begin = cuts[i], count = cuts[i + 1] - begin;
    outs.push_back(m.Extend(Narrow(x, begin, count), state, mask.Narrow(begin, count)));
  }
  if (state_out) *state_out = state;
  return at::cat(outs, 2);
}

// The gradients of the inputs, given that of the output, and the output in one form, from nothing.
inline std::vector<at::Tensor> GradientsAndOutput(Mechanism& m, Form form,
                                                  const std::vector<at::Tensor>& x,
                                                  const ops::Mask& mask, const at::Tensor& g) {
  const std::vector<at::Tensor> leaves = Leaves(x);
  const at::Tensor out = form == Form::kCausal ? ExtendPieces(m, leaves, {0, x[0].size(2)}, mask)
                                               : m.Bidirectional(leaves, mask);
  std::vector<at::Tensor> all = Gradients((out * g).sum(), leaves);
  all.push_back(out.detach());
  return all;
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
