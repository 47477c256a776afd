#include "cistern/ops/sum_memory.h"

#include "cistern/ops/testing.h"

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
    return std::string(match ? "match" : "read") + " T" + std::to_string(length) + " n" + std::to_string(slots) + " d" +
           std::to_string(width) + " gates " + std::to_string(int(gates)) + (empty ? " empty" : "") + (lengths ? " lengths" : "") +
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
          cases.push_back({match, 3, 2, length, 7, 5, gates, length % 2 == 0, (masks & 1) != 0, (masks & 2) != 0, masks % 3 == 0});
        }
      }
    }
    cases.push_back({match, 1, 1, 37, 1, 1});
    cases.push_back({match, 2, 1, 130, 33, 43, Gates::kMild, true});
    cases.push_back({match, 0, 2, 5, 3, 4});
  }
  return cases;
}

// Inputs in double: a (r or q), w, u (v or k), memory, and log_gate where there is one.
struct Problem {
  std::vector<at::Tensor> x;
  Mask mask;
  at::Tensor g_out, g_memory;
};

Problem MakeProblem(const Case& c) {
  at::manual_seed(17 + c.length);
  Problem p;
  const int64_t B = c.batch, H = c.heads, T = c.length, n = c.slots, d = c.width;
  p.x = {Normal({B, H, T, c.match ? d : n}), Normal({B, H, T, n}), Normal({B, H, T, d}), Normal({B, H, n, d}, c.empty ? 0 : 1)};
  if (c.gates != Gates::kNone) {
    at::Tensor gate = -Normal({B, H, T, c.gates == Gates::kPerToken ? 1 : n}).abs();
    if (c.gates == Gates::kJumps) {
      // -300 underflows a float, -1e30 would swallow what is added to it.
      gate = (gate * 0.01).to(at::kFloat).to(at::kDouble);
      gate = gate.masked_fill(at::rand_like(gate) < 0.05, -300.0).masked_fill(at::rand_like(gate) < 0.05, -1e30);
      gate = gate.masked_fill(at::rand_like(gate) < 0.05, -kInf).to(at::kFloat).to(at::kDouble);
    }
    p.x.push_back(gate);
  }
  if (c.lengths) p.mask.lengths = at::cat({Lengths({T, 0}), at::randint(0, T + 1, {B}, at::kLong)}).narrow(0, 0, B);
  if (c.starts) p.mask.starts = at::rand({B, T}) < 0.15;
  p.g_out = Normal({B, H, T, c.match ? n : d}), p.g_memory = Normal({B, H, n, d});
  return p;
}

SumResult RunOp(bool match, const std::vector<at::Tensor>& x, const Mask& mask) {
  return (match ? &SumMatch : &SumRead)(x[0], x[1], x[2], x[3], mask, x.size() > 4 ? x[4] : at::Tensor());
}

at::Tensor Loss(const Problem& p, const SumResult& r) {
  return (r.out * p.g_out.to(r.out.scalar_type())).sum() + (r.memory * p.g_memory).sum().to(r.out.scalar_type());
}

// The inputs as leaves; the memory stays double.
std::vector<at::Tensor> Leaves(const Problem& p, at::ScalarType dtype = at::kDouble, bool heads_last = false) {
  std::vector<at::Tensor> x;
  for (size_t i = 0; i < p.x.size(); ++i) {
    x.push_back(Leaf(i == 3 ? p.x[i] : WithLayout(p.x[i].to(dtype), heads_last)));
  }
  return x;
}

// out, memory and the gradients of a, w, u, memory, log_gate.
std::vector<at::Tensor> Everything(const Case& c, const Problem& p, Impl impl, at::ScalarType dtype) {
  ImplScope scope(impl);
  const std::vector<at::Tensor> x = Leaves(p, dtype, c.heads_last);
  const SumResult r = RunOp(c.match, x, p.mask);
  std::vector<at::Tensor> all = {r.out.detach(), r.memory.detach()};
  for (const at::Tensor& g : Gradients(Loss(p, r), x)) all.push_back(g);
  return all;
}

const char* kParts[] = {"out", "memory", "d_a", "d_w", "d_u", "d_memory", "d_log_gate"};

TEST(SumOps, ThreeImplementationsAgreeForwardAndBackward) {
  for (const Case& c : Cases()) {
    const Problem p = MakeProblem(c);
    const auto want = Everything(c, p, Impl::kReference, at::kDouble);
    for (const Impl impl : kImpls) {
      for (const auto dtype : {at::kDouble, at::kFloat}) {
        const auto got = Everything(c, p, impl, dtype);
        EXPECT_EQ(got[0].scalar_type(), dtype);
        EXPECT_EQ(got[1].scalar_type(), at::kDouble);
        for (size_t i = 0; i < want.size(); ++i) {
          // The kernels sum a gate's gradient over all later tokens, whose rounding adds up (kernels/sum_memory.h).
          const double tolerance = dtype == at::kDouble ? 1e-12 : i == 6 ? 3e-6 : 1e-6;
          ExpectClose(got[i], want[i], tolerance,
                      c.Name() + ", " + ImplName(impl) + (dtype == at::kFloat ? " float " : " double ") + kParts[i]);
        }
      }
    }
    if (HasFailure()) break;
  }
}

TEST(SumOps, GradientsMatchFiniteDifferences) {
  for (const Case& c : Cases()) {
    if (c.length > 37 || c.batch == 0 || c.gates == Gates::kJumps) continue;
    const Problem p = MakeProblem(c);
    for (const Impl impl : kImpls) {
      ImplScope scope(impl);
      ExpectGradientsMatchDifferences([&](const std::vector<at::Tensor>& x) { return Loss(p, RunOp(c.match, x, p.mask)); }, p.x,
                                      c.Name() + ", " + ImplName(impl));
    }
  }
}

TEST(SumOps, GradientOfOneOutputAlone) {
  // The other output's gradient is undefined then.
  for (const bool match : {false, true}) {
    for (const Gates gates : {Gates::kNone, Gates::kMild}) {
      const Problem p = MakeProblem({match, 2, 2, 19, 3, 4, gates});
      for (int output = 0; output < 2; ++output) {
        std::vector<std::vector<at::Tensor>> all;
        for (const Impl impl : {Impl::kReference, Impl::kKernel}) {
          ImplScope scope(impl);
          const std::vector<at::Tensor> x = Leaves(p);
          const SumResult r = RunOp(match, x, p.mask);
          all.push_back(Gradients((output == 0 ? r.out : r.memory).square().sum(), x));
        }
        for (size_t i = 0; i < p.x.size(); ++i)
          ExpectClose(all[1][i], all[0][i], 1e-12, "output " + std::to_string(output) + ", input " + std::to_string(i));
      }
    }
  }
}

TEST(SumOps, SecondDerivatives) {
  for (const bool match : {false, true}) {
    for (const Gates gates : {Gates::kNone, Gates::kMild}) {
      const Problem p = MakeProblem({match, 2, 2, 21, 3, 5, gates, false, true, true});
      auto second = [&](Impl impl, at::ScalarType dtype) {
        ImplScope scope(impl);
        const std::vector<at::Tensor> x = Leaves(p, dtype);
        const auto g = torch::autograd::grad({Loss(p, RunOp(match, x, p.mask)).square()}, x, {}, true, true);
        at::Tensor loss = at::zeros({}, dtype);
        for (const at::Tensor& t : g) loss = loss + t.square().sum().to(dtype);
        return Gradients(loss, x);
      };
      const auto want = second(Impl::kComposite, at::kDouble), exact = second(Impl::kKernel, at::kDouble),
                 got = second(Impl::kKernel, at::kFloat);
      for (size_t i = 0; i < want.size(); ++i) {
        ExpectClose(exact[i], want[i], 1e-11, "double, input " + std::to_string(i));
        ExpectClose(got[i], want[i], 1e-5, "float, input " + std::to_string(i));  // two backward passes deep
      }
      // The composite's second derivative is itself checked by differences of its first.
      ImplScope scope(Impl::kKernel);
      ExpectGradientsMatchDifferences(
          [&](const std::vector<at::Tensor>& x_in) {
            at::AutoGradMode enable(true);
            std::vector<at::Tensor> x;
            for (const at::Tensor& t : x_in) x.push_back(t.requires_grad() ? t : Leaf(t));
            at::Tensor loss = at::zeros({}, at::kDouble);
            for (const at::Tensor& t : torch::autograd::grad({Loss(p, RunOp(match, x, p.mask))}, x, {}, true, true))
              loss = loss + t.square().sum();
            return loss;
          },
          p.x, "second");
    }
  }
}

// x of tokens [begin, begin + count), going on from `memory`.
std::vector<at::Tensor> Piece(const std::vector<at::Tensor>& x, int64_t begin, int64_t count, const at::Tensor& memory) {
  std::vector<at::Tensor> piece;
  for (size_t i = 0; i < x.size(); ++i) piece.push_back(i == 3 ? memory : x[i].narrow(2, begin, count));
  return piece;
}

TEST(SumOps, SplitEqualsWholeThroughTheMemory) {
  for (const bool match : {false, true}) {
    for (const Gates gates : {Gates::kNone, Gates::kMild, Gates::kJumps}) {
      const Problem p = MakeProblem({match, 2, 2, 37, 5, 4, gates, true, false, true});
      for (const Impl impl : kImpls) {
        ImplScope scope(impl);
        auto run = [&](const std::vector<int64_t>& cuts) {
          const std::vector<at::Tensor> x = Leaves(p);
          at::Tensor memory = x[3];
          std::vector<at::Tensor> outs;
          for (size_t i = 0; i + 1 < cuts.size(); ++i) {
            const int64_t begin = cuts[i], count = cuts[i + 1] - begin;
            const SumResult r = RunOp(match, Piece(x, begin, count, memory), {{}, p.mask.starts->narrow(1, begin, count)});
            memory = r.memory;
            outs.push_back(r.out);
          }
          const SumResult whole = {at::cat(outs, 2), memory};
          std::vector<at::Tensor> all = {whole.out.detach(), memory.detach()};
          for (const at::Tensor& g : Gradients(Loss(p, whole), x)) all.push_back(g);
          return all;
        };
        const auto want = run({0, 37});
        std::vector<int64_t> each;
        for (int64_t t = 0; t <= 37; ++t) each.push_back(t);
        for (int64_t cut = 0; cut <= 38; ++cut) {
          const auto got = run(cut == 38 ? each : std::vector<int64_t>{0, cut, 37});
          for (size_t i = 0; i < want.size(); ++i)
            ExpectClose(got[i], want[i], 1e-12, ImplName(impl) + " cut " + std::to_string(cut) + " " + kParts[i]);
        }
      }
    }
  }
}

TEST(SumOps, SameBitsForAnyNumberOfThreads) {
  for (const bool match : {false, true}) {
    for (const Gates gates : {Gates::kNone, Gates::kJumps}) {
      const Case c = {match, 3, 5, 200, 16, 20, gates, false, true, true, true};
      const Problem p = MakeProblem(c);
      const auto want = Everything(c, p, Impl::kKernel, at::kFloat);
      for (const int threads : {2, 3}) {
        SetNumThreads(threads);
        const auto got = Everything(c, p, Impl::kKernel, at::kFloat);
        SetNumThreads(1);
        for (size_t i = 0; i < want.size(); ++i) ExpectSameBits(got[i], want[i], c.Name() + " " + kParts[i]);
      }
    }
  }
}

TEST(SumOps, PaddingHasNoEffectAndNoGradient) {
  const double nan = std::nan("");
  for (const bool match : {false, true}) {
    for (const Gates gates : {Gates::kNone, Gates::kMild}) {
      Problem p = MakeProblem({match, 3, 2, 23, 4, 5, gates});
      const Mask mask = {Lengths({23, 9, 0}), {}};
      const at::Tensor pad = (at::arange(23).unsqueeze(0) >= mask.lengths->unsqueeze(1)).unsqueeze(1).unsqueeze(-1);
      for (size_t i = 0; i < p.x.size(); ++i) {
        if (i != 3) p.x[i] = p.x[i].masked_fill(pad, nan);
      }
      for (const Impl impl : kImpls) {
        ImplScope scope(impl);
        const std::vector<at::Tensor> x = Leaves(p);
        const SumResult r = RunOp(match, x, mask);
        const auto g = Gradients(Loss(p, r), x);
        for (int64_t b = 0; b < 3; ++b) {
          const int64_t length = mask.lengths->index({b}).item<int64_t>();
          std::vector<at::Tensor> alone = Piece(p.x, 0, length, p.x[3]);
          for (at::Tensor& t : alone) t = t.narrow(0, b, 1);
          const SumResult want = RunOp(match, alone, {});
          const std::string what = ImplName(impl) + " row " + std::to_string(b);
          ExpectClose(r.out.narrow(0, b, 1).narrow(2, 0, length), want.out, 1e-14, what);
          ExpectClose(r.memory.narrow(0, b, 1), want.memory, 1e-14, what);
          EXPECT_EQ(r.out.narrow(0, b, 1).narrow(2, length, 23 - length).abs().sum().item<double>(), 0) << what;
          for (size_t i = 0; i < g.size(); ++i) {
            if (i == 3) continue;
            EXPECT_EQ(g[i].narrow(0, b, 1).narrow(2, length, 23 - length).abs().sum().item<double>(), 0) << what;
          }
        }
      }
    }
  }
}

TEST(SumOps, DocumentsOfARowDoNotSeeEachOther) {
  const int64_t T = 90;
  const std::pair<int64_t, int64_t> documents[] = {{0, 7}, {7, 13}, {20, 70}};
  for (const bool match : {false, true}) {
    for (const Gates gates : {Gates::kNone, Gates::kMild}) {
      const Problem p = MakeProblem({match, 1, 2, T, 4, 5, gates, true});
      const Mask mask = {{}, Starts(1, T, {{0, 0}, {0, 7}, {0, 20}})};
      for (const Impl impl : kImpls) {
        ImplScope scope(impl);
        const std::vector<at::Tensor> x = Leaves(p), y = Leaves(p);
        std::vector<at::Tensor> outs;
        for (const auto& [begin, count] : documents) outs.push_back(RunOp(match, Piece(y, begin, count, y[3]), {}).out);
        const at::Tensor packed = RunOp(match, x, mask).out, apart = at::cat(outs, 2);
        ExpectClose(packed, apart, 1e-13, ImplName(impl));
        const auto g = Gradients((packed * p.g_out).sum(), x), want = Gradients((apart * p.g_out).sum(), y);
        for (size_t i = 0; i < g.size(); ++i) {
          if (i != 3) ExpectClose(g[i], want[i], 1e-12, ImplName(impl) + " gradient " + std::to_string(i));
        }
        EXPECT_EQ(g[3].abs().sum().item<double>(), 0);
        if (gates == Gates::kNone) continue;
        for (const auto& [begin, count] : documents) EXPECT_EQ(g[4].narrow(2, begin, 1).abs().sum().item<double>(), 0);
      }
    }
  }
}

TEST(SumOps, WriteIsReadToTheEnd) {
  for (const Gates gates : {Gates::kNone, Gates::kMild, Gates::kJumps, Gates::kPerToken}) {
    for (const int64_t length : {0, 1, 37, 1100}) {
      for (const bool lengths : {false, true}) {
        const Problem p = MakeProblem({false, 3, 2, length, 5, 4, gates, false, lengths});
        ImplScope scope(Impl::kReference);
        const std::vector<at::Tensor> x = Leaves(p), y = Leaves(p);
        const at::Tensor want = RunOp(false, x, p.mask).memory,
                         got = SumWrite(y[1], y[2], y[3], p.mask, y.size() > 4 ? y[4] : at::Tensor());
        const std::string what = "gates " + std::to_string(int(gates)) + " T" + std::to_string(length);
        ExpectClose(got, want, 1e-12, what);
        const auto g = Gradients((got * p.g_memory).sum(), y), g_want = Gradients((want * p.g_memory).sum(), x);
        for (size_t i = 1; i < y.size(); ++i) ExpectClose(g[i], g_want[i], 1e-11, what + " gradient " + std::to_string(i));
        const auto f = Leaves(p, at::kFloat);
        ExpectClose(SumWrite(f[1], f[2], f[3], p.mask, f.size() > 4 ? f[4] : at::Tensor()), want, 1e-6, what + " float");
      }
    }
  }
}

TEST(SumOps, HalfPrecisionGoesThroughTheComposite) {
  const Problem p = MakeProblem({false, 2, 2, 37, 5, 4, Gates::kMild});
  std::vector<at::Tensor> x, rounded;
  for (size_t i = 0; i < p.x.size(); ++i) {
    x.push_back(i == 3 ? p.x[i] : p.x[i].to(at::kBFloat16));
    rounded.push_back(x.back().to(at::kDouble));
  }
  const SumResult got = RunOp(false, x, {}), want = RunOp(false, rounded, {});
  EXPECT_EQ(got.out.scalar_type(), at::kBFloat16);
  ExpectClose(got.out, want.out, 5e-3, "out");
  ExpectClose(got.memory, want.memory, 1e-6, "memory");
}

TEST(SumOps, WrongShapesNameTheOpAndTheShape) {
  const at::Tensor memory = EmptySums(2, 3, 5, 4, at::kFloat), w = at::zeros({2, 3, 6, 5}), v = at::zeros({2, 3, 6, 4});
  EXPECT_EQ(memory.scalar_type(), at::kDouble);
  for (const Impl impl : kImpls) {
    ImplScope scope(impl);
    ExpectContains(Thrown([&] { SumRead(v, w, v, memory); }), {"[sum_read]", "r of shape [2, 3, 6, 5]", "[2, 3, 6, 4]"});
    ExpectContains(Thrown([&] { SumMatch(w, w, v, memory); }), {"[sum_match]", "q of shape [2, 3, 6, 4]", "[2, 3, 6, 5]"});
    ExpectContains(Thrown([&] { SumRead(w, w, at::zeros({2, 3, 7, 4}), memory); }), {"[sum_read]", "v", "[2, 3, 7, 4]"});
    ExpectContains(Thrown([&] { SumRead(w, w.select(0, 0), v, memory); }), {"[sum_read]", "w of shape [B,H,T,n]", "[3, 6, 5]"});
    ExpectContains(Thrown([&] { SumRead(w, w, v, EmptySums(2, 3, 5, 9, at::kFloat)); }), {"[sum_read]", "memory", "[2, 3, 5, 9]"});
    ExpectContains(Thrown([&] { SumRead(w, w, v, memory.to(at::kFloat)); }), {"[sum_read]", "memory in double", "Float"});
    ExpectContains(Thrown([&] { SumRead(w, w, v.to(at::kDouble), memory); }), {"[sum_read]", "one dtype", "Double"});
    ExpectContains(Thrown([&] { SumRead(w, w, v, memory, {}, at::zeros({2, 3, 6, 2})); }), {"[sum_read]", "log_gate", "[2, 3, 6, 2]"});
    ExpectContains(Thrown([&] {
                     SumRead(w, w, v, memory, {}, at::zeros({2, 3, 6, 5}, at::kDouble));
                   }),
                   {"[sum_read]", "log_gate", "Double"});
    ExpectContains(Thrown([&] { SumRead(w, w, v, memory, {Lengths({1, 2, 3}), {}}); }), {"[sum_read]", "lengths", "[3]"});
    ExpectContains(Thrown([&] { SumRead(w, w, v, memory, {{}, at::zeros({2, 5}, at::kBool)}); }), {"[sum_read]", "starts", "[2, 5]"});
    ExpectContains(Thrown([&] { SumWrite(w, at::zeros({2, 3, 7, 4}), memory); }), {"[sum_write]", "[2, 3, 7, 4]"});
    ExpectContains(Thrown([&] { SumWrite(w, v, memory, {{}, at::zeros({2, 6}, at::kBool)}); }), {"[sum_write]", "one document"});
  }
}

}  // namespace
}  // namespace cistern::ops
