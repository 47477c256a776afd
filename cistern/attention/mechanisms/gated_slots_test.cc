// Gated slots by hand, and their limits.
#include "cistern/attention/testing_mechanisms.h"

namespace cistern {
namespace {

using namespace cistern::testing;

std::shared_ptr<Mechanism> Make(const Json& options, int64_t dim, int64_t heads) {
  AttentionDims dims;
  dims.dim = dim, dims.heads = heads;
  const auto m = FindMechanism("gated_slots").make(options, dims);
  m->eval();
  return m;
}

TEST(GatedSlots, HalfByHand) {
  // One slot, so that its softmax is one: the output is the slot's value, v_1/4 + v_2/2 after two
  // tokens with gates of 1/2.
  const auto m = Make({{"slots", 1}, {"temperature", 1}}, 2, 1);
  const at::Tensor v = at::tensor({8., 16., 4., 2.}, at::kDouble).view({1, 1, 2, 2}),
                   gate = at::zeros({1, 1, 2, 1}, at::kDouble);
  ExpectClose(ExtendPieces(*m, {v, v, v, gate}, {0, 2}),
              at::tensor({4., 8., 4., 5.}, at::kDouble).view({1, 1, 2, 2}), 1e-15, "by hand");
  // The temperature is a root of the gate: sigmoid(x)^(1/2) = 1/2 where sigmoid(x) = 1/4.
  const auto rooted = Make({{"slots", 1}, {"temperature", 2}}, 2, 1);
  ExpectClose(ExtendPieces(*rooted, {v, v, v, gate + std::log(1. / 3)}, {0, 2}),
              ExtendPieces(*m, {v, v, v, gate}, {0, 2}), 1e-15, "root");
}

TEST(GatedSlots, ClosedGatesAreAttentionToTheTokenItself) {
  // g = 0: every slot holds the last token alone, whatever the query.
  const auto m = Make({{"slots", 3}, {"temperature", 1}}, 10, 2);
  at::manual_seed(2);
  auto x = Inputs(*m, 2, 9);
  x[3].fill_(-800);
  ExpectClose(ExtendPieces(*m, x, {0, 4, 9}), x[2], 1e-14, "the token's own value");
  // g = 1 after the first token: its write stays.
  x[3].fill_(800).narrow(2, 0, 1).fill_(-800);
  ExpectClose(ExtendPieces(*m, x, {0, 4, 9}), x[2].narrow(2, 0, 1).expand_as(x[2]), 1e-14,
              "the first token's value");
}

TEST(GatedSlots, SmallWritesAddUpInFloat) {
  // 1 - g = 1e-5: ten thousand writes of it. In float 1 - g of a gate rounded to float would be off
  // by a fraction of a percent.
  const int64_t T = 20000;
  const auto m = Make({{"slots", 1}, {"temperature", 1}}, 2, 1);
  const at::Tensor one = at::ones({1, 1, T, 2}),
                   gate = at::full({1, 1, T, 1}, std::log((1 - 1e-5) / 1e-5));
  at::NoGradGuard guard;
  const double want = 1 - std::exp(double(T) * std::log1p(-1e-5));
  EXPECT_NEAR(ExtendPieces(*m, {one, one, one, gate}, {0, T})[0][0][T - 1][0].item<double>(), want,
              1e-5);
}

TEST(GatedSlots, OrderOfSlotsDoesNotMatter) {
  const auto m = Make({{"slots", 3}}, 10, 2);
  at::manual_seed(3);
  auto x = Inputs(*m, 2, 20);
  const at::Tensor want = ExtendPieces(*m, x, {0, 20});
  x[3] = x[3].index_select(3, at::tensor({2, 0, 1}, at::kLong));
  ExpectClose(ExtendPieces(*m, x, {0, 20}), want, 1e-13, "permuted");
}

}  // namespace
}  // namespace cistern
