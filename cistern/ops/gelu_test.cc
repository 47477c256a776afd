#include "cistern/ops/gelu.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/forward_grad.h>

#include "cistern/ops/impl.h"
#include "cistern/ops/testing.h"

namespace cistern::ops {
namespace {

using namespace cistern::testing;

TEST(GeluOp, IsTorchs) {
  at::manual_seed(3);
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const double tolerance = dtype == at::kFloat ? 1e-6 : dtype == at::kDouble ? 1e-14 : 4e-3;
    for (const at::Tensor& values :
         {at::randn({2, 33, 7}), at::randn({70, 3}).t(), at::randn({5}), at::randn({0, 4})}) {
      const at::Tensor x = Leaf(values.to(dtype));
      const at::Tensor exact = Leaf(x.detach().to(at::kDouble)), want = at::gelu(exact),
                       y = Gelu(x);
      EXPECT_EQ(y.scalar_type(), dtype);
      if (x.numel() == 0) continue;
      ExpectClose(y.to(at::kDouble), want, tolerance, "y");
      const at::Tensor g = at::randn_like(want);
      ExpectClose(Gradients((y * g.to(dtype)).sum(), {x})[0].to(at::kDouble),
                  Gradients((want * g).sum(), {exact})[0], tolerance, "dx");
    }
  }
}

TEST(GeluOp, ElsewhereAndRefused) {
  EXPECT_EQ(Gelu(at::ones({2, 3}, at::kBFloat16)).scalar_type(), at::kBFloat16);
  EXPECT_EQ(Gelu(at::ones({2, 3}, at::TensorOptions(at::kMeta).dtype(at::kFloat))).size(1), 3);
  const at::Tensor x = at::randn({4, 5});
  const ImplScope composite(Impl::kComposite);
  EXPECT_TRUE(at::equal(Gelu(x), at::gelu(x)));
  ExpectContains(Thrown([] { Gelu(at::ones({2}, at::kLong)); }), {"[gelu]", "real numbers"});
}

// As training with second derivatives needs it.
TEST(GeluOp, SecondDerivatives) {
  const at::Tensor x = Leaf(Normal({3, 4}));
  const auto slope = [](const at::Tensor& y, const at::Tensor& by) {
    return torch::autograd::grad({y.sum()}, {by}, {}, true, true)[0];
  };
  const at::Tensor ours = slope(Gelu(x), x), theirs = slope(at::gelu(x), x);
  ExpectClose(slope(ours, x), slope(theirs, x), 1e-12, "second derivative");
}

// Never a silent zero.
TEST(GeluOp, ForwardModeIsRefusedByTheKernel) {
  const at::Tensor x = Normal({3, 4}), direction = Normal({3, 4});
  for (const auto impl : {Impl::kKernel, Impl::kComposite}) {
    const ImplScope scope(impl);
    const uint64_t level = torch::autograd::ForwardADLevel::get_next_idx();
    const std::string refusal = Thrown([&] {
      const at::Tensor y = Gelu(at::_make_dual(x, direction, int64_t(level))),
                       tangent = std::get<1>(at::_unpack_dual(y, int64_t(level)));
      ASSERT_TRUE(tangent.defined());
      ExpectClose(tangent, at::gelu_backward(direction, x), 1e-12, "tangent");
    });
    torch::autograd::ForwardADLevel::release_idx(level);
    if (impl == Impl::kKernel) {
      ExpectContains(refusal, {"[gelu] has no forward-mode derivative"});
    } else {
      EXPECT_EQ(refusal, "no error");
    }
  }
}

}  // namespace
}  // namespace cistern::ops
