#include "cistern/ops/linear_product.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <array>

#include "cistern/kernels/isa.h"
#include "cistern/kernels/transposed_product.h"
#include "cistern/ops/impl.h"

namespace cistern::ops {
namespace {

struct Case {
  std::vector<int64_t> x;
  int64_t out;
  bool bias;
};

class AutocastScope {
 public:
  AutocastScope() { at::autocast::set_autocast_enabled(at::kCPU, true); }
  ~AutocastScope() {
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
  }
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

// The gradient by the weights: of many rows that are alike, whose rounding errors are too, of
// either shape, as a sum that goes on, and of a graph. As near as 1e-5 or as torch's product is:
// MKL's for any processor (MKL_CBWR=COMPATIBLE) is off by 2.5e-5 on one of Intel's.
TEST(LinearProduct, TransposedProduct) {
  for (const auto& [rows, n, k] : {std::array<int64_t, 3>{4096, 300, 70},
                                   {4096, 70, 300},
                                   {65536, 64, 96},
                                   {5, 3, 4},
                                   {1, 2000, 9000}}) {
    const at::Tensor a = at::rand({1, n}).expand({rows, n}).contiguous(), b = at::randn({rows, k}),
                     ones = at::rand({1, k}).expand({rows, k}).contiguous();
    for (const at::Tensor& x : {b, ones}) {
      const at::Tensor want = at::mm(a.to(at::kDouble).t(), x.to(at::kDouble)),
                       got = TransposedProduct(a, x);
      ASSERT_EQ(got.sizes(), want.sizes());
      at::Tensor of_torch = at::mm(a.t(), x);
      EXPECT_LT(Far(got, want), std::max(1e-5, 1.01 * Far(of_torch, want)))
          << rows << " " << n << " " << k;
      at::Tensor sum;
      for (int i = 0; i < 3; ++i) AddTransposedProduct(a, x, sum);
      for (int i = 1; i < 3; ++i) of_torch.addmm_(a.t(), x);
      EXPECT_LT(Far(sum, 3 * want), std::max(1e-5, 1.01 * Far(of_torch, 3 * want)))
          << rows << " " << n << " " << k;
    }
  }
  const at::Tensor a = at::randn({2048, 128}).requires_grad_(), b = at::randn({2048, 160});
  EXPECT_TRUE(TransposedProduct(a, b).requires_grad());
  const ImplScope scope(Impl::kComposite);
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(TransposedProduct(a, b), at::mm(a.t(), b)));
}

// Few rows without a gradient: the definition in double, and every row as it is alone, which
// torch's product of more rows is not.
TEST(LinearProduct, FewRowsOfDecoding) {
  const at::NoGradGuard no_grad;
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    for (const int64_t in : {1, 3, 63, 64, 65, 1000}) {
      const at::Tensor w = at::randn({130, in}, type), b = at::randn({130}, type),
                       wide = at::randn({2, 4, 2 * in}, type);
      for (const at::Tensor& bias : {at::Tensor(), b}) {
        // As it lies, and every second channel: strided.
        for (const at::Tensor& x : {wide.narrow(2, 0, in), wide.slice(2, 0, 2 * in, 2)}) {
          const at::Tensor y = LinearProduct(x, w, bias);
          at::Tensor want = at::matmul(x.to(at::kDouble), w.to(at::kDouble).t());
          if (bias.defined()) want = want + bias.to(at::kDouble);
          ASSERT_EQ(y.sizes(), at::IntArrayRef({2, 4, 130}));
          ASSERT_EQ(y.scalar_type(), type);
          EXPECT_LT(Far(y, want), type == at::kFloat ? 3e-7 : 4e-15) << in;
          for (int64_t r = 0; r < 8; ++r)
            EXPECT_TRUE(at::equal(LinearProduct(x[r / 4][r % 4], w, bias), y[r / 4][r % 4])) << in;
        }
      }
    }
  }
}

// What it does not serve is torch's, to the bit, and wrong shapes are torch's errors.
TEST(LinearProduct, FewRowsAreTorchsWhereTheyAreNotPlain) {
  const at::Tensor x = at::randn({1, 1000}), w = at::randn({300, 1000}), b = at::randn({300});
  const at::Tensor torchs = at::linear(x, w, b);
  const auto differs = [&] { return !at::equal(LinearProduct(x, w, b), torchs); };
  EXPECT_TRUE(differs());  // else the rest says nothing
  const at::Tensor trained = w.detach().clone().requires_grad_();
  EXPECT_TRUE(at::equal(LinearProduct(x, trained, b), torchs));
  EXPECT_TRUE(LinearProduct(x, trained, b).requires_grad());
  {
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(at::equal(LinearProduct(x, trained, b), torchs));
  }
  const at::Tensor turned = w.t().contiguous().t();
  EXPECT_TRUE(at::equal(LinearProduct(x, turned, b), at::linear(x, turned, b)));
  const at::Tensor rows = at::randn({33, 1000});
  const at::Tensor fewer = w.narrow(0, 0, 100);
  EXPECT_TRUE(at::equal(LinearProduct(rows, fewer), at::linear(rows, fewer)));
  {
    const ImplScope scope(Impl::kComposite);
    EXPECT_TRUE(at::equal(LinearProduct(x, w, b), torchs));
  }
  EXPECT_EQ(LinearProduct(at::randn({0, 1000}), w).sizes(), at::IntArrayRef({0, 300}));
  EXPECT_ANY_THROW(LinearProduct(at::randn({1, 999}), w, b));
  EXPECT_ANY_THROW(LinearProduct(x, w, at::randn({299})));
  EXPECT_ANY_THROW(LinearProduct(x, w.to(at::kDouble)));
}

TEST(LinearProduct, OtherDtypesAndAutocastAreTorchs) {
  const at::Tensor x = at::randn({2048, 256}), w = at::randn({256, 256});
  EXPECT_TRUE(at::equal(LinearProduct(x.to(at::kDouble), w.to(at::kDouble)),
                        at::linear(x.to(at::kDouble), w.to(at::kDouble))));
  {
    const ImplScope scope(Impl::kComposite);
    EXPECT_TRUE(at::equal(LinearProduct(x, w), at::linear(x, w)));
  }
  const AutocastScope autocast;
  EXPECT_EQ(LinearProduct(x, w).scalar_type(), at::kBFloat16);
}

at::Tensor Rounded(const at::Tensor& x) { return x.detach().to(at::kBFloat16).to(at::kDouble); }

// Under autocast in bfloat16: the output and the gradient by x are torch's, to the bit where the
// processor multiplies bfloat16; the gradients by weights and bias are in float, where the
// kernel forms them without a rounding.
TEST(LinearProduct, TrainsUnderAutocast) {
  for (const Case& c : {Case{{3, 700, 96}, 160, true}, Case{{2048, 160}, 70, false},
                        Case{{2, 1500, 64}, 500, true}}) {
    const int64_t in = c.x.back();
    for (const bool half : {false, true}) {
      const auto type = half ? at::kBFloat16 : at::kFloat;
      const at::Tensor x = at::randn(c.x).to(type).requires_grad_(),
                       first = at::randn({c.out / 2, in}).requires_grad_(),
                       second = at::randn({c.out - c.out / 2, in}).requires_grad_(),
                       b = c.bias ? at::randn({c.out}).requires_grad_() : at::Tensor();
      std::vector<at::Tensor> inputs = {x, first, second};
      if (c.bias) inputs.push_back(b);
      std::vector<int64_t> sizes = c.x;
      sizes.back() = c.out;
      const at::Tensor dy = at::randn(sizes, at::kBFloat16);
      const auto run = [&](Impl impl) {
        const ImplScope scope(impl);
        const AutocastScope autocast;
        const at::Tensor y = LinearProduct(x, at::cat({first, second}), b);
        EXPECT_EQ(y.scalar_type(), at::kBFloat16);
        auto all = torch::autograd::grad({y}, inputs, {dy});
        all.push_back(y.detach());
        return all;
      };
      const auto got = run(Impl::kKernel), torchs = run(Impl::kComposite);
      if (HasBFloat16()) {
        EXPECT_TRUE(at::equal(got.back(), torchs.back()));
        EXPECT_TRUE(at::equal(got[0], torchs[0]));
      } else {  // widened, with sums in another order
        EXPECT_LT(Far(got.back(), torchs.back().to(at::kDouble)), 4e-3);
        EXPECT_LT(Far(got[0], torchs[0].to(at::kDouble)), 4e-3);
      }
      const at::Tensor rows = Rounded(dy).reshape({-1, c.out}),
                       want = at::mm(rows.t(), Rounded(x).reshape({-1, in}));
      const double near = CanMultiplyTransposed() || !HasBFloat16() ? 1e-6 : 4e-3;
      EXPECT_LT(Far(at::cat({got[1], got[2]}), want), near);
      EXPECT_GT(Far(at::cat({torchs[1], torchs[2]}), want), 1e-4);  // else `near` says nothing
      EXPECT_EQ(got[1].scalar_type(), at::kFloat);
      if (c.bias) {
        EXPECT_LT(Far(got[3], rows.sum(0)), near);
      }
    }
  }
}

// Weights that meet other operations of the same step, whose rounded copy autocast shares; without
// a gradient; derivatives of the gradients.
TEST(LinearProduct, UnderAutocastBesideOtherOperations) {
  const at::Tensor x = at::randn({2048, 64}).requires_grad_(), w = at::randn({64, 64});
  const auto far = [](const at::Tensor& a, const at::Tensor& b) {
    return Far(a.detach(), b.detach().to(at::kDouble));
  };
  const auto gradient = [&](bool ours_first, bool ours) {
    const at::Tensor weight = w.clone().requires_grad_();
    const AutocastScope autocast;
    const auto other = [&] { return at::linear(x, weight).to(at::kFloat).pow(2).mean(); };
    const auto mine = [&] {
      return (ours ? LinearProduct(x, weight) : at::linear(x, weight)).to(at::kFloat).pow(3).mean();
    };
    const at::Tensor one = ours_first ? mine() : other(), two = ours_first ? other() : mine();
    return torch::autograd::grad({one + two}, {weight})[0];
  };
  EXPECT_LT(far(gradient(true, true), gradient(true, false)), 4e-3);
  EXPECT_LT(far(gradient(false, true), gradient(true, false)), 4e-3);

  const at::Tensor weight = w.clone().requires_grad_();
  const auto penalty = [&](Impl impl) {
    const ImplScope scope(impl);
    const AutocastScope autocast;
    const at::Tensor y = LinearProduct(x, weight).to(at::kFloat);
    const auto d = torch::autograd::grad({y.pow(2).mean()}, {x, weight}, {}, true, true);
    const at::Tensor sum = d[0].pow(2).sum() + d[1].pow(2).sum();
    return torch::autograd::grad({sum}, {x, weight});
  };
  const auto got = penalty(Impl::kKernel), want = penalty(Impl::kComposite);
  for (size_t i = 0; i < 2; ++i) EXPECT_LT(far(got[i], want[i]), 1e-2) << i;

  const at::NoGradGuard no_grad;
  const AutocastScope autocast;
  if (HasBFloat16()) {
    EXPECT_TRUE(at::equal(LinearProduct(x, weight), at::linear(x, weight)));
  } else {  // widened, with sums in another order
    EXPECT_LT(far(LinearProduct(x, weight), at::linear(x, weight)), 4e-3);
  }
}

// What the processor does not multiply is multiplied as floats: operands rounded once each, the
// result once, with a bias and without, in any shape, given as bfloat16 or made so by autocast.
TEST(LinearProduct, WidensWhatTheProcessorDoesNotMultiply) {
  if (HasBFloat16()) GTEST_SKIP() << "this processor multiplies bfloat16";
  const at::Tensor x = at::randn({3, 40, 24}).to(at::kBFloat16),
                   w = at::randn({30, 24}).to(at::kBFloat16), b = at::randn({30}).to(at::kBFloat16);
  const auto wide = [](const at::Tensor& t) { return t.detach().to(at::kDouble); };
  for (const at::Tensor& bias : {at::Tensor(), b}) {
    at::Tensor want = at::matmul(wide(x), wide(w).t());
    if (bias.defined()) want = want + wide(bias);
    const at::Tensor rounded = want.to(at::kBFloat16);
    const auto expect = [&](const at::Tensor& y) {
      ASSERT_EQ(y.scalar_type(), at::kBFloat16);
      EXPECT_GT((y == rounded).to(at::kDouble).mean().item<double>(), 0.99);
      EXPECT_LT(Far(y.detach(), want), 4e-3);
    };
    {
      const at::NoGradGuard no_grad;
      expect(LinearProduct(x, w, bias));
    }
    const auto leaf = [](const at::Tensor& t) {
      return t.defined() ? t.to(at::kFloat).requires_grad_() : t;
    };
    const at::Tensor lx = leaf(x), lw = leaf(w), lb = leaf(bias);
    at::Tensor y;
    {
      const AutocastScope autocast;
      {
        const at::NoGradGuard no_grad;
        expect(LinearProduct(lx, lw, lb));
      }
      y = LinearProduct(lx, lw, lb);
    }
    expect(y);
    const at::Tensor g = at::randn(y.sizes()).to(at::kBFloat16);
    y.backward(g);
    const at::Tensor rows = wide(g).flatten(0, 1);
    EXPECT_LT(Far(lx.grad(), at::matmul(wide(g), wide(w))), 4e-3);
    EXPECT_LT(Far(lw.grad(), at::mm(rows.t(), wide(x).flatten(0, 1))), 1e-6);
    if (bias.defined()) {
      EXPECT_LT(Far(lb.grad(), rows.sum(0)), 1e-6);
    }
  }
}

// Operands in bfloat16 have their product in float, wherever it is formed.
TEST(LinearProduct, TransposedProductOfBFloat16) {
  const at::NoGradGuard no_grad;
  const at::Tensor a = at::randn({3000, 90}, at::kBFloat16),
                   b = at::randn({3000, 240}, at::kBFloat16).slice(1, 0, 200),
                   want = at::mm(a.to(at::kDouble).t(), b.to(at::kDouble));
  for (const Impl impl : {Impl::kKernel, Impl::kComposite}) {
    const ImplScope scope(impl);
    const bool in_float = (CanMultiplyTransposed() && impl == Impl::kKernel) || !HasBFloat16();
    const double near = in_float ? 1e-6 : 4e-3;
    at::Tensor sum = TransposedProduct(a, b);
    ASSERT_EQ(sum.scalar_type(), at::kFloat);
    EXPECT_LT(Far(sum, want), near);
    AddTransposedProduct(a, b, sum);
    EXPECT_LT(Far(sum, 2 * want), near);
    at::Tensor turned = at::ones({200, 90}).t();  // not where the kernel writes
    AddTransposedProduct(a, b, turned);
    EXPECT_LT(Far(turned, want + 1), near);
  }
  EXPECT_ANY_THROW(TransposedProduct(a, b.slice(0, 0, 2999)));
}

TEST(LinearProduct, TheSameFromCallToCall) {
  const at::Tensor x = at::randn({2048, 128}), w = at::randn({256, 128});
  const at::Tensor y = LinearProduct(x, w);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(LinearProduct(x.clone(), w.clone()), y));
}

}  // namespace
}  // namespace cistern::ops
