// Tokens in bfloat16 beside weights, log-weights and gates in float: slots and sums.
#include "cistern/ops/rounded_tokens_test.h"
#include "cistern/ops/slot_memory.h"
#include "cistern/ops/sum_memory.h"

namespace cistern::ops {
namespace {

using namespace rounded_tokens;

// Sums, whose weights and gates stay in float beside tokens in bfloat16.
void ExpectRoundedSums(const Shape& s, const Mask& mask, int64_t gates, bool match) {
  const Tensors tokens(match ? 2 : 1, Heads(s.length, s.width));
  Tensors others = {at::randn({3, 2, s.slots, s.width}, at::kDouble), Heads(s.length, s.slots)};
  if (!match) others.push_back(Heads(s.length, s.slots));
  if (gates > 0) others.push_back(at::log_sigmoid(Heads(s.length, gates)));
  const auto run = [&](const Tensors& x) {
    const size_t n = tokens.size();
    const at::Tensor first = HeadsFirst(x[0]), w = HeadsFirst(x[n + 1]),
                     gate = gates > 0 ? HeadsFirst(x.back()) : at::Tensor();
    const SumResult r = match ? SumMatch(first, w, HeadsFirst(x[1]), x[n], mask, gate)
                              : SumRead(HeadsFirst(x[n + 2]), w, first, x[n], mask, gate);
    EXPECT_EQ(r.out.scalar_type(), (match ? w : first).scalar_type());
    return Tensors{r.out.to(first.scalar_type()), r.memory};
  };
  ExpectRounded(tokens, others, run,
                (match ? "sum match " : "sum read ") + std::to_string(s.length) + " gates " +
                    std::to_string(gates));
}

TEST(BFloat16Tokens, SumsWithWeightsInFloat) {
  at::manual_seed(4);
  for (const Shape& s : kShapes) {
    for (const Mask& mask : Masks(s.length)) {
      for (const int64_t gates : {int64_t{0}, int64_t{1}, s.slots}) {
        for (const bool match : {false, true}) ExpectRoundedSums(s, mask, gates, match);
      }
    }
  }
}

// The same of slots, with z of every token.
void ExpectRoundedSlots(const Shape& s, const Mask& mask, bool match) {
  const Tensors tokens(match ? 2 : 1, Heads(s.length, s.width));
  Tensors others = {at::randn({3, 2, s.slots, s.width}, at::kDouble),
                    at::randn({3, 2, s.slots}, at::kDouble), Heads(s.length, s.slots)};
  if (!match) others.push_back(Heads(s.length, s.slots));
  const auto run = [&](const Tensors& x) {
    const size_t n = tokens.size();
    const at::Tensor first = HeadsFirst(x[0]), log_weights = HeadsFirst(x[n + 2]);
    const SlotState state = {x[n], x[n + 1]};
    const SlotResult r =
        match ? SlotMatch(first, log_weights, HeadsFirst(x[1]), state, mask, true)
              : SlotRead(HeadsFirst(x[n + 3]), log_weights, first, state, mask, true);
    EXPECT_EQ(r.out.scalar_type(), (match ? log_weights : first).scalar_type());
    EXPECT_EQ(r.z_out.scalar_type(), at::kFloat);
    return Tensors{r.out.to(first.scalar_type()), r.state.memory, r.state.z};
  };
  ExpectRounded(tokens, others, run,
                (match ? "slot match " : "slot read ") + std::to_string(s.length), OfWalks());
}

TEST(BFloat16Tokens, SlotsWithWeightsInFloat) {
  WithAndWithoutPairs([] {
    at::manual_seed(4);
    for (const Shape& s : kShapes) {
      for (const Mask& mask : Masks(s.length)) {
        for (const bool match : {false, true}) ExpectRoundedSlots(s, mask, match);
      }
    }
  });
}

}  // namespace
}  // namespace cistern::ops
