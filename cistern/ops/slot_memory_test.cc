#include "cistern/ops/slot_memory.h"

#include "cistern/ops/testing.h"

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
    return std::string(match ? "match" : "read") + " T" + std::to_string(length) + " n" + std::to_string(slots) + " d" +
           std::to_string(width) + " weights " + std::to_string(int(weights)) + (empty ? " empty" : "") + (lengths ? " lengths" : "") +
           (starts ? " starts" : "") + (heads_last ? " heads last" : "");
  }
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const bool match : {false, true}) {
    for (const int64_t length : {0, 1, 5, 16, 17, 37, 65}) {
      for (int masks = 0; masks < 4; ++masks) {
        cases.push_back({match, 3, 2, length, 7, 5, Weights::kMild, length % 2 == 0, (masks & 1) != 0, (masks & 2) != 0, length != 5});
      }
    }
    for (const Weights w : {Weights::kJumps, Weights::kHoles}) {
      for (int masks = 0; masks < 4; ++masks)
        cases.push_back({match, 3, 2, 37, 7, 5, w, masks == 0, (masks & 1) != 0, (masks & 2) != 0, masks == 3});
    }
    cases.push_back({match, 1, 1, 37, 1, 1});
    cases.push_back({match, 2, 1, 130, 33, 43, Weights::kMild, true});
    cases.push_back({match, 0, 2, 5, 3, 4});
  }
  return cases;
}

// Inputs in double: a (r or q), s, u (v or k), memory, z.
struct Problem {
  std::vector<at::Tensor> x;
  Mask mask;
  at::Tensor g_out, g_z_out, g_memory, g_z;
  double largest = 0;
};

Problem MakeProblem(const Case& c) {
  at::manual_seed(17 + c.length);
  Problem p;
  const int64_t B = c.batch, H = c.heads, T = c.length, n = c.slots, d = c.width;
  at::Tensor s = Normal({B, H, T, n}, 2);
  if (c.weights == Weights::kJumps)
    s = s + (at::rand({B, H, T, n}) < 0.1).to(at::kDouble) * 300 - (at::rand({B, H, T, n}) < 0.1).to(at::kDouble) * 900;
  p.largest = s.numel() > 0 ? s.abs().max().item<double>() : 0;
  if (c.weights == Weights::kHoles) s = s.masked_fill((at::rand({B, H, T, n}) < 0.5).logical_or(at::arange(n) % 5 == 4), -kInf);
  at::Tensor memory = Normal({B, H, n, d}), z = Normal({B, H, n}, 2);
  const at::Tensor fresh = c.empty ? at::ones({B, H, n}, at::kBool) : at::rand({B, H, n}) < 0.3;
  z = z.masked_fill(fresh, -kInf), memory = memory.masked_fill(fresh.unsqueeze(-1), 0.0);
  p.x = {Normal({B, H, T, c.match ? d : n}), s, Normal({B, H, T, d}), memory, z};
  if (c.lengths) p.mask.lengths = at::cat({Lengths({T, 0}), at::randint(0, T + 1, {B}, at::kLong)}).narrow(0, 0, B);
  if (c.starts) p.mask.starts = at::rand({B, T}) < 0.15;
  p.g_out = Normal({B, H, T, c.match ? n : d}), p.g_z_out = Normal({B, H, T, n});
  p.g_memory = Normal({B, H, n, d}), p.g_z = Normal({B, H, n});
  return p;
}

SlotResult RunOp(bool match, const std::vector<at::Tensor>& x, const Mask& mask, bool want_z = true) {
  return (match ? &SlotMatch : &SlotRead)(x[0], x[1], x[2], {x[3], x[4]}, mask, want_z);
}
at::Tensor Finite(const at::Tensor& z) { return z.masked_fill(z.isinf(), 0.0); }

// Touches every output.
at::Tensor Loss(const Problem& p, const SlotResult& r) {
  const auto t = r.out.scalar_type();
  return (r.out * p.g_out.to(t)).sum() + (Finite(r.z_out) * p.g_z_out.to(t)).sum() + (r.state.memory * p.g_memory.to(t)).sum() +
         (Finite(r.state.z) * p.g_z).sum().to(t);
}

// out, memory, z, z_out and the gradients of a, s, u, memory, z.
std::vector<at::Tensor> Everything(const Case& c, const Problem& p, Impl impl, at::ScalarType dtype) {
  ImplScope scope(impl);
  std::vector<at::Tensor> x;
  for (size_t i = 0; i < 5; ++i) {
    const at::Tensor t = i == 4 ? p.x[i] : p.x[i].to(dtype);
    x.push_back(Leaf(i < 3 ? WithLayout(t, c.heads_last) : t));
  }
  const SlotResult r = RunOp(c.match, x, p.mask);
  std::vector<at::Tensor> all = {r.out.detach(), r.state.memory.detach(), r.state.z.detach(), r.z_out.detach()};
  for (const at::Tensor& g : Gradients(Loss(p, r), x)) all.push_back(g);
  return all;
}

const char* kParts[] = {"out", "memory", "z", "z_out", "d_a", "d_s", "d_u", "d_memory", "d_z"};

TEST(SlotOps, ThreeImplementationsAgreeForwardAndBackward) {
  for (const Case& c : Cases()) {
    const Problem p = MakeProblem(c);
    const auto want = Everything(c, p, Impl::kReference, at::kDouble);
    for (const Impl impl : kImpls) {
      for (const auto dtype : {at::kDouble, at::kFloat}) {
        const auto got = Everything(c, p, impl, dtype);
        const double tolerance = dtype == at::kDouble ? 1e-12 : 1e-6 + p.largest * std::ldexp(1.0, -22);
        for (size_t i = 0; i < want.size(); ++i) {
          ExpectClose(got[i], want[i], tolerance,
                      c.Name() + ", " + ImplName(impl) + (dtype == at::kFloat ? " float " : " double ") + kParts[i]);
        }
      }
    }
    if (HasFailure()) break;
  }
}

TEST(SlotOps, GradientsMatchFiniteDifferences) {
  for (const Case& c : Cases()) {
    if (c.length > 37 || c.batch == 0 || c.weights == Weights::kJumps) continue;
    const Problem p = MakeProblem(c);
    for (const Impl impl : kImpls) {
      ImplScope scope(impl);
      ExpectGradientsMatchDifferences([&](const std::vector<at::Tensor>& x) { return Loss(p, RunOp(c.match, x, p.mask)); }, p.x,
                                      c.Name() + ", " + ImplName(impl));
    }
  }
}

TEST(SlotOps, GradientOfOneOutputAlone) {
  // The other outputs' gradients are undefined then.
  for (const bool match : {false, true}) {
    const Problem p = MakeProblem({match, 2, 2, 19, 3, 4});
    for (int output = 0; output < 4; ++output) {
      std::vector<std::vector<at::Tensor>> all;
      for (const Impl impl : {Impl::kReference, Impl::kKernel}) {
        ImplScope scope(impl);
        std::vector<at::Tensor> x;
        for (const at::Tensor& t : p.x) x.push_back(Leaf(t));
        const SlotResult r = RunOp(match, x, p.mask);
        const at::Tensor y[] = {r.out, Finite(r.z_out), r.state.memory, Finite(r.state.z)};
        all.push_back(Gradients(y[output].square().sum(), x));
      }
      for (size_t i = 0; i < 5; ++i)
        ExpectClose(all[1][i], all[0][i], 1e-12, "output " + std::to_string(output) + ", input " + std::to_string(i));
    }
  }
}

TEST(SlotOps, SecondDerivatives) {
  for (const bool match : {false, true}) {
    const Problem p = MakeProblem({match, 2, 2, 21, 3, 5, Weights::kMild, false, true, true});
    auto second = [&](Impl impl, at::ScalarType dtype) {
      ImplScope scope(impl);
      std::vector<at::Tensor> x;
      for (size_t i = 0; i < 5; ++i) x.push_back(Leaf(i == 4 ? p.x[i] : p.x[i].to(dtype)));
      const auto g = torch::autograd::grad({Loss(p, RunOp(match, x, p.mask)).square()}, x, {}, true, true);
      at::Tensor loss = at::zeros({}, dtype);
      for (const at::Tensor& t : g) loss = loss + t.square().sum().to(dtype);
      return Gradients(loss, x);
    };
    const auto want = second(Impl::kComposite, at::kDouble), exact = second(Impl::kKernel, at::kDouble),
               got = second(Impl::kKernel, at::kFloat);
    for (size_t i = 0; i < 5; ++i) {
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

TEST(SlotOps, SplitEqualsWholeThroughTheState) {
  for (const bool match : {false, true}) {
    const Problem p = MakeProblem({match, 2, 2, 37, 5, 4, Weights::kMild, true, false, true});
    for (const Impl impl : kImpls) {
      ImplScope scope(impl);
      auto run = [&](const std::vector<int64_t>& cuts) {
        std::vector<at::Tensor> x;
        for (const at::Tensor& t : p.x) x.push_back(Leaf(t));
        SlotState state = {x[3], x[4]};
        std::vector<at::Tensor> outs, zs;
        for (size_t i = 0; i + 1 < cuts.size(); ++i) {
          const int64_t begin = cuts[i], count = cuts[i + 1] - begin;
          std::vector<at::Tensor> piece = {x[0].narrow(2, begin, count), x[1].narrow(2, begin, count), x[2].narrow(2, begin, count),
                                           state.memory, state.z};
          const SlotResult r = RunOp(match, piece, {{}, p.mask.starts->narrow(1, begin, count)});
          state = r.state;
          outs.push_back(r.out), zs.push_back(r.z_out);
        }
        const SlotResult whole = {at::cat(outs, 2), state, at::cat(zs, 2)};
        std::vector<at::Tensor> all = {whole.out.detach(), state.memory.detach(), state.z.detach(), whole.z_out.detach()};
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

TEST(SlotOps, SameBitsForAnyNumberOfThreads) {
  for (const bool match : {false, true}) {
    const Case c = {match, 3, 5, 200, 16, 20, Weights::kMild, false, true, true, true};
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

TEST(SlotOps, PastIsBitwiseBlindToTheFuture) {
  ImplScope scope(Impl::kKernel);
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    for (const bool match : {false, true}) {
      const Problem p = MakeProblem({match, 2, 2, 150, 9, 20, Weights::kJumps, true});
      std::vector<at::Tensor> x;
      for (size_t i = 0; i < 5; ++i) x.push_back(i == 4 ? p.x[i] : p.x[i].to(dtype));
      const SlotResult want = RunOp(match, x, {});
      for (const int64_t t : {1, 63, 64, 65, 149}) {
        std::vector<at::Tensor> changed = x;
        for (size_t i = 0; i < 3; ++i) changed[i] = at::cat({x[i].narrow(2, 0, t), x[i].narrow(2, t, 150 - t) * -37.0 + 11.0}, 2);
        const SlotResult got = RunOp(match, changed, {});
        ExpectSameBits(got.out.narrow(2, 0, t), want.out.narrow(2, 0, t), "out before " + std::to_string(t));
        ExpectSameBits(got.z_out.narrow(2, 0, t), want.z_out.narrow(2, 0, t), "z before " + std::to_string(t));
        EXPECT_FALSE(at::equal(got.out, want.out));
      }
    }
  }
}

TEST(SlotOps, PaddingHasNoEffectAndNoGradient) {
  for (const bool match : {false, true}) {
    const Problem p = MakeProblem({match, 3, 2, 23, 4, 5});
    const Mask mask = {Lengths({23, 9, 0}), {}};
    for (const Impl impl : kImpls) {
      ImplScope scope(impl);
      std::vector<at::Tensor> x;
      for (const at::Tensor& t : p.x) x.push_back(Leaf(t));
      const SlotResult r = RunOp(match, x, mask);
      const auto g = Gradients(Loss(p, r), x);
      for (int64_t b = 0; b < 3; ++b) {
        const int64_t length = mask.lengths->index({b}).item<int64_t>();
        std::vector<at::Tensor> alone;
        for (size_t i = 0; i < 5; ++i) alone.push_back(i < 3 ? p.x[i].narrow(0, b, 1).narrow(2, 0, length) : p.x[i].narrow(0, b, 1));
        const SlotResult want = RunOp(match, alone, {});
        const std::string what = ImplName(impl) + " row " + std::to_string(b);
        ExpectClose(r.out.narrow(0, b, 1).narrow(2, 0, length), want.out, 1e-14, what);
        ExpectClose(r.state.memory.narrow(0, b, 1), want.state.memory, 1e-14, what);
        ExpectClose(r.state.z.narrow(0, b, 1), want.state.z, 1e-14, what);
        EXPECT_EQ(r.out.narrow(0, b, 1).narrow(2, length, 23 - length).abs().sum().item<double>(), 0) << what;
        EXPECT_EQ(r.z_out.narrow(0, b, 1).narrow(2, length, 23 - length).abs().sum().item<double>(), 0) << what;
        for (size_t i = 0; i < 3; ++i) EXPECT_EQ(g[i].narrow(0, b, 1).narrow(2, length, 23 - length).abs().sum().item<double>(), 0) << what;
      }
    }
  }
}

TEST(SlotOps, DocumentsOfARowDoNotSeeEachOther) {
  // The documents' log-weights lie a thousand apart: nothing of one may set the scale of another.
  const int64_t T = 40;
  for (const bool match : {false, true}) {
    Problem p = MakeProblem({match, 1, 2, T, 4, 5, Weights::kMild, true});
    p.x[1] = at::cat({p.x[1].narrow(2, 0, 7) + 1000, p.x[1].narrow(2, 7, 13) - 1000, p.x[1].narrow(2, 20, 20)}, 2);
    const Mask mask = {{}, Starts(1, T, {{0, 0}, {0, 7}, {0, 20}})};
    const std::pair<int64_t, int64_t> documents[] = {{0, 7}, {7, 13}, {20, 20}};
    for (const Impl impl : kImpls) {
      ImplScope scope(impl);
      std::vector<at::Tensor> x, y;
      for (const at::Tensor& t : p.x) x.push_back(Leaf(t)), y.push_back(Leaf(t));
      const SlotResult packed = RunOp(match, x, mask);
      std::vector<at::Tensor> outs;
      for (const auto& [begin, count] : documents) {
        outs.push_back(
            RunOp(match, {y[0].narrow(2, begin, count), y[1].narrow(2, begin, count), y[2].narrow(2, begin, count), y[3], y[4]}, {}).out);
      }
      ExpectClose(packed.out, at::cat(outs, 2), 1e-13, ImplName(impl));
      const auto g = Gradients((packed.out * p.g_out).sum(), x), want = Gradients((at::cat(outs, 2) * p.g_out).sum(), y);
      for (size_t i = 0; i < 3; ++i) ExpectClose(g[i], want[i], 1e-12, ImplName(impl) + " gradient " + std::to_string(i));
    }
  }
}

TEST(SlotOps, WriteIsReadToTheEnd) {
  for (const Weights w : {Weights::kMild, Weights::kHoles, Weights::kJumps}) {
    for (const int64_t length : {0, 1, 37}) {
      for (const bool lengths : {false, true}) {
        const Problem p = MakeProblem({false, 3, 2, length, 5, 4, w, length == 37, lengths});
        ImplScope scope(Impl::kReference);
        std::vector<at::Tensor> x, y;
        for (const at::Tensor& t : p.x) x.push_back(Leaf(t)), y.push_back(Leaf(t));
        const SlotState want = RunOp(false, x, p.mask).state, got = SlotWrite(y[1], y[2], {y[3], y[4]}, p.mask);
        ExpectClose(got.memory, want.memory, 1e-12, "memory");
        ExpectClose(got.z, want.z, 1e-12, "z");
        auto loss = [&](const SlotState& s) { return (s.memory * p.g_memory).sum() + (Finite(s.z) * p.g_z).sum(); };
        const auto g = Gradients(loss(got), y), g_want = Gradients(loss(want), x);
        for (size_t i = 0; i < 5; ++i) ExpectClose(g[i], g_want[i], 1e-11, "gradient " + std::to_string(i));
        const SlotState f = SlotWrite(p.x[1].to(at::kFloat), p.x[2].to(at::kFloat), {p.x[3].to(at::kFloat), p.x[4]}, p.mask);
        ExpectClose(f.memory, want.memory, 1e-6 + p.largest * std::ldexp(1.0, -22), "float memory");
      }
    }
  }
}

TEST(SlotOps, MergedStatesAreTheWhole) {
  for (const Weights w : {Weights::kMild, Weights::kHoles, Weights::kJumps}) {
    const Problem p = MakeProblem({false, 3, 2, 37, 5, 4, w, true});
    auto piece = [&](int64_t begin, int64_t count) {
      return SlotWrite(p.x[1].narrow(2, begin, count), p.x[2].narrow(2, begin, count), {p.x[3], p.x[4]});
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
  // In float, against the reference in double. Values are of size 1: the errors are absolute. (Log-weights spread over tens lose more: a
  // mean in float drops what is below its last bit, 1e-5 of it at a spread of 3.)
  at::NoGradGuard guard;
  at::manual_seed(6);
  const int64_t T = 100000;
  const at::Tensor r = at::softmax(Normal({1, 1, T, 4}), -1).to(at::kFloat), s = Normal({1, 1, T, 4}).to(at::kFloat),
                   v = Normal({1, 1, T, 6}).to(at::kFloat);
  SlotResult want;
  {
    ImplScope scope(Impl::kReference);
    want = SlotRead(r.to(at::kDouble), s.to(at::kDouble), v.to(at::kDouble), EmptySlots(1, 1, 4, 6, at::kDouble));
  }
  SlotState state = EmptySlots(1, 1, 4, 6, at::kFloat);
  at::Tensor last;
  for (int64_t t = 0; t < T; ++t) {
    const SlotResult step = SlotRead(r.narrow(2, t, 1), s.narrow(2, t, 1), v.narrow(2, t, 1), state);
    state = step.state;
    last = step.out;
  }
  EXPECT_LT((state.memory.to(at::kDouble) - want.state.memory).abs().max().item<double>(), 1e-6);
  EXPECT_LT((state.z - want.state.z).abs().max().item<double>(), 1e-12);
  EXPECT_LT((last.to(at::kDouble) - want.out.narrow(2, T - 1, 1)).abs().max().item<double>(), 1e-6);
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
    ExpectContains(Thrown([&] { SlotMatch(s, s, v, state); }), {"[slot_match]", "q of shape [2, 3, 6, 4]", "[2, 3, 6, 5]"});
    ExpectContains(Thrown([&] { SlotRead(s, s, at::zeros({2, 3, 7, 4}), state); }), {"[slot_read]", "v", "[2, 3, 7, 4]"});
    ExpectContains(Thrown([&] { SlotRead(s, s.select(0, 0), v, state); }), {"[slot_read]", "s of shape [B,H,T,n]", "[3, 6, 5]"});
    ExpectContains(Thrown([&] { SlotRead(s, s, v, EmptySlots(2, 3, 5, 9, at::kFloat)); }), {"[slot_read]", "memory", "[2, 3, 5, 9]"});
    ExpectContains(Thrown([&] { SlotRead(s, s, v, {state.memory, state.z.to(at::kFloat)}); }), {"[slot_read]", "z in double", "Float"});
    ExpectContains(Thrown([&] { SlotRead(s, s, v.to(at::kDouble), state); }), {"[slot_read]", "one dtype", "Double"});
    ExpectContains(Thrown([&] { SlotRead(s, s, v, state, {Lengths({1, 2, 3}), {}}); }), {"[slot_read]", "lengths", "[3]"});
    if (impl != Impl::kComposite) {  // which cannot look at lengths on another device
      ExpectContains(Thrown([&] { SlotRead(s, s, v, state, {Lengths({6, 7}), {}}); }), {"lengths[1] = 7", "0..T = 6"});
      ExpectContains(Thrown([&] { SlotRead(s, s, v, state, {Lengths({-1, 6}), {}}); }), {"lengths[0] = -1"});
    }
    ExpectContains(Thrown([&] { SlotRead(s, s, v, state, {{}, at::zeros({2, 5}, at::kBool)}); }), {"[slot_read]", "starts", "[2, 5]"});
    ExpectContains(Thrown([&] { SlotWrite(s, at::zeros({2, 3, 7, 4}), state); }), {"[slot_write]", "[2, 3, 7, 4]"});
    ExpectContains(Thrown([&] { MergeSlots(state, EmptySlots(2, 3, 5, 9, at::kFloat)); }), {"[merge_slots]", "[2, 3, 5, 9]"});
  }
}

}  // namespace
}  // namespace cistern::ops
