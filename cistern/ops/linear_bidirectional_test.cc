// Linear attention of all tokens at once: the definition, composition and kernel agree, forward and
// backward, on every instruction set.
#include "cistern/ops/all_tokens_test.h"
#include "cistern/ops/linear_attention.h"

namespace cistern::ops {
namespace {

using namespace all_tokens_test;

const LinearRule kRules[] = {{FeatureMap::kEluPlusOne, 0, DivisorRule::kPlus, 1e-6},
                             {FeatureMap::kEluPlusOne, 0.1, DivisorRule::kAtLeast, 0.5},
                             {FeatureMap::kNone, 0, DivisorRule::kMagnitude, 0.5},
                             {FeatureMap::kNone, 0, DivisorRule::kSignSafe, 0.5},
                             {FeatureMap::kEluPlusOne, 0, DivisorRule::kNone, 0.25}};

struct Shape {
  int64_t batch, heads, length, features, width;
  bool lengths = false, heads_last = false;
};
const std::vector<Shape> kShapes = {{2, 2, 0, 3, 4},
                                    {2, 1, 1, 3, 4},
                                    {3, 2, 33, 7, 5, true, true},
                                    {1, 2, 31, 16, 16},
                                    {1, 1, 70, 65, 33},
                                    {2, 2, 161, 16, 32, true},
                                    {1, 1, 300, 2, 1},
                                    {1, 2, 4500, 17, 8, false, true},
                                    {2, 1, 4100, 16, 16, true}};

std::string NameOf(const char* what, const Shape& s, const LinearRule& rule) {
  return std::string(what) + " B" + std::to_string(s.batch) + " H" + std::to_string(s.heads) +
         " T" + std::to_string(s.length) + " n" + std::to_string(s.features) + " d" +
         std::to_string(s.width) + " rule " + std::to_string(int(rule.divisor)) + " " + ActiveIsa();
}

Problem WriteProblem(const Shape& s, const LinearRule& rule) {
  at::manual_seed(7 + s.length);
  const at::Tensor memory =
      at::randn({s.batch, s.heads, s.features, rule.Columns(s.width)}, at::kDouble);
  return {NameOf("write", s, rule),
          {at::randn({s.batch, s.heads, s.length, s.features}).to(at::kDouble),
           at::randn({s.batch, s.heads, s.length, s.width}).to(at::kDouble), memory},
          2,
          {at::randn_like(memory)},
          s.heads_last,
          [rule, mask = s.lengths ? SomeLengths(s.batch, s.length) : Mask{}](const Tensors& x) {
            return Tensors{LinearWrite(x[0], x[1], x[2], rule, mask)};
          }};
}

Problem ReadProblem(const Shape& s, const LinearRule& rule) {
  at::manual_seed(70 + s.length);
  at::Tensor memory = at::randn({s.batch, s.heads, s.features, rule.Columns(s.width)}, at::kDouble);
  // Sums of features that are positive, so that no row is divided by nearly nothing.
  if (rule.map == FeatureMap::kEluPlusOne && rule.divisor != DivisorRule::kNone)
    memory.select(3, s.width).abs_().add_(0.5);
  return {NameOf("read", s, rule),
          {at::randn({s.batch, s.heads, s.length, s.features}).to(at::kDouble), memory},
          1,
          {at::randn({s.batch, s.heads, s.length, s.width}, at::kDouble)},
          s.heads_last,
          [rule](const Tensors& x) { return Tensors{LinearRead(x[0], x[1], rule)}; }};
}

template <class Body>
void ForEachProblem(Body body) {
  for (const auto& make : {WriteProblem, ReadProblem}) {
    for (const Shape& s : kShapes) {
      for (const LinearRule& rule : kRules) body(make(s, rule));
    }
  }
}

TEST(LinearBidirectional, ImplementationsAgree) {
  OnEveryIsa([] {
    ForEachProblem([](const Problem& p) {
      ExpectAgreement(
          p, [](Impl, at::ScalarType dtype) { return dtype == at::kDouble ? 1e-12 : 1e-5; });
    });
  });
}

TEST(LinearBidirectional, SameBitsForAnyNumberOfThreads) {
  ForEachProblem(ExpectSameBitsForAnyNumberOfThreads);
}

TEST(LinearBidirectional, OnPoisonedWorkspaces) {
  ForEachProblem(ExpectFiniteOnPoisonedWorkspaces);
}

// A write of all tokens is the memory that a causal walk leaves.
TEST(LinearBidirectional, WritesWhatAWalkLeaves) {
  for (const LinearRule& rule : kRules) {
    const Problem p = WriteProblem({2, 2, 161, 16, 32}, rule);
    const at::Tensor walked = LinearAttention(p.x[0], p.x[0], p.x[1], p.x[2], rule).memory;
    ExpectClose(p.run(p.x)[0], walked, 1e-13, p.name);
  }
}

TEST(LinearBidirectional, WhatIsNotFinite) {
  ExpectPaddingUnread(WriteProblem({3, 2, 33, 7, 5, true, true}, kRules[0]));
}

TEST(LinearBidirectional, SecondDerivatives) {
  for (const auto& make : {WriteProblem, ReadProblem})
    ExpectSecondDerivatives(make({1, 2, 9, 3, 4}, kRules[0]));
}

TEST(LinearBidirectional, Refusals) {
  const at::Tensor k = at::randn({1, 2, 4, 3}), v = at::randn({1, 2, 4, 5});
  const at::Tensor memory = at::zeros({1, 2, 3, 6}, at::kDouble);
  const LinearRule rule = kRules[0];
  EXPECT_THROW(LinearWrite(k, v.narrow(2, 0, 3), memory, rule), c10::Error);
  EXPECT_THROW(LinearWrite(k, v.to(at::kDouble), memory, rule), c10::Error);
  EXPECT_THROW(LinearWrite(k, v, memory.narrow(3, 0, 5), rule), c10::Error);
  EXPECT_THROW(LinearWrite(k, v, memory.to(at::kFloat), rule), c10::Error);
  EXPECT_THROW(LinearWrite(k, v, memory, rule, {{}, at::zeros({1, 4}, at::kBool)}), c10::Error);
  EXPECT_THROW(LinearRead(k, memory.narrow(2, 0, 2), rule), c10::Error);
  EXPECT_THROW(LinearRead(k, memory.narrow(3, 0, 1), rule), c10::Error);
  EXPECT_THROW(LinearRead(k, memory.to(at::kFloat), rule), c10::Error);
}

}  // namespace
}  // namespace cistern::ops
