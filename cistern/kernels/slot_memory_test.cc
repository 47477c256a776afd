// The forward kernels against their definition, on every instruction set.
#include "cistern/kernels/slot_memory.h"

#include "cistern/base/parallel.h"
#include "cistern/kernels/ref/slot_memory_ref.h"
#include "cistern/kernels/slot_test.h"

namespace cistern::slot_test {
namespace {

Forward Reference(const Problem& p) {
  Forward f{std::vector<double>(p.Tokens() * p.OutWidth()),
            std::vector<double>(p.Tokens() * p.shape.slots), p.memory, p.z};
  (p.match ? ref::SlotMatch : ref::SlotRead)(p.shape, p.a.data(), p.s.data(), p.u.data(), p.Mask(),
                                             f.memory.data(), f.z.data(), f.out.data(),
                                             f.z_out.data());
  return f;
}

template <class T>
void ExpectDefinition(const Problem& p, Layout layout = Layout::kBTHW) {
  const Forward got = RunForward<T>(p, layout), want = Reference(p);
  const double tolerance = Tolerance<T>(p);
  EXPECT_LE(RelativeRms(got.out, want.out), tolerance) << p.name;
  EXPECT_LE(RelativeRms(got.z_out, want.z_out), tolerance) << p.name;
  EXPECT_LE(RelativeRms(got.memory, want.memory), tolerance) << p.name;
  EXPECT_LE(RelativeRms(got.z, want.z), tolerance) << p.name;
}

void ExpectDefinitionInBoth(const Problem& p, Layout layout = Layout::kBTHW) {
  ExpectDefinition<float>(p, layout);
  ExpectDefinition<double>(p, layout);
}

TEST(SlotMemory, LengthsAndWeights) {
  ForEachIsa([] {
    uint64_t seed = 1;
    for (bool match : {false, true}) {
      for (int64_t T : {0, 1, 2, 31, 32, 33, 63, 64, 65, 200}) {
        for (Weights weights : kAllWeights) {
          ExpectDefinitionInBoth(MakeProblem(seed++, match, {2, 2, T, 17, 5}, {.weights = weights}),
                                 T % 2 == 0 ? Layout::kBHTW : Layout::kBTHW);
        }
      }
      ExpectDefinitionInBoth(MakeProblem(seed++, match, {1, 2, 1000, 64, 64}));
    }
  });
}

TEST(SlotMemory, Widths) {
  ForEachIsa([] {
    uint64_t seed = 1000;
    for (bool match : {false, true}) {
      for (int64_t n : {1, 3, 5, 16, 17, 64, 65}) {
        for (int64_t d : {1, 3, 5, 16, 17, 64, 65}) {
          for (int64_t T : {1, 37})
            ExpectDefinitionInBoth(
                MakeProblem(seed++, match, {1, 2, T, n, d}, {.weights = Weights::kHoles}));
        }
      }
    }
  });
}

TEST(SlotMemory, StartsAndLengths) {
  ForEachIsa([] {
    for (uint64_t seed = 2000; seed < 2024; ++seed) {
      const Weights weights = kAllWeights[seed % 6];
      for (int64_t T : {1, 2, 90}) {
        ExpectDefinitionInBoth(
            MakeProblem(seed, seed % 4 < 2, {3, 2, T, 9, 20},
                        {.weights = weights, .starts = true, .lengths = seed % 3 != 0}));
      }
    }
  });
}

TEST(SlotMemory, RandomShapes) {
  Random random(7);
  for (int i = 0; i < 150; ++i) {
    const SlotShape shape{1 + random.Below(3), 1 + random.Below(3), random.Below(150),
                          1 + random.Below(40), 1 + random.Below(80)};
    const Options options{kAllWeights[random.Below(6)], Start(random.Below(3)),
                          random.Below(2) == 0, random.Below(2) == 0};
    ExpectDefinitionInBoth(MakeProblem(3000 + uint64_t(i), random.Below(2) == 0, shape, options));
  }
}

// Tokens [begin, end) of p, starting from the state given.
Problem Piece(const Problem& p, int64_t begin, int64_t end, const std::vector<double>& memory,
              const std::vector<double>& z) {
  Problem piece = p;
  piece.shape.length = end - begin;
  piece.memory = memory;
  piece.z = z;
  piece.a = p.Cut(p.a, p.AWidth(), begin, end);
  piece.s = p.Cut(p.s, p.shape.slots, begin, end);
  piece.u = p.Cut(p.u, p.shape.width, begin, end);
  return piece;
}

void Append(const Forward& piece, Forward& all) {  // one head
  all.out.insert(all.out.end(), piece.out.begin(), piece.out.end());
  all.z_out.insert(all.z_out.end(), piece.z_out.begin(), piece.z_out.end());
  all.memory = piece.memory;
  all.z = piece.z;
}

template <class T>
void ExpectPiecesEqualWhole(const Problem& p) {
  const double tolerance = 2 * Tolerance<T>(p);
  const Forward whole = RunForward<T>(p);
  const auto expect_same = [&](const Forward& got, int64_t split) {
    EXPECT_LE(RelativeRms(got.out, whole.out), tolerance) << p.name << " split " << split;
    EXPECT_LE(RelativeRms(got.z_out, whole.z_out), tolerance) << p.name << " split " << split;
    EXPECT_LE(RelativeRms(got.memory, whole.memory), tolerance) << p.name << " split " << split;
    EXPECT_LE(RelativeRms(got.z, whole.z), tolerance) << p.name << " split " << split;
  };
  for (int64_t split = 0; split <= p.shape.length; ++split) {
    Forward all;
    Append(RunForward<T>(Piece(p, 0, split, p.memory, p.z)), all);
    Append(RunForward<T>(Piece(p, split, p.shape.length, all.memory, all.z)), all);
    expect_same(all, split);
  }
  Forward all{{}, {}, p.memory, p.z};
  for (int64_t t = 0; t < p.shape.length; ++t)
    Append(RunForward<T>(Piece(p, t, t + 1, all.memory, all.z)), all);
  expect_same(all, -1);
}

TEST(SlotMemory, SplitAnywhere) {
  uint64_t seed = 4000;
  for (Weights weights : kAllWeights) {
    for (bool match : {false, true}) {
      const Problem p = MakeProblem(seed++, match, {1, 1, 67, 7, 19}, {.weights = weights});
      ExpectPiecesEqualWhole<float>(p);
      ExpectPiecesEqualWhole<double>(p);
    }
  }
}

// Outputs before t do not change by a bit when the tokens from t on become others, NaN, infinite or
// absent.
TEST(SlotMemory, CausalBitwise) {
  ForEachIsa([] {
    for (Weights weights : kAllWeights) {
      for (bool match : {false, true}) {
        const Problem p =
            MakeProblem(5000 + uint64_t(weights), match, {1, 1, 80, 18, 21}, {.weights = weights});
        const Forward whole = RunForward<float>(p);
        for (int64_t t : {2, 3, 17, 31, 32, 33, 50, 63, 64, 79}) {
          const size_t outs = size_t(t * p.OutWidth()), zs = size_t(t * p.shape.slots);
          for (double poison : {0.5, std::numeric_limits<double>::quiet_NaN(), kInf, -kInf, 1e30}) {
            Problem other = p;
            std::fill(other.a.begin() + t * p.AWidth(), other.a.end(), poison);
            std::fill(other.u.begin() + t * p.shape.width, other.u.end(), poison);
            std::fill(other.s.begin() + t * p.shape.slots, other.s.end(), poison);
            const Forward changed = RunForward<float>(other);
            EXPECT_TRUE(SameBits(changed.out, whole.out, outs) &&
                        SameBits(changed.z_out, whole.z_out, zs))
                << p.name << " t " << t;
          }
          const Forward shorter = RunForward<float>(Piece(p, 0, t, p.memory, p.z));
          EXPECT_TRUE(SameBits(shorter.out, whole.out, outs) &&
                      SameBits(shorter.z_out, whole.z_out, zs))
              << p.name << " t " << t;
        }
      }
    }
  });
}

TEST(SlotMemory, NanIsNotSwallowed) {
  for (bool match : {false, true}) {
    for (int64_t T : {1, 9}) {
      Problem p = MakeProblem(1, match, {1, 1, T, 4, 4});
      p.s[0] = std::numeric_limits<double>::quiet_NaN();
      const Forward f = RunForward<float>(p);
      EXPECT_TRUE(std::isnan(f.out[0]) && std::isnan(f.z[0]) && std::isnan(f.memory[0]) &&
                  std::isnan(f.z_out[0]))
          << p.name;
    }
  }
}

TEST(SlotMemory, SameBitsForAnyThreadCount) {
  const int threads = NumThreads();
  for (bool match : {false, true}) {
    const Problem p = MakeProblem(6000, match, {3, 3, 300, 20, 33},
                                  {.weights = Weights::kJumps, .starts = true, .lengths = true});
    SetNumThreads(1);
    const Forward one = RunForward<float>(p);
    SetNumThreads(2);
    const Forward two = RunForward<float>(p);
    EXPECT_TRUE(SameBits(one.out, two.out, one.out.size()) &&
                SameBits(one.memory, two.memory, one.memory.size()) && one.z == two.z);
  }
  SetNumThreads(threads);
}

// Fewer heads than threads: parts of a head, where documents and padding begin anywhere.
TEST(SlotMemory, SameBitsWhereThreadsShareAHead) {
  const int threads = NumThreads();
  for (const Weights weights : {Weights::kMild, Weights::kJumps}) {
    for (const bool match : {false, true}) {
      for (const int64_t batch : {1, 2}) {
        const Problem p =
            MakeProblem(6100, match, {batch, 1, 1600, 7, 5},
                        {.weights = weights, .starts = batch == 2, .lengths = batch == 2});
        SetNumThreads(1);
        const Forward one = RunForward<float>(p);
        for (const int more : {2, 3, 8}) {
          SetNumThreads(more);
          const Forward many = RunForward<float>(p);
          EXPECT_TRUE(SameBits(one.out, many.out, one.out.size()) &&
                      SameBits(one.memory, many.memory, one.memory.size()) && one.z == many.z)
              << p.name << " threads " << more;
        }
      }
    }
  }
  SetNumThreads(threads);
}

// A slot that is hardly written any more must still move by the right amount, and not drift: 1e5
// tokens of weight e^-9.
TEST(SlotMemory, LongRunDoesNotDrift) {
  const int64_t T = 100000;
  Problem p = MakeProblem(8000, false, {1, 1, T, 2, 3}, {.start = Start::kFull});
  for (double& s : p.s) s = static_cast<float>(s - 9);
  ExpectDefinition<float>(p);
}

}  // namespace
}  // namespace cistern::slot_test
