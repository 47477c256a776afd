#include "cistern/ops/fourier_features.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cistern/ops/features_test.h"
#include "cistern/ops/impl.h"
#include "cistern/ops/tensor_rows.h"
#include "cistern/ops/testing.h"

namespace cistern::ops {
namespace {

using namespace cistern::testing;
using Tensors = std::vector<at::Tensor>;

struct Problem {
  at::Tensor x, scale, matrices;
  bool normalise;
};

std::vector<Problem> Problems() {
  at::manual_seed(1);
  std::vector<Problem> all;
  for (const bool normalise : {false, true}) {
    for (const bool scaled : {false, true}) {
      all.push_back({Normal({2, 3, 9, 7}), scaled ? Normal({3, 1, 7}) : at::Tensor(),
                     Normal({3, 11, 7}), normalise});
    }
  }
  all.push_back({Normal({2, 3, 0, 7}), Normal({3, 1, 7}), Normal({3, 11, 7}), true});
  all.push_back({Normal({0, 3, 4, 7}), at::Tensor(), Normal({3, 11, 7}), false});
  // As layers leave tokens: [B,T,H,d] in memory.
  all.push_back(
      {Normal({2, 9, 3, 16}).transpose(1, 2), Normal({3, 1, 16}), Normal({3, 16, 16}), true});
  return all;
}

// The features, then the gradients of x and, if there is one, of scale.
Tensors All(const Problem& p, at::ScalarType type, at::ScalarType of_matrices) {
  const at::Tensor x = Leaf(p.x.to(type)),
                   scale = p.scale.defined() ? Leaf(p.scale.to(of_matrices)) : p.scale;
  const at::Tensor y = FourierFeatures(x, {scale, p.matrices.to(of_matrices), p.normalise, 0.3});
  EXPECT_EQ(y.scalar_type(), ComputeTypeOf(x));
  at::manual_seed(2);
  const at::Tensor g = at::randn(y.sizes(), at::kDouble).to(y.scalar_type());
  Tensors leaves = {x};
  if (scale.defined()) leaves.push_back(scale);
  Tensors all = Gradients((y * g).sum(), leaves);
  all.insert(all.begin(), y.detach());
  return all;
}

TEST(FourierFeatures, ImplementationsAgree) {
  for (const Problem& p : Problems())
    ExpectKernelIsComposite([&](at::ScalarType type) { return All(p, type, type); });
}

TEST(FourierFeatures, TokensInHalfPrecision) {
  for (const Problem& p : Problems()) {
    if (p.x.numel() == 0) continue;
    const Tensors want = All(p, at::kDouble, at::kDouble),
                  brain = All(p, at::kBFloat16, at::kFloat), half = All(p, at::kHalf, at::kHalf);
    for (size_t i = 0; i < want.size(); ++i) {
      ExpectClose(brain[i], want[i], 2e-2, "bfloat16");
      ExpectClose(half[i], want[i], 2e-2, "float16");
    }
  }
}

TEST(FourierFeatures, SecondDerivatives) {
  const Problem p = Problems()[3];
  const auto second = [&](Impl impl) {
    const ImplScope scope(impl);
    const at::Tensor x = Leaf(p.x), scale = Leaf(p.scale);
    const at::Tensor y = FourierFeatures(x, {scale, p.matrices, true, 0.7});
    const auto first = torch::autograd::grad({y.pow(3).sum()}, {x, scale}, {}, true, true);
    return Gradients(first[0].square().sum() + first[1].square().sum(), {x, scale});
  };
  const Tensors want = second(Impl::kComposite), got = second(Impl::kKernel);
  for (size_t i = 0; i < want.size(); ++i) ExpectClose(got[i], want[i], 1e-11, "second");
}

TEST(FourierFeatures, MatricesWithAGradient) {
  const Problem p = Problems()[3];
  const auto gradients = [&](Impl impl) {
    const ImplScope scope(impl);
    const Tensors leaves = {Leaf(p.x), Leaf(p.scale), Leaf(p.matrices)};
    return Gradients(FourierFeatures(leaves[0], {leaves[1], leaves[2], true, 0.7}).pow(3).sum(),
                     leaves);
  };
  const Tensors want = gradients(Impl::kComposite), got = gradients(Impl::kKernel);
  EXPECT_GT(want[2].abs().max().item<double>(), 0);
  for (size_t i = 0; i < want.size(); ++i) ExpectClose(got[i], want[i], 1e-12, "gradient");
}

TEST(FourierFeatures, Errors) {
  const Problem p = Problems()[1];
  const auto error = [&](const at::Tensor& x, const at::Tensor& scale, const at::Tensor& matrices) {
    return Thrown([&] { FourierFeatures(x, {scale, matrices, true, 1}); });
  };
  ExpectContains(error(p.x[0], p.scale, p.matrices), {"[fourier_features]", "x [B,H,T,d]"});
  ExpectContains(error(p.x, p.scale, p.matrices[0]), {"matrices [H,m,d]", "[2, 3, 9, 7]"});
  ExpectContains(error(p.x, p.scale[0], p.matrices), {"scale [H,1,d]"});
  ExpectContains(error(p.x, p.scale, p.matrices.to(at::kFloat)), {"of Double", "got Float"});
}

}  // namespace
}  // namespace cistern::ops
