// Softmax attention by blocks of queries: what is dropped, its gradients, its memory.
#include "cistern/ops/blockwise_attention.h"

#include <ATen/ATen.h>

#include <cmath>

#include "cistern/base/memory.h"
#include "cistern/ops/softmax_attention.h"
#include "cistern/ops/testing.h"

namespace cistern::ops {
namespace {

using namespace cistern::testing;

at::Tensor Plain(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                 const at::Tensor& visible, const at::Tensor& bias, double scale,
                 const at::Tensor& factor = {}) {
  at::Tensor scores = at::matmul(q, k.transpose(2, 3)) * scale;
  if (bias.defined()) scores = scores + bias;
  if (visible.defined()) scores = scores.masked_fill(visible.logical_not(), -1e30);
  at::Tensor p = at::softmax(scores, 3);
  if (visible.defined()) p = p * visible;
  return at::matmul(factor.defined() ? p * factor : p, v);
}

void ExpectSame(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want,
                const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i)
    ExpectClose(got[i], want[i], 1e-11, what + " " + std::to_string(i));
}

// 3 blocks of queries; some rows see nothing.
TEST(BlockwiseAttention, WithoutDropoutIsTheExplicitOne) {
  at::manual_seed(1);
  const int64_t T = 26, S = 200000;
  const at::Tensor q = Leaf(Normal({1, 2, T, 3})), k = Leaf(Normal({1, 2, S, 3})),
                   v = Leaf(Normal({1, 2, S, 2})), bias = Leaf(Normal({1, 2, T, S})),
                   g = Normal({1, 2, T, 2});
  ASSERT_TRUE(WorthBlocks(q, k));
  at::Tensor visible = at::rand({1, 1, T, S}) < 0.7;
  visible.select(2, 4).fill_(false);
  for (const bool masked : {false, true}) {
    const at::Tensor seen = masked ? visible : at::Tensor();
    const at::Tensor got = BlockwiseAttention(q, k, v, seen, bias, 0.3, {}),
                     want = Plain(q, k, v, seen, bias, 0.3);
    ExpectClose(got, want, 1e-12, masked ? "masked" : "all");
    ExpectSame(Gradients((got * g).sum(), {q, k, v, bias}),
               Gradients((want * g).sum(), {q, k, v, bias}), masked ? "masked" : "all");
  }
  const at::Tensor keys = visible.narrow(2, 0, 1);  // the same for all queries
  ExpectClose(BlockwiseAttention(q, k, v, keys, {}, 0.3, {}), Plain(q, k, v, keys, {}, 0.3), 1e-12,
              "keys");
}

// The identity as values shows the probabilities: dropped, or divided by what is kept.
TEST(BlockwiseAttention, DropsAShareAndTheSameInTheBackwardPass) {
  const int64_t T = 70000, S = 64;  // two blocks
  const double dropout = 0.2;
  const DropoutDraw draw = {dropout, 7};
  at::manual_seed(1);
  const at::Tensor q = Leaf(Normal({1, 1, T, 3})), k = Leaf(Normal({1, 1, S, 3})),
                   eye = at::eye(S, at::kDouble).view({1, 1, S, S}), g = Normal({1, 1, T, S});
  const at::Tensor full = Plain(q, k, eye, {}, {}, 0.5).detach();
  const at::Tensor v = Leaf(eye), p = BlockwiseAttention(q, k, v, {}, {}, 0.5, draw);
  const at::Tensor factor = (p.detach() != 0) / (1 - dropout);
  ExpectClose(p, full * factor, 1e-13, "kept ones are scaled");
  const auto share = [&](const at::Tensor& x) {
    return (x == 0).to(at::kDouble).mean().item<double>();
  };
  EXPECT_NEAR(share(factor), dropout, 1e-3);  // 5 deviations of 4.5 million
  EXPECT_NEAR(share(factor.narrow(2, 65536, T - 65536)), dropout, 5e-3);
  // The blocks have draws of their own.
  EXPECT_GT((factor.narrow(2, 0, 4464) != factor.narrow(2, 65536, 4464))
                .to(at::kDouble)
                .mean()
                .item<double>(),
            0.3);
  const at::Tensor want = Plain(q, k, v, {}, {}, 0.5, factor);
  ExpectSame(Gradients((p * g).sum(), {q, k, v}), Gradients((want * g).sum(), {q, k, v}),
             "gradients");
  EXPECT_TRUE(at::equal(BlockwiseAttention(q, k, v, {}, {}, 0.5, draw), p)) << "the seed";
  EXPECT_FALSE(at::equal(BlockwiseAttention(q, k, v, {}, {}, 0.5, {dropout, 8}), p)) << "another";
}

TEST(BlockwiseAttention, IsDifferentiableTwice) {
  at::manual_seed(1);
  const at::Tensor q = Leaf(Normal({2, 2, 4, 3})), k = Leaf(Normal({2, 2, 5, 3})),
                   v = Leaf(Normal({2, 2, 5, 2})), bias = Leaf(Normal({1, 2, 4, 5})),
                   g = Normal({2, 2, 4, 2});
  const auto second = [&](const at::Tensor& out) {
    const auto first = torch::autograd::grad({(out * g).sum()}, {q, k, v, bias}, {}, true, true);
    at::Tensor sum = first[0].square().sum();
    for (size_t i = 1; i < 4; ++i) sum = sum + first[i].square().sum();
    return Gradients(sum, {q, k, v, bias});
  };
  ExpectSame(second(BlockwiseAttention(q, k, v, {}, bias, 0.3, {})),
             second(Plain(q, k, v, {}, bias, 0.3)), "second derivatives");
}

// 100 million probabilities, 400 MB: explicit attention with dropout keeps three times that for the
// backward pass alone; blocks and what libraries keep for themselves are some 350 MB.
TEST(BlockwiseAttention, HoldsNoProbabilities) {
  const int64_t T = 5000;
  const auto step = [&](int64_t length) {
    at::manual_seed(1);
    const at::Tensor q = Leaf(Normal({1, 4, length, 8}).to(at::kFloat)),
                     k = Leaf(Normal({1, 4, length, 8}).to(at::kFloat)),
                     v = Leaf(Normal({1, 4, length, 8}).to(at::kFloat));
    SoftmaxOptions options;
    options.causal = true;
    options.dropout = 0.1;
    SoftmaxAttention(q, k, v, options).sum().backward();
    EXPECT_TRUE(q.grad().isfinite().all().item<bool>());
  };
  step(8);
  ResetPeakMemory();
  const int64_t before = ResidentBytes();
  if (PeakBytes() > before + (8 << 20))
    GTEST_SKIP() << "the system does not reset the peak of memory";
  step(T);
  EXPECT_LT(PeakBytes() - before, 2 * (4 * T * T * 4));
}

}  // namespace
}  // namespace cistern::ops
