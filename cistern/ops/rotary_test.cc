#include "cistern/ops/rotary.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cistern/ops/impl.h"
#include "cistern/ops/testing.h"

namespace cistern::ops {
namespace {

using namespace cistern::testing;

at::Tensor Table(const at::Tensor& angles) { return at::cat({angles.cos(), angles.sin()}, -1); }

// As a complex number times e^(i angle): first half + i second half.
at::Tensor Turned(const at::Tensor& x, const at::Tensor& angles) {
  const auto halves = x.to(at::kDouble).chunk(2, 3);
  const at::Tensor z = at::complex(halves[0].contiguous(), halves[1].contiguous()) *
                       at::polar(at::ones_like(angles), angles).unsqueeze(1);
  return at::cat({at::real(z), at::imag(z)}, 3);
}

TEST(RotaryOp, TurnsPairsAndGradientsBack) {
  at::manual_seed(5);
  for (const auto impl : {Impl::kKernel, Impl::kComposite, Impl::kReference}) {
    const ImplScope scope(impl);
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      const double tolerance = dtype == at::kFloat ? 1e-6 : 1e-14;
      for (const int64_t tables : {1, 2}) {
        for (const int64_t width : {2, 6, 32, 70}) {
          const at::Tensor angles = 3 * at::randn({tables, 9, width / 2}, at::kDouble);
          // Heads as a projection has them, beside others.
          const at::Tensor leaf = Leaf(at::randn({2, 9, 3, width + 4}, at::kDouble).to(dtype)),
                           x = leaf.narrow(3, 2, width).transpose(1, 2);
          const at::Tensor y = Rotary(x, Table(angles).to(dtype));
          ExpectClose(y.to(at::kDouble), Turned(x.detach(), angles), tolerance, "y");
          const at::Tensor g = at::randn({2, 3, 9, width}, at::kDouble),
                           dx = Gradients((y * g.to(dtype)).sum(), {leaf})[0];
          ExpectClose(dx.narrow(3, 2, width).transpose(1, 2).to(at::kDouble), Turned(g, -angles),
                      tolerance, "dx");
          EXPECT_EQ(dx.narrow(3, 0, 2).abs().max().item<double>(), 0);
        }
      }
    }
  }
}

TEST(RotaryOp, OtherTypesAndRefusals) {
  const at::Tensor x = at::randn({1, 2, 3, 4}), table = Table(at::randn({1, 3, 2}));
  const at::Tensor half = x.to(at::kBFloat16);
  ExpectSameBits(Rotary(half, table), Rotary(half.to(at::kFloat), table).to(at::kBFloat16),
                 "rounded once");
  ExpectContains(Thrown([&] { Rotary(half, table.to(at::kBFloat16)); }),
                 {"[rotary]", "table of Float for x of BFloat16"});
  EXPECT_EQ(Rotary(x.to(at::kMeta), table.to(at::kMeta)).sizes(), x.sizes());
  EXPECT_EQ(Rotary(at::ones({0, 2, 3, 4}), table).numel(), 0);
  ExpectContains(Thrown([&] { Rotary(at::ones({1, 2, 3, 5}), table); }), {"[rotary]", "even d"});
  ExpectContains(Thrown([&] {
                   Rotary(x, at::ones({1, 4, 4}));
                 }),
                 {"[rotary]", "table [1 or B,T,d]"});
  ExpectContains(Thrown([&] { Rotary(x, table.to(at::kDouble)); }),
                 {"[rotary]", "Float", "Double"});
}

// As training with second derivatives needs it: turned twice by the opposite angles.
TEST(RotaryOp, SecondDerivatives) {
  const at::Tensor x = Leaf(Normal({1, 2, 3, 4})), table = Table(Normal({1, 3, 2}));
  const at::Tensor y = Rotary(x, table),
                   slope = torch::autograd::grad({y.pow(3).sum()}, {x}, {}, true, true)[0];
  const at::Tensor second = torch::autograd::grad({slope.sum()}, {x})[0];
  const ImplScope composite(Impl::kComposite);
  const at::Tensor z = Rotary(x, table),
                   theirs = torch::autograd::grad({z.pow(3).sum()}, {x}, {}, true, true)[0];
  ExpectClose(second, torch::autograd::grad({theirs.sum()}, {x})[0], 1e-12, "second derivative");
}

}  // namespace
}  // namespace cistern::ops
