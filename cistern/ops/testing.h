#pragma once
// Helpers for the tests of the torch layers.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "cistern/base/parallel.h"
#include "cistern/base/testing_messages.h"
#include "cistern/ops/impl.h"

namespace cistern::testing {

inline constexpr double kInf = std::numeric_limits<double>::infinity();
// One thread: the tests' tensors are tiny, and on a busy machine idle threads that spin make them
// fifty times slower.
inline const bool kOneThread = (SetNumThreads(1), true);

inline constexpr ops::Impl kImpls[] = {ops::Impl::kKernel, ops::Impl::kComposite,
                                       ops::Impl::kReference};

// Normal numbers that float holds exactly, as doubles: every precision then computes the same
// problem.
inline at::Tensor Normal(at::IntArrayRef sizes, double scale = 1) {
  return (at::randn(sizes, at::kDouble) * scale).to(at::kFloat).to(at::kDouble);
}

inline at::Tensor Lengths(const std::vector<int64_t>& lengths) {
  return at::tensor(lengths, at::kLong);
}

// [B,T] bool, true at the given (row, token).
inline at::Tensor Starts(int64_t batch, int64_t length,
                         const std::vector<std::pair<int64_t, int64_t>>& at_) {
  at::Tensor starts = at::zeros({batch, length}, at::kBool);
  for (const auto& [b, t] : at_)
    starts.index_put_({at::tensor({b}), at::tensor({t})}, at::ones({}, at::kBool));
  return starts;
}

// The same numbers in [B,T,H,w] memory with spare columns, when asked.
inline at::Tensor WithLayout(const at::Tensor& x, bool heads_last) {
  if (!heads_last) return x.contiguous();
  at::Tensor memory =
      at::full({x.size(0), x.size(2), x.size(1) * x.size(3) + 3}, std::nan(""), x.options());
  at::Tensor view = memory.narrow(2, 0, x.size(1) * x.size(3))
                        .view({x.size(0), x.size(2), x.size(1), x.size(3)})
                        .transpose(1, 2);
  view.copy_(x.detach());
  return view;
}

inline at::Tensor Leaf(const at::Tensor& x) { return x.detach().requires_grad_(true); }

// |a - b| / |b| in root mean square; where b is all zero, |a| / scale, or |a| must be zero too
// (scale 0). Infinities have to be in the same places.
inline double RelRms(const at::Tensor& a_in, const at::Tensor& b_in, double scale = 0) {
  at::Tensor a = a_in.detach().to(at::kDouble), b = b_in.detach().to(at::kDouble);
  if (a.sizes() != b.sizes()) return kInf;
  const at::Tensor infinite = b.isinf();
  if (!at::equal(a.masked_select(infinite), b.masked_select(infinite))) return kInf;
  a = a.masked_fill(infinite, 0.0), b = b.masked_fill(infinite, 0.0);
  const double difference = (a - b).norm().item<double>(), size = b.norm().item<double>();
  if (std::isnan(difference)) return kInf;
  return difference == 0 ? 0 : difference / std::max(size > 0 ? size : scale, 1e-300);
}
// scale: the size of what sums to `want` where that is exactly zero, which rounding need not be.
inline void ExpectClose(const at::Tensor& got, const at::Tensor& want, double tolerance,
                        const std::string& what, double scale = 0) {
  EXPECT_LE(RelRms(got, want, scale), tolerance) << what;
}
inline void ExpectSameBits(const at::Tensor& got, const at::Tensor& want, const std::string& what) {
  EXPECT_TRUE(at::equal(got, want)) << what << ": relative difference " << RelRms(got, want);
}

// Gradients of f's scalar, in the order of x (zeros where there is none).
inline std::vector<at::Tensor> Gradients(const at::Tensor& loss, const std::vector<at::Tensor>& x) {
  std::vector<at::Tensor> g = torch::autograd::grad({loss}, x, {}, true, false, true);
  for (size_t i = 0; i < g.size(); ++i) {
    if (!g[i].defined()) g[i] = at::zeros_like(x[i]);
  }
  return g;
}

// Central differences along random directions, one for each input, in double. Infinite entries of
// an input stay where they are.
inline void ExpectGradientsMatchDifferences(
    const std::function<at::Tensor(const std::vector<at::Tensor>&)>& f,
    const std::vector<at::Tensor>& x, const std::string& what, double tolerance = 2e-7) {
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& t : x) leaves.push_back(Leaf(t));
  const std::vector<at::Tensor> g = Gradients(f(leaves), leaves);
  at::NoGradGuard guard;
  for (size_t i = 0; i < x.size(); ++i) {
    const at::Tensor direction = at::randn_like(x[i]).masked_fill(x[i].isinf(), 0.0);
    const double step = 1e-5;
    std::vector<at::Tensor> moved = x;
    moved[i] = x[i] + step * direction;
    const double up = f(moved).item<double>();
    moved[i] = x[i] - step * direction;
    const double down = f(moved).item<double>(), want = (up - down) / (2 * step);
    const double got = (g[i] * direction).sum().item<double>();
    const double size = (g[i] * direction).norm().item<double>() + std::abs(want);
    EXPECT_NEAR(got, want, tolerance * std::max(1.0, size)) << what << ", input " << i;
  }
}

}  // namespace cistern::testing
