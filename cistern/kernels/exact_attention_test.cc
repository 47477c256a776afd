// Exact attention against its definition, forward and backward, on every instruction set; what is
// not seen, later tokens and threads bit for bit.
#include "cistern/kernels/exact_attention.h"

#include <numeric>

#include "cistern/base/parallel.h"
#include "cistern/kernels/attention_test.h"
#include "cistern/kernels/workspace.h"

namespace cistern {
namespace {

using namespace attention_test;
using slot_test::Array;
using slot_test::ForEachIsa;
using slot_test::Layout;
using slot_test::RelativeRms;

template <class T>
Result RunKernel(const Problem& p, Layout layout = Layout::kBTHW) {
  const AttentionShape& s = p.shape;
  const SlotShape of_queries = {s.batch, s.heads, s.queries, 0, 0},
                  of_keys = {s.batch, s.heads, s.keys, 0, 0};
  const Array<T> q(of_queries, s.key_width, layout, p.q), k(of_keys, s.key_width, layout, p.k),
      v(of_keys, s.value_width, layout, p.v), g(of_queries, s.value_width, layout, p.g);
  Array<T> out(of_queries, s.value_width, layout), dq(of_queries, s.key_width, layout),
      dk(of_keys, s.key_width, layout), dv(of_keys, s.value_width, layout);
  std::vector<T> stats(size_t(2 * s.batch * s.heads * s.queries + 1));
  // Few queries that want no gradient go another way: as they give the output, it is checked.
  Array<T> plain(of_queries, s.value_width, layout);
  AttentionForward<T>(s, p.scale, q.in(), k.in(), v.in(), p.Mask(), plain.rows(), nullptr);
  AttentionForward<T>(s, p.scale, q.in(), k.in(), v.in(), p.Mask(), out.rows(), stats.data());
  const Array<T>& given = out;
  AttentionBackward<T>(s, p.scale, q.in(), k.in(), v.in(), given.in(), g.in(), p.Mask(),
                       stats.data(), dq.rows(), dk.rows(), dv.rows());
  return {plain.Values(), dq.Values(), dk.Values(), dv.Values()};
}

template <class T>
Result RunIn(const Problem& p) {
  return RunKernel<T>(p);
}

bool Smaller(double x, double y) { return std::abs(x) < std::abs(y); }

template <class T>
void ExpectClose(const Problem& p, Result want, Layout layout, double tolerance) {
  Result got = RunKernel<T>(p, layout);
  const char* const names[] = {"out", "dq", "dk", "dv"};
  for (size_t i = 0; i < 4; ++i) {
    // Gradients of q and k may be zero but for rounding (of one key, or where one key has all the
    // weight): what they are differences of counts beside them.
    std::vector<double> x = *got.All()[i], y = *want.All()[i];
    const double largest =
        i == 2 ? (p.q.empty() ? 0 : std::abs(*std::max_element(p.q.begin(), p.q.end(), Smaller)))
               : 1;
    for (double value : want.dv) {
      x.push_back(std::max(1.0, largest * p.scale) * value);
      y.push_back(x.back());
    }
    EXPECT_LE(RelativeRms(x, y), tolerance)
        << names[i] << " " << p.name << " isa " << ActiveIsa() << " of " << sizeof(T) << " bytes";
  }
}

// In both types on every instruction set.
void ExpectDefinition(const Problem& p, Layout layout = Layout::kBTHW, double in_float = 2e-6) {
  const Result want = Reference(p);
  ForEachIsa([&] {
    ExpectClose<float>(p, want, layout, in_float);
    ExpectClose<double>(p, want, layout, 1e-13);
  });
}
// What does not depend on the instruction set: on the best.
void ExpectDefinitionOnBest(const Problem& p) {
  const Result want = Reference(p);
  ExpectClose<float>(p, want, Layout::kBTHW, 2e-6);
  ExpectClose<double>(p, want, Layout::kBTHW, 1e-13);
}

// Each length with each mask; batches, heads, layouts and the keys before the queries take turns.
TEST(ExactAttention, LengthsAndMasks) {
  uint64_t seed = 1;
  for (Kind kind : kKinds) {
    for (int64_t T : {0, 1, 2, 5, 63, 64, 65, 100}) {
      ++seed;
      if (T > 60 && T < 70 && seed % 3 == 0) continue;  // two of three; 8 and 3 have no factor
      const AttentionShape shape = {2, T > 5 ? 1 : 2, T, T + (seed % 2 == 0 ? 0 : 40), 9, 5};
      ExpectDefinition(MakeProblem(seed, shape, kind),
                       seed % 4 < 2 ? Layout::kBHTW : Layout::kBTHW);
    }
  }
}

// Each width of keys and each of values, with three of the other; decoding and tiles take turns.
TEST(ExactAttention, Widths) {
  uint64_t seed = 1000;
  const int64_t of_keys[] = {1, 3, 8, 16, 17, 64, 80}, of_values[] = {1, 4, 15, 16, 33, 64, 128};
  for (size_t i = 0; i < 7; ++i) {
    for (size_t turn : {0, 2, 3}) {
      const Kind kind = kKinds[++seed % std::size(kKinds)];
      const int64_t T = (i + turn) % 2 == 0 ? 2 : 70;
      ExpectDefinition(
          MakeProblem(seed, {1, 2, T, T, of_keys[i], of_values[(i + turn) % 7]}, kind));
    }
  }
}

// Keys that are too many for a near cache are met by several blocks of queries together: a last
// group of fewer, blocks that are done before others or begin elsewhere, a tail of keys.
TEST(ExactAttention, BlocksThatGoTogether) {
  uint64_t seed = 1400;
  for (Kind kind : {Kind::kAll, Kind::kCausal, Kind::kLengths, Kind::kDocuments, Kind::kHoles}) {
    Problem p = MakeProblem(++seed, {1, 1, 330, 1110, 96, 40}, kind);
    if (kind == Kind::kDocuments) {  // few and long
      for (size_t t = 0; t < p.ranges.size(); ++t)
        p.ranges[t].begin = t < 90 ? 0 : t < 250 ? 37 : p.ranges[t].begin;
    }
    ExpectDefinitionOnBest(p);
    p.dropout = {0.1, 3};
    ExpectDefinitionOnBest(p);
  }
}

std::vector<double> Rounded(std::vector<double> x) {
  for (double& value : x) value = static_cast<float>(BFloat16(static_cast<float>(value)));
  return x;
}

// Outputs, without and with what the backward needs, and gradients of tokens that are stored as S,
// whose numbers bfloat16 has; float takes outputs into the backward as bfloat16 would keep them.
template <class S>
std::vector<std::vector<double>> RunRounded(const Problem& p, Layout layout) {
  using T = ComputeType<S>;
  const AttentionShape& s = p.shape;
  const SlotShape of_queries = {s.batch, s.heads, s.queries, 0, 0},
                  of_keys = {s.batch, s.heads, s.keys, 0, 0};
  const Array<S> q(of_queries, s.key_width, layout, p.q), k(of_keys, s.key_width, layout, p.k),
      v(of_keys, s.value_width, layout, p.v), g(of_queries, s.value_width, layout, p.g);
  Array<S> plain(of_queries, s.value_width, layout), out(of_queries, s.value_width, layout);
  std::vector<T> stats(size_t(2 * s.batch * s.heads * s.queries + 1));
  AttentionForward<S>(s, p.scale, q.in(), k.in(), v.in(), p.Mask(), plain.rows(), nullptr);
  AttentionForward<S>(s, p.scale, q.in(), k.in(), v.in(), p.Mask(), out.rows(), stats.data());
  const Array<S> given(of_queries, s.value_width, layout, Rounded(out.Values()));
  Array<T> dq(of_queries, s.key_width, layout), dk(of_keys, s.key_width, layout),
      dv(of_keys, s.value_width, layout);
  AttentionBackward<S>(s, p.scale, q.in(), k.in(), v.in(), given.in(), g.in(), p.Mask(),
                       stats.data(), dq.rows(), dk.rows(), dv.rows());
  return {Rounded(plain.Values()),
          Rounded(out.Values()),
          std::vector<double>(stats.begin(), stats.end()),
          dq.Values(),
          dk.Values(),
          dv.Values()};
}

void ExpectBitsOfFloat(Problem p, Layout layout) {
  for (auto* x : {&p.q, &p.k, &p.v, &p.g}) *x = Rounded(*x);
  const auto want = RunRounded<float>(p, layout), got = RunRounded<BFloat16>(p, layout);
  const char* const names[] = {"out", "out for the backward", "stats", "dq", "dk", "dv"};
  for (size_t i = 0; i < want.size(); ++i)
    EXPECT_EQ(got[i], want[i]) << names[i] << " " << p.name << " isa " << ActiveIsa();
}

// Tokens in bfloat16: what the floats give that the tokens are, rounded.
TEST(ExactAttention, TokensInBFloat16) {
  ForEachIsa([] {
    uint64_t seed = 1500;
    for (Kind kind : kKinds) {
      for (int64_t width : {1, 20, 64}) {
        for (int64_t keys : {3, 70, 250, 2100}) {
          ++seed;
          if (keys == 2100 && kind != Kind::kAll && kind != Kind::kCausal) continue;
          const int64_t few = 1 + int64_t(seed % 3), many = seed % 2 == 0 ? 70 : 150;
          const AttentionShape shape = {2,    2,     keys == 250 ? many : few,
                                        keys, width, width == 20 ? 33 : width};
          Problem p = MakeProblem(seed, shape, kind);
          if (seed % 4 == 0) p.dropout = {0.3, seed};
          ExpectBitsOfFloat(p, seed % 2 == 0 ? Layout::kBHTW : Layout::kBTHW);
        }
      }
    }
  });
}

// Blocks that go over their keys together share copies of them; in rounds of several groups; with a
// dilation.
TEST(ExactAttention, TokensInBFloat16ThatAreMany) {
  for (Kind kind : {Kind::kAll, Kind::kCausal, Kind::kBand, Kind::kDocuments, Kind::kHoles})
    ExpectBitsOfFloat(MakeProblem(1600, {1, 1, 330, 1110, 96, 40}, kind), Layout::kBTHW);
  ExpectBitsOfFloat(MakeProblem(1601, {1, 1, 450, 770, 4, 3}, Kind::kHoles), Layout::kBTHW);
  ExpectBitsOfFloat(MakeProblem(1602, {1, 2, 200, 204, 9, 10, 2}, Kind::kWindow), Layout::kBTHW);
}

// Two keys, the second so many nats below the first, with a value that shows any weight.
TEST(ExactAttention, WeightsBelowTwoToTheMinus64AreZeroInFloat) {
  ForEachIsa([] {
    for (const int64_t T : {1, 70}) {
      for (const double below : {40.0, 50.0}) {
        Problem p;
        p.shape = {1, 1, T, 2, 1, 1};
        p.scale = 1;
        p.q.assign(size_t(T), 1), p.g.assign(size_t(T), 1);
        p.k = {0, -below}, p.v = {0, 1e30};
        const double weight = std::exp(-below);
        const Result in_float = RunKernel<float>(p), in_double = RunKernel<double>(p);
        EXPECT_NEAR(in_double.out[0], weight * 1e30, 1e-9 * weight * 1e30);
        if (below == 40) {
          EXPECT_NEAR(in_float.out[0], weight * 1e30, 1e-5 * weight * 1e30) << ActiveIsa();
          EXPECT_GT(in_float.dv[1], 0);
        } else {
          EXPECT_EQ(in_float.out[0], 0) << ActiveIsa();
          EXPECT_EQ(in_float.dv[1], 0) << ActiveIsa();
          EXPECT_EQ(in_float.dq[0], 0) << ActiveIsa();
        }
      }
    }
  });
}

TEST(ExactAttention, Dilated) {
  uint64_t seed = 2000;
  for (int64_t g : {2, 3, 5}) {
    for (Kind kind : {Kind::kAll, Kind::kCausal, Kind::kWindow, Kind::kDocuments, Kind::kHoles}) {
      for (int64_t T : {1, 2, 9, 71}) {
        const int64_t ahead = int64_t(++seed % 3) * g;
        ExpectDefinition(MakeProblem(seed, {T < 70 ? 2 : 1, 1, T, T + ahead, 9, 10, g}, kind));
      }
    }
  }
  // More than one block of queries and tile of keys for each remainder.
  ExpectDefinition(MakeProblem(++seed, {1, 1, 200, 202, 5, 4, 2}, Kind::kDocuments));
}

TEST(ExactAttention, CrossAndRandomShapes) {
  Random random(7);
  for (int i = 0; i < 40; ++i) {
    const int64_t longest = i % 8 == 0 ? 200 : 70;
    const AttentionShape shape = {1 + random.Below(2),   1 + random.Below(2),
                                  random.Below(longest), random.Below(longest),
                                  1 + random.Below(16),  1 + random.Below(20)};
    const Kind kinds[] = {Kind::kAll, Kind::kLengths, Kind::kHoles, Kind::kCausal, Kind::kBand};
    ExpectDefinition(MakeProblem(3000 + uint64_t(i), shape, kinds[random.Below(5)]));
  }
}

// The backward in rounds of two and of four groups; decoding in parts.
TEST(ExactAttention, LongAndInGroups) {
  for (Kind kind : {Kind::kAll, Kind::kCausal, Kind::kWindow, Kind::kHoles})
    ExpectDefinition(MakeProblem(4001, {1, 1, 2, 2100, 4, 3}, kind));
  for (Kind kind : {Kind::kAll, Kind::kWindow})
    ExpectDefinitionOnBest(MakeProblem(4000, {1, 1, 200, 390, 5, 4}, kind));
  for (Kind kind : {Kind::kCausal, Kind::kHoles})
    ExpectDefinitionOnBest(MakeProblem(4002, {1, 1, 450, 770, 4, 3}, kind));
}

// Each mask with dropout; rates, dilations and types of width take turns.
TEST(ExactAttention, Dropout) {
  uint64_t seed = 2500;
  for (Kind kind : kKinds) {
    for (int64_t T : {1, 3, 66, 100}) {
      ++seed;
      const int64_t step =
          kind == Kind::kCausal || kind == Kind::kHoles ? 1 + int64_t(seed % 3) : 1;
      Problem p = MakeProblem(seed, {T < 10 ? 2 : 1, 2, T, T + 2 * step, 5, 3, step}, kind);
      p.dropout = {seed % 2 == 0 ? 0.3 : 0.75, seed << 35 | seed, int64_t(seed % 4)};
      ExpectDefinition(p);
    }
  }
}

TEST(ExactAttention, DropoutOfNothingAndOfEverything) {
  Problem p = MakeProblem(2600, {1, 2, 70, 100, 9, 5}, Kind::kCausal);
  const Result whole = RunKernel<float>(p);
  p.dropout = {1e-12, 5};  // less than one in 2^32
  EXPECT_EQ(RunKernel<float>(p).dv, whole.dv);
  p.dropout.rate = 1;
  Result nothing = RunKernel<float>(p);
  for (const std::vector<double>* x : nothing.All())
    EXPECT_EQ(std::count(x->begin(), x->end(), 0.0), int64_t(x->size()));
}

// The identity as values shows what is kept: about the share that the rate says, in every head,
// and others for another seed.
TEST(ExactAttention, DropoutTakesItsShare) {
  Problem p = MakeProblem(2700, {2, 2, 200, 64, 8, 64}, Kind::kAll);
  for (size_t i = 0; i < p.v.size(); ++i) p.v[i] = i % 64 == i / 64 % 64 ? 1 : 0;
  const auto kept = [&](uint64_t seed) {
    p.dropout = {0.2, seed};
    return RunKernel<float>(p).out;
  };
  const std::vector<double> x = kept(1), y = kept(2), again = kept(1);
  EXPECT_EQ(x, again);
  const size_t head = 200 * 64;
  double differ = 0;
  for (size_t h = 0; h < 4; ++h) {
    const double share = double(std::count(x.begin() + int64_t(h * head),
                                           x.begin() + int64_t((h + 1) * head), 0.0)) /
                         double(head);
    EXPECT_NEAR(share, 0.2, 0.018) << h;  // 5 deviations
    for (size_t i = 0; i < head; ++i)
      differ += (x[h * head + i] == 0) != (x[(h + 1) % 4 * head + i] == 0);
  }
  EXPECT_NEAR(differ / double(4 * head), 0.32, 0.02) << "heads draw for themselves";
  differ = 0;
  for (size_t i = 0; i < x.size(); ++i) differ += (x[i] == 0) != (y[i] == 0);
  EXPECT_NEAR(differ / double(x.size()), 0.32, 0.02) << "seeds";
}

// Scores up to thousands, of which each row's largest decides.
TEST(ExactAttention, HostileScores) {
  for (int64_t T : {3, 110}) {
    Problem p = MakeProblem(5000, {1, 1, T, T + 20, 8, 4}, Kind::kCausal);
    for (size_t i = 0; i < p.q.size(); ++i) p.q[i] = float(std::round(p.q[i] * 8) * 1024);
    for (double& x : p.k) x = float(std::round(x * 8) / 8);  // scores are exact in float
    ExpectDefinition(p, Layout::kBHTW, 8e-6);
  }
}

// The kernel's own gradients need no definition: differences of what it gives.
TEST(ExactAttention, GradientsAreDifferences) {
  for (Kind kind : {Kind::kAll, Kind::kCausal, Kind::kEmpty, Kind::kHoles}) {
    const Problem p = MakeProblem(6000, {1, 1, 6, 8, 3, 2}, kind);
    Result r = RunKernel<double>(p);
    const auto loss = [&](const Problem& of) {
      const std::vector<double> out = RunKernel<double>(of).out;
      return std::inner_product(out.begin(), out.end(), p.g.begin(), 0.0);
    };
    std::vector<double> Problem::*const inputs[] = {&Problem::q, &Problem::k, &Problem::v};
    for (size_t n = 0; n < 3; ++n) {
      for (size_t i = 0; i < (p.*inputs[n]).size(); ++i) {
        Problem up = p, down = p;
        (up.*inputs[n])[i] += 1e-5, (down.*inputs[n])[i] -= 1e-5;
        EXPECT_NEAR((*r.All()[n + 1])[i], (loss(up) - loss(down)) / 2e-5, 1e-8) << p.name;
      }
    }
  }
}

TEST(ExactAttention, WhatIsNotSeenHasNoPart) {
  ForEachIsa([] {
    for (Kind kind : {Kind::kCausal, Kind::kWindow, Kind::kBand, Kind::kLengths, Kind::kDocuments,
                      Kind::kHoles}) {
      for (int64_t T : {3, 100}) {
        const Problem p = MakeProblem(7000, {T < 100 ? 2 : 1, 1, T, T + 2, 9, 5}, kind);
        const Result in_float = RunKernel<float>(p), in_double = RunKernel<double>(p);
        for (const int64_t j : {int64_t{0}, T / 2, T + 1}) {
          ExpectUnseenHasNoPart(p, in_float, j, kNan, RunIn<float>);
          ExpectUnseenHasNoPart(p, in_double, j, kNan, RunIn<double>);
          ExpectUnseenHasNoPart(p, in_float, j, 7.0, RunIn<float>);
          if (T < 100) ExpectUnseenHasNoPart(p, in_double, j, 7.0, RunIn<double>);
        }
      }
    }
  });
}

// A query and its gradient of NaN reach the keys that it sees and no others; of 45 queries, which
// are one block, gradients are not added to what was there.
TEST(ExactAttention, GradientsOfNanReachWhatWasSeen) {
  for (const int64_t T : {45, 90}) {
    Problem p = MakeProblem(8000, {1, 1, T, T, 5, 6}, Kind::kCausal);
    const Result without = RunKernel<float>(p);
    const int64_t t = 40;
    for (int64_t c = 0; c < 5; ++c) p.q[size_t(t * 5 + c)] = kNan;
    const Result r = RunKernel<float>(p);
    for (int64_t j = 0; j < T; ++j) {
      EXPECT_EQ(std::isnan(r.dk[size_t(j * 5)]), j <= t) << j;
      EXPECT_EQ(std::isnan(r.dv[size_t(j * 6)]), j <= t) << j;
      EXPECT_EQ(std::isnan(r.out[size_t(j * 6)]), j == t) << j;
      EXPECT_EQ(std::isnan(r.dq[size_t(j * 5)]), j == t) << j;
      if (j <= t) continue;
      EXPECT_NEAR(r.dk[size_t(j * 5)], without.dk[size_t(j * 5)], 1e-5) << j;
      EXPECT_NEAR(r.dv[size_t(j * 6)], without.dv[size_t(j * 6)], 1e-5) << j;
    }
  }
}

// Scores that are exact in float, of which the largest have all the weight.
TEST(ExactAttention, ScoresOfAnySize) {
  ForEachIsa([] {
    for (const double size : {0x1p10, 0x1p23, 0x1p24, 0x1p31, 0x1p40, 0x1p100}) {
      for (const int64_t T : {1, 5, 70, 230}) {
        for (const double from : {-4.0, 0.0, 1.0}) {
          Problem p = MakeProblem(8500, {1, 2, T, T, 1, 3}, Kind::kCausal);
          p.scale = 1;
          for (double& x : p.q) x = size;
          for (size_t j = 0; j < p.k.size(); ++j) p.k[j] = from + double(7 * j % 5);
          p.name += " scores of " + std::to_string(size) + " from " + std::to_string(from);
          ExpectClose<float>(p, Reference(p), Layout::kBTHW, 1e-5);
          ExpectClose<double>(p, Reference(p), Layout::kBTHW, 1e-12);
        }
      }
    }
  });
}

TEST(ExactAttention, AnyNumberOfThreads) {
  const int before = NumThreads();
  for (Kind kind : {Kind::kCausal, Kind::kWindow, Kind::kHoles}) {
    const bool drops = kind == Kind::kCausal;
    for (const AttentionShape& shape :
         {AttentionShape{1, 1, 450, 780, 4, 3}, AttentionShape{2, 3, 130, 150, 5, 4},
          AttentionShape{1, 1, 530, 1110, 96, 40}, AttentionShape{1, 2, 2, 5000, 4, 3}}) {
      Problem p = MakeProblem(9000, shape, kind);
      if (drops) p.dropout = {0.1, 3};
      SetNumThreads(1);
      Result want = RunKernel<float>(p);
      for (int threads : {2, 3, 5}) {
        SetNumThreads(threads);
        Result got = RunKernel<float>(p);
        for (size_t i = 0; i < 4; ++i) {
          EXPECT_TRUE(slot_test::SameBits(*got.All()[i], *want.All()[i], want.All()[i]->size()))
              << p.name << " output " << i << " threads " << threads;
        }
      }
    }
  }
  SetNumThreads(before);
}

TEST(ExactAttention, ScratchMayHoldAnything) {
  ForEachIsa([] {
    for (Kind kind : kKinds) {
      for (const int64_t T : {3, 70}) {
        const Problem p = MakeProblem(10000, {1, 1, T, T + 4, 9, 5}, kind);
        Result want = RunKernel<float>(p);
        Workspace::PoisonAll(true);
        Result got = RunKernel<float>(p);
        Workspace::PoisonAll(false);
        for (size_t i = 0; i < 4; ++i)
          EXPECT_EQ(RelativeRms(*got.All()[i], *want.All()[i]), 0) << p.name << " output " << i;
      }
    }
  });
}

}  // namespace
}  // namespace cistern
