#include "cistern/ops/slot_memory.h"

#include "cistern/ops/memory_test.h"

namespace cistern::ops {
namespace {

using namespace cistern::testing;

enum class Weights { kMild, kJumps, kHoles };

struct Case {
  bool match;
  int64_t batch, heads, length, slots, width;
  Weights weights = Weights::kMild;
  bool empty = false, lengths = false, starts = false, heads_last = false;
  std::string Name() const {
    return std::string(match ? "match" : "read") + " T" + std::to_string(length) + " n" +
           std::to_string(slots) + " d" + std::to_string(width) + " weights " +
           std::to_string(int(weights)) + (empty ? " empty" : "") + (lengths ? " lengths" : "") +
           (starts ? " starts" : "") + (heads_last ? " heads last" : "");
  }
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const bool match : {false, true}) {
    for (const int64_t length : {0, 1, 5, 16, 17, 37, 65}) {
      for (int masks = 0; masks < 4; ++masks) {
        cases.push_back({match, 3, 2, length, 7, 5, Weights::kMild, length % 2 == 0,
                         (masks & 1) != 0, (masks & 2) != 0, length != 5});
      }
    }
    for (const Weights w : {Weights::kJumps, Weights::kHoles}) {
      for (int masks = 0; masks < 4; ++masks)
        cases.push_back(
            {match, 3, 2, 37, 7, 5, w, masks == 0, (masks & 1) != 0, (masks & 2) != 0, masks == 3});
    }
    cases.push_back({match, 1, 1, 37, 1, 1});
    cases.push_back({match, 2, 1, 130, 33, 43, Weights::kMild, true});
    cases.push_back({match, 0, 2, 5, 3, 4});
  }
  return cases;
}

double LargestLogWeight(const MemoryProblem& p) {
  return p.x[1].numel() > 0 ? p.x[1].masked_fill(p.x[1].isinf(), 0.0).abs().max().item<double>()
                            : 0;
}

MemoryProblem MakeProblem(const Case& c) {
  at::manual_seed(17 + c.length);
  MemoryProblem p;
  p.name = c.Name();
  p.state = {3, 4}, p.of_tokens = 2;
  p.parts = {"out", "z_out", "memory", "z", "d_a", "d_s", "d_u", "d_memory", "d_z"};
  const int64_t B = c.batch, H = c.heads, T = c.length, n = c.slots, d = c.width;
  at::Tensor s = Normal({B, H, T, n}, 2);
  if (c.weights == Weights::kJumps)
    s = s + (at::rand({B, H, T, n}) < 0.1).to(at::kDouble) * 300 -
        (at::rand({B, H, T, n}) < 0.1).to(at::kDouble) * 900;
  if (c.weights == Weights::kHoles)
    s = s.masked_fill((at::rand({B, H, T, n}) < 0.5).logical_or(at::arange(n) % 5 == 4), -kInf);
  at::Tensor memory = Normal({B, H, n, d}), z = Normal({B, H, n}, 2);
  const at::Tensor fresh = c.empty ? at::ones({B, H, n}, at::kBool) : at::rand({B, H, n}) < 0.3;
  z = z.masked_fill(fresh, -kInf), memory = memory.masked_fill(fresh.unsqueeze(-1), 0.0);
  p.x = {Normal({B, H, T, c.match ? d : n}), s, Normal({B, H, T, d}), memory, z};
  if (c.lengths)
    p.mask.lengths =
        at::cat({Lengths({T, 0}), at::randint(0, T + 1, {B}, at::kLong)}).narrow(0, 0, B);
  if (c.starts) p.mask.starts = at::rand({B, T}) < 0.15;
  p.g = {Normal({B, H, T, c.match ? n : d}), Normal({B, H, T, n}), Normal({B, H, n, d}),
         Normal({B, H, n})};
  p.run = [match = c.match](const Tensors& x, const Mask& mask) {
    const SlotResult r =
        (match ? &SlotMatch : &SlotRead)(x[0], x[1], x[2], {x[3], x[4]}, mask, true);
    return Tensors{r.out, r.z_out, r.state.memory, r.state.z};
  };
  return p;
}

TEST(SlotOps, ThreeImplementationsAgreeForwardAndBackward) {
  for (const Case& c : Cases()) {
    const MemoryProblem p = MakeProblem(c);
    const double largest = LargestLogWeight(p);
    ExpectImplementationsAgree(p, c.heads_last, [&](at::ScalarType dtype, size_t) {
      return dtype == at::kDouble ? 1e-12 : 1e-6 + largest * std::ldexp(1.0, -22);
    });
    if (HasFailure()) break;
  }
}

TEST(SlotOps, GradientsMatchFiniteDifferences) {
  for (const Case& c : Cases()) {
    if (c.length <= 37 && c.batch > 0 && c.weights != Weights::kJumps)
      ExpectFiniteDifferences(MakeProblem(c));
  }
}

TEST(SlotOps, ReadAndMatchAlike) {
  for (const bool match : {false, true}) {
    ExpectGradientsOfOneOutputAlone(MakeProblem({match, 2, 2, 19, 3, 4}));
    ExpectSecondDerivatives(
        MakeProblem({match, 2, 2, 21, 3, 5, Weights::kMild, false, true, true}));
    ExpectPiecesEqualWhole(MakeProblem({match, 2, 2, 37, 5, 4, Weights::kMild, true, false, true}));
    ExpectSameBitsForAnyNumberOfThreads(
        MakeProblem({match, 3, 5, 200, 16, 20, Weights::kMild, false, true, true}));
    ExpectPaddingHasNoEffect(MakeProblem({match, 3, 2, 23, 4, 5}));
    // The documents' log-weights lie a thousand apart: nothing of one may set the scale of another.
    MemoryProblem p = MakeProblem({match, 1, 2, 40, 4, 5, Weights::kMild, true});
    p.x[1] = at::cat(
        {p.x[1].narrow(2, 0, 7) + 1000, p.x[1].narrow(2, 7, 13) - 1000, p.x[1].narrow(2, 20, 20)},
        2);
    ExpectDocumentsApart(p, {{0, 7}, {7, 13}, {20, 20}});
  }
}

TEST(SlotOps, PastIsBitwiseBlindToTheFuture) {
  ImplScope scope(Impl::kKernel);
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    for (const bool match : {false, true}) {
      const MemoryProblem p = MakeProblem({match, 2, 2, 150, 9, 20, Weights::kJumps, true});
      std::vector<at::Tensor> x;
      for (size_t i = 0; i < 5; ++i) x.push_back(i >= 3 ? p.x[i] : p.x[i].to(dtype));
      const Tensors want = p.run(x, {});
      for (const int64_t t : {1, 63, 64, 65, 149}) {
        std::vector<at::Tensor> changed = x;
        for (size_t i = 0; i < 3; ++i)
          changed[i] =
              at::cat({x[i].narrow(2, 0, t), x[i].narrow(2, t, 150 - t) * -37.0 + 11.0}, 2);
        const Tensors got = p.run(changed, {});
        for (size_t i = 0; i < 2; ++i)
          ExpectSameBits(got[i].narrow(2, 0, t), want[i].narrow(2, 0, t),
                         p.parts[i] + " before " + std::to_string(t));
        EXPECT_FALSE(at::equal(got[0], want[0]));
      }
    }
  }
}

TEST(SlotOps, WriteIsReadToTheEnd) {
  for (const Weights w : {Weights::kMild, Weights::kHoles, Weights::kJumps}) {
    for (const int64_t length : {0, 1, 37}) {
      for (const bool lengths : {false, true}) {
        const MemoryProblem p = MakeProblem({false, 3, 2, length, 5, 4, w, length == 37, lengths});
        ImplScope scope(Impl::kReference);
        const Tensors x = LeavesOf(p), y = LeavesOf(p), all = p.run(x, p.mask);
        const SlotState want = {all[2], all[3]}, got = SlotWrite(y[1], y[2], {y[3], y[4]}, p.mask);
        ExpectClose(got.memory, want.memory, 1e-12, "memory");
        ExpectClose(got.z, want.z, 1e-12, "z");
        auto loss = [&](const SlotState& s) {
          return (s.memory * p.g[2]).sum() + (Finite(s.z) * p.g[3]).sum();
        };
        const auto g = Gradients(loss(got), y), g_want = Gradients(loss(want), x);
        for (size_t i = 0; i < 5; ++i)
          ExpectClose(g[i], g_want[i], 1e-11, "gradient " + std::to_string(i));
        const SlotState f =
            SlotWrite(p.x[1].to(at::kFloat), p.x[2].to(at::kFloat), {p.x[3], p.x[4]}, p.mask);
        ExpectClose(f.memory, want.memory, 1e-6 + LargestLogWeight(p) * std::ldexp(1.0, -22),
                    "float memory");
      }
    }
  }
}

TEST(SlotOps, MergedStatesAreTheWhole) {
  for (const Weights w : {Weights::kMild, Weights::kHoles, Weights::kJumps}) {
    const MemoryProblem p = MakeProblem({false, 3, 2, 37, 5, 4, w, true});
    auto piece = [&](int64_t begin, int64_t count) {
      return SlotWrite(p.x[1].narrow(2, begin, count), p.x[2].narrow(2, begin, count),
                       {p.x[3], p.x[4]});
    };
    const SlotState want = piece(0, 37);
    for (const int64_t cut : {0, 1, 20, 37}) {
      const SlotState got = MergeSlots(piece(0, cut), piece(cut, 37 - cut));
      ExpectClose(got.memory, want.memory, 1e-13, "cut " + std::to_string(cut));
      ExpectClose(got.z, want.z, 1e-13, "cut " + std::to_string(cut));
    }
    // Associative.
    const SlotState left = MergeSlots(MergeSlots(piece(0, 9), piece(9, 9)), piece(18, 19)),
                    right = MergeSlots(piece(0, 9), MergeSlots(piece(9, 9), piece(18, 19)));
    ExpectClose(left.memory, right.memory, 1e-13, "associative");
  }
}

TEST(SlotOps, AHundredThousandTokensOneAtATimeStayExact) {
  // In float, against the reference in double. Values go with their log-weights, which spread over
  // 3: a mean in float would drop the tokens of small weight, which are unlike the others, and be
  // wrong by 1e-4.
  at::NoGradGuard guard;
  at::manual_seed(6);
  const int64_t T = 100000;
  const at::Tensor r = at::softmax(Normal({1, 1, T, 4}), -1).to(at::kFloat),
                   s = Normal({1, 1, T, 4}, 3).to(at::kFloat),
                   v = (Normal({1, 1, T, 6}) + s.narrow(3, 0, 1)).to(at::kFloat);
  SlotResult want;
  {
    ImplScope scope(Impl::kReference);
    want = SlotRead(r.to(at::kDouble), s.to(at::kDouble), v.to(at::kDouble),
                    EmptySlots(1, 1, 4, 6, at::kDouble));
  }
  SlotState state = EmptySlots(1, 1, 4, 6, at::kFloat);
  at::Tensor last;
  for (int64_t t = 0; t < T; ++t) {
    const SlotResult step =
        SlotRead(r.narrow(2, t, 1), s.narrow(2, t, 1), v.narrow(2, t, 1), state);
    state = step.state;
    last = step.out;
  }
  EXPECT_LT((state.memory - want.state.memory).abs().max().item<double>(), 1e-12);
  EXPECT_LT((state.z - want.state.z).abs().max().item<double>(), 1e-12);
  ExpectClose(last, want.out.narrow(2, T - 1, 1), 1e-7, "the last output");
}

TEST(SlotOps, WrongShapesNameTheOpAndTheShape) {
  const SlotState state = EmptySlots(2, 3, 5, 4, at::kFloat);
  const at::Tensor s = at::zeros({2, 3, 6, 5}), v = at::zeros({2, 3, 6, 4});
  for (const Impl impl : kImpls) {
    ImplScope scope(impl);
    ExpectContains(Thrown([&] {
                     SlotRead(at::zeros({2, 3, 6, 4}), s, v, state);
                   }),
                   {"[slot_read]", "r of shape [2, 3, 6, 5]", "[2, 3, 6, 4]"});
    ExpectContains(Thrown([&] { SlotMatch(s, s, v, state); }),
                   {"[slot_match]", "q of shape [2, 3, 6, 4]", "[2, 3, 6, 5]"});
    ExpectContains(Thrown([&] {
                     SlotRead(s, s, at::zeros({2, 3, 7, 4}), state);
                   }),
                   {"[slot_read]", "v", "[2, 3, 7, 4]"});
    ExpectContains(Thrown([&] { SlotRead(s, s.select(0, 0), v, state); }),
                   {"[slot_read]", "s of shape [B,H,T,n]", "[3, 6, 5]"});
    ExpectContains(Thrown([&] { SlotRead(s, s, v, EmptySlots(2, 3, 5, 9, at::kFloat)); }),
                   {"[slot_read]", "memory", "[2, 3, 5, 9]"});
    ExpectContains(Thrown([&] {
                     SlotRead(s, s, v, {state.memory, state.z.to(at::kFloat)});
                   }),
                   {"[slot_read]", "z in double", "Float"});
    ExpectContains(Thrown([&] { SlotRead(s, s, v.to(at::kDouble), state); }),
                   {"[slot_read]", "one dtype", "Double"});
    ExpectContains(Thrown([&] {
                     SlotRead(s, s, v, state, {Lengths({1, 2, 3}), {}});
                   }),
                   {"[slot_read]", "lengths", "[3]"});
    if (impl != Impl::kComposite) {  // which cannot look at lengths on another device
      ExpectContains(Thrown([&] {
                       SlotRead(s, s, v, state, {Lengths({6, 7}), {}});
                     }),
                     {"lengths[1] = 7", "0..T = 6"});
      ExpectContains(Thrown([&] {
                       SlotRead(s, s, v, state, {Lengths({-1, 6}), {}});
                     }),
                     {"lengths[0] = -1"});
    }
    ExpectContains(Thrown([&] {
                     SlotRead(s, s, v, state, {{}, at::zeros({2, 5}, at::kBool)});
                   }),
                   {"[slot_read]", "starts", "[2, 5]"});
    ExpectContains(Thrown([&] {
                     SlotWrite(s, at::zeros({2, 3, 7, 4}), state);
                   }),
                   {"[slot_write]", "[2, 3, 7, 4]"});
    ExpectContains(Thrown([&] { MergeSlots(state, EmptySlots(2, 3, 5, 9, at::kFloat)); }),
                   {"[merge_slots]", "[2, 3, 5, 9]"});
  }
}

}  // namespace
}  // namespace cistern::ops
