// Linear attention of all tokens at once: the definition, composition and kernel agree, forward and
// backward, on every instruction set.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cistern/base/parallel.h"
#include "cistern/kernels/isa.h"
#include "cistern/kernels/workspace.h"
#include "cistern/ops/impl.h"
#include "cistern/ops/linear_attention.h"
#include "cistern/ops/testing.h"

namespace cistern::ops {
namespace {

using namespace cistern::testing;
using Tensors = std::vector<at::Tensor>;

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

struct Problem {
  std::string name;
  Tensors x;     // tokens, then the memory
  at::Tensor g;  // of the output
  bool heads_last;
  std::function<at::Tensor(const Tensors&)> run;
};

std::string NameOf(const char* what, const Shape& s, const LinearRule& rule) {
  return std::string(what) + " B" + std::to_string(s.batch) + " H" + std::to_string(s.heads) +
         " T" + std::to_string(s.length) + " n" + std::to_string(s.features) + " d" +
         std::to_string(s.width) + " rule " + std::to_string(int(rule.divisor)) + " " + ActiveIsa();
}

Mask LengthsOf(const Shape& s) {
  Mask mask;
  if (!s.lengths) return mask;
  std::vector<int64_t> lengths(size_t(s.batch), s.length);
  lengths.back() = s.length / 3;
  if (s.batch > 2) lengths[1] = 0;
  mask.lengths = at::tensor(lengths);
  return mask;
}

Problem WriteProblem(const Shape& s, const LinearRule& rule) {
  at::manual_seed(7 + s.length);
  const at::Tensor memory =
      at::randn({s.batch, s.heads, s.features, rule.Columns(s.width)}, at::kDouble);
  return {NameOf("write", s, rule),
          {at::randn({s.batch, s.heads, s.length, s.features}).to(at::kDouble),
           at::randn({s.batch, s.heads, s.length, s.width}).to(at::kDouble), memory},
          at::randn_like(memory),
          s.heads_last,
          [rule, mask = LengthsOf(s)](const Tensors& x) {
            return LinearWrite(x[0], x[1], x[2], rule, mask);
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
          at::randn({s.batch, s.heads, s.length, s.width}, at::kDouble),
          s.heads_last,
          [rule](const Tensors& x) { return LinearRead(x[0], x[1], rule); }};
}

// The output, then gradients.
Tensors Everything(const Problem& p, Impl impl, at::ScalarType dtype) {
  const ImplScope scope(impl);
  Tensors x;
  for (size_t i = 0; i < p.x.size(); ++i)
    x.push_back(Leaf(i + 1 < p.x.size() ? WithLayout(p.x[i].to(dtype), p.heads_last) : p.x[i]));
  const at::Tensor y = p.run(x);
  Tensors all = {y.detach()};
  for (const at::Tensor& t : Gradients((y * p.g.to(y.scalar_type())).sum(), x)) all.push_back(t);
  return all;
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
  for (const std::string& isa : SupportedIsas()) {
    ForceIsa(isa);
    ForEachProblem([](const Problem& p) {
      const Tensors want = Everything(p, Impl::kReference, at::kDouble);
      for (const Impl impl : kImpls) {
        for (const auto dtype : {at::kDouble, at::kFloat}) {
          const Tensors got = Everything(p, impl, dtype);
          for (size_t i = 0; i < want.size(); ++i)
            ExpectClose(got[i], want[i], dtype == at::kDouble ? 1e-12 : 1e-5,
                        p.name + ", " + ImplName(impl) + " " + at::toString(dtype) + " " +
                            std::to_string(i));
        }
      }
    });
  }
  ForceIsa("");
}

TEST(LinearBidirectional, SameBitsForAnyNumberOfThreads) {
  const int threads = NumThreads();
  ForEachProblem([](const Problem& p) {
    SetNumThreads(1);
    const Tensors want = Everything(p, Impl::kKernel, at::kFloat);
    for (const int count : {2, 3}) {
      SetNumThreads(count);
      const Tensors got = Everything(p, Impl::kKernel, at::kFloat);
      for (size_t i = 0; i < want.size(); ++i) ExpectSameBits(got[i], want[i], p.name);
    }
  });
  SetNumThreads(threads);
}

TEST(LinearBidirectional, OnPoisonedWorkspaces) {
  Workspace::PoisonAll(true);
  ForEachProblem([](const Problem& p) {
    for (const at::Tensor& t : Everything(p, Impl::kKernel, at::kFloat))
      EXPECT_TRUE(at::isfinite(t).all().item<bool>()) << p.name;
  });
  Workspace::PoisonAll(false);
}

// A write of all tokens is the memory that a causal walk leaves.
TEST(LinearBidirectional, WritesWhatAWalkLeaves) {
  for (const LinearRule& rule : kRules) {
    const Problem p = WriteProblem({2, 2, 161, 16, 32}, rule);
    const at::Tensor walked = LinearAttention(p.x[0], p.x[0], p.x[1], p.x[2], rule).memory;
    ExpectClose(p.run(p.x), walked, 1e-13, p.name);
  }
}

// NaN in padding is not read; NaN in a token reaches the memory.
TEST(LinearBidirectional, WhatIsNotFinite) {
  const Problem p = WriteProblem({3, 2, 33, 7, 5, true, true}, kRules[0]);
  const Tensors want = Everything(p, Impl::kKernel, at::kFloat);
  Problem poisoned = p;
  for (size_t i : {size_t{0}, size_t{1}}) {
    poisoned.x[i] = p.x[i].clone();
    poisoned.x[i].select(0, 1).fill_(std::nan(""));
    poisoned.x[i].select(0, 2).narrow(1, 11, 22).fill_(std::numeric_limits<double>::infinity());
  }
  for (const Impl impl : kImpls) {
    const Tensors got = Everything(poisoned, impl, at::kFloat);
    for (size_t i = 0; i < want.size(); ++i)
      ExpectClose(got[i], want[i], 1e-5, std::string(ImplName(impl)) + " " + std::to_string(i));
  }
  for (size_t i : {size_t{0}, size_t{1}}) {
    Problem bad = p;
    bad.x[i] = p.x[i].clone();
    bad.x[i][0][0][4][2] = std::nan("");
    EXPECT_TRUE(at::isnan(Everything(bad, Impl::kKernel, at::kFloat)[0]).any().item<bool>()) << i;
  }
}

TEST(LinearBidirectional, SecondDerivatives) {
  for (const auto& make : {WriteProblem, ReadProblem}) {
    const Problem p = make({1, 2, 9, 3, 4}, kRules[0]);
    const auto second = [&](Impl impl) {
      const ImplScope scope(impl);
      Tensors x;
      for (const at::Tensor& t : p.x) x.push_back(Leaf(t));
      const Tensors first = torch::autograd::grad({p.run(x).square().sum()}, x, {}, true, true);
      at::Tensor norm = at::zeros({}, at::kDouble);
      for (const at::Tensor& t : first) norm = norm + t.square().sum();
      return Gradients(norm, x);
    };
    const Tensors want = second(Impl::kComposite), got = second(Impl::kKernel);
    for (size_t i = 0; i < want.size(); ++i) ExpectClose(got[i], want[i], 1e-10, p.name);
  }
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
