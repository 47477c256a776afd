// Exact attention as an op: three implementations, gradients once and twice, what it refuses.
#include "cistern/ops/exact_attention.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "cistern/ops/banded_attention.h"
#include "cistern/ops/softmax_attention.h"
#include "cistern/ops/testing.h"

namespace cistern::ops {
namespace {

using namespace cistern::testing;

struct Case {
  at::Tensor q, k, v, g;
  SeenKeys seen;
  std::string name;
  DropoutDraw dropout = {};
};

std::vector<Case> Cases() {
  const auto make = [](int64_t T, int64_t S, const std::string& name) {
    return Case{Normal({2, 3, T, 5}),
                Normal({2, 3, S, 5}),
                Normal({2, 3, S, 7}),
                Normal({2, 3, T, 7}),
                {},
                name,
                {}};
  };
  std::vector<Case> all = {make(9, 12, "all"),     make(1, 12, "one"),  make(70, 70, "window"),
                           make(8, 14, "dilated"), make(6, 9, "valid"), make(12, 12, "empty")};
  const auto ranges = [](int64_t rows, int64_t T, auto&& range) {
    const at::Tensor x = at::zeros({rows, T, 3}, at::kLong);
    auto r = x.accessor<int64_t, 3>();
    for (int64_t b = 0; b < rows; ++b) {
      for (int64_t t = 0; t < T; ++t) {
        const std::array<int64_t, 3> of = range(b, t);
        for (int64_t i = 0; i < 3; ++i) r[b][t][i] = of[size_t(i)];
      }
    }
    return x;
  };
  using Range = std::array<int64_t, 3>;
  all[2].seen.ranges = ranges(1, 70, [](int64_t, int64_t t) {
    return Range{std::max<int64_t>(0, t - 6), t + 1, 0};
  });
  all[3].seen = {ranges(2, 8, [](int64_t b, int64_t t) { return Range{b, t + 7, 0}; }), {}, 3};
  all[4].seen.valid = at::rand({2, 9}) < 0.6;
  all[4].seen.valid[1].fill_(false);
  all[5].seen.ranges = ranges(1, 12, [](int64_t, int64_t t) {
    return Range{std::max<int64_t>(0, t - 4), t + 1, std::max<int64_t>(0, 4 - t)};
  });
  for (size_t i : {0, 2, 3, 4, 5}) {
    Case dropped = all[i];
    dropped.name += " with dropout", dropped.dropout = {0.4, 123 + i};
    all.push_back(dropped);
  }
  return all;
}

std::vector<at::Tensor> Leaves(const Case& c, at::ScalarType dtype) {
  return {Leaf(c.q.to(dtype)), Leaf(c.k.to(dtype)), Leaf(c.v.to(dtype))};
}

TEST(ExactAttention, ThreeImplementationsAgree) {
  for (const Case& c : Cases()) {
    std::vector<at::Tensor> want;
    for (const Impl impl : {Impl::kReference, Impl::kKernel, Impl::kComposite}) {
      ImplScope scope(impl);
      for (const auto dtype : {at::kDouble, at::kFloat}) {
        const auto x = Leaves(c, dtype);
        const at::Tensor out = ExactAttention(x[0], x[1], x[2], 0.4, c.seen, c.dropout);
        auto got = Gradients((out * c.g.to(dtype)).sum(), x);
        got.push_back(out.detach());
        EXPECT_EQ(out.sizes(), c.g.sizes()) << c.name;
        if (want.empty()) want = got;
        for (size_t i = 0; i < got.size(); ++i) {
          ExpectClose(got[i], want[i], dtype == at::kDouble ? 1e-13 : 2e-6,
                      c.name + " " + ImplName(impl) + " " + std::to_string(i));
        }
      }
    }
  }
}

TEST(ExactAttention, SecondDerivativesAreThoseOfTheComposite) {
  for (const Case& c : Cases()) {
    const auto second = [&] {
      const auto x = Leaves(c, at::kDouble);
      const at::Tensor out = ExactAttention(x[0], x[1], x[2], 0.4, c.seen, c.dropout);
      const auto first = torch::autograd::grad({(out.square() * c.g).sum()}, x, {}, {}, true);
      return Gradients(first[0].square().sum() + first[1].square().sum() + first[2].square().sum(),
                       x);
    };
    std::vector<std::vector<at::Tensor>> all;
    for (const Impl impl : {Impl::kComposite, Impl::kKernel}) {
      ImplScope scope(impl);
      all.push_back(second());
    }
    for (size_t i = 0; i < 3; ++i) ExpectClose(all[1][i], all[0][i], 1e-12, c.name);
  }
}

// No row, no token: gradients of gradients are those of nothing.
TEST(ExactAttention, NothingToAttend) {
  for (const Impl impl : {Impl::kComposite, Impl::kKernel}) {
    ImplScope scope(impl);
    for (const auto& [rows, length] : {std::pair(0, 3), std::pair(2, 0)}) {
      std::vector<at::Tensor> x;
      for (int i = 0; i < 3; ++i) x.push_back(Leaf(at::rand({rows, 2, length, 4}, at::kDouble)));
      SeenKeys seen;
      seen.ranges = at::zeros({rows, length, 3}, at::kLong);
      const at::Tensor out = ExactAttention(x[0], x[1], x[2], 0.4, seen, {});
      EXPECT_EQ(out.sizes(), x[0].sizes());
      const auto first = torch::autograd::grad({out.square().sum()}, x, {}, {}, true);
      const auto second = Gradients(first[0].square().sum() + x[0].sum(), x);
      for (size_t i = 0; i < 3; ++i) EXPECT_EQ(second[i].sizes(), x[i].sizes());
    }
  }
}

// One seed of torch's generator drops the same by kernels, in blocks and explicitly; another drops
// others.
TEST(ExactAttention, DropoutIsTheSameEverywhere) {
  at::manual_seed(1);
  const at::Tensor q = Normal({2, 3, 30, 5}), k = Normal({2, 3, 34, 5}), v = Normal({2, 3, 34, 7}),
                   g = Normal({2, 3, 30, 7});
  SoftmaxOptions causal;
  causal.causal = true, causal.query_offset = 4, causal.dropout = 0.3;
  SoftmaxOptions biased = causal;
  biased.bias = Leaf(Normal({1, 3, 30, 34}));
  const at::Tensor keys = at::rand({2, 34}) < 0.8;
  const auto step = [&](const SoftmaxOptions& options, int64_t seed) {
    at::manual_seed(seed);
    const std::vector<at::Tensor> x = {Leaf(q), Leaf(k), Leaf(v)};
    const at::Tensor out = SoftmaxAttention(x[0], x[1], x[2], options, {}, keys);
    auto all = Gradients((out * g).sum(), x);
    all.push_back(out.detach());
    return all;
  };
  for (const SoftmaxOptions& options : {causal, biased}) {
    std::vector<at::Tensor> want;
    for (const Impl impl : {Impl::kReference, Impl::kKernel, Impl::kComposite}) {
      ImplScope scope(impl);
      const auto got = step(options, 9);
      if (want.empty()) want = got;
      for (size_t i = 0; i < got.size(); ++i)
        ExpectClose(got[i], want[i], 1e-12, ImplName(impl) + " " + std::to_string(i));
      EXPECT_GT(RelRms(step(options, 10)[3], want[3]), 0.05);
    }
  }
  // Of probabilities that are given: those of the same attention.
  const at::Tensor p = AttentionProbabilities(q, k, causal, {}, keys), want = step(causal, 9)[3];
  at::manual_seed(9);
  ExpectClose(ApplyProbabilities(p, v, 0.3), want, 1e-12, "probabilities");
}

TEST(ExactAttention, BandsWithDropoutAgree) {
  at::manual_seed(1);
  const at::Tensor q = Normal({2, 2, 50, 5}), k = Normal({2, 2, 56, 5}), g = Normal({2, 2, 50, 5});
  for (const Band& band : {Band{5, 0, 6, 0, 1}, Band{3, 2, 6, 4, 1}, Band{2, 0, 6, 0, 3}}) {
    std::vector<at::Tensor> want;
    for (const Impl impl : {Impl::kReference, Impl::kKernel, Impl::kComposite}) {
      ImplScope scope(impl);
      at::manual_seed(9);
      const std::vector<at::Tensor> x = {Leaf(q), Leaf(k)};
      const at::Tensor out = BandedAttention(x[0], x[1], x[1], band, {}, 0.4, 0.3);
      auto got = Gradients((out * g).sum(), x);
      got.push_back(out.detach());
      if (want.empty()) want = got;
      for (size_t i = 0; i < got.size(); ++i)
        ExpectClose(got[i], want[i], 1e-12, ImplName(impl) + " " + std::to_string(i));
    }
    ImplScope scope(Impl::kKernel);
    EXPECT_GT(RelRms(BandedAttention(q, k, k, band, {}, 0.4, 0), want[2]), 0.05);
  }
}

TEST(ExactAttention, RefusesWhatDoesNotFit) {
  ImplScope scope(Impl::kKernel);
  const at::Tensor x = Normal({2, 3, 4, 5});
  ExpectContains(Thrown([&] {
                   ExactAttention(x, Normal({2, 3, 4, 6}), x, 1);
                 }),
                 {"[exact_attention]", "[2, 3, 4, 6]"});
  ExpectContains(Thrown([&] { ExactAttention(x, x.to(at::kFloat), x, 1); }), {"one dtype"});
  ExpectContains(Thrown([&] { ExactAttention(x, x, x, 1, {}, {1.5, 1}); }), {"dropout", "1.5"});
  const auto with = [&](const SeenKeys& seen) {
    return Thrown([&] { ExactAttention(x, x, x, 1, seen); });
  };
  ExpectContains(with({at::zeros({1, 4, 2}, at::kLong), {}, 1}), {"ranges [B or 1,T,3]"});
  ExpectContains(with({at::full({1, 4, 3}, 5, at::kLong), {}, 1}), {"within 0..S = 4", "5..5"});
  ExpectContains(with({{}, at::ones({2, 5}, at::kBool), 1}), {"valid [B,S]", "[2, 5]"});
  ExpectContains(Thrown([&] {
                   ExactAttention(x, Normal({2, 3, 5, 5}), Normal({2, 3, 5, 5}), 1, {{}, {}, 2});
                 }),
                 {"dilation that divides S - T", "got 2"});
}

}  // namespace
}  // namespace cistern::ops
