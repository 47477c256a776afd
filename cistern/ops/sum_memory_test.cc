#include "cistern/ops/sum_memory.h"

#include "cistern/ops/memory_test.h"

namespace cistern::ops {
namespace {

using namespace cistern::testing;

enum class Gates { kNone, kMild, kJumps, kPerToken };

struct Case {
  bool match;
  int64_t batch, heads, length, slots, width;
  Gates gates = Gates::kNone;
  bool empty = false, lengths = false, starts = false, heads_last = false;
  std::string Name() const {
    return std::string(match ? "match" : "read") + " T" + std::to_string(length) + " n" +
           std::to_string(slots) + " d" + std::to_string(width) + " gates " +
           std::to_string(int(gates)) + (empty ? " empty" : "") + (lengths ? " lengths" : "") +
           (starts ? " starts" : "") + (heads_last ? " heads last" : "");
  }
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const bool match : {false, true}) {
    for (const int64_t length : {0, 1, 5, 16, 17, 37, 65, 70}) {
      for (const Gates gates : {Gates::kNone, Gates::kMild, Gates::kJumps, Gates::kPerToken}) {
        for (int masks = 0; masks < 4; ++masks) {
          if (length > 37 && gates == Gates::kPerToken) continue;
          cases.push_back({match, 3, 2, length, 7, 5, gates, length % 2 == 0, (masks & 1) != 0,
                           (masks & 2) != 0, masks % 3 == 0});
        }
      }
    }
    cases.push_back({match, 1, 1, 37, 1, 1});
    cases.push_back({match, 2, 1, 130, 33, 43, Gates::kMild, true});
    cases.push_back({match, 0, 2, 5, 3, 4});
  }
  return cases;
}

MemoryProblem MakeProblem(const Case& c) {
  at::manual_seed(17 + c.length);
  MemoryProblem p;
  p.name = c.Name();
  p.state = {3};
  p.parts = {"out", "memory", "d_a", "d_w", "d_u", "d_memory", "d_log_gate"};
  const int64_t B = c.batch, H = c.heads, T = c.length, n = c.slots, d = c.width;
  p.x = {Normal({B, H, T, c.match ? d : n}), Normal({B, H, T, n}), Normal({B, H, T, d}),
         Normal({B, H, n, d}, c.empty ? 0 : 1)};
  if (c.gates != Gates::kNone) {
    at::Tensor gate = -Normal({B, H, T, c.gates == Gates::kPerToken ? 1 : n}).abs();
    if (c.gates == Gates::kJumps) {
      // -300 underflows a float, -1e30 would swallow what is added to it.
      gate = (gate * 0.01).to(at::kFloat).to(at::kDouble);
      gate = gate.masked_fill(at::rand_like(gate) < 0.05, -300.0)
                 .masked_fill(at::rand_like(gate) < 0.05, -1e30);
      gate = gate.masked_fill(at::rand_like(gate) < 0.05, -kInf).to(at::kFloat).to(at::kDouble);
    }
    p.x.push_back(gate);
  }
  if (c.lengths)
    p.mask.lengths =
        at::cat({Lengths({T, 0}), at::randint(0, T + 1, {B}, at::kLong)}).narrow(0, 0, B);
  if (c.starts) p.mask.starts = at::rand({B, T}) < 0.15;
  p.g = {Normal({B, H, T, c.match ? n : d}), Normal({B, H, n, d})};
  p.run = [match = c.match](const Tensors& x, const Mask& mask) {
    const SumResult r = (match ? &SumMatch : &SumRead)(x[0], x[1], x[2], x[3], mask,
                                                       x.size() > 4 ? x[4] : at::Tensor());
    EXPECT_EQ(r.memory.scalar_type(), at::kDouble);
    return Tensors{r.out, r.memory};
  };
  return p;
}

TEST(SumOps, ThreeImplementationsAgreeForwardAndBackward) {
  for (const Case& c : Cases()) {
    // The kernels sum a gate's gradient over all later tokens, whose rounding adds up
    // (kernels/sum_memory.h).
    ExpectImplementationsAgree(MakeProblem(c), c.heads_last, [](at::ScalarType dtype, size_t i) {
      return dtype == at::kDouble ? 1e-12 : i == 6 ? 3e-6 : 1e-6;
    });
    if (HasFailure()) break;
  }
}

TEST(SumOps, GradientsMatchFiniteDifferences) {
  for (const Case& c : Cases()) {
    if (c.length <= 37 && c.batch > 0 && c.gates != Gates::kJumps)
      ExpectFiniteDifferences(MakeProblem(c));
  }
}

TEST(SumOps, ReadAndMatchAlike) {
  for (const bool match : {false, true}) {
    for (const Gates gates : {Gates::kNone, Gates::kMild, Gates::kJumps}) {
      ExpectPiecesEqualWhole(MakeProblem({match, 2, 2, 37, 5, 4, gates, true, false, true}));
      ExpectSameBitsForAnyNumberOfThreads(
          MakeProblem({match, 3, 5, 200, 16, 20, gates, false, true, true}));
      if (gates == Gates::kJumps) continue;
      ExpectGradientsOfOneOutputAlone(MakeProblem({match, 2, 2, 19, 3, 4, gates}));
      ExpectSecondDerivatives(MakeProblem({match, 2, 2, 21, 3, 5, gates, false, true, true}));
      ExpectPaddingHasNoEffect(MakeProblem({match, 3, 2, 23, 4, 5, gates}));
      const std::vector<std::pair<int64_t, int64_t>> documents = {{0, 7}, {7, 13}, {20, 70}};
      const Tensors g =
          ExpectDocumentsApart(MakeProblem({match, 1, 2, 90, 4, 5, gates, true}), documents);
      if (gates == Gates::kNone) continue;
      for (const auto& [begin, count] : documents)
        EXPECT_EQ(g[4].narrow(2, begin, 1).abs().sum().item<double>(), 0);
    }
  }
}

TEST(SumOps, WriteIsReadToTheEnd) {
  for (const Gates gates : {Gates::kNone, Gates::kMild, Gates::kJumps, Gates::kPerToken}) {
    for (const int64_t length : {0, 1, 37, 1100}) {
      for (const bool lengths : {false, true}) {
        const MemoryProblem p = MakeProblem({false, 3, 2, length, 5, 4, gates, false, lengths});
        ImplScope scope(Impl::kReference);
        const Tensors x = LeavesOf(p), y = LeavesOf(p);
        const at::Tensor want = p.run(x, p.mask)[1],
                         got =
                             SumWrite(y[1], y[2], y[3], p.mask, y.size() > 4 ? y[4] : at::Tensor());
        const std::string what =
            "gates " + std::to_string(int(gates)) + " T" + std::to_string(length);
        ExpectClose(got, want, 1e-12, what);
        const auto g = Gradients((got * p.g[1]).sum(), y),
                   g_want = Gradients((want * p.g[1]).sum(), x);
        for (size_t i = 1; i < y.size(); ++i)
          ExpectClose(g[i], g_want[i], 1e-11, what + " gradient " + std::to_string(i));
        const Tensors f = LeavesOf(p, at::kFloat);
        ExpectClose(SumWrite(f[1], f[2], f[3], p.mask, f.size() > 4 ? f[4] : at::Tensor()), want,
                    1e-6, what + " float");
      }
    }
  }
}

TEST(SumOps, HalfPrecisionIsNearDouble) {
  const MemoryProblem p = MakeProblem({false, 2, 2, 37, 5, 4, Gates::kMild});
  std::vector<at::Tensor> x, rounded;
  for (size_t i = 0; i < p.x.size(); ++i) {
    x.push_back(i == 3 ? p.x[i] : p.x[i].to(at::kBFloat16));
    rounded.push_back(x.back().to(at::kDouble));
  }
  const Tensors got = p.run(x, {}), want = p.run(rounded, {});
  EXPECT_EQ(got[0].scalar_type(), at::kBFloat16);
  ExpectClose(got[0], want[0], 5e-3, "out");
  ExpectClose(got[1], want[1], 1e-6, "memory");
}

TEST(SumOps, WrongShapesNameTheOpAndTheShape) {
  const at::Tensor memory = EmptySums(2, 3, 5, 4, at::kFloat), w = at::zeros({2, 3, 6, 5}),
                   v = at::zeros({2, 3, 6, 4});
  EXPECT_EQ(memory.scalar_type(), at::kDouble);
  for (const Impl impl : kImpls) {
    ImplScope scope(impl);
    ExpectContains(Thrown([&] { SumRead(v, w, v, memory); }),
                   {"[sum_read]", "r of shape [2, 3, 6, 5]", "[2, 3, 6, 4]"});
    ExpectContains(Thrown([&] { SumMatch(w, w, v, memory); }),
                   {"[sum_match]", "q of shape [2, 3, 6, 4]", "[2, 3, 6, 5]"});
    ExpectContains(Thrown([&] {
                     SumRead(w, w, at::zeros({2, 3, 7, 4}), memory);
                   }),
                   {"[sum_read]", "v", "[2, 3, 7, 4]"});
    ExpectContains(Thrown([&] { SumRead(w, w.select(0, 0), v, memory); }),
                   {"[sum_read]", "w of shape [B,H,T,n]", "[3, 6, 5]"});
    ExpectContains(Thrown([&] { SumRead(w, w, v, EmptySums(2, 3, 5, 9, at::kFloat)); }),
                   {"[sum_read]", "memory", "[2, 3, 5, 9]"});
    ExpectContains(Thrown([&] { SumRead(w, w, v, memory.to(at::kFloat)); }),
                   {"[sum_read]", "memory in double", "Float"});
    ExpectContains(Thrown([&] { SumRead(w, w, v.to(at::kDouble), memory); }),
                   {"[sum_read]", "one dtype", "Double"});
    ExpectContains(Thrown([&] {
                     SumRead(w, w, v, memory, {}, at::zeros({2, 3, 6, 2}));
                   }),
                   {"[sum_read]", "log_gate", "[2, 3, 6, 2]"});
    ExpectContains(Thrown([&] {
                     SumRead(w, w, v, memory, {}, at::zeros({2, 3, 6, 5}, at::kDouble));
                   }),
                   {"[sum_read]", "log_gate", "Double"});
    ExpectContains(Thrown([&] {
                     SumRead(w, w, v, memory, {Lengths({1, 2, 3}), {}});
                   }),
                   {"[sum_read]", "lengths", "[3]"});
    ExpectContains(Thrown([&] {
                     SumRead(w, w, v, memory, {{}, at::zeros({2, 5}, at::kBool)});
                   }),
                   {"[sum_read]", "starts", "[2, 5]"});
    ExpectContains(Thrown([&] {
                     SumWrite(w, at::zeros({2, 3, 7, 4}), memory);
                   }),
                   {"[sum_write]", "[2, 3, 7, 4]"});
    ExpectContains(Thrown([&] {
                     SumWrite(w, v, memory, {{}, at::zeros({2, 6}, at::kBool)});
                   }),
                   {"[sum_write]", "one document"});
  }
}

}  // namespace
}  // namespace cistern::ops
