#include "cistern/ops/linear_product.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "cistern/ops/impl.h"

namespace cistern::ops {
namespace {

struct Case {
  std::vector<int64_t> x;
  int64_t out;
  bool bias;
};

double Far(const at::Tensor& got, const at::Tensor& want) {
  return ((got.to(at::kDouble) - want).norm() / want.norm()).item<double>();
}

// Large enough for another library where there is one, and small: both are the definition in
// double.
TEST(LinearProduct, IsTheLinearMapWithItsGradients) {
  for (const Case& c : {Case{{4, 512, 128}, 256, true}, Case{{4, 512, 128}, 256, false},
                        Case{{2048, 96}, 130, true}, Case{{3, 5, 8}, 4, true}}) {
    const int64_t in = c.x.back();
    // Every second channel of a wider tensor: strided.
    at::Tensor wide =
        c.x.size() == 3 ? at::randn({c.x[0], c.x[1], 2 * in}) : at::randn({c.x[0], 2 * in});
    const at::Tensor x = wide.slice(-1, 0, 2 * in, 2).detach().requires_grad_(),
                     w = at::randn({c.out, in}).requires_grad_(),
                     b = c.bias ? at::randn({c.out}).requires_grad_() : at::Tensor();
    std::vector<at::Tensor> inputs = {x, w}, exact;
    if (c.bias) inputs.push_back(b);
    for (const at::Tensor& t : inputs) exact.push_back(t.detach().to(at::kDouble).requires_grad_());
    const at::Tensor y = LinearProduct(x, w, b);
    at::Tensor want = at::matmul(exact[0], exact[1].t());
    if (c.bias) want = want + exact[2];
    ASSERT_EQ(y.sizes(), want.sizes());
    EXPECT_LT(Far(y.detach(), want.detach()), 1e-6);
    // First derivatives, and those of a function of them, by a gradient that is not contiguous.
    const at::Tensor dy = at::randn({c.out}).expand(want.sizes());
    const auto first = torch::autograd::grad({y}, inputs, {dy}, true, true);
    const auto first_exact = torch::autograd::grad({want}, exact, {dy.to(at::kDouble)}, true, true);
    for (size_t i = 0; i < inputs.size(); ++i)
      EXPECT_LT(Far(first[i].detach(), first_exact[i].detach()), 2e-6) << i;
    const auto second = torch::autograd::grad({first[0].pow(2).sum() + first[1].pow(2).sum()},
                                              {x, w}, {}, false, false);
    const auto second_exact =
        torch::autograd::grad({first_exact[0].pow(2).sum() + first_exact[1].pow(2).sum()},
                              {exact[0], exact[1]}, {}, false, false);
    for (size_t i = 0; i < 2; ++i) EXPECT_LT(Far(second[i], second_exact[i]), 4e-6) << i;
  }
}

TEST(LinearProduct, OtherDtypesAndAutocastAreTorchs) {
  const at::Tensor x = at::randn({2048, 256}), w = at::randn({256, 256});
  EXPECT_TRUE(at::equal(LinearProduct(x.to(at::kDouble), w.to(at::kDouble)),
                        at::linear(x.to(at::kDouble), w.to(at::kDouble))));
  {
    const ImplScope scope(Impl::kComposite);
    EXPECT_TRUE(at::equal(LinearProduct(x, w), at::linear(x, w)));
  }
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const at::Tensor half = LinearProduct(x, w);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  EXPECT_EQ(half.scalar_type(), at::kBFloat16);
}

TEST(LinearProduct, TheSameFromCallToCall) {
  const at::Tensor x = at::randn({2048, 128}), w = at::randn({256, 128});
  const at::Tensor y = LinearProduct(x, w);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(LinearProduct(x.clone(), w.clone()), y));
}

}  // namespace
}  // namespace cistern::ops
