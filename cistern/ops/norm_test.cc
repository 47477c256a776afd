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

// The sum, its norm and all gradients, of each type of what is added (none, float, bfloat16) and of
// the norm, where both results are used, or one of them.
TEST(AddNorm, IsTheSumAndTorchsNorm) {
  at::manual_seed(3);
  for (const bool biased : {true, false}) {
    for (const bool rounds : {true, false}) {
      for (const std::optional<at::ScalarType> type :
           {std::optional<at::ScalarType>(), std::optional(at::kFloat),
            std::optional(at::kBFloat16)}) {
        for (const at::Tensor& values :
             {at::randn({2, 33, 24}), at::randn({24, 5}).t(), at::randn({24})}) {
          std::vector<at::Tensor> x = {Leaf(values), Leaf(at::randn({24}) + 1)};
          if (biased) x.push_back(Leaf(at::randn({24})));
          if (type) x.push_back(Leaf(at::randn_like(values).to(*type)));
          std::vector<at::Tensor> exact;
          for (const at::Tensor& t : x) exact.push_back(Leaf(t.detach().to(at::kDouble)));
          const auto bias_of = [&](const auto& t) { return biased ? t[2] : at::Tensor(); };
          const SumAndNorm got =
              AddNorm(x[0], type ? x.back() : at::Tensor(), {x[1], bias_of(x), 1e-5}, rounds);
          const at::Tensor sum = type ? exact[0] + exact.back() : exact[0],
                           norm = Expected(sum, exact[1], bias_of(exact));
          EXPECT_EQ(got.sum.scalar_type(), at::kFloat);
          EXPECT_EQ(got.norm.scalar_type(), rounds ? at::kBFloat16 : at::kFloat);
          EXPECT_TRUE(at::equal(got.sum, type ? x[0] + x.back() : x[0]));
          EXPECT_TRUE(at::allclose(got.norm.to(at::kDouble), norm, rounds ? 0.004 : 1e-5, 1e-5));
          const at::Tensor g_sum = at::randn_like(norm).to(at::kFloat),
                           g_norm = at::randn_like(norm).to(got.norm.scalar_type());
          for (const int used : {1, 2, 3}) {
            std::vector<at::Tensor> of, of_exact, by, by_exact;
            if (used & 1) of.push_back(got.sum), of_exact.push_back(sum), by.push_back(g_sum);
            if (used & 2) of.push_back(got.norm), of_exact.push_back(norm), by.push_back(g_norm);
            for (const at::Tensor& g : by) by_exact.push_back(g.to(at::kDouble));
            const auto d = torch::autograd::grad(of, x, by, true, false, true),
                       need = torch::autograd::grad(of_exact, exact, by_exact, true, false, true);
            for (size_t i = 0; i < x.size(); ++i) {
              ASSERT_EQ(d[i].defined(), need[i].defined()) << used << " " << i;
              if (!d[i].defined()) continue;
              EXPECT_EQ(d[i].scalar_type(), x[i].scalar_type());
              ExpectClose(d[i].to(at::kDouble), need[i],
                          d[i].scalar_type() == at::kFloat ? 3e-6 : 0.004,
                          "gradient " + std::to_string(i));
            }
          }
        }
      }
    }
  }
}

TEST(AddNorm, CompositeMetaDoubleAndRefusals) {
  const at::Tensor x = at::randn({4, 6}), w = at::randn({6}), b = at::randn({6});
  const NormOf norm = {w, b, 1e-5};
  const at::Tensor y = AddNorm(x, {}, norm, true).norm;
  const auto meta = at::TensorOptions(at::kMeta).dtype(at::kFloat);
  EXPECT_EQ(AddNorm(at::ones({4, 6}, meta), {}, {at::ones({6}, meta), {}, 1e-5}).norm.size(0), 4);
  EXPECT_EQ(AddNorm(at::ones({0, 6}), {}, norm).norm.size(0), 0);
  const at::Tensor exact = x.to(at::kDouble);
  EXPECT_TRUE(at::equal(AddNorm(exact, exact, {w.to(at::kDouble), {}, 1e-5}).norm,
                        at::rms_norm(2 * exact, {6}, w.to(at::kDouble), 1e-5)));
  ExpectContains(Thrown([&] {
                   AddNorm(x, {}, {at::ones({5}), {}, 1e-5});
                 }),
                 {"[norm]", "[5]", "[4, 6]"});
  ExpectContains(Thrown([&] { AddNorm(x, {}, {w, at::ones({5}), 1e-5}); }), {"bias", "[6]", "[5]"});
  ExpectContains(Thrown([&] {
                   AddNorm(x, at::ones({1, 6}), norm);
                 }),
                 {"[norm] expected added", "[4, 6]", "got [1, 6]"});
  const ImplScope composite(Impl::kComposite);
  EXPECT_TRUE(
      at::allclose(AddNorm(x, {}, norm, true).norm.to(at::kFloat), y.to(at::kFloat), 0.008));
}

TEST(AddNorm, SecondDerivatives) {
  for (const bool rounds : {true, false}) {
    const at::Tensor x = Leaf(Normal({3, 4}).to(at::kFloat)), y = Leaf(at::ones({3, 4})),
                     w = Leaf(at::ones({4}));
    const auto slope = [&](const at::Tensor& sum, const at::Tensor& norm) {
      const at::Tensor of = norm.to(at::kFloat).pow(2).sum() + sum.pow(3).sum();
      const at::Tensor first = torch::autograd::grad({of}, {y}, {}, true, true)[0];
      return torch::autograd::grad({first.pow(3).sum()}, {x})[0];
    };
    const SumAndNorm got = AddNorm(x, y, {w, {}, 1e-5}, rounds);
    const at::Tensor sum = x + y, ours = slope(got.sum, got.norm),
                     theirs = slope(sum, at::rms_norm(sum, {4}, w, 1e-5));
    EXPECT_LT(
        (ours - theirs).norm().item<double>(),
        rounds ? 0.05 * theirs.norm().item<double>() + 0.05 : 1e-5 * theirs.norm().item<double>());
  }
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
  // Everything else is torch's: one type, strides.
  for (const at::Tensor& other : {at::randn({3, 50}), at::randn({50, 3}).to(at::kBFloat16).t()})
    EXPECT_TRUE(at::equal(AddResidual(x, other), x + other));
  for (const at::Tensor& other : {at::randn({50}).to(at::kBFloat16), at::randn({1, 50})})
    ExpectContains(Thrown([&] { AddResidual(x, other); }), {"[residual]", "[3, 50], got"});
  const at::NoGradGuard guard;
  EXPECT_TRUE(at::equal(AddResidual(x, y), want));
}

}  // namespace
}  // namespace cistern::ops
