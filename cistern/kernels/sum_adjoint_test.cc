// The backwards of the summing slot memory: the reference's against finite differences, the
// kernels' (composed as sum_memory.h says) against the reference's.
#include "cistern/base/parallel.h"
#include "cistern/kernels/ref/sum_memory_ref.h"
#include "cistern/kernels/sum_test.h"

namespace cistern::sum_test {
namespace {

struct Gradients {
  std::vector<double> a, w, u, memory, log_gate;
};

Gradients Reference(const Problem& p) {
  Gradients d{std::vector<double>(p.a.size()),
              std::vector<double>(p.w.size()),
              std::vector<double>(p.u.size()),
              std::vector<double>(p.memory.size()),
              {}};
  const std::vector<double> gates = SlotGates(p);
  std::vector<double> dgates(gates.size());
  (p.match ? ref::SumMatchBackward : ref::SumReadBackward)(
      p.shape, p.a.data(), p.w.data(), p.u.data(), p.gates == 0 ? nullptr : gates.data(), p.Mask(),
      p.memory.data(), p.g.data(), p.dmemory_T.data(), d.a.data(), d.w.data(), d.u.data(),
      p.gates == 0 ? nullptr : dgates.data(), d.memory.data());
  d.log_gate = SumOverSlots(p, dgates);
  return d;
}

template <class T>
Gradients Kernels(const Problem& p, Layout layout = Layout::kBTHW) {
  const int64_t n = p.shape.slots, d = p.shape.width;
  const Array<T> a(p.shape, p.AWidth(), layout, p.a), w(p.shape, n, layout, p.w),
      u(p.shape, d, layout, p.u), g(p.shape, p.OutWidth(), layout, p.g),
      gate = GateArray<T>(p, layout);
  Array<T> x(p.shape, n, layout), da(p.shape, p.AWidth(), layout), dw(p.shape, n, layout),
      du(p.shape, d, layout), dgate(p.shape, p.gates, layout);
  std::vector<double> memory = p.memory, G = p.dmemory_T, h(p.shape.batch * p.shape.heads * n);
  if (p.match) {
    SumMatch<T>(p.shape, a.in(), w.in(), u.in(), KernelGates(p, gate), p.Mask(), memory.data(),
                x.rows());
    std::vector<double> again = p.memory;
    SumRead<T>(p.shape, g.in(), w.in(), u.in(), KernelGates(p, gate), p.Mask(), again.data(),
               da.rows());
  } else {
    SumMatch<T>(p.shape, g.in(), w.in(), u.in(), KernelGates(p, gate), p.Mask(), memory.data(),
                da.rows());
  }
  for (size_t i = 0; i < G.size(); ++i) h[i / size_t(d)] += G[i] * memory[i];
  SumAdjoint<T>(p.shape, (p.match ? g : a).in(), (p.match ? a : g).in(), w.in(), u.in(),
                std::as_const(p.match ? x : da).rows(), KernelGates(p, gate), p.Mask(), G.data(),
                h.data(), du.rows(), dw.rows(), dgate.rows());
  return {da.Values(), dw.Values(), du.Values(), G, dgate.Values()};
}

// The root mean square of x - y.
double Rms(const std::vector<double>& x, const std::vector<double>& y) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += (x[i] - y[i]) * (x[i] - y[i]);
  return std::sqrt(sum / double(std::max<size_t>(x.size(), 1)));
}

template <class T>
void ExpectReference(const Problem& p, Layout layout = Layout::kBTHW) {
  const Gradients got = Kernels<T>(p, layout), want = Reference(p);
  EXPECT_LE(RelativeRms(got.a, want.a), kTolerance<T>) << p.name;
  EXPECT_LE(RelativeRms(got.w, want.w), kTolerance<T>) << p.name;
  EXPECT_LE(RelativeRms(got.u, want.u), kTolerance<T>) << p.name;
  EXPECT_LE(RelativeRms(got.memory, want.memory), kTolerance<T>) << p.name;
  // A gate's gradient is the sum of the later terms a b - w dw: their rounding adds up, and strong
  // gates make it far smaller than they are.
  std::vector<double> terms(p.gates == 0 ? 0 : p.w.size());
  for (size_t i = 0; i < terms.size(); ++i) terms[i] = std::abs(p.w[i] * want.w[i]);
  terms = SumOverSlots(p, terms);
  for (size_t i = 0; i < terms.size(); ++i) terms[i] += std::abs(want.log_gate[i]);
  const double tolerance = kTolerance<T> * (1 + std::sqrt(double(p.shape.length)) / 10);
  EXPECT_LE(Rms(got.log_gate, want.log_gate),
            tolerance * Rms(terms, std::vector<double>(terms.size())))
      << p.name;
  for (size_t i = 0; i < p.log_gate.size(); ++i) {
    if (p.log_gate[i] == -kInf) {
      EXPECT_EQ(got.log_gate[i], 0) << p.name;
    }
  }
}

void ExpectReferenceInBoth(const Problem& p, Layout layout = Layout::kBTHW) {
  ExpectReference<float>(p, layout);
  ExpectReference<double>(p, layout);
}

// <g, out> + <dmemory_T, memory_T>
double Loss(const Problem& p) {
  std::vector<double> out(p.Tokens() * p.OutWidth()), memory = p.memory;
  const std::vector<double> gates = SlotGates(p);
  (p.match ? ref::SumMatch : ref::SumRead)(p.shape, p.a.data(), p.w.data(), p.u.data(),
                                           p.gates == 0 ? nullptr : gates.data(), p.Mask(),
                                           memory.data(), out.data());
  double sum = 0;
  for (size_t i = 0; i < out.size(); ++i) sum += p.g[i] * out[i];
  for (size_t i = 0; i < memory.size(); ++i) sum += p.dmemory_T[i] * memory[i];
  return sum;
}

TEST(SumReference, FiniteDifferences) {
  uint64_t seed = 1;
  for (bool match : {false, true}) {
    for (Gates gates : kAllGates) {
      for (bool masked : {false, true}) {
        Problem p = MakeProblem(seed++, match, {2, 1, 12, 4, 3},
                                {.gates = gates, .starts = masked, .lengths = masked});
        const Gradients d = Reference(p);
        const auto check = [&](std::vector<double>& x, const std::vector<double>& gradient,
                               const char* what) {
          ExpectDifferences(x, gradient, p.name + " " + what, [&] { return Loss(p); });
        };
        check(p.a, d.a, "a");
        check(p.w, d.w, "w");
        check(p.u, d.u, "u");
        check(p.memory, d.memory, "memory");
        check(p.log_gate, d.log_gate, "log_gate");
      }
    }
  }
}

TEST(SumAdjoint, LengthsAndGates) {
  ForEachIsa([] {
    uint64_t seed = 100;
    for (bool match : {false, true}) {
      for (int64_t T : {0, 1, 2, 31, 32, 33, 63, 64, 65, 200}) {
        for (Gates gates : kAllGates) {
          ExpectReferenceInBoth(MakeProblem(seed++, match, {2, 2, T, 17, 5}, {.gates = gates}),
                                T % 2 == 0 ? Layout::kBHTW : Layout::kBTHW);
        }
      }
      for (Gates gates : kAllGates)
        ExpectReferenceInBoth(MakeProblem(seed++, match, {1, 1, 1000, 64, 64}, {.gates = gates}));
    }
  });
}

TEST(SumAdjoint, Widths) {
  static constexpr Gates kWidthGates[] = {Gates::kNone, Gates::kJumps, Gates::kShared};
  ForEachIsa([] {
    uint64_t seed = 1000;
    for (bool match : {false, true}) {
      for (int64_t n : {1, 3, 5, 16, 17, 64, 65}) {
        for (int64_t d : {1, 3, 5, 16, 17, 64, 65}) {
          ExpectReferenceInBoth(
              MakeProblem(seed, match, {1, 2, 37, n, d}, {.gates = kWidthGates[seed % 3]}));
          ++seed;
        }
      }
    }
  });
}

TEST(SumAdjoint, RandomShapesWithStartsAndLengths) {
  Random random(8);
  for (int i = 0; i < 200; ++i) {
    const SlotShape shape{1 + random.Below(3), 1 + random.Below(3), random.Below(150),
                          1 + random.Below(40), 1 + random.Below(80)};
    const Options options{kAllGates[random.Below(7)], random.Below(2) == 0, random.Below(4) != 0,
                          random.Below(2) == 0};
    ExpectReferenceInBoth(MakeProblem(3000 + uint64_t(i), random.Below(2) == 0, shape, options));
  }
}

TEST(SumAdjoint, SameBitsForAnyThreadCount) {
  const int threads = NumThreads();
  const Problem p = MakeProblem(6000, false, {3, 3, 300, 20, 33},
                                {.gates = Gates::kJumps, .starts = true, .lengths = true});
  SetNumThreads(1);
  const Gradients one = Kernels<float>(p);
  SetNumThreads(2);
  const Gradients two = Kernels<float>(p);
  EXPECT_TRUE(one.w == two.w && one.u == two.u && one.memory == two.memory &&
              one.log_gate == two.log_gate);
  SetNumThreads(threads);
}

// Fewer heads than threads: parts of a head, where documents and padding begin anywhere.
TEST(SumAdjoint, SameBitsWhereThreadsShareAHead) {
  const int threads = NumThreads();
  for (const Gates gates : kAllGates) {
    for (const int64_t batch : {1, 2}) {
      const Problem p = MakeProblem(6100, false, {batch, 1, 1600, 7, 5},
                                    {.gates = gates, .starts = batch == 2, .lengths = batch == 2});
      SetNumThreads(1);
      const Gradients one = Kernels<float>(p);
      for (const int more : {2, 3, 8}) {
        SetNumThreads(more);
        const Gradients many = Kernels<float>(p);
        EXPECT_TRUE(one.w == many.w && one.u == many.u && one.memory == many.memory &&
                    one.log_gate == many.log_gate)
            << p.name << " threads " << more;
      }
    }
  }
  SetNumThreads(threads);
}

}  // namespace
}  // namespace cistern::sum_test
