// Writes and reads of all tokens at once: the definition, composition and kernel agree, forward and
// backward, on every instruction set.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cistern/base/parallel.h"
#include "cistern/kernels/isa.h"
#include "cistern/kernels/workspace.h"
#include "cistern/ops/impl.h"
#include "cistern/ops/memory_test.h"
#include "cistern/ops/slot_memory.h"
#include "cistern/ops/testing.h"

namespace cistern::ops {
namespace {

using namespace cistern::testing;

constexpr double kInf = std::numeric_limits<double>::infinity();

enum class Weights { kMild, kOffset, kGrowth, kHoles, kNone };

struct Shape {
  int64_t batch, heads, length, slots, width;
  bool empty = false, lengths = false, heads_last = false;
};
const std::vector<Shape> kShapes = {{2, 2, 0, 3, 4},
                                    {2, 1, 1, 3, 4, true},
                                    {1, 2, 31, 16, 16, true},
                                    {3, 2, 33, 7, 5, false, true, true},
                                    {1, 1, 70, 65, 33},
                                    {2, 2, 161, 16, 32, true, true},
                                    {1, 1, 300, 1, 1},
                                    {1, 2, 4500, 17, 8, false, false, true},
                                    {2, 1, 4100, 16, 16, true, true}};

at::Tensor LogWeights(const Shape& s, Weights kind) {
  at::Tensor x = at::randn({s.batch, s.heads, s.length, s.slots}, at::kDouble) * 2;
  const at::Tensor slot = at::arange(s.slots, at::kDouble),
                   time = at::arange(s.length, at::kDouble).unsqueeze(-1);
  if (kind == Weights::kOffset) x = x + (slot.remainder(3) - 1) * 1e4;
  if (kind == Weights::kGrowth) x = x + time * 3.7 * (slot.remainder(2) * 2 - 1);
  if (kind == Weights::kHoles)
    x = x.masked_fill(at::rand_like(x) < 0.3, -kInf).masked_fill(slot.remainder(5) == 4, -kInf);
  if (kind == Weights::kNone) x = at::full_like(x, -kInf);
  return x.to(at::kFloat).to(at::kDouble);
}

std::string NameOf(const Shape& s, Weights kind) {
  return "B" + std::to_string(s.batch) + " H" + std::to_string(s.heads) + " T" +
         std::to_string(s.length) + " n" + std::to_string(s.slots) + " d" +
         std::to_string(s.width) + " weights " + std::to_string(int(kind)) + " " + ActiveIsa();
}

struct Problem {
  std::string name;
  Tensors x;      // tokens, then states
  size_t tokens;  // how many of x are tokens
  Tensors g;      // of the outputs
  bool heads_last;
  std::function<Tensors(const Tensors&)> run;
};

Problem WriteProblem(const Shape& s, Weights kind) {
  at::manual_seed(7 + s.length);
  Mask mask;
  if (s.lengths) {
    std::vector<int64_t> lengths(size_t(s.batch), s.length);
    lengths.back() = s.length / 3;
    if (s.batch > 2) lengths[1] = 0;
    mask.lengths = at::tensor(lengths);
  }
  at::Tensor z = at::randn({s.batch, s.heads, s.slots}, at::kDouble);
  if (kind == Weights::kOffset) z = z + 1e4;
  if (s.empty) z = z.masked_fill(at::arange(s.slots).remainder(2) == 0, -kInf);
  const auto memory = at::randn({s.batch, s.heads, s.slots, s.width}, at::kDouble);
  return {"write " + NameOf(s, kind),
          {LogWeights(s, kind), at::randn({s.batch, s.heads, s.length, s.width}).to(at::kDouble),
           memory, z},
          2,
          {at::randn_like(memory), at::randn_like(z)},
          s.heads_last,
          [mask](const Tensors& x) {
            const SlotState after = SlotWrite(x[0], x[1], {x[2], x[3]}, mask);
            return Tensors{after.memory, after.z};
          }};
}

Problem ReadProblem(const Shape& s, Weights kind) {
  at::manual_seed(70 + s.length);
  // Slots that nothing reads; a row that reads nothing would be NaN.
  at::Tensor x = LogWeights(s, kind == Weights::kHoles ? Weights::kMild : kind);
  if (kind == Weights::kHoles && s.slots > 1)
    x = x.masked_fill(at::arange(s.slots).remainder(3) == 1, -kInf);
  return {"read " + NameOf(s, kind),
          {x, at::randn({s.batch, s.heads, s.slots, s.width}, at::kDouble)},
          1,
          {at::randn({s.batch, s.heads, s.length, s.width}, at::kDouble)},
          s.heads_last,
          [](const Tensors& y) { return Tensors{SlotSoftmaxRead(y[0], y[1])}; }};
}

// Outputs, then gradients.
Tensors Everything(const Problem& p, Impl impl, at::ScalarType dtype) {
  const ImplScope scope(impl);
  Tensors x;
  for (size_t i = 0; i < p.x.size(); ++i)
    x.push_back(Leaf(i < p.tokens ? WithLayout(p.x[i].to(dtype), p.heads_last) : p.x[i]));
  const Tensors y = p.run(x);
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (size_t i = 0; i < y.size(); ++i)
    loss = loss + (Finite(y[i]) * p.g[i].to(y[i].scalar_type())).sum().to(at::kDouble);
  Tensors all;
  for (const at::Tensor& t : y) all.push_back(t.detach());
  for (const at::Tensor& t : Gradients(loss, x)) all.push_back(t);
  return all;
}

template <class Make>
void ForEachProblem(Make make, const std::function<void(const Problem&)>& body) {
  for (const Shape& s : kShapes) {
    for (const Weights kind : {Weights::kMild, Weights::kOffset, Weights::kGrowth, Weights::kHoles})
      body(make(s, kind));
  }
}

void OnEveryIsa(const std::function<void()>& body) {
  for (const std::string& isa : SupportedIsas()) {
    ForceIsa(isa);
    body();
  }
  ForceIsa("");
}

void ExpectAgreement(const Problem& p) {
  const Tensors want = Everything(p, Impl::kReference, at::kDouble);
  double largest = 0;
  if (p.x[0].numel() > 0) largest = Finite(p.x[0]).abs().max().item<double>();
  for (const Impl impl : kImpls) {
    for (const auto dtype : {at::kDouble, at::kFloat}) {
      // Composed in float, log-weights far from 0 lose the bits of their references.
      if (impl == Impl::kComposite && dtype == at::kFloat && largest > 100) continue;
      const double tolerance =
          dtype == at::kDouble ? 1e-12 * std::max(1.0, largest) : 2e-6 + largest * 0x1p-21;
      const Tensors got = Everything(p, impl, dtype);
      for (size_t i = 0; i < want.size(); ++i)
        ExpectClose(
            got[i], want[i], tolerance,
            p.name + ", " + ImplName(impl) + " " + at::toString(dtype) + " " + std::to_string(i));
    }
  }
}

TEST(SlotBidirectional, WritesAgree) {
  OnEveryIsa([] { ForEachProblem(WriteProblem, ExpectAgreement); });
}
TEST(SlotBidirectional, ReadsAgree) {
  OnEveryIsa([] { ForEachProblem(ReadProblem, ExpectAgreement); });
}

// Nothing is read that was not written.
TEST(SlotBidirectional, OnPoisonedWorkspaces) {
  Workspace::PoisonAll(true);
  for (const auto& make : {WriteProblem, ReadProblem}) {
    for (const Shape& s : kShapes) {
      const Problem p = make(s, Weights::kMild);
      for (const at::Tensor& t : Everything(p, Impl::kKernel, at::kFloat))
        EXPECT_TRUE(at::isfinite(Finite(t)).all().item<bool>()) << p.name;
    }
  }
  Workspace::PoisonAll(false);
}

TEST(SlotBidirectional, SameBitsForAnyNumberOfThreads) {
  const int threads = NumThreads();
  for (const auto& make : {WriteProblem, ReadProblem}) {
    for (const Shape& s : kShapes) {
      const Problem p = make(s, Weights::kMild);
      SetNumThreads(1);
      const Tensors want = Everything(p, Impl::kKernel, at::kFloat);
      for (const int count : {2, 3}) {
        SetNumThreads(count);
        const Tensors got = Everything(p, Impl::kKernel, at::kFloat);
        for (size_t i = 0; i < want.size(); ++i) ExpectSameBits(got[i], want[i], p.name);
      }
    }
  }
  SetNumThreads(threads);
}

// A write of all tokens is the state that a causal walk leaves.
TEST(SlotBidirectional, WritesWhatAWalkLeaves) {
  for (const Weights kind : {Weights::kMild, Weights::kOffset, Weights::kHoles}) {
    const Problem p = WriteProblem({2, 2, 161, 16, 32, true}, kind);
    const at::Tensor r = at::zeros_like(p.x[0]);
    const SlotState walked = SlotRead(r, p.x[0], p.x[1], {p.x[2], p.x[3]}).state;
    const Tensors written = p.run(p.x);
    ExpectClose(written[0], walked.memory, 1e-12, p.name);
    ExpectClose(Finite(written[1]), Finite(walked.z), 1e-12, p.name);
  }
}

// Slots that nothing was written to stay empty, and have no gradient.
TEST(SlotBidirectional, NothingWritten) {
  const Problem p = WriteProblem({1, 2, 40, 16, 5, true}, Weights::kNone);
  for (const Impl impl : kImpls) {
    const Tensors all = Everything(p, impl, at::kFloat);
    const at::Tensor empty = at::isneginf(p.x[3]);
    EXPECT_TRUE(at::isneginf(all[1]).equal(empty)) << ImplName(impl);
    EXPECT_EQ(all[0].masked_select(empty.unsqueeze(-1)).abs().sum().item<double>(), 0);
    for (size_t i = 2; i < 4; ++i) EXPECT_EQ(all[i].abs().sum().item<double>(), 0) << i;
  }
}

// NaN in padding is not read; NaN in a token reaches the slots that it writes.
TEST(SlotBidirectional, WhatIsNotFinite) {
  Problem p = WriteProblem({3, 2, 33, 7, 5, false, true, true}, Weights::kMild);
  const Tensors want = Everything(p, Impl::kKernel, at::kFloat);
  Problem poisoned = p;
  for (size_t i : {size_t{0}, size_t{1}}) {
    poisoned.x[i] = p.x[i].clone();
    poisoned.x[i].select(0, 1).fill_(std::nan(""));
    poisoned.x[i].select(0, 2).narrow(1, 11, 22).fill_(kInf);
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
    const at::Tensor memory = Everything(bad, Impl::kKernel, at::kFloat)[0][0][0];
    EXPECT_TRUE(at::isnan(memory).any().item<bool>()) << i;
  }
}

TEST(SlotBidirectional, SecondDerivatives) {
  for (const auto& make : {WriteProblem, ReadProblem}) {
    const Problem p = make({1, 2, 9, 3, 4}, Weights::kMild);
    const auto second = [&](Impl impl) {
      const ImplScope scope(impl);
      Tensors x;
      for (const at::Tensor& t : p.x) x.push_back(Leaf(t));
      const Tensors y = p.run(x);
      at::Tensor loss = at::zeros({}, at::kDouble);
      for (const at::Tensor& t : y) loss = loss + t.square().sum();
      const Tensors first = torch::autograd::grad({loss}, x, {}, true, true);
      at::Tensor norm = at::zeros({}, at::kDouble);
      for (const at::Tensor& t : first) norm = norm + t.square().sum();
      return Gradients(norm, x);
    };
    const Tensors want = second(Impl::kComposite), got = second(Impl::kKernel);
    for (size_t i = 0; i < want.size(); ++i) ExpectClose(got[i], want[i], 1e-10, p.name);
  }
}

TEST(SlotBidirectional, Refusals) {
  const at::Tensor s = at::randn({1, 2, 4, 3}), v = at::randn({1, 2, 4, 5});
  const SlotState state = EmptySlots(1, 2, 3, 5, s.options());
  EXPECT_THROW(SlotWrite(s, v.narrow(2, 0, 3), state), c10::Error);
  EXPECT_THROW(SlotWrite(s, v.to(at::kDouble), state), c10::Error);
  EXPECT_THROW(SlotWrite(s, v, {state.memory.to(at::kFloat), state.z}), c10::Error);
  EXPECT_THROW(SlotWrite(s, v, state, {{}, at::zeros({1, 4}, at::kBool)}), c10::Error);
  EXPECT_THROW(SlotSoftmaxRead(s, state.memory.narrow(2, 0, 2)), c10::Error);
  EXPECT_THROW(SlotSoftmaxRead(s, state.memory.to(at::kFloat)), c10::Error);
}

}  // namespace
}  // namespace cistern::ops
