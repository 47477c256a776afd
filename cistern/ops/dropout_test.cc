#include "cistern/ops/dropout.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/forward_grad.h>

#include "cistern/ops/draws.h"
#include "cistern/ops/impl.h"
#include "cistern/ops/testing.h"

namespace cistern::ops {
namespace {

using namespace cistern::testing;

// What a first dropout of the scope multiplies x by, by the definition.
at::Tensor Factors(const at::Tensor& x, double rate, uint64_t seed, int64_t first_row,
                   const std::vector<int64_t>& numbers = {}) {
  const DrawScope scope(seed, first_row);
  const DropoutDraw draw = DrawDropout(rate);
  const int64_t rows = x.size(0);
  const at::Tensor factors = at::empty({rows, x.numel() / rows}, at::kDouble);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t number = first_row + (numbers.empty() ? r : numbers[size_t(r)]);
    for (int64_t i = 0; i < factors.size(1); ++i)
      factors[r][i] = draw.KeepsValue(uint64_t(number), uint64_t(i)) ? draw.KeptValueFactor() : 0;
  }
  return factors.view(x.sizes());
}

TEST(DropoutOp, DefinitionInEveryImplementation) {
  at::manual_seed(3);
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const double tolerance = dtype == at::kDouble ? 1e-15 : dtype == at::kFloat ? 1e-7 : 4e-3;
    for (const at::Tensor& values :
         {at::randn({2, 33, 7}), at::randn({70, 3}).t(), at::randn({5})}) {
      const at::Tensor factors = Factors(values, 0.3, 9, 4), g = at::randn_like(values);
      for (const Impl impl : kImpls) {
        const ImplScope with(impl);
        const DrawScope scope(9, 4);
        const at::Tensor x = Leaf(values.to(dtype)), y = Dropout(x, 0.3, true);
        EXPECT_EQ(y.scalar_type(), dtype);
        const auto rounded = [&](const at::Tensor& t) { return t.to(dtype).to(at::kDouble); };
        ExpectClose(y.to(at::kDouble), rounded(values) * factors, tolerance, "y");
        ExpectClose(Gradients((y * g.to(dtype)).sum(), {x})[0].to(at::kDouble),
                    rounded(g) * factors, tolerance, "dx");
      }
    }
  }
}

TEST(DropoutOp, NothingToDrop) {
  const at::Tensor x = at::randn({3, 4});
  EXPECT_TRUE(Dropout(x, 0.5, false).is_same(x));
  EXPECT_TRUE(Dropout(x, 0, true).is_same(x));
  EXPECT_TRUE(DropoutOfTokens(x, at::arange(3), 2, 0, true).is_same(x));
  EXPECT_EQ(Dropout(at::empty({0, 4}), 0.5, true).size(0), 0);
  EXPECT_TRUE(Dropout(at::empty({2, 4}, at::kMeta), 0.5, true).is_meta());
  EXPECT_EQ(Dropout(x, 1, true).count_nonzero().item<int64_t>(), 0);
}

TEST(DropoutOp, TokensHaveRowsOfTheirOwn) {
  const at::Tensor x = at::ones({3, 50}, at::kDouble);
  const std::vector<int64_t> tokens = {0, 7, 2};
  const auto at_row = [&](int64_t row, auto&& run) {
    const DrawScope scope(11, row);
    return run();
  };
  const auto some = [&] { return DropoutOfTokens(x, at::tensor(tokens), 8, 0.5, true); };
  const DrawScope scope(11);
  constexpr int64_t kToken = int64_t{1} << 32;
  EXPECT_TRUE(at_row(0, some).equal(x * Factors(x, 0.5, 11, 0, {0, 7 * kToken, 2 * kToken})));
  EXPECT_TRUE(
      at_row(2, some).equal(x * Factors(x, 0.5, 11, 0, {2, 2 + 7 * kToken, 2 + 2 * kToken})));
  // Tokens 0 and 7 of row 0 and 2 of row 1, of 9 a row; the same of 30 a row.
  const auto of = [&](std::vector<int64_t> numbers, int64_t of_row) {
    return at_row(1, [&] { return DropoutOfTokens(x, at::tensor(numbers), of_row, 0.5, true); });
  };
  EXPECT_TRUE(
      of({0, 7, 11}, 9).equal(x * Factors(x, 0.5, 11, 0, {1, 1 + 7 * kToken, 2 + 2 * kToken})));
  EXPECT_TRUE(of({0, 7, 32}, 30).equal(of({0, 7, 11}, 9)));
}

TEST(DropoutOp, DerivativesOfEveryOrderAndForwardMode) {
  const at::Tensor x = Leaf(Normal({3, 40})), g = Leaf(Normal({3, 40}));
  const at::Tensor factors = Factors(x, 0.4, 5, 0);
  const DrawScope scope(5);
  const at::Tensor dx = torch::autograd::grad({Dropout(x, 0.4, true)}, {x}, {g}, true, true)[0];
  ExpectClose(dx, g * factors, 1e-15, "first");
  ExpectClose(Gradients((dx * dx).sum(), {g})[0], 2 * g * factors * factors, 1e-15, "second");
  const DrawScope again(5);
  const uint64_t level = torch::autograd::ForwardADLevel::get_next_idx();
  {
    const at::Tensor y = Dropout(at::_make_dual(x.detach(), g.detach(), int64_t(level)), 0.4, true);
    ExpectClose(std::get<1>(at::_unpack_dual(y, int64_t(level))), g * factors, 1e-15, "tangent");
  }
  torch::autograd::ForwardADLevel::release_idx(level);
}

// The backward pass needs neither the input nor what was dropped.
TEST(DropoutOp, KeepsNothing) {
  const at::Tensor leaf = Leaf(Normal({3, 40}));
  at::Tensor x = leaf * 2;
  const at::Tensor y = Dropout(x, 0.4, true);
  EXPECT_EQ(x.use_count(), 1);
}

TEST(DropoutOp, Refusals) {
  ExpectContains(Thrown([] { Dropout(at::ones({2}, at::kLong), 0.5, true); }),
                 {"[dropout]", "real numbers"});
  ExpectContains(Thrown([] { Dropout(at::ones({2}), 1.5, true); }), {"[dropout]", "rate", "1.5"});
  ExpectContains(Thrown([] {
                   DropoutOfTokens(at::ones({2, 3}), at::arange(3), 4, 0.5, true);
                 }),
                 {"[dropout]", "int64", "[3]"});
}

TEST(Draws, FollowFromTheSeedAndTheirOrder) {
  const auto three = [](uint64_t seed, int64_t row) {
    const DrawScope scope(seed, row);
    std::vector<uint64_t> out;
    for (int i = 0; i < 3; ++i) {
      const Draw draw = Draw::Next();
      EXPECT_EQ(draw.first_row, row);
      EXPECT_LT(draw.seed, uint64_t{1} << 62);
      out.push_back(draw.seed);
    }
    return out;
  };
  const std::vector<uint64_t> first = three(1, 0);
  EXPECT_EQ(three(1, 5), first);
  EXPECT_NE(first[0], first[1]);
  EXPECT_NE(first[1], first[2]);
  for (const uint64_t other : three(2, 0))
    EXPECT_EQ(std::count(first.begin(), first.end(), other), 0);
}

TEST(Draws, AScopeLeavesTheGeneratorAndTheScopeAroundItAlone) {
  at::manual_seed(2);
  const uint64_t drawn = Draw::Next().seed;
  EXPECT_NE(Draw::Next().seed, drawn);
  at::manual_seed(2);
  {
    const DrawScope scope(4);
    const uint64_t first = Draw::Next().seed;
    {
      const DrawScope inner(4);
      EXPECT_EQ(Draw::Next().seed, first);
    }
    EXPECT_NE(Draw::Next().seed, first);
  }
  EXPECT_EQ(Draw::Next().seed, drawn);
}

}  // namespace
}  // namespace cistern::ops
