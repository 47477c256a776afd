// Writes and reads of all tokens at once: the definition, composition and kernel agree, forward and
// backward, on every instruction set.
#include "cistern/ops/all_tokens_test.h"
#include "cistern/ops/slot_attention.h"

namespace cistern::ops {
namespace {

using namespace all_tokens_test;

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

Problem WriteProblem(const Shape& s, Weights kind) {
  at::manual_seed(7 + s.length);
  const Mask mask = s.lengths ? SomeLengths(s.batch, s.length) : Mask{};
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

// Keys and values, with the log-weights, lengths and z of WriteProblem.
Problem AbcWriteProblem(const Shape& s, Weights kind) {
  Problem p = WriteProblem(s, kind);
  const Mask mask = s.lengths ? SomeLengths(s.batch, s.length) : Mask{};
  const at::Tensor memory = p.x[2];
  p.name = "abc " + p.name;
  p.x = {p.x[0],
         p.x[1],
         at::randn_like(p.x[1]).to(at::kFloat).to(at::kDouble),
         memory,
         at::randn_like(memory),
         p.x[3]};
  p.tokens = 3;
  p.g = {p.g[0], at::randn_like(memory), p.g[1]};
  p.run = [mask](const Tensors& x) {
    const AbcState after = AbcWrite(x[0], x[1], x[2], {x[3], x[4], x[5]}, mask);
    return Tensors{after.keys, after.values, after.z};
  };
  return p;
}

// kHoles: slots that count as empty, and a head of which all do, whatever they hold; kOffset:
// logits far from 0; kGrowth: logits that differ by tens.
Problem AbcReadProblem(const Shape& s, Weights kind) {
  at::manual_seed(700 + s.length);
  at::Tensor keys = at::randn({s.batch, s.heads, s.slots, s.width}, at::kDouble),
             values = at::randn_like(keys), z;
  if (kind == Weights::kOffset) keys = keys + 30;
  if (kind == Weights::kGrowth) keys = keys * at::arange(s.slots, at::kDouble).unsqueeze(-1) / 2;
  if (kind == Weights::kHoles) {
    z = at::randn({s.batch, s.heads, s.slots}, at::kDouble);
    if (s.slots > 1) z = z.masked_fill(at::arange(s.slots).remainder(3) == 1, -kInf);
    z[0][0].fill_(-kInf);
  }
  const double scale = 1 / std::sqrt(double(s.width));
  return {"abc read " + NameOf(s, kind),
          {at::randn({s.batch, s.heads, s.length, s.width}).to(at::kDouble), keys, values},
          1,
          {at::randn({s.batch, s.heads, s.length, s.width}, at::kDouble)},
          s.heads_last,
          [z, scale](const Tensors& x) { return Tensors{AbcRead(x[0], x[1], x[2], z, scale)}; }};
}

// Queries of slots in place of log-weights: kOffset, far from each other; kGrowth, products with
// keys that grow; kHoles: as WriteProblem. Keys are narrower than values.
Problem PackProblem(const Shape& s, Weights kind) {
  Problem p = WriteProblem(s, kind);
  const Mask mask = s.lengths ? SomeLengths(s.batch, s.length) : Mask{};
  const int64_t width = (s.width + 1) / 2;
  at::Tensor queries = at::randn({s.batch, s.heads, s.slots, width}, at::kDouble),
             keys = at::randn({s.batch, s.heads, s.length, width}).to(at::kDouble);
  if (kind == Weights::kOffset)
    queries = queries + (at::arange(s.slots).remainder(3) - 1).view({-1, 1}) * 100;
  if (kind == Weights::kGrowth)
    keys = keys * (at::arange(s.length).unsqueeze(-1) / 16).clamp_max(16);
  const double scale = 1 / std::sqrt(double(width));
  p.name = "pack " + p.name;
  p.x = {keys, p.x[1], queries, p.x[2], p.x[3]};
  p.run = [mask, scale](const Tensors& x) {
    const SlotState after = SlotPack(x[2], x[0], x[1], scale, {x[3], x[4]}, mask);
    return Tensors{after.memory, after.z};
  };
  return p;
}

template <class Make>
void ForEachProblem(Make make, const std::function<void(const Problem&)>& body) {
  for (const Shape& s : kShapes) {
    for (const Weights kind : {Weights::kMild, Weights::kOffset, Weights::kGrowth, Weights::kHoles})
      body(make(s, kind));
  }
}

void ExpectAllAgree(const Problem& p) {
  const double largest = p.x[0].numel() > 0 ? Finite(p.x[0]).abs().max().item<double>() : 0;
  ExpectAgreement(p, [&](Impl impl, at::ScalarType dtype) {
    if (dtype == at::kDouble) return 1e-12 * std::max(1.0, largest);
    // Composed in float, log-weights far from 0 lose the bits of their references.
    return impl == Impl::kComposite && largest > 100 ? -1 : 2e-6 + largest * 0x1p-21;
  });
}

TEST(SlotBidirectional, WritesAgree) {
  OnEveryIsa([] { ForEachProblem(WriteProblem, ExpectAllAgree); });
}
TEST(SlotBidirectional, ReadsAgree) {
  OnEveryIsa([] { ForEachProblem(ReadProblem, ExpectAllAgree); });
}

TEST(SlotBidirectional, PacksAgree) {
  OnEveryIsa([] {
    ForEachProblem(PackProblem, [](const Problem& p) {
      ExpectAgreement(p, [&](Impl impl, at::ScalarType dtype) {
        if (dtype == at::kDouble) return 1e-11;
        // Log-weights of hundreds, rounded before they are compared.
        const bool far = p.name.find("weights 1") != std::string::npos ||
                         p.name.find("weights 2") != std::string::npos;
        return far ? (impl == Impl::kComposite ? -1 : 3e-4) : 5e-6;
      });
    });
  });
}
// A pack is a write whose log-weights are products.
TEST(SlotBidirectional, PacksWhatAWriteDoes) {
  const Problem p = PackProblem({2, 2, 4161, 16, 32, true, true}, Weights::kMild);
  const Mask mask = SomeLengths(2, 4161);
  const at::Tensor s = at::matmul(p.x[0], p.x[2].transpose(2, 3)) / 4.0;
  const SlotState written = SlotWrite(s, p.x[1], {p.x[3], p.x[4]}, mask);
  const Tensors packed = p.run(p.x);
  ExpectClose(packed[0], written.memory, 1e-12, "memory");
  ExpectClose(packed[1], written.z, 1e-12, "z");
}

TEST(SlotBidirectional, AbcWritesAgree) {
  OnEveryIsa([] { ForEachProblem(AbcWriteProblem, ExpectAllAgree); });
}
TEST(SlotBidirectional, AbcReadsAgree) {
  OnEveryIsa([] {
    ForEachProblem(AbcReadProblem, [](const Problem& p) {
      ExpectAgreement(p, [](Impl, at::ScalarType dtype) {
        return dtype == at::kDouble ? 1e-12 : 5e-5;  // logits of a hundred
      });
    });
  });
}

// What is written together is what is written apart.
TEST(SlotBidirectional, AbcWritesWhatTwoWritesDo) {
  const Problem p = AbcWriteProblem({2, 2, 161, 16, 32, true, true}, Weights::kHoles);
  const Mask mask = SomeLengths(2, 161);
  const Tensors both = p.run(p.x);
  const SlotState keys = SlotWrite(p.x[0], p.x[1], {p.x[3], p.x[5]}, mask),
                  values = SlotWrite(p.x[0], p.x[2], {p.x[4], p.x[5]}, mask);
  ExpectSameBits(both[0], keys.memory, "keys");
  ExpectSameBits(both[1], values.memory, "values");
  ExpectSameBits(both[2], values.z, "z");
}

TEST(SlotBidirectional, OnPoisonedWorkspaces) {
  for (const auto& make :
       {WriteProblem, ReadProblem, AbcWriteProblem, AbcReadProblem, PackProblem}) {
    for (const Shape& s : kShapes) ExpectFiniteOnPoisonedWorkspaces(make(s, Weights::kMild));
  }
}

TEST(SlotBidirectional, SameBitsForAnyNumberOfThreads) {
  for (const auto& make :
       {WriteProblem, ReadProblem, AbcWriteProblem, AbcReadProblem, PackProblem}) {
    for (const Shape& s : kShapes) ExpectSameBitsForAnyNumberOfThreads(make(s, Weights::kMild));
  }
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

TEST(SlotBidirectional, WhatIsNotFinite) {
  for (const auto& make : {WriteProblem, AbcWriteProblem, PackProblem})
    ExpectPaddingUnread(make({3, 2, 33, 7, 5, false, true, true}, Weights::kMild));
}

// Also where nothing else was written.
TEST(SlotBidirectional, NothingButNaNIsNaN) {
  for (const int64_t length : {1, 2}) {
    Problem p = WriteProblem({1, 1, length, 3, 4, true}, Weights::kNone);
    p.x[0].select(2, 0).fill_(std::nan(""));
    for (const Impl impl : kImpls) {
      const Tensors all = Everything(p, impl, at::kFloat);
      EXPECT_TRUE(at::isnan(all[0]).all().item<bool>()) << ImplName(impl);
      EXPECT_TRUE(at::isnan(all[1]).all().item<bool>()) << ImplName(impl);
    }
  }
}

// NaN in a memory stays, however little of it is left.
TEST(SlotBidirectional, NaNInTheStateStays) {
  Problem p = WriteProblem({1, 1, 2, 3, 4}, Weights::kMild);
  p.x[2].fill_(std::nan(""));
  p.x[3].fill_(-1e4);
  for (const Impl impl : kImpls)
    EXPECT_TRUE(at::isnan(Everything(p, impl, at::kFloat)[0]).all().item<bool>()) << ImplName(impl);
}

TEST(SlotBidirectional, SecondDerivatives) {
  for (const auto& make : {WriteProblem, ReadProblem, AbcWriteProblem, AbcReadProblem, PackProblem})
    ExpectSecondDerivatives(make({1, 2, 9, 3, 4}, Weights::kMild));
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
  const AbcState abc = {state.memory, state.memory.clone(), state.z};
  EXPECT_THROW(AbcWrite(s, v.narrow(2, 0, 3), v, abc), c10::Error);
  EXPECT_THROW(AbcWrite(s, v.to(at::kDouble), v, abc), c10::Error);
  EXPECT_THROW(AbcWrite(s, v, v, {abc.keys, abc.values, abc.z.to(at::kFloat)}), c10::Error);
  EXPECT_THROW(AbcWrite(s, v, v, abc, {{}, at::zeros({1, 4}, at::kBool)}), c10::Error);
  const at::Tensor queries = at::randn({1, 2, 3, 5}, at::kDouble);
  EXPECT_THROW(SlotPack(queries.narrow(3, 0, 4), v, v, 1, state), c10::Error);
  EXPECT_THROW(SlotPack(queries.narrow(2, 0, 2), v, v, 1, state), c10::Error);
  EXPECT_THROW(SlotPack(queries.to(at::kFloat), v, v, 1, state), c10::Error);
  EXPECT_THROW(SlotPack(queries, v, v.narrow(2, 0, 3), 1, state), c10::Error);
  EXPECT_THROW(SlotPack(queries, v.to(at::kDouble), v, 1, state), c10::Error);
  EXPECT_THROW(SlotPack(queries, v, v, 1, state, {{}, at::zeros({1, 4}, at::kBool)}), c10::Error);
  EXPECT_THROW(AbcRead(v, abc.keys.narrow(3, 0, 4), abc.values, {}, 1), c10::Error);
  EXPECT_THROW(AbcRead(v, abc.keys, abc.values.to(at::kFloat), {}, 1), c10::Error);
  EXPECT_THROW(AbcRead(v, abc.keys, abc.values, abc.z.narrow(2, 0, 2), 1), c10::Error);
}

}  // namespace
}  // namespace cistern::ops
