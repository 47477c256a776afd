// Linear attention of all tokens at once with Fourier features inside: composition and kernel
// agree, forward and backward, on every instruction set.
#include "cistern/ops/all_tokens_test.h"
#include "cistern/ops/fourier_attention.h"

namespace cistern::ops {
namespace {

using namespace all_tokens_test;

const LinearRule kRules[] = {{FeatureMap::kFourier, 0, DivisorRule::kSignSafe, 2},
                             {FeatureMap::kFourier, 0, DivisorRule::kAtLeast, 1},
                             {FeatureMap::kFourier, 0, DivisorRule::kNone, 0.25}};

struct Shape {
  int64_t batch, heads, length, features, width, channels;
  bool lengths = false, heads_last = false, scaled = true, normalise = true;
};
const std::vector<Shape> kShapes = {{2, 2, 0, 3, 4, 5},
                                    {2, 1, 1, 3, 4, 4},
                                    {3, 2, 33, 7, 5, 6, true, true},
                                    {1, 2, 31, 16, 16, 16, false, false, false},
                                    {1, 1, 70, 33, 33, 17, false, false, true, false},
                                    {2, 2, 161, 16, 32, 8, true},
                                    {1, 2, 4500, 9, 8, 4, false, true},
                                    {2, 1, 4100, 16, 16, 16, true}};

std::string NameOf(const char* what, const Shape& s, const LinearRule& rule) {
  return std::string(what) + " B" + std::to_string(s.batch) + " H" + std::to_string(s.heads) +
         " T" + std::to_string(s.length) + " m" + std::to_string(s.features) + " d" +
         std::to_string(s.width) + " rule " + std::to_string(int(rule.divisor)) + " " + ActiveIsa();
}

// The last tensors of a problem are its scale, where it has one, in double.
FourierFeatureMap MapOf(const Shape& s, const Tensors& x, const at::Tensor& matrices) {
  return {s.scaled ? x.back().to(x[0].scalar_type()) : at::Tensor(),
          matrices.to(x[0].scalar_type()), s.normalise, 0.5};
}

Problem WriteProblem(const Shape& s, const LinearRule& rule) {
  at::manual_seed(7 + s.length);
  const at::Tensor memory = at::randn({s.batch, s.heads, 2 * s.features, rule.Columns(s.width)},
                                      at::kDouble),
                   matrices = at::randn({s.heads, s.features, s.channels}, at::kDouble);
  Problem p = {NameOf("write", s, rule),
               {at::randn({s.batch, s.heads, s.length, s.channels}).to(at::kDouble),
                at::randn({s.batch, s.heads, s.length, s.width}).to(at::kDouble), memory},
               2,
               {at::randn_like(memory)},
               s.heads_last,
               [=, mask = s.lengths ? SomeLengths(s.batch, s.length) : Mask{}](const Tensors& x) {
                 return Tensors{FourierWrite(x[0], x[1], x[2], MapOf(s, x, matrices), rule, mask)};
               }};
  if (s.scaled) p.x.push_back(at::randn({s.heads, 1, s.channels}, at::kDouble));
  return p;
}

Problem ReadProblem(const Shape& s, const LinearRule& rule) {
  at::manual_seed(70 + s.length);
  const at::Tensor memory = at::randn({s.batch, s.heads, 2 * s.features, rule.Columns(s.width)},
                                      at::kDouble),
                   matrices = at::randn({s.heads, s.features, s.channels}, at::kDouble);
  Problem p = {NameOf("read", s, rule),
               {at::randn({s.batch, s.heads, s.length, s.channels}).to(at::kDouble), memory},
               1,
               {at::randn({s.batch, s.heads, s.length, s.width}, at::kDouble)},
               s.heads_last,
               [=](const Tensors& x) {
                 return Tensors{FourierRead(x[0], x[1], MapOf(s, x, matrices), rule)};
               }};
  if (s.scaled) p.x.push_back(at::randn({s.heads, 1, s.channels}, at::kDouble));
  return p;
}

template <class Body>
void ForEachProblem(Body body) {
  for (const auto& make : {WriteProblem, ReadProblem}) {
    for (const Shape& s : kShapes) {
      for (const LinearRule& rule : kRules) body(make(s, rule));
    }
  }
}

TEST(FourierBidirectional, ImplementationsAgree) {
  OnEveryIsa([] {
    ForEachProblem([](const Problem& p) {
      ExpectAgreement(
          p, [](Impl, at::ScalarType dtype) { return dtype == at::kDouble ? 1e-11 : 5e-5; });
    });
  });
}

TEST(FourierBidirectional, SameBitsForAnyNumberOfThreads) {
  ForEachProblem(ExpectSameBitsForAnyNumberOfThreads);
}

TEST(FourierBidirectional, OnPoisonedWorkspaces) {
  ForEachProblem(ExpectFiniteOnPoisonedWorkspaces);
}

// A write of all tokens is the memory that a causal walk leaves.
TEST(FourierBidirectional, WritesWhatAWalkLeaves) {
  at::manual_seed(3);
  const FourierFeatureMap map = {at::randn({2, 1, 8}, at::kDouble),
                                 at::randn({2, 16, 8}, at::kDouble), true, 0.5};
  const at::Tensor k = at::randn({2, 2, 161, 8}, at::kDouble),
                   v = at::randn({2, 2, 161, 32}, at::kDouble);
  for (const LinearRule& rule : kRules) {
    const at::Tensor memory = at::randn({2, 2, 32, rule.Columns(32)}, at::kDouble);
    ExpectClose(FourierWrite(k, v, memory, map, rule),
                FourierAttention(k, k, v, memory, map, rule).memory, 1e-13, "memory");
  }
}

TEST(FourierBidirectional, WhatIsNotFinite) {
  ExpectPaddingUnread(WriteProblem({3, 2, 33, 7, 5, 6, true, true}, kRules[0]));
}

TEST(FourierBidirectional, SecondDerivatives) {
  for (const auto& make : {WriteProblem, ReadProblem})
    ExpectSecondDerivatives(make({1, 2, 9, 3, 4, 5}, kRules[0]));
}

TEST(FourierBidirectional, MatricesWithAGradient) {
  at::manual_seed(4);
  const at::Tensor x = at::randn({1, 2, 9, 5}, at::kDouble),
                   v = at::randn({1, 2, 9, 4}, at::kDouble),
                   memory = at::randn({1, 2, 6, 5}, at::kDouble),
                   given = at::randn({2, 3, 5}, at::kDouble);
  const auto gradient = [&](Impl impl) {
    const ImplScope scope(impl);
    const at::Tensor matrices = Leaf(given);
    const FourierFeatureMap map = {{}, matrices, true, 0.5};
    const at::Tensor written = FourierWrite(x, v, memory, map, kRules[0]);
    return Gradients(FourierRead(x, written, map, kRules[0]).square().sum(), {matrices})[0];
  };
  const at::Tensor want = gradient(Impl::kComposite);
  EXPECT_GT(want.abs().max().item<double>(), 0);
  ExpectClose(gradient(Impl::kKernel), want, 1e-11, "gradient");
}

TEST(FourierBidirectional, Refusals) {
  const at::Tensor k = at::randn({1, 2, 4, 3}), v = at::randn({1, 2, 4, 5});
  const at::Tensor memory = at::zeros({1, 2, 8, 6}, at::kDouble);
  const FourierFeatureMap map = {{}, at::randn({2, 4, 3}), true, 0.5};
  const LinearRule rule = kRules[0];
  EXPECT_THROW(FourierWrite(k, v.narrow(2, 0, 3), memory, map, rule), c10::Error);
  EXPECT_THROW(FourierWrite(k, v.to(at::kDouble), memory, map, rule), c10::Error);
  EXPECT_THROW(FourierWrite(k, v, memory.narrow(3, 0, 5), map, rule), c10::Error);
  EXPECT_THROW(FourierWrite(k, v, memory.to(at::kFloat), map, rule), c10::Error);
  EXPECT_THROW(FourierWrite(k, v, memory, map, rule, {{}, at::zeros({1, 4}, at::kBool)}),
               c10::Error);
  EXPECT_THROW(FourierRead(k, memory.narrow(2, 0, 6), map, rule), c10::Error);
  EXPECT_THROW(FourierRead(k.narrow(3, 0, 2), memory, map, rule), c10::Error);
  EXPECT_THROW(FourierRead(k, memory.to(at::kFloat), map, rule), c10::Error);
}

}  // namespace
}  // namespace cistern::ops
