// FAVOR+'s fused walk against its definition, forward and backward, on every instruction set. What
// it shares with Latte's and ABC's is tested in ops/slot_attention_test.cc and slot_memory_test.cc.
#include "cistern/kernels/slot_attention.h"

#include "cistern/kernels/ref/slot_memory_ref.h"
#include "cistern/kernels/slot_test.h"

namespace cistern::slot_test {
namespace {

// Outputs, the state after, gradients of x, s, v and the state before.
struct Results {
  std::vector<double> out, memory, z, dx, ds, dv, dmemory, dz;
};

Results Definition(const Problem& p) {
  const int64_t rows = p.Tokens();
  Results r{std::vector<double>(rows * p.shape.width),
            p.memory,
            p.z,
            std::vector<double>(rows * p.shape.slots),
            std::vector<double>(rows * p.shape.slots),
            std::vector<double>(rows * p.shape.width),
            std::vector<double>(p.memory.size()),
            std::vector<double>(p.z.size())};
  ref::FavorRead(p.shape, p.a.data(), p.s.data(), p.u.data(), p.Mask(), r.memory.data(), r.z.data(),
                 r.out.data());
  ref::FavorReadBackward(p.shape, p.a.data(), p.s.data(), p.u.data(), p.Mask(), p.memory.data(),
                         p.z.data(), p.g.data(), p.dmemory_T.data(), p.dz_T.data(), r.dx.data(),
                         r.ds.data(), r.dv.data(), r.dmemory.data(), r.dz.data());
  return r;
}

template <class T>
Results Kernel(const Problem& p, Layout layout) {
  const int64_t n = p.shape.slots, d = p.shape.width;
  const Array<T> x(p.shape, n, layout, p.a), s(p.shape, n, layout, p.s), v(p.shape, d, layout, p.u),
      g(p.shape, d, layout, p.g);
  Array<T> out(p.shape, d, layout), dx(p.shape, n, layout), ds(p.shape, n, layout),
      dv(p.shape, d, layout);
  Results r;
  r.memory = p.memory, r.z = p.z;
  FavorForward<T>(p.shape, x.in(), s.in(), v.in(), p.Mask(), r.memory.data(), r.z.data(),
                  out.rows());
  // As SlotAdjoint has it: h = dM . M - dz in, and out that from which dz comes.
  std::vector<T> G(p.dmemory_T.begin(), p.dmemory_T.end()), h;
  for (size_t l = 0; l < p.z.size(); ++l)
    h.push_back(static_cast<T>(SlotDot(p.dmemory_T, r.memory, l, d) - p.dz_T[l]));
  FavorBackward<T>(p.shape, x.in(), s.in(), v.in(), g.in(), p.Mask(), p.memory.data(), p.z.data(),
                   G.data(), h.data(), dx.rows(), ds.rows(), dv.rows());
  r.out = out.Values(), r.dx = dx.Values(), r.ds = ds.Values(), r.dv = dv.Values();
  r.dmemory = ToDouble(G);
  for (size_t l = 0; l < p.z.size(); ++l) r.dz.push_back(SlotDot(G, p.memory, l, d) - double(h[l]));
  return r;
}

template <class T>
void ExpectDefinition(const Problem& p, Layout layout) {
  const Results got = Kernel<T>(p, layout), want = Definition(p);
  const double tolerance = 4 * Tolerance<T>(p);
  EXPECT_LE(RelativeRms(got.out, want.out), tolerance) << p.name;
  EXPECT_LE(RelativeRms(got.memory, want.memory), tolerance) << p.name;
  EXPECT_LE(RelativeRms(got.z, want.z), tolerance) << p.name;
  // Where one slot is read alone, or several alike, dx is what rounding leaves of r (dr - r . dr):
  // small beside dv, which is r . g.
  const auto with_dv = [](Results r) {
    r.dx.insert(r.dx.end(), r.dv.begin(), r.dv.end());
    return r.dx;
  };
  EXPECT_LE(RelativeRms(with_dv(got), with_dv(want)), tolerance) << p.name;
  EXPECT_LE(RelativeRms(got.ds, want.ds), tolerance) << p.name;
  EXPECT_LE(RelativeRms(got.dv, want.dv), tolerance) << p.name;
  EXPECT_LE(RelativeRms(got.dmemory, want.dmemory), tolerance) << p.name;
  EXPECT_LE(RelativeRms(got.dz, want.dz), tolerance) << p.name;
}

void ExpectDefinitionInBoth(const Problem& p, Layout layout = Layout::kBTHW) {
  ExpectDefinition<float>(p, layout);
  ExpectDefinition<double>(p, layout);
}

TEST(FavorAttention, LengthsAndWeights) {
  ForEachIsa([] {
    uint64_t seed = 1;
    for (int64_t T : {0, 1, 2, 31, 32, 33, 63, 64, 65, 200}) {
      for (Weights weights : kAllWeights) {
        ExpectDefinitionInBoth(MakeProblem(seed++, false, {2, 2, T, 17, 5}, {.weights = weights}),
                               T % 2 == 0 ? Layout::kBHTW : Layout::kBTHW);
      }
    }
    ExpectDefinitionInBoth(MakeProblem(seed++, false, {1, 2, 1000, 64, 32}));
  });
}

TEST(FavorAttention, Widths) {
  ForEachIsa([] {
    uint64_t seed = 1000;
    for (int64_t n : {1, 3, 16, 17, 64, 65}) {
      for (int64_t d : {1, 5, 16, 65}) {
        for (int64_t T : {1, 37})
          ExpectDefinitionInBoth(
              MakeProblem(seed++, false, {1, 2, T, n, d}, {.weights = Weights::kHoles}));
      }
    }
  });
}

TEST(FavorAttention, StartsAndLengths) {
  ForEachIsa([] {
    for (uint64_t seed = 2000; seed < 2024; ++seed) {
      for (int64_t T : {1, 2, 90}) {
        ExpectDefinitionInBoth(MakeProblem(
            seed, false, {3, 2, T, 9, 20},
            {.weights = kAllWeights[seed % 6], .starts = true, .lengths = seed % 3 != 0}));
      }
    }
  });
}

// Queries whose largest logits fall on slots that hold almost nothing, and such as no float's
// exponential takes.
TEST(FavorAttention, LogitsFarApart) {
  ForEachIsa([] {
    for (uint64_t seed = 3000; seed < 3012; ++seed) {
      Problem p = MakeProblem(seed, false, {1, 2, 150, 19, 8}, {.weights = kAllWeights[seed % 6]});
      Random random(seed);
      for (double& x : p.a) {
        if (random.Below(4) == 0) x += random.Below(2) == 0 ? 190 : -190;
        if (random.Below(50) == 0) x = -kInf;
      }
      ExpectDefinitionInBoth(p);
    }
  });
}

}  // namespace
}  // namespace cistern::slot_test
