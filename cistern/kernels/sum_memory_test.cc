// The forward kernels of the summing slot memory against their definition, on every instruction
// set.
#include "cistern/kernels/sum_memory.h"

#include "cistern/base/parallel.h"
#include "cistern/kernels/ref/sum_memory_ref.h"
#include "cistern/kernels/sum_test.h"

namespace cistern::sum_test {
namespace {

Forward Reference(const Problem& p) {
  Forward f{std::vector<double>(p.Tokens() * p.OutWidth()), p.memory};
  const std::vector<double> gates = SlotGates(p);
  (p.match ? ref::SumMatch : ref::SumRead)(p.shape, p.a.data(), p.w.data(), p.u.data(),
                                           p.gates == 0 ? nullptr : gates.data(), p.Mask(),
                                           f.memory.data(), f.out.data());
  return f;
}

template <class T>
void ExpectDefinition(const Problem& p, Layout layout = Layout::kBTHW) {
  const Forward got = RunForward<T>(p, layout), want = Reference(p);
  EXPECT_LE(RelativeRms(got.out, want.out), kTolerance<T>) << p.name;
  EXPECT_LE(RelativeRms(got.memory, want.memory), kTolerance<T>) << p.name;
}

void ExpectDefinitionInBoth(const Problem& p, Layout layout = Layout::kBTHW) {
  ExpectDefinition<float>(p, layout);
  ExpectDefinition<double>(p, layout);
}

// One slot, one column: 1, 1 + 1/2, 1/4 (after a gate of 0), then 1/4 e^-1 + 1; a document begins
// at the fifth token.
TEST(SumReference, ByHand) {
  Problem p = MakeProblem(1, false, {1, 1, 5, 1, 1}, {.empty = true});
  p.a = {1, 1, 2, 1, 1}, p.w = {1, 0.5, 0.25, 1, -1}, p.u = {1, 1, 1, 1, 3},
  p.log_gate = {-5, 0, -kInf, -1, 0}, p.starts = {0, 0, 0, 0, 1};
  const std::vector<double> want = {1, 1.5, 0.5, 1 + 0.25 * std::exp(-1), -3};
  const Forward f = Reference(p);
  for (size_t t = 0; t < 5; ++t) EXPECT_NEAR(f.out[t], want[t], 1e-15);
  EXPECT_EQ(f.memory[0], -3);
  ExpectDefinitionInBoth(p);
}

TEST(SumMemory, LengthsAndGates) {
  ForEachIsa([] {
    uint64_t seed = 1;
    for (bool match : {false, true}) {
      for (int64_t T : {0, 1, 2, 31, 32, 33, 63, 64, 65, 200}) {
        for (Gates gates : kAllGates) {
          ExpectDefinitionInBoth(MakeProblem(seed++, match, {2, 2, T, 17, 5}, {.gates = gates}),
                                 T % 2 == 0 ? Layout::kBHTW : Layout::kBTHW);
        }
      }
      for (Gates gates : {Gates::kNone, Gates::kMixed})
        ExpectDefinitionInBoth(MakeProblem(seed++, match, {1, 2, 1000, 64, 64}, {.gates = gates}));
    }
  });
}

TEST(SumMemory, Widths) {
  static constexpr Gates kWidthGates[] = {Gates::kNone, Gates::kJumps, Gates::kShared};
  ForEachIsa([] {
    uint64_t seed = 1000;
    for (bool match : {false, true}) {
      for (int64_t n : {1, 3, 5, 16, 17, 64, 65}) {
        for (int64_t d : {1, 3, 5, 16, 17, 64, 65}) {
          for (int64_t T : {1, 37}) {
            ExpectDefinitionInBoth(
                MakeProblem(seed, match, {1, 2, T, n, d}, {.gates = kWidthGates[seed % 3]}));
            ++seed;
          }
        }
      }
    }
  });
}

TEST(SumMemory, RandomShapesWithStartsAndLengths) {
  ForEachIsa([] {
    Random random(7);
    for (int i = 0; i < 100; ++i) {
      const SlotShape shape{1 + random.Below(3), 1 + random.Below(3), random.Below(120),
                            1 + random.Below(40), 1 + random.Below(80)};
      const Options options{kAllGates[random.Below(7)], random.Below(2) == 0, random.Below(3) != 0,
                            random.Below(2) == 0};
      ExpectDefinitionInBoth(MakeProblem(3000 + uint64_t(i), random.Below(2) == 0, shape, options));
    }
  });
}

// Tokens [begin, end) of p, starting from the memory given.
Problem Piece(const Problem& p, int64_t begin, int64_t end, const std::vector<double>& memory) {
  Problem piece = p;
  piece.shape.length = end - begin;
  piece.memory = memory;
  piece.a = p.Cut(p.a, p.AWidth(), begin, end);
  piece.w = p.Cut(p.w, p.shape.slots, begin, end);
  piece.log_gate = p.Cut(p.log_gate, p.gates, begin, end);
  piece.u = p.Cut(p.u, p.shape.width, begin, end);
  return piece;
}

TEST(SumMemory, SplitAnywhere) {
  uint64_t seed = 4000;
  for (Gates gates : kAllGates) {
    for (bool match : {false, true}) {
      const Problem p = MakeProblem(seed++, match, {1, 1, 67, 7, 19}, {.gates = gates});
      const Forward whole = RunForward<double>(p);
      const auto run = [&](const std::vector<int64_t>& cuts) {
        Forward all{{}, p.memory};
        for (size_t i = 0; i + 1 < cuts.size(); ++i) {
          const Forward piece = RunForward<double>(Piece(p, cuts[i], cuts[i + 1], all.memory));
          all.out.insert(all.out.end(), piece.out.begin(), piece.out.end());
          all.memory = piece.memory;
        }
        EXPECT_LE(RelativeRms(all.out, whole.out), 1e-13) << p.name << " split " << cuts[1];
        EXPECT_LE(RelativeRms(all.memory, whole.memory), 1e-13) << p.name << " split " << cuts[1];
      };
      std::vector<int64_t> each;
      for (int64_t t = 0; t <= 67; ++t) {
        run({0, t, 67});
        each.push_back(t);
      }
      run(each);
    }
  }
}

// Outputs before t do not change by a bit when the tokens from t on become others, NaN, infinite or
// absent.
TEST(SumMemory, CausalBitwise) {
  ForEachIsa([] {
    for (Gates gates : kAllGates) {
      for (bool match : {false, true}) {
        const Problem p =
            MakeProblem(5000 + uint64_t(gates), match, {1, 1, 80, 18, 21}, {.gates = gates});
        const Forward whole = RunForward<float>(p);
        for (int64_t t : {2, 3, 17, 31, 32, 33, 50, 63, 64, 79}) {
          const size_t outs = size_t(t * p.OutWidth());
          for (double poison : {0.5, std::numeric_limits<double>::quiet_NaN(), kInf, -kInf, 1e30}) {
            Problem other = p;
            std::fill(other.a.begin() + t * p.AWidth(), other.a.end(), poison);
            std::fill(other.u.begin() + t * p.shape.width, other.u.end(), poison);
            std::fill(other.w.begin() + t * p.shape.slots, other.w.end(), poison);
            if (!other.log_gate.empty())
              std::fill(other.log_gate.begin() + t * p.gates, other.log_gate.end(),
                        -std::abs(poison));
            EXPECT_TRUE(SameBits(RunForward<float>(other).out, whole.out, outs))
                << p.name << " t " << t;
          }
          EXPECT_TRUE(SameBits(RunForward<float>(Piece(p, 0, t, p.memory)).out, whole.out, outs))
              << p.name << " t " << t;
        }
      }
    }
  });
}

// What a gate of 0 or the start of a document forgets is forgotten whatever it was.
TEST(SumMemory, ForgetsInfinity) {
  for (bool match : {false, true}) {
    for (bool start : {false, true}) {
      for (int64_t T : {1, 3, 40}) {
        Problem p =
            MakeProblem(6, match, {1, 1, T, 6, 5}, {.gates = start ? Gates::kNone : Gates::kMild});
        if (start) {
          p.starts.assign(size_t(T), 0);
          p.starts[0] = 1;
        } else {
          std::fill_n(p.log_gate.begin(), 6, -kInf);
        }
        const Forward want = RunForward<float>(p);
        std::fill(p.memory.begin(), p.memory.end(), kInf);
        const Forward got = RunForward<float>(p);
        EXPECT_TRUE(SameBits(got.out, want.out, want.out.size()) &&
                    SameBits(got.memory, want.memory, want.memory.size()))
            << p.name;
      }
    }
  }
}

TEST(SumMemory, NanIsNotSwallowed) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (bool match : {false, true}) {
    for (int64_t T : {1, 9}) {
      for (int input = 0; input < 2; ++input) {
        Problem p = MakeProblem(1, match, {1, 1, T, 4, 4});
        (input == 0 ? p.w : p.log_gate)[size_t(T / 2 * 4)] = nan;
        const Forward f = RunForward<float>(p);
        EXPECT_TRUE(std::isnan(f.out[size_t(T / 2 * 4)]) && std::isnan(f.memory[0]))
            << p.name << " input " << input;
      }
    }
  }
}

TEST(SumMemory, SameBitsForAnyThreadCount) {
  const int threads = NumThreads();
  for (Gates gates : {Gates::kNone, Gates::kJumps}) {
    for (bool match : {false, true}) {
      const Problem p = MakeProblem(6000, match, {3, 3, 300, 20, 33},
                                    {.gates = gates, .starts = true, .lengths = true});
      SetNumThreads(1);
      const Forward one = RunForward<float>(p);
      SetNumThreads(2);
      const Forward two = RunForward<float>(p);
      EXPECT_TRUE(SameBits(one.out, two.out, one.out.size()) &&
                  SameBits(one.memory, two.memory, one.memory.size()));
    }
  }
  SetNumThreads(threads);
}

// Fewer heads than threads: parts of a head, where documents and padding begin anywhere.
TEST(SumMemory, SameBitsWhereThreadsShareAHead) {
  const int threads = NumThreads();
  for (const Gates gates : kAllGates) {
    for (const bool match : {false, true}) {
      for (const int64_t batch : {1, 2}) {
        const Problem p =
            MakeProblem(6100, match, {batch, 1, 1600, 7, 5},
                        {.gates = gates, .starts = batch == 2, .lengths = batch == 2});
        SetNumThreads(1);
        const Forward one = RunForward<float>(p);
        for (const int more : {2, 3, 8}) {
          SetNumThreads(more);
          const Forward many = RunForward<float>(p);
          EXPECT_TRUE(SameBits(one.out, many.out, one.out.size()) &&
                      SameBits(one.memory, many.memory, one.memory.size()))
              << p.name << " threads " << more;
        }
      }
    }
  }
  SetNumThreads(threads);
}

// A float count stops at 2^24; the memory goes on.
TEST(SumMemory, CountsBeyondFloat) {
  for (int64_t T : {1, 100}) {
    Problem p = MakeProblem(1, false, {1, 1, T, 1, 1}, {.gates = Gates::kNone});
    p.memory = {16777216.0};
    std::fill(p.w.begin(), p.w.end(), 1), std::fill(p.u.begin(), p.u.end(), 1);
    EXPECT_EQ(RunForward<float>(p).memory[0], 16777216.0 + double(T));
  }
}

// A slow decay keeps its rate over many chunks: 1e5 tokens with a gate that float rounds by a third
// of its distance from 1.
TEST(SumMemory, SlowGatesDoNotDrift) {
  Problem p = MakeProblem(8000, false, {1, 1, 100000, 2, 3}, {.gates = Gates::kSlow});
  for (double& gate : p.log_gate) gate = static_cast<float>(-1.8e-7);
  ExpectDefinition<float>(p);
}

}  // namespace
}  // namespace cistern::sum_test
