#include "cistern/ops/feed_forward.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cistern/base/parallel.h"
#include "cistern/ops/draws.h"
#include "cistern/ops/impl.h"
#include "cistern/ops/testing.h"

namespace cistern::ops {
namespace {

using namespace cistern::testing;

// x, up, down, residual and, where asked for, both biases.
std::vector<at::Tensor> Inputs(at::IntArrayRef sizes, int64_t hidden, bool biased) {
  const int64_t width = sizes.back();
  std::vector<at::Tensor> x = {at::randn(sizes), at::randn({hidden, width}) / 4,
                               at::randn({width, hidden}) / 4, at::randn(sizes)};
  if (biased) x.push_back(at::randn({hidden})), x.push_back(at::randn({width}));
  for (at::Tensor& t : x) t = Leaf(t);
  return x;
}

FeedForwardMaps Maps(const std::vector<at::Tensor>& x) {
  const bool biased = x.size() > 4;
  return {x[1], biased ? x[4] : at::Tensor(), x[2], biased ? x[5] : at::Tensor()};
}

at::Tensor Ours(const std::vector<at::Tensor>& x, const FeedForwardDropout& dropout = {}) {
  return GeluFeedForward(x[0], Maps(x), x[3], dropout);
}

// Undefined factors: nothing is dropped.
at::Tensor Definition(const std::vector<at::Tensor>& x, const at::Tensor& hidden = {},
                      const at::Tensor& out = {}) {
  const bool biased = x.size() > 4;
  const at::Tensor h = at::matmul(x[0], x[1].t()), g = at::gelu(biased ? h + x[4] : h);
  at::Tensor y = at::matmul(hidden.defined() ? g * hidden : g, x[2].t());
  if (biased) y = y + x[5];
  return x[3] + (out.defined() ? y * out : y);
}

std::vector<at::Tensor> InDouble(const std::vector<at::Tensor>& x) {
  std::vector<at::Tensor> exact;
  for (const at::Tensor& t : x) exact.push_back(Leaf(t.detach().to(at::kDouble)));
  return exact;
}

// One block, several, and a part of one; the values and all gradients, and those of some inputs
// alone.
TEST(GeluFeedForward, IsTheDefinition) {
  at::manual_seed(1);
  for (const bool biased : {true, false}) {
    for (const std::vector<int64_t>& sizes :
         {std::vector<int64_t>{2, 7, 12}, {3, 700, 16}, {5, 8}}) {
      const std::vector<at::Tensor> x = Inputs(sizes, 40, biased), exact = InDouble(x);
      const at::Tensor y = Ours(x), want = Definition(exact), g = at::randn(sizes);
      ExpectClose(y.to(at::kDouble), want, 2e-6, "values");
      const auto d = torch::autograd::grad({y}, x, {g}, true),
                 need = torch::autograd::grad({want}, exact, {g.to(at::kDouble)}, true);
      for (size_t i = 0; i < x.size(); ++i) {
        ExpectClose(d[i].to(at::kDouble), need[i], 3e-6, "gradient " + std::to_string(i));
        std::vector<at::Tensor> one = x;
        for (size_t j = 0; j < x.size(); ++j) {
          if (j != i) one[j] = x[j].detach();
        }
        ExpectSameBits(torch::autograd::grad({Ours(one)}, {one[i]}, {g})[0], d[i],
                       "gradient of one input alone");
      }
      const at::NoGradGuard guard;
      ExpectSameBits(Ours(x), y.detach(), "without gradients");
    }
  }
}

// Blocks are those of the forward pass, however many threads the backward pass has.
TEST(GeluFeedForward, ThreadsMayChangeInBetween) {
  at::manual_seed(5);
  const std::vector<at::Tensor> x = Inputs({2100, 8}, 12, true), exact = InDouble(x);
  const at::Tensor g = at::randn({2100, 8});
  const auto need = torch::autograd::grad({Definition(exact)}, exact, {g.to(at::kDouble)});
  const int before = NumThreads();
  for (const int forward : {1, 3}) {
    SetNumThreads(forward);
    const at::Tensor y = Ours(x);
    SetNumThreads(4 - forward);
    const auto d = torch::autograd::grad({y}, x, {g});
    for (size_t i = 0; i < x.size(); ++i)
      ExpectClose(d[i].to(at::kDouble), need[i], 3e-6, std::to_string(i));
  }
  SetNumThreads(before);
}

constexpr uint64_t kSeed = 17;
constexpr int64_t kFirstRow = 3;
constexpr FeedForwardDropout kDropout = {0.3, 0.2};

at::Tensor Dropping(const std::vector<at::Tensor>& x, const FeedForwardDropout& dropout) {
  const DrawScope scope(kSeed, kFirstRow);
  return Ours(x, dropout);
}

// 0 or what is kept is multiplied by, of [B,...,width] like x.
at::Tensor Factors(const at::Tensor& x, int64_t width, const DropoutDraw& draw) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = width;
  const at::Tensor factors = at::empty(sizes, at::kDouble);
  const int64_t of_row = factors.numel() / sizes[0];
  double* const to = factors.mutable_data_ptr<double>();
  for (int64_t i = 0; i < factors.numel(); ++i) {
    const bool kept = draw.KeepsValue(uint64_t(kFirstRow + i / of_row), uint64_t(i % of_row));
    to[i] = kept ? draw.KeptValueFactor() : 0;
  }
  return factors;
}

// The definition with what the scope of Dropping drops.
at::Tensor DefinitionWith(const std::vector<at::Tensor>& x, const FeedForwardDropout& dropout) {
  const DrawScope scope(kSeed, kFirstRow);
  const DropoutDraw hidden = DrawDropout(dropout.hidden), out = DrawDropout(dropout.out);
  return Definition(x, Factors(x[0], x[1].size(0), hidden), Factors(x[0], x[0].size(-1), out));
}

// Rows of a batch that begin and end within blocks, widths that are no multiples of what is drawn
// at once; one of the two rates alone; by threads that change in between; one input alone.
TEST(GeluFeedForward, DropsByTheDefinition) {
  at::manual_seed(6);
  const int before = NumThreads();
  for (const FeedForwardDropout& dropout :
       {kDropout, FeedForwardDropout{0.3, 0}, FeedForwardDropout{0, 0.2}}) {
    for (const std::vector<int64_t>& sizes :
         {std::vector<int64_t>{2, 7, 12}, {3, 700, 16}, {2, 3, 4, 8}, {5, 8}}) {
      const std::vector<at::Tensor> x = Inputs(sizes, 40, true), exact = InDouble(x);
      const at::Tensor g = at::randn(sizes), want = DefinitionWith(exact, dropout);
      const auto need = torch::autograd::grad({want}, exact, {g.to(at::kDouble)});
      SetNumThreads(2);
      const at::Tensor y = Dropping(x, dropout);
      ExpectClose(y.to(at::kDouble), want, 2e-6, "values");
      SetNumThreads(1);
      const auto d = torch::autograd::grad({y}, x, {g}, true);
      for (size_t i = 0; i < x.size(); ++i) {
        ExpectClose(d[i].to(at::kDouble), need[i], 3e-6, "gradient " + std::to_string(i));
        std::vector<at::Tensor> one = x;
        for (size_t j = 0; j < x.size(); ++j) {
          if (j != i) one[j] = x[j].detach();
        }
        ExpectClose(torch::autograd::grad({Dropping(one, dropout)}, {one[i]}, {g})[0], d[i], 1e-6,
                    "gradient of one input alone");
      }
      const at::NoGradGuard guard;
      ExpectClose(Dropping(x, dropout), y.detach(), 1e-6, "without gradients");
    }
  }
  SetNumThreads(before);
}

// In double, in bfloat16 and composed of other ops the same is dropped.
TEST(GeluFeedForward, EveryImplementationDropsTheSame) {
  at::manual_seed(7);
  const std::vector<at::Tensor> x = Inputs({3, 5, 8}, 40, true), exact = InDouble(x);
  const at::Tensor want = DefinitionWith(exact, kDropout);
  ExpectClose(Dropping(exact, kDropout), want, 1e-14, "double");
  std::vector<at::Tensor> half;
  for (const at::Tensor& t : x) half.push_back(t.detach().to(at::kBFloat16));
  half[3] = x[3];
  ExpectClose(Dropping(half, kDropout).to(at::kDouble), want, 0.03, "bfloat16");
  for (const Impl impl : {Impl::kComposite, Impl::kReference}) {
    const ImplScope with(impl);
    ExpectClose(Dropping(x, kDropout).to(at::kDouble), want, 2e-6, "another implementation");
  }
}

TEST(GeluFeedForward, RefusesRatesAboveOneAndOtherResiduals) {
  const std::vector<at::Tensor> x = Inputs({5, 8}, 12, true);
  ExpectContains(Thrown([&] { Ours(x, {1.5, 0}); }), {"[feed_forward]", "1.5"});
  ExpectContains(Thrown([&] { Ours(x, {0, 2}); }), {"[feed_forward]", "2"});
  std::vector<at::Tensor> one_row = x;
  one_row[3] = x[3].narrow(0, 0, 1);
  ExpectContains(Thrown([&] { Ours(one_row); }), {"[feed_forward] expected residual", "got [1, "});
}

// Rows that are strided, and a gradient that is expanded.
TEST(GeluFeedForward, StridedInputs) {
  at::manual_seed(2);
  std::vector<at::Tensor> x = Inputs({6, 8}, 10, true);
  x[0] = Leaf(at::randn({8, 6}).t()), x[3] = Leaf(at::randn({6, 16}).slice(1, 0, 16, 2));
  const std::vector<at::Tensor> exact = InDouble(x);
  const auto d = torch::autograd::grad({Ours(x).sum()}, x),
             need = torch::autograd::grad({Definition(exact).sum()}, exact);
  for (size_t i = 0; i < x.size(); ++i)
    ExpectClose(d[i].to(at::kDouble), need[i], 3e-6, std::to_string(i));
}

// Without dropout and with it.
TEST(GeluFeedForward, SecondDerivatives) {
  at::manual_seed(3);
  const std::vector<at::Tensor> x = Inputs({9, 8}, 12, true), exact = InDouble(x);
  const auto second = [](const at::Tensor& y, const std::vector<at::Tensor>& of) {
    const auto first = torch::autograd::grad({y.pow(3).sum()}, of, {}, true, true);
    at::Tensor sum = first[0].pow(2).sum();
    for (size_t i = 1; i < first.size(); ++i) sum = sum + first[i].pow(2).sum();
    return torch::autograd::grad({sum}, of);
  };
  const auto check = [&](const at::Tensor& ours, const at::Tensor& definition) {
    const auto got = second(ours, x), want = second(definition, exact);
    for (size_t i = 0; i < x.size(); ++i)
      ExpectClose(got[i].to(at::kDouble), want[i], 1e-5, std::to_string(i));
  };
  check(Ours(x), Definition(exact));
  check(Dropping(x, kDropout), DefinitionWith(exact, kDropout));
}

// What the blocks do not serve: doubles, bfloat16, the composite, shapes alone.
TEST(GeluFeedForward, OtherTensors) {
  at::manual_seed(4);
  const std::vector<at::Tensor> x = Inputs({5, 8}, 12, true), exact = InDouble(x);
  const at::Tensor want = Definition(exact);
  ExpectClose(Ours(exact), want, 1e-14, "double");
  std::vector<at::Tensor> half, meta;
  for (const at::Tensor& t : x) {
    half.push_back(t.detach().to(at::kBFloat16));
    meta.push_back(t.detach().to(at::kMeta));
  }
  half[3] = x[3];  // the stream stays in float
  const at::Tensor rounded = Ours(half);
  EXPECT_EQ(rounded.scalar_type(), at::kFloat);
  ExpectClose(rounded.to(at::kDouble), want, 0.03, "bfloat16");
  EXPECT_EQ(Ours(meta).sizes(), want.sizes());
  EXPECT_EQ(Ours(Inputs({0, 8}, 12, true)).sizes(), at::IntArrayRef({0, 8}));
  const ImplScope composite(Impl::kComposite);
  ExpectClose(Ours(x).to(at::kDouble), want, 2e-6, "composite");
}

}  // namespace
}  // namespace cistern::ops
