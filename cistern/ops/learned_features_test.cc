#include "cistern/ops/learned_features.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cistern/ops/exact_attention.h"
#include "cistern/ops/features_test.h"
#include "cistern/ops/impl.h"
#include "cistern/ops/tensor_rows.h"
#include "cistern/ops/testing.h"

namespace cistern::ops {
namespace {

using namespace cistern::testing;
using Tensors = std::vector<at::Tensor>;

constexpr double kScale = 0.7;

struct Problem {
  at::Tensor x, weights, bias;
};

// Fewer tokens than the kernel takes, as many and more, none, and as layers leave them.
std::vector<Problem> Problems() {
  at::manual_seed(1);
  return {{Normal({2, 3, 9, 7}), Normal({3, 11, 7}), Normal({3, 11})},
          {Normal({2, 3, 40, 7}), Normal({3, 11, 7}), Normal({3, 11})},
          {Normal({2, 3, 0, 7}), Normal({3, 11, 7}), Normal({3, 11})},
          {Normal({0, 3, 20, 7}), Normal({3, 11, 7}), Normal({3, 11})},
          {Normal({2, 33, 3, 16}).transpose(1, 2), Normal({3, 16, 16}), Normal({3, 16})}};
}

// The features, then the gradients of x, W and b.
Tensors All(const Problem& p, at::ScalarType type, at::ScalarType of_weights) {
  const Tensors leaves = {Leaf(p.x.to(type)), Leaf(p.weights.to(of_weights)),
                          Leaf(p.bias.to(of_weights))};
  const at::Tensor y = LearnedFeatures(leaves[0], leaves[1], leaves[2], kScale);
  EXPECT_EQ(y.scalar_type(), type);
  at::manual_seed(2);
  const at::Tensor g = at::randn(y.sizes(), at::kDouble).to(type);
  Tensors all = Gradients((y * g).sum(), leaves);
  all.insert(all.begin(), y.detach());
  return all;
}

TEST(LearnedFeatures, ImplementationsAgree) {
  for (const Problem& p : Problems())
    ExpectKernelIsComposite([&](at::ScalarType type) { return All(p, type, type); });
}

TEST(LearnedFeatures, TokensInHalfPrecision) {
  // Weights are rounded too where torch multiplies, and some features' signs with them.
  const double rounded = MultipliesBFloat16() ? 0.1 : 1e-2;
  for (Problem p : Problems()) {
    if (p.x.numel() == 0) continue;
    p.x = p.x.to(at::kBFloat16).to(at::kDouble);
    const Tensors want = All(p, at::kDouble, at::kDouble),
                  brain = All(p, at::kBFloat16, at::kFloat), half = All(p, at::kHalf, at::kHalf);
    for (size_t i = 0; i < want.size(); ++i) {
      ExpectClose(brain[i], want[i], rounded, "bfloat16");
      ExpectClose(half[i], want[i], 5e-2, "float16");
    }
  }
}

TEST(LearnedFeatures, SecondDerivatives) {
  const Problem p = Problems()[1];
  const auto second = [&](Impl impl) {
    const ImplScope scope(impl);
    const Tensors leaves = {Leaf(p.x), Leaf(p.weights), Leaf(p.bias)};
    const at::Tensor y = LearnedFeatures(leaves[0], leaves[1], leaves[2], kScale);
    const auto first = torch::autograd::grad({y.pow(3).sum()}, leaves, {}, true, true);
    return Gradients(first[0].square().sum() + first[1].square().sum() + first[2].square().sum(),
                     leaves);
  };
  const Tensors want = second(Impl::kComposite), got = second(Impl::kKernel);
  for (size_t i = 0; i < want.size(); ++i) ExpectClose(got[i], want[i], 1e-11, "second");
}

TEST(LearnedFeatures, Errors) {
  const Problem p = Problems()[1];
  const auto error = [&](const at::Tensor& x, const at::Tensor& weights, const at::Tensor& bias) {
    return Thrown([&] { LearnedFeatures(x, weights, bias, 1); });
  };
  ExpectContains(error(p.x[0], p.weights, p.bias), {"[learned_features]", "x [B,H,T,d]"});
  ExpectContains(error(p.x, p.weights[0], p.bias), {"weights [H,n,d]", "[2, 3, 40, 7]"});
  ExpectContains(error(p.x, p.weights, p.bias[0]), {"bias [H,n]", "[3, 11, 7]"});
  ExpectContains(error(p.x, p.weights.to(at::kFloat), p.bias), {"of Double", "got Float"});
}

}  // namespace
}  // namespace cistern::ops
