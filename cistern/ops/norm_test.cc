#include "cistern/ops/norm.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cistern/ops/impl.h"
#include "cistern/ops/testing.h"

namespace cistern::ops {
namespace {

using namespace cistern::testing;

at::Tensor Expected(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return bias.defined() ? at::layer_norm(x, {x.size(-1)}, weight, bias, 1e-5)
                        : at::rms_norm(x, {x.size(-1)}, weight, 1e-5);
}

TEST(NormOp, IsTorchsRounded) {
  at::manual_seed(3);
  for (const bool biased : {true, false}) {
    for (const at::Tensor& values :
         {at::randn({2, 33, 24}), at::randn({24, 5}).t(), at::randn({24})}) {
      std::vector<at::Tensor> x = {Leaf(values), Leaf(at::randn({24}) + 1)};
      if (biased) x.push_back(Leaf(at::randn({24})));
      std::vector<at::Tensor> exact;
      for (const at::Tensor& t : x) exact.push_back(Leaf(t.detach().to(at::kDouble)));
      const at::Tensor y = NormToBFloat16(x[0], x[1], biased ? x[2] : at::Tensor(), 1e-5),
                       want = Expected(exact[0], exact[1], biased ? exact[2] : at::Tensor());
      EXPECT_EQ(y.scalar_type(), at::kBFloat16);
      EXPECT_TRUE(at::allclose(y.to(at::kDouble), want, 0.004, 1e-5));
      const at::Tensor g = at::randn_like(want).to(at::kBFloat16);
      const auto got = torch::autograd::grad({y}, x, {g}),
                 need = torch::autograd::grad({want}, exact, {g.to(at::kDouble)});
      for (size_t i = 0; i < x.size(); ++i) {
        EXPECT_EQ(got[i].scalar_type(), at::kFloat);
        ExpectClose(got[i].to(at::kDouble), need[i], 3e-6, "gradient " + std::to_string(i));
      }
    }
  }
}

TEST(NormOp, CompositeMetaAndRefusals) {
  const at::Tensor x = at::randn({4, 6}), w = at::randn({6}), b = at::randn({6});
  const at::Tensor y = NormToBFloat16(x, w, b, 1e-5);
  const auto meta = at::TensorOptions(at::kMeta).dtype(at::kFloat);
  EXPECT_EQ(NormToBFloat16(at::ones({4, 6}, meta), at::ones({6}, meta), {}, 1e-5).size(0), 4);
  EXPECT_EQ(NormToBFloat16(at::ones({0, 6}), w, b, 1e-5).size(0), 0);
  ExpectContains(Thrown([&] { NormToBFloat16(x, at::ones({5}), {}, 1e-5); }),
                 {"[norm_to_bfloat16]", "[5]", "[4, 6]"});
  ExpectContains(Thrown([&] { NormToBFloat16(x.to(at::kDouble), w.to(at::kDouble), {}, 1e-5); }),
                 {"expected float", "Double"});
  const ImplScope composite(Impl::kComposite);
  EXPECT_TRUE(at::allclose(NormToBFloat16(x, w, b, 1e-5).to(at::kFloat), y.to(at::kFloat), 0.008));
}

TEST(NormOp, SecondDerivatives) {
  const at::Tensor x = Leaf(Normal({3, 4}).to(at::kFloat)), w = Leaf(at::ones({4}));
  const auto slope = [&](const at::Tensor& y) {
    const at::Tensor first =
        torch::autograd::grad({y.to(at::kFloat).pow(2).sum()}, {x}, {}, true, true)[0];
    return torch::autograd::grad({first.pow(3).sum()}, {x})[0];
  };
  const at::Tensor ours = slope(NormToBFloat16(x, w, {}, 1e-5)),
                   theirs = slope(at::rms_norm(x, {4}, w, 1e-5));
  EXPECT_LT((ours - theirs).norm().item<double>(), 0.05 * theirs.norm().item<double>() + 0.05);
}

TEST(AddResidual, IsTheSum) {
  at::manual_seed(1);
  const at::Tensor x = Leaf(at::randn({3, 50})), y = Leaf(at::randn({3, 50}).to(at::kBFloat16));
  const at::Tensor sum = AddResidual(x, y), want = x + y;
  EXPECT_EQ(sum.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(sum, want));
  const at::Tensor g = at::randn_like(want);
  const auto got = torch::autograd::grad({sum}, {x, y}, {g}),
             need = torch::autograd::grad({want}, {x, y}, {g});
  EXPECT_TRUE(at::equal(got[0], need[0]));
  EXPECT_EQ(got[1].scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::equal(got[1], need[1]));
  // Everything else is torch's: one type, other shapes, strides.
  for (const at::Tensor& other : {at::randn({3, 50}), at::randn({50}).to(at::kBFloat16),
                                  at::randn({50, 3}).to(at::kBFloat16).t()})
    EXPECT_TRUE(at::equal(AddResidual(x, other), x + other));
  const at::NoGradGuard guard;
  EXPECT_TRUE(at::equal(AddResidual(x, y), want));
}

}  // namespace
}  // namespace cistern::ops
