// The backwards: the reference's against finite differences, the kernels' (composed as
// slot_memory.h says) against the reference's.
#include "cistern/base/parallel.h"
#include "cistern/kernels/ref/slot_memory_ref.h"
#include "cistern/kernels/slot_test.h"

namespace cistern::slot_test {
namespace {

struct Gradients {
  std::vector<double> a, s, u, memory, z;
};

Gradients Reference(const Problem& p) {
  Gradients d{std::vector<double>(p.a.size()), std::vector<double>(p.s.size()),
              std::vector<double>(p.u.size()), std::vector<double>(p.memory.size()),
              std::vector<double>(p.z.size())};
  (p.match ? ref::SlotMatchBackward : ref::SlotReadBackward)(
      p.shape, p.a.data(), p.s.data(), p.u.data(), p.Mask(), p.memory.data(), p.z.data(),
      p.g.data(), p.dz.data(), p.dmemory_T.data(), p.dz_T.data(), d.a.data(), d.s.data(),
      d.u.data(), d.memory.data(), d.z.data());
  return d;
}

template <class T>
Gradients Kernels(const Problem& p, Layout layout = Layout::kBTHW) {
  const int64_t n = p.shape.slots, d = p.shape.width;
  const Array<T> a(p.shape, p.AWidth(), layout, p.a), s(p.shape, n, layout, p.s),
      u(p.shape, d, layout, p.u), g(p.shape, p.OutWidth(), layout, p.g),
      dz(p.shape, n, layout, p.dz);
  Array<T> x(p.shape, n, layout), da(p.shape, p.AWidth(), layout), ds(p.shape, n, layout),
      du(p.shape, d, layout);
  std::vector<double> memory = p.memory, z = p.z;
  std::vector<T> G(p.dmemory_T.begin(), p.dmemory_T.end()), h(p.z.size());
  if (p.match) {
    SlotMatch<T>(p.shape, a.in(), s.in(), u.in(), p.Mask(), memory.data(), z.data(), x.rows(), {});
    std::vector<double> again = p.memory, z_again = p.z;
    SlotRead<T>(p.shape, g.in(), s.in(), u.in(), p.Mask(), again.data(), z_again.data(), da.rows(),
                {});
  } else {
    SlotMatch<T>(p.shape, g.in(), s.in(), u.in(), p.Mask(), memory.data(), z.data(), da.rows(), {});
  }
  for (size_t l = 0; l < h.size(); ++l) {
    double dot = -p.dz_T[l];
    for (int64_t j = 0; j < d; ++j) dot += double(G[l * d + j]) * memory[l * d + j];
    h[l] = static_cast<T>(dot);
  }
  SlotAdjoint<T>(p.shape, (p.match ? g : a).in(), (p.match ? a : g).in(), s.in(), u.in(),
                 std::as_const(p.match ? x : da).rows(), dz.in(), p.Mask(), p.z.data(), G.data(),
                 h.data(), du.rows(), ds.rows());
  Gradients r{da.Values(), ds.Values(), du.Values(), ToDouble(G), std::vector<double>(p.z.size())};
  for (size_t l = 0; l < h.size(); ++l) {
    r.z[l] = p.z[l] == -kInf ? 0 : -double(h[l]);
    for (int64_t j = 0; j < d && p.z[l] != -kInf; ++j)
      r.z[l] += double(G[l * d + j]) * p.memory[l * d + j];
  }
  return r;
}

template <class T>
void ExpectReference(const Problem& p, Layout layout = Layout::kBTHW) {
  const Gradients got = Kernels<T>(p, layout), want = Reference(p);
  const double tolerance = 3 * Tolerance<T>(p);  // ds and dz0 are differences of dot products
  EXPECT_LE(RelativeRms(got.a, want.a), tolerance) << p.name;
  EXPECT_LE(RelativeRms(got.s, want.s), tolerance) << p.name;
  EXPECT_LE(RelativeRms(got.u, want.u), tolerance) << p.name;
  EXPECT_LE(RelativeRms(got.memory, want.memory), tolerance) << p.name;
  EXPECT_LE(RelativeRms(got.z, want.z), 5 * tolerance)
      << p.name;  // few numbers, each the difference of two dot products of width d
  for (size_t i = 0; i < p.s.size(); ++i) {
    if (p.s[i] == -kInf) {
      EXPECT_EQ(got.s[i], 0) << p.name;
    }
  }
}

void ExpectReferenceInBoth(const Problem& p, Layout layout = Layout::kBTHW) {
  ExpectReference<float>(p, layout);
  ExpectReference<double>(p, layout);
}

double Dot(const std::vector<double>& x, const std::vector<double>& y) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += std::isfinite(y[i]) ? x[i] * y[i] : 0;
  return sum;
}

// <g, out> + <dz, z_out> + <dmemory_T, memory_T> + <dz_T, z_T>
double Loss(const Problem& p) {
  std::vector<double> out(p.Tokens() * p.OutWidth()), z_out(p.s.size()), memory = p.memory, z = p.z;
  (p.match ? ref::SlotMatch : ref::SlotRead)(p.shape, p.a.data(), p.s.data(), p.u.data(), p.Mask(),
                                             memory.data(), z.data(), out.data(), z_out.data());
  return Dot(p.g, out) + Dot(p.dz, z_out) + Dot(p.dmemory_T, memory) + Dot(p.dz_T, z);
}

TEST(SlotReference, FiniteDifferences) {
  uint64_t seed = 1;
  for (bool match : {false, true}) {
    for (Weights weights : {Weights::kMild, Weights::kHoles, Weights::kLate}) {
      for (bool masked : {false, true}) {
        Problem p = MakeProblem(seed++, match, {2, 1, 12, 4, 3},
                                {.weights = weights, .starts = masked, .lengths = masked});
        const Gradients d = Reference(p);
        const auto check = [&](std::vector<double>& x, const std::vector<double>& gradient,
                               const char* what) {
          ExpectDifferences(x, gradient, p.name + " " + what, [&] { return Loss(p); });
        };
        check(p.a, d.a, "a");
        check(p.s, d.s, "s");
        check(p.u, d.u, "u");
        check(p.memory, d.memory, "memory");
        check(p.z, d.z, "z");
      }
    }
  }
}

TEST(SlotAdjoint, LengthsAndWeights) {
  ForEachIsa([] {
    uint64_t seed = 100;
    for (bool match : {false, true}) {
      for (int64_t T : {0, 1, 2, 31, 32, 33, 63, 64, 65, 200}) {
        for (Weights weights : kAllWeights) {
          ExpectReferenceInBoth(MakeProblem(seed++, match, {2, 2, T, 17, 5}, {.weights = weights}),
                                T % 2 == 0 ? Layout::kBHTW : Layout::kBTHW);
        }
      }
      ExpectReferenceInBoth(MakeProblem(seed++, match, {1, 2, 1000, 64, 64}));
    }
  });
}

TEST(SlotAdjoint, Widths) {
  ForEachIsa([] {
    uint64_t seed = 1000;
    for (bool match : {false, true}) {
      for (int64_t n : {1, 3, 5, 16, 17, 64, 65}) {
        for (int64_t d : {1, 3, 5, 16, 17, 64, 65})
          ExpectReferenceInBoth(
              MakeProblem(seed++, match, {1, 2, 37, n, d}, {.weights = Weights::kHoles}));
      }
    }
  });
}

TEST(SlotAdjoint, RandomShapesWithStartsAndLengths) {
  Random random(8);
  for (int i = 0; i < 200; ++i) {
    const SlotShape shape{1 + random.Below(3), 1 + random.Below(3), random.Below(150),
                          1 + random.Below(40), 1 + random.Below(80)};
    const Options options{kAllWeights[random.Below(6)], Start(random.Below(3)),
                          random.Below(4) != 0, random.Below(2) == 0};
    ExpectReferenceInBoth(MakeProblem(3000 + uint64_t(i), random.Below(2) == 0, shape, options));
  }
}

TEST(SlotAdjoint, SameBitsForAnyThreadCount) {
  const int threads = NumThreads();
  const Problem p = MakeProblem(6000, false, {3, 3, 300, 20, 33},
                                {.weights = Weights::kJumps, .starts = true, .lengths = true});
  SetNumThreads(1);
  const Gradients one = Kernels<float>(p);
  SetNumThreads(2);
  const Gradients two = Kernels<float>(p);
  EXPECT_TRUE(one.s == two.s && one.u == two.u && one.memory == two.memory && one.z == two.z);
  SetNumThreads(threads);
}

// Fewer heads than threads: parts of a head, where documents and padding begin anywhere.
TEST(SlotAdjoint, SameBitsWhereThreadsShareAHead) {
  const int threads = NumThreads();
  for (const Weights weights : {Weights::kMild, Weights::kJumps}) {
    for (const int64_t batch : {1, 2}) {
      const Problem p =
          MakeProblem(6100, false, {batch, 1, 1600, 7, 5},
                      {.weights = weights, .starts = batch == 2, .lengths = batch == 2});
      SetNumThreads(1);
      const Gradients one = Kernels<float>(p);
      for (const int more : {2, 3, 8}) {
        SetNumThreads(more);
        const Gradients many = Kernels<float>(p);
        EXPECT_TRUE(one.s == many.s && one.u == many.u && one.memory == many.memory &&
                    one.z == many.z)
            << p.name << " threads " << more;
      }
    }
  }
  SetNumThreads(threads);
}

}  // namespace
}  // namespace cistern::slot_test
