// Exact attention of tokens in bfloat16 against the definition on the same tokens, forward and
// backward; what is not seen, later tokens and threads bit for bit.
#include "cistern/kernels/exact_attention_bfloat16.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "cistern/base/parallel.h"
#include "cistern/kernels/attention_test.h"
#include "cistern/kernels/isa.h"
#include "cistern/kernels/workspace.h"

namespace cistern {
namespace {

using namespace attention_test;
using slot_test::Array;
using slot_test::Layout;
using slot_test::RelativeRms;

// By pairs (avx512) and by tiles (avx512_amx), where the processor has them.
class BFloat16Attention : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::vector<std::string> supported = SupportedIsas();
    if (std::find(supported.begin(), supported.end(), GetParam()) == supported.end())
      GTEST_SKIP() << "this processor has no " << GetParam();
    ForceIsa(GetParam());
    ASSERT_EQ(ActiveIsa(), GetParam());
    if (!CanAttendBFloat16()) GTEST_SKIP() << "no products of bfloat16 on this processor";
  }
  void TearDown() override { ForceIsa(""); }
};
INSTANTIATE_TEST_SUITE_P(By, BFloat16Attention, ::testing::Values("avx512", "avx512_amx"),
                         [](const auto& of) { return std::string(of.param); });

// Tokens that bfloat16 holds.
Problem Rounded(Problem p) {
  for (std::vector<double>* x : {&p.q, &p.k, &p.v, &p.g}) {
    for (double& value : *x) value = double(float(BFloat16(float(value))));
  }
  return p;
}
Problem MakeRounded(uint64_t seed, const AttentionShape& shape, Kind kind, double spread = 1) {
  return Rounded(MakeProblem(seed, shape, kind, spread));
}

// Memory that holds NaN where nothing was written.
CallMemory Scribbled() {
  return [heap = HeapMemory()](size_t bytes) {
    std::byte* const memory = heap(bytes);
    std::memset(memory, 0xff, bytes);
    return memory;
  };
}

Result Run(const Problem& p, Layout layout) {
  const AttentionShape& s = p.shape;
  const SlotShape of_queries = {s.batch, s.heads, s.queries, 0, 0},
                  of_keys = {s.batch, s.heads, s.keys, 0, 0};
  const Array<BFloat16> q(of_queries, s.key_width, layout, p.q),
      k(of_keys, s.key_width, layout, p.k), v(of_keys, s.value_width, layout, p.v),
      g(of_queries, s.value_width, layout, p.g);
  Array<BFloat16> out(of_queries, s.value_width, layout);
  Array<BFloat16> dq(of_queries, s.key_width, layout), dk(of_keys, s.key_width, layout),
      dv(of_keys, s.value_width, layout);
  std::vector<float> stats(size_t(2 * s.batch * s.heads * s.queries + 1));
  AttentionForward(s, p.scale, q.in(), k.in(), v.in(), p.Mask(), out.rows(), stats.data(),
                   Scribbled());
  const Array<BFloat16>& given = out;
  AttentionBackward(s, p.scale, q.in(), k.in(), v.in(), given.in(), g.in(), p.Mask(), stats.data(),
                    dq.rows(), dk.rows(), dv.rows(), Scribbled());
  return {out.Values(), dq.Values(), dk.Values(), dv.Values()};
}
Result RunPlain(const Problem& p) { return Run(p, Layout::kBTHW); }

double LargestOf(const std::vector<double>& x) {
  double largest = 0;
  for (double value : x) largest = std::max(largest, std::abs(value));
  return largest;
}

// A value of bfloat16 is off by 2^-9 of itself at most, by a third of that on average.
void ExpectDefinition(const Problem& p, Layout layout = Layout::kBTHW, double tolerance = 6e-3) {
  Result got = Run(p, layout), want = Reference(p);
  const char* const names[] = {"out", "dq", "dk", "dv"};
  for (size_t i = 0; i < 4; ++i) {
    // Gradients of q and k are differences: what they are differences of counts beside them.
    std::vector<double> x = *got.All()[i], y = *want.All()[i];
    const double beside = i == 1 ? LargestOf(p.k) * p.scale : i == 2 ? LargestOf(p.q) * p.scale : 1;
    for (double value : i == 1 || i == 2 ? want.dv : std::vector<double>()) {
      x.push_back(std::max(1.0, beside) * value);
      y.push_back(x.back());
    }
    EXPECT_LE(RelativeRms(x, y), tolerance) << names[i] << " " << p.name;
  }
}

TEST_P(BFloat16Attention, LengthsAndMasks) {
  uint64_t seed = 1;
  for (Kind kind : kKinds) {
    for (int64_t T : {0, 1, 2, 5, 63, 64, 65, 100, 131}) {
      ++seed;
      const AttentionShape shape = {2, 2, T, T + (seed % 2 == 0 ? 0 : 40), 9, 5};
      ExpectDefinition(MakeRounded(seed, shape, kind),
                       seed % 4 < 2 ? Layout::kBHTW : Layout::kBTHW);
    }
  }
}

TEST_P(BFloat16Attention, Widths) {
  uint64_t seed = 1000;
  for (int64_t of_keys : {1, 2, 3, 8, 16, 17, 31, 32, 64, 80}) {
    for (int64_t of_values : {1, 4, 15, 16, 33, 64, 128}) {
      const Kind kind = kKinds[++seed % std::size(kKinds)];
      ExpectDefinition(MakeRounded(seed, {1, 2, 70, 74, of_keys, of_values}, kind));
    }
  }
}

TEST_P(BFloat16Attention, DilatedCrossAndLong) {
  uint64_t seed = 2000;
  for (int64_t g : {2, 3, 5}) {
    for (Kind kind : {Kind::kAll, Kind::kCausal, Kind::kWindow, Kind::kDocuments, Kind::kHoles})
      ExpectDefinition(MakeRounded(++seed, {1, 1, 171, 171 + 2 * g, 10, 12, g}, kind));
  }
  for (Kind kind : {Kind::kAll, Kind::kLengths, Kind::kHoles})
    ExpectDefinition(MakeRounded(++seed, {2, 1, 130, 75, 16, 16}, kind));
  for (Kind kind : {Kind::kAll, Kind::kCausal, Kind::kWindow, Kind::kHoles})  // in groups
    ExpectDefinition(MakeRounded(++seed, {1, 1, 450, 790, 8, 6}, kind));
}

TEST_P(BFloat16Attention, Dropout) {
  uint64_t seed = 2500;
  for (Kind kind : kKinds) {
    for (int64_t T : {1, 66, 100}) {
      Problem p = MakeRounded(++seed, {1, 2, T, T + 2, 6, 4, 1}, kind);
      p.dropout = {seed % 2 == 0 ? 0.3 : 0.75, seed << 35 | seed, int64_t(seed % 4)};
      ExpectDefinition(p);
    }
  }
}

// Scores of thousands and more, of which each row's largest decides.
TEST_P(BFloat16Attention, HostileScores) {
  for (const double factor : {0x1p10, 0x1p20, 0x1p24, 0x1p31, 0x1p60}) {
    Problem p = MakeProblem(5000, {1, 1, 110, 130, 8, 4}, Kind::kCausal);
    for (double& x : p.q) x = std::round(x * 8) * factor;
    for (double& x : p.k) x = std::round(x * 8) / 8;  // scores are exact
    p.name += " factor " + std::to_string(factor);
    ExpectDefinition(Rounded(p), Layout::kBHTW, 1e-2);
  }
}

// Factors of the scores that turn their order around, or make all of them alike.
TEST_P(BFloat16Attention, AnyFactorOfScores) {
  for (const double scale : {-0.7, 0.0, 3.0}) {
    for (Kind kind : {Kind::kCausal, Kind::kHoles}) {
      Problem p = MakeRounded(6000, {1, 2, 90, 92, 9, 5}, kind);
      p.scale = scale;
      ExpectDefinition(p);
    }
  }
}

// Weights and sums are float: the average of many values has no error of bfloat16's sums.
TEST_P(BFloat16Attention, SumsAreFloat) {
  Problem p = MakeProblem(1, {1, 1, 64, 8192, 2, 2}, Kind::kAll);
  std::fill(p.q.begin(), p.q.end(), 0.0);
  for (size_t j = 0; j < p.v.size(); ++j) p.v[j] = j % 4 < 2 ? 1 : 2;
  for (double x : RunPlain(Rounded(p)).out) EXPECT_EQ(x, 1.5);
}

TEST_P(BFloat16Attention, WhatIsNotSeenHasNoPart) {
  for (Kind kind : {Kind::kCausal, Kind::kWindow, Kind::kBand, Kind::kLengths, Kind::kDocuments,
                    Kind::kHoles}) {
    for (int64_t T : {3, 100}) {
      const Problem p = MakeRounded(7000, {T < 100 ? 2 : 1, 1, T, T + 2, 9, 5}, kind);
      const Result want = RunPlain(p);
      for (const int64_t j : {int64_t{0}, T / 2, T + 1}) {
        ExpectUnseenHasNoPart(p, want, j, kNan, RunPlain);
        ExpectUnseenHasNoPart(p, want, j, 7.0, RunPlain);
      }
    }
  }
}

// NaN and infinities, of one component of one token, reach what the definition says and nothing
// else. Queries in whole blocks and in a rest, tiles that are seen whole and in part.
TEST_P(BFloat16Attention, NotFiniteReachesWhatSeesIt) {
  for (const Kind kind : {Kind::kCausal, Kind::kAll, Kind::kHoles}) {
    for (const int64_t T : {64, 91}) {
      const Problem p = MakeRounded(8000, {1, 1, T, T + 103, 6, 6}, kind);
      for (const double value : {kNan, slot_test::kInf, -slot_test::kInf}) {
        for (std::vector<double> Problem::*of :
             {&Problem::q, &Problem::k, &Problem::v, &Problem::g}) {
          Problem lost = p;
          (lost.*of)[40 * 6 + 3] = value;
          Result got = RunPlain(lost), want = Reference(lost);
          for (size_t i = 0; i < 4; ++i) {
            for (size_t n = 0; n < want.All()[i]->size(); ++n)
              ASSERT_EQ(std::isfinite((*got.All()[i])[n]), std::isfinite((*want.All()[i])[n]))
                  << p.name << " output " << i << " token " << n / 6 << " of " << value << " in "
                  << (of == &Problem::q   ? "q"
                      : of == &Problem::k ? "k"
                      : of == &Problem::v ? "v"
                                          : "g");
          }
        }
      }
    }
  }
}

TEST_P(BFloat16Attention, AnyNumberOfThreads) {
  const int before = NumThreads();
  for (Kind kind : {Kind::kCausal, Kind::kWindow, Kind::kHoles}) {
    for (const AttentionShape& shape :
         {AttentionShape{1, 1, 450, 780, 4, 3}, AttentionShape{2, 3, 130, 150, 5, 4}}) {
      Problem p = MakeRounded(9000, shape, kind);
      if (kind == Kind::kCausal) p.dropout = {0.1, 3};
      SetNumThreads(1);
      Result want = RunPlain(p);
      for (int threads : {2, 3, 5}) {
        SetNumThreads(threads);
        Result got = RunPlain(p);
        for (size_t i = 0; i < 4; ++i) {
          EXPECT_TRUE(slot_test::SameBits(*got.All()[i], *want.All()[i], want.All()[i]->size()))
              << p.name << " output " << i << " threads " << threads;
        }
      }
    }
  }
  SetNumThreads(before);
}

TEST_P(BFloat16Attention, ScratchMayHoldAnything) {
  for (Kind kind : kKinds) {
    for (const int64_t T : {3, 70}) {
      const Problem p = MakeRounded(10000, {1, 1, T, T + 5, 9, 5}, kind);
      Result want = RunPlain(p);
      Workspace::PoisonAll(true);
      Result got = RunPlain(p);
      Workspace::PoisonAll(false);
      for (size_t i = 0; i < 4; ++i)
        EXPECT_EQ(RelativeRms(*got.All()[i], *want.All()[i]), 0) << p.name << " output " << i;
    }
  }
}

}  // namespace
}  // namespace cistern
