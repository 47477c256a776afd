// FAVOR+ of all tokens at once from queries and keys: composition and kernel agree, forward and
// backward, on every instruction set.
#include "cistern/ops/favor_bidirectional.h"

#include "cistern/ops/all_tokens_test.h"
#include "cistern/ops/slot_attention.h"
#include "cistern/ops/tensor_rows.h"

namespace cistern::ops {
namespace {

using namespace all_tokens_test;

struct Shape {
  int64_t batch, heads, length, slots, width, channels;
  bool lengths = false, heads_last = false;
  double spread = 1;  // of tokens: large ones cut what a write counts from
};
const std::vector<Shape> kShapes = {{2, 2, 0, 3, 4, 5},
                                    {2, 1, 1, 3, 4, 4},
                                    {3, 2, 33, 7, 5, 6, true, true},
                                    {1, 2, 31, 16, 16, 16},
                                    {1, 1, 70, 65, 33, 17},
                                    {2, 2, 161, 32, 32, 8, true},
                                    {1, 1, 300, 2, 1, 1},
                                    {1, 2, 200, 19, 8, 9, false, false, 8},
                                    {1, 2, 4500, 17, 8, 4, false, true},
                                    {2, 1, 4100, 16, 16, 16, true}};

std::string NameOf(const char* what, const Shape& s) {
  return std::string(what) + " B" + std::to_string(s.batch) + " H" + std::to_string(s.heads) +
         " T" + std::to_string(s.length) + " n" + std::to_string(s.slots) + " d" +
         std::to_string(s.width) + " from " + std::to_string(s.channels) + " " + ActiveIsa();
}

// memory and z, of which some slots are empty.
Tensors StateOf(const Shape& s) {
  const at::Tensor fresh = at::rand({s.batch, s.heads, s.slots}) < 0.3;
  return {at::randn({s.batch, s.heads, s.slots, s.width}, at::kDouble)
              .masked_fill(fresh.unsqueeze(-1), 0.0),
          (2 * at::randn({s.batch, s.heads, s.slots}, at::kDouble))
              .masked_fill(fresh, -std::numeric_limits<double>::infinity())};
}

Problem WriteProblem(const Shape& s) {
  at::manual_seed(7 + s.length);
  const Tensors state = StateOf(s);
  const at::Tensor matrix = at::randn({s.slots, s.channels}, at::kDouble);
  return {NameOf("write", s),
          {s.spread * at::randn({s.batch, s.heads, s.length, s.channels}, at::kDouble),
           at::randn({s.batch, s.heads, s.length, s.width}, at::kDouble), state[0], state[1]},
          2,
          {at::randn_like(state[0]), at::randn_like(state[1])},
          s.heads_last,
          [=, mask = s.lengths ? SomeLengths(s.batch, s.length) : Mask{}](const Tensors& x) {
            const SlotState after =
                FavorWrite(x[0], x[1], matrix.to(ComputeTypeOf(x[0])), 0.5, {x[2], x[3]}, mask);
            return Tensors{after.memory, after.z};
          }};
}

Problem ReadProblem(const Shape& s) {
  at::manual_seed(70 + s.length);
  const Tensors state = StateOf(s);
  const at::Tensor matrix = at::randn({s.slots, s.channels}, at::kDouble);
  return {NameOf("read", s),
          {s.spread * at::randn({s.batch, s.heads, s.length, s.channels}, at::kDouble), state[0],
           state[1]},
          1,
          {at::randn({s.batch, s.heads, s.length, s.width}, at::kDouble)},
          s.heads_last,
          [=](const Tensors& x) {
            return Tensors{FavorRead(x[0], matrix.to(ComputeTypeOf(x[0])), 0.5, {x[1], x[2]})};
          }};
}

template <class Body>
void ForEachProblem(Body body) {
  for (const auto& make : {WriteProblem, ReadProblem}) {
    for (const Shape& s : kShapes) body(make(s));
  }
}

TEST(FavorBidirectional, ImplementationsAgree) {
  OnEveryIsa([] {
    ForEachProblem([](const Problem& p) {
      ExpectAgreement(
          p, [](Impl, at::ScalarType dtype) { return dtype == at::kDouble ? 1e-11 : 1e-4; });
    });
  });
}

TEST(FavorBidirectional, SameBitsForAnyNumberOfThreads) {
  ForEachProblem(ExpectSameBitsForAnyNumberOfThreads);
}

TEST(FavorBidirectional, OnPoisonedWorkspaces) { ForEachProblem(ExpectFiniteOnPoisonedWorkspaces); }

// A write of all tokens is the state that a causal walk leaves; an empty memory reads 0.
TEST(FavorBidirectional, WritesWhatAWalkLeaves) {
  at::manual_seed(3);
  const at::Tensor matrix = at::randn({16, 8}, at::kDouble),
                   k = at::randn({2, 2, 161, 8}, at::kDouble),
                   v = at::randn({2, 2, 161, 32}, at::kDouble);
  const SlotState empty = EmptySlots(2, 2, 16, 32, k.options()),
                  written = FavorWrite(k, v, matrix, 0.5, empty),
                  walked = FavorQueriesAttention(k, k, v, matrix, 0.5, empty).state;
  ExpectClose(written.memory, walked.memory, 1e-12, "memory");
  ExpectClose(written.z, walked.z, 1e-12, "z");
  EXPECT_EQ(FavorRead(k, matrix, 0.5, empty).abs().max().item<double>(), 0);
}

TEST(FavorBidirectional, TokensInBFloat16) {
  for (const Shape& s : {kShapes[5], kShapes[9]}) {
    for (const auto& make : {WriteProblem, ReadProblem}) {
      Problem p = make(s);
      for (size_t i = 0; i < p.tokens; ++i) p.x[i] = p.x[i].to(at::kBFloat16).to(at::kDouble);
      const Tensors want = Everything(p, Impl::kKernel, at::kDouble),
                    got = Everything(p, Impl::kKernel, at::kBFloat16);
      for (size_t i = 0; i < want.size(); ++i)
        ExpectClose(got[i], want[i], 0.04, p.name + " " + std::to_string(i));
    }
  }
}

TEST(FavorBidirectional, WhatIsNotFinite) {
  ExpectPaddingUnread(WriteProblem({3, 2, 33, 7, 5, 6, true, true}));
}

TEST(FavorBidirectional, SecondDerivatives) {
  for (const auto& make : {WriteProblem, ReadProblem})
    ExpectSecondDerivatives(make({1, 2, 9, 3, 4, 5}));
}

TEST(FavorBidirectional, MatrixWithAGradient) {
  at::manual_seed(4);
  const at::Tensor x = at::randn({1, 2, 9, 5}, at::kDouble),
                   v = at::randn({1, 2, 9, 4}, at::kDouble), given = at::randn({3, 5}, at::kDouble);
  const SlotState empty = EmptySlots(1, 2, 3, 4, x.options());
  const auto gradient = [&](Impl impl) {
    const ImplScope scope(impl);
    const at::Tensor matrix = Leaf(given);
    const SlotState written = FavorWrite(x, v, matrix, 0.5, empty);
    return Gradients(FavorRead(x, matrix, 0.5, written).square().sum(), {matrix})[0];
  };
  const at::Tensor want = gradient(Impl::kComposite);
  EXPECT_GT(want.abs().max().item<double>(), 0);
  ExpectClose(gradient(Impl::kKernel), want, 1e-11, "gradient");
}

TEST(FavorBidirectional, Refusals) {
  const at::Tensor k = at::randn({1, 2, 4, 3}), v = at::randn({1, 2, 4, 5}),
                   matrix = at::randn({8, 3});
  const SlotState state = EmptySlots(1, 2, 8, 5, k.options());
  EXPECT_THROW(FavorWrite(k, v.narrow(2, 0, 3), matrix, 1, state), c10::Error);
  EXPECT_THROW(FavorWrite(k, v.to(at::kDouble), matrix, 1, state), c10::Error);
  EXPECT_THROW(FavorWrite(k, v.narrow(3, 0, 4), matrix, 1, state), c10::Error);
  EXPECT_THROW(FavorWrite(k, v, matrix.narrow(1, 0, 2), 1, state), c10::Error);
  EXPECT_THROW(FavorWrite(k, v, matrix, 1, {state.memory.to(at::kFloat), state.z}), c10::Error);
  EXPECT_THROW(FavorWrite(k, v, matrix, 1, state, {{}, at::zeros({1, 4}, at::kBool)}), c10::Error);
  EXPECT_THROW(FavorRead(k, matrix.narrow(0, 0, 6), 1, state), c10::Error);
  EXPECT_THROW(FavorRead(k, matrix.to(at::kDouble), 1, state), c10::Error);
  EXPECT_THROW(FavorRead(k, matrix, 1, {state.memory, state.z.narrow(2, 0, 6)}), c10::Error);
}

}  // namespace
}  // namespace cistern::ops
