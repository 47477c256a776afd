#include "cistern/nn/head_loss.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

#include "cistern/base/error.h"
#include "cistern/ops/testing.h"

namespace cistern {
namespace {

using namespace cistern::testing;

at::Tensor Logits(const std::vector<at::Tensor>& x) {
  const at::Tensor y = at::matmul(x[0], x[1].t());
  return x.size() > 2 ? y + x[2] : y;
}

TEST(HeadLoss, IsCrossEntropyOfTheLogits) {
  at::manual_seed(5);
  // 900 rows of 1,500 logits are three pieces and a part of one.
  for (const auto& [rows, vocabulary] :
       std::vector<std::pair<int64_t, int64_t>>{{1, 3}, {900, 1500}, {40, 60000}}) {
    for (const double smoothing : {0.0, 0.1}) {
      for (const bool bias : {false, true}) {
        std::vector<at::Tensor> x = {Leaf(Normal({rows, 7})), Leaf(Normal({vocabulary, 7}))};
        if (bias) x.push_back(Leaf(Normal({vocabulary})));
        at::Tensor targets = at::randint(vocabulary, {rows}, at::kLong);
        if (rows > 1) targets.narrow(0, 3, 5).fill_(-100);
        const at::Tensor want =
            at::cross_entropy_loss(Logits(x), targets, {}, at::Reduction::Mean, -100, smoothing);
        const at::Tensor got = HeadLoss(x[0], x[1], bias ? x[2] : at::Tensor(), targets, smoothing);
        ExpectClose(got, want, 1e-13, "loss");
        const auto want_g = Gradients(want * 3, x), got_g = Gradients(got * 3, x);
        for (size_t i = 0; i < x.size(); ++i)
          ExpectClose(got_g[i], want_g[i], 1e-12, "gradient " + std::to_string(i));
        at::NoGradGuard guard;
        ExpectClose(HeadLoss(x[0], x[1], bias ? x[2] : at::Tensor(), targets, smoothing), want,
                    1e-13, "without gradients");
      }
    }
  }
}

TEST(HeadLoss, NothingToCountIsZero) {
  const std::vector<at::Tensor> x = {Leaf(Normal({3, 4})), Leaf(Normal({5, 4}))};
  const at::Tensor loss = HeadLoss(x[0], x[1], {}, at::full({3}, -100, at::kLong));
  EXPECT_EQ(loss.item<double>(), 0);
  for (const at::Tensor& g : Gradients(loss, x)) EXPECT_EQ(g.abs().sum().item<double>(), 0);
}

TEST(HeadLoss, BFloat16ProductsStayClose) {
  at::manual_seed(5);
  const std::vector<at::Tensor> x = {Leaf(Normal({300, 16}).to(at::kFloat)),
                                     Leaf(Normal({2000, 16}).to(at::kFloat))};
  const at::Tensor targets = at::randint(2000, {300}, at::kLong);
  const at::Tensor want = HeadLoss(x[0], x[1], {}, targets);
  const auto want_g = Gradients(want, x);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const at::Tensor got = HeadLoss(x[0], x[1], {}, targets);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_EQ(got.scalar_type(), at::kFloat);
  EXPECT_FALSE(at::equal(got, want));
  ExpectClose(got, want, 5e-3, "loss");
  const auto got_g = Gradients(got, x);
  for (size_t i = 0; i < x.size(); ++i) ExpectClose(got_g[i], want_g[i], 1e-2, "gradient");
}

TEST(HeadLoss, BadShapesAreNamed) {
  ExpectContains(Thrown([] {
                   HeadLoss(at::zeros({3, 4}), at::zeros({5, 6}), {}, at::zeros({3}, at::kLong));
                 }),
                 {"[head_loss]", "[3, 4]", "[5, 6]"});
}

// Never a silent zero.
TEST(HeadLoss, ForwardModeIsRefused) {
  const at::Tensor hidden = Normal({3, 4}), weight = Normal({5, 4}),
                   targets = at::zeros({3}, at::kLong);
  const uint64_t level = torch::autograd::ForwardADLevel::get_next_idx();
  for (const bool of_hidden : {true, false}) {
    const auto dual = [&](const at::Tensor& x) {
      return at::_make_dual(x, at::ones_like(x), int64_t(level));
    };
    ExpectContains(Thrown([&] {
                     HeadLoss(of_hidden ? dual(hidden) : hidden, of_hidden ? weight : dual(weight),
                              {}, targets);
                   }),
                   {"[head_loss] has no forward-mode derivative"});
  }
  torch::autograd::ForwardADLevel::release_idx(level);
}

}  // namespace
}  // namespace cistern
