#include "cistern/ops/sin_cos.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cistern/ops/impl.h"
#include "cistern/ops/testing.h"

namespace cistern::ops {
namespace {

using namespace cistern::testing;

TEST(SinCos, ImplementationsAgree) {
  at::manual_seed(1);
  const std::vector<std::vector<int64_t>> shapes = {{3, 2, 5, 7}, {40, 16}, {0, 4}, {9}};
  for (const std::vector<int64_t>& sizes : shapes) {
    for (const auto dtype : {at::kDouble, at::kFloat}) {
      const at::Tensor x = (at::randn(sizes, at::kDouble) * 3).to(at::kFloat).to(dtype);
      const auto all = [&](Impl impl) {
        const ImplScope scope(impl);
        const at::Tensor leaf = Leaf(x), y = SinCos(leaf, 0.3);
        at::manual_seed(2);
        const at::Tensor g = at::randn(y.sizes(), y.options());
        return std::vector<at::Tensor>{y.detach(), Gradients((y * g).sum(), {leaf})[0]};
      };
      const auto want = all(Impl::kComposite), got = all(Impl::kKernel);
      for (size_t i = 0; i < 2; ++i) {
        EXPECT_EQ(got[i].scalar_type(), dtype);
        ExpectClose(got[i], want[i], dtype == at::kDouble ? 1e-14 : 1e-6, "sin_cos");
      }
    }
  }
}

// Of a view that is not contiguous.
TEST(SinCos, Strided) {
  const at::Tensor x = at::randn({4, 6, 5}).transpose(0, 2);
  ExpectClose(SinCos(x, 2), SinCos(x.contiguous(), 2), 0, "strided");
  const at::Tensor leaf = Leaf(x), plain = Leaf(x.contiguous());
  ExpectClose(Gradients(SinCos(leaf, 2).square().sum() + SinCos(leaf, 1).sum(), {leaf})[0],
              Gradients(SinCos(plain, 2).square().sum() + SinCos(plain, 1).sum(), {plain})[0], 1e-6,
              "strided gradient");
}

TEST(SinCos, SecondDerivatives) {
  const at::Tensor x = at::randn({5, 3}, at::kDouble);
  const auto second = [&](Impl impl) {
    const ImplScope scope(impl);
    const at::Tensor leaf = Leaf(x);
    const auto first =
        torch::autograd::grad({SinCos(leaf, 0.7).pow(3).sum()}, {leaf}, {}, true, true);
    return Gradients(first[0].square().sum(), {leaf})[0];
  };
  ExpectClose(second(Impl::kKernel), second(Impl::kComposite), 1e-12, "sin_cos");
}

}  // namespace
}  // namespace cistern::ops
