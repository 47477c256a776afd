// Gated slots' fused walks against their definition, forward and backward, on every instruction
// set: gates in double, and the references of the summing memory.
#include "cistern/kernels/gated_slots.h"

#include <cmath>

#include "cistern/kernels/ref/sum_memory_ref.h"
#include "cistern/kernels/sum_test.h"

namespace cistern::sum_test {
namespace {

constexpr double kScale = 0.4;

enum class Logits { kMild, kStrong, kJumps };
constexpr Logits kAllLogits[] = {Logits::kMild, Logits::kStrong, Logits::kJumps};

// Two memories with one mask: `keys` is a match, `values` a read.
struct GatedProblem {
  Problem keys, values;
  std::vector<double> x;  // the gates' logits
  double temperature = 1;
  const SlotShape& shape() const { return keys.shape; }
  RowMask Mask() const { return keys.Mask(); }
};

GatedProblem MakeGated(uint64_t seed, const SlotShape& shape, Logits kind,
                       const Options& options = {}) {
  GatedProblem p{MakeProblem(seed, true, shape, options),
                 MakeProblem(seed + 500000, false, shape, {.empty = options.empty}),
                 {},
                 kind == Logits::kMild ? 8.0 : 1.0};
  Random random(seed + 1);
  p.x = Normals(random, p.keys.Tokens() * shape.slots, 2);
  for (double& x : p.x) {
    if (kind == Logits::kStrong) x = static_cast<float>(3 * x - 4);
    if (kind == Logits::kJumps && random.Below(8) == 0) {
      const double jumps[] = {400, -25, -1e4, -kInf, kInf};
      x = jumps[random.Below(5)];
    }
  }
  return p;
}

struct Results {
  std::vector<double> out, keys, values, dq, dk, dv, dx, dkeys, dvalues;
};

Results Definition(const GatedProblem& p) {
  const SlotShape& shape = p.shape();
  const auto n = static_cast<size_t>(shape.slots);
  std::vector<double> log_gate, w;
  for (const double x : p.x) {
    log_gate.push_back((std::min(x, 0.0) - std::log1p(std::exp(-std::abs(x)))) / p.temperature);
    w.push_back(-std::expm1(log_gate.back()));
  }
  const size_t of_slots = p.x.size(), of_width = p.keys.u.size();
  Results r;
  r.out.resize(of_width), r.keys = p.keys.memory, r.values = p.values.memory;
  std::vector<double> y(of_slots), read(of_slots), dp(of_slots), dy(of_slots);
  ref::SumMatch(shape, p.keys.a.data(), w.data(), p.keys.u.data(), log_gate.data(), p.Mask(),
                r.keys.data(), y.data());
  for (size_t i = 0; i < of_slots; i += n) {
    double most = -kInf, sum = 0;
    for (size_t l = i; l < i + n; ++l) most = std::max(most, y[l] *= kScale);
    for (size_t l = i; l < i + n; ++l) sum += read[l] = std::exp(y[l] - most);
    for (size_t l = i; l < i + n; ++l) read[l] /= sum;
  }
  ref::SumRead(shape, read.data(), w.data(), p.values.u.data(), log_gate.data(), p.Mask(),
               r.values.data(), r.out.data());

  r.dq.resize(of_width), r.dk.resize(of_width), r.dv.resize(of_width), r.dx.resize(of_slots);
  r.dkeys.resize(r.keys.size()), r.dvalues.resize(r.keys.size());
  std::vector<double> dw_keys(of_slots), dw_values(of_slots), dlg_keys(of_slots),
      dlg_values(of_slots);
  ref::SumReadBackward(shape, read.data(), w.data(), p.values.u.data(), log_gate.data(), p.Mask(),
                       p.values.memory.data(), p.values.g.data(), p.values.dmemory_T.data(),
                       dp.data(), dw_values.data(), r.dv.data(), dlg_values.data(),
                       r.dvalues.data());
  for (size_t i = 0; i < of_slots; i += n) {
    double dot = 0;
    for (size_t l = i; l < i + n; ++l) dot += read[l] * dp[l];
    for (size_t l = i; l < i + n; ++l) dy[l] = kScale * read[l] * (dp[l] - dot);
  }
  ref::SumMatchBackward(shape, p.keys.a.data(), w.data(), p.keys.u.data(), log_gate.data(),
                        p.Mask(), p.keys.memory.data(), dy.data(), p.keys.dmemory_T.data(),
                        r.dq.data(), dw_keys.data(), r.dk.data(), dlg_keys.data(), r.dkeys.data());
  for (size_t i = 0; i < of_slots; ++i) {
    const double slope = 1 / (1 + std::exp(p.x[i])) / p.temperature, dw = dw_keys[i] + dw_values[i],
                 dlg = dlg_keys[i] + dlg_values[i];
    r.dx[i] = (dlg - std::exp(log_gate[i]) * dw) * slope;
  }
  return r;
}

template <class T>
Results Kernel(const GatedProblem& p, Layout layout) {
  const SlotShape& shape = p.shape();
  const int64_t n = shape.slots, d = shape.width;
  const Array<T> q(shape, d, layout, p.keys.a), k(shape, d, layout, p.keys.u),
      v(shape, d, layout, p.values.u), x(shape, n, layout, p.x), g(shape, d, layout, p.values.g);
  Array<T> out(shape, d, layout), y(shape, n, layout), dq(shape, d, layout), dk(shape, d, layout),
      dv(shape, d, layout), dx(shape, n, layout), dy(shape, n, layout), terms(shape, n, layout);
  const GatedSlotsOptions options = {kScale, p.temperature};
  const GatedSlotsInputs<T> in = {q.in(), k.in(), v.in(), x.in()};
  Results r;
  r.keys = p.keys.memory, r.values = p.values.memory;
  GatedSlotsForward<T>(shape, options, in, p.Mask(), r.keys.data(), r.values.data(), out.rows(),
                       y.rows());
  r.dkeys = p.keys.dmemory_T, r.dvalues = p.values.dmemory_T;
  std::vector<double> h(static_cast<size_t>(p.keys.States()));
  for (size_t l = 0; l < h.size(); ++l) {
    for (size_t j = l * size_t(d); j < (l + 1) * size_t(d); ++j)
      h[l] += r.dkeys[j] * r.keys[j] + r.dvalues[j] * r.values[j];
  }
  GatedSlotsBackward<T>(shape, options, in, y.in(), g.in(), p.Mask(), p.keys.memory.data(),
                        p.values.memory.data(), r.dkeys.data(), r.dvalues.data(), h.data(),
                        dq.rows(), dk.rows(), dv.rows(), dx.rows(), dy.rows(), terms.rows());
  r.out = out.Values(), r.dq = dq.Values(), r.dk = dk.Values(), r.dv = dv.Values();
  r.dx = dx.Values();
  return r;
}

template <class T>
void ExpectDefinition(const GatedProblem& p, Layout layout) {
  const Results got = Kernel<T>(p, layout), want = Definition(p);
  const std::string& name = p.keys.name;
  // With one slot, or a gate that forgets, the gradients of q and k are what rounding leaves of
  // p (dp - p . dp): small beside dv.
  const auto with_dv = [](std::vector<double> x, const Results& r) {
    x.insert(x.end(), r.dv.begin(), r.dv.end());
    return x;
  };
  const double tolerance = std::is_same_v<T, float> ? 3e-6 : 1e-12;
  EXPECT_LE(RelativeRms(got.out, want.out), tolerance) << name;
  EXPECT_LE(RelativeRms(got.keys, want.keys), tolerance) << name;
  EXPECT_LE(RelativeRms(got.values, want.values), tolerance) << name;
  EXPECT_LE(RelativeRms(with_dv(got.dq, got), with_dv(want.dq, want)), tolerance) << name;
  EXPECT_LE(RelativeRms(with_dv(got.dk, got), with_dv(want.dk, want)), tolerance) << name;
  EXPECT_LE(RelativeRms(got.dv, want.dv), tolerance) << name;
  EXPECT_LE(RelativeRms(with_dv(got.dx, got), with_dv(want.dx, want)), 3 * tolerance) << name;
  EXPECT_LE(RelativeRms(got.dkeys, want.dkeys), tolerance) << name;
  EXPECT_LE(RelativeRms(got.dvalues, want.dvalues), tolerance) << name;
}

void ExpectDefinitionInBoth(const GatedProblem& p, Layout layout = Layout::kBTHW) {
  ExpectDefinition<float>(p, layout);
  ExpectDefinition<double>(p, layout);
}

TEST(GatedSlots, LengthsAndGates) {
  ForEachIsa([] {
    uint64_t seed = 1;
    for (int64_t T : {0, 1, 2, 31, 32, 33, 63, 64, 65, 200}) {
      for (Logits logits : kAllLogits) {
        for (bool empty : {false, true})
          ExpectDefinitionInBoth(MakeGated(seed++, {2, 2, T, 17, 5}, logits, {.empty = empty}),
                                 T % 2 == 0 ? Layout::kBHTW : Layout::kBTHW);
      }
    }
    ExpectDefinitionInBoth(MakeGated(seed++, {1, 2, 1000, 64, 32}, Logits::kMild));
  });
}

TEST(GatedSlots, Widths) {
  ForEachIsa([] {
    uint64_t seed = 1000;
    for (int64_t n : {1, 3, 16, 17, 64, 65}) {
      for (int64_t d : {1, 5, 16, 65}) {
        for (int64_t T : {1, 37})
          ExpectDefinitionInBoth(MakeGated(seed++, {1, 2, T, n, d}, Logits::kJumps));
      }
    }
  });
}

TEST(GatedSlots, RandomShapesWithStartsAndLengths) {
  ForEachIsa([] {
    for (uint64_t seed = 2000; seed < 2024; ++seed) {
      for (int64_t T : {1, 2, 90}) {
        ExpectDefinitionInBoth(MakeGated(seed, {3, 2, T, 9, 20}, kAllLogits[seed % 3],
                                         {.starts = true, .lengths = seed % 4 != 0}));
      }
    }
  });
}

// A gate so close to 1 that a float's product of gates would be 1: forgetting over a million
// tokens.
TEST(GatedSlots, SlowGatesDoNotDrift) {
  GatedProblem p = MakeGated(3000, {1, 1, 20000, 16, 4}, Logits::kMild);
  for (double& x : p.x) x = static_cast<float>(12 + x / 4);
  p.temperature = 4;
  const Results got = Kernel<float>(p, Layout::kBTHW), want = Definition(p);
  EXPECT_LE(RelativeRms(got.keys, want.keys), 2e-6);
  EXPECT_LE(RelativeRms(got.values, want.values), 2e-6);
  EXPECT_LE(RelativeRms(got.out, want.out), 2e-6);
}

}  // namespace
}  // namespace cistern::sum_test
