// The kernels of linear attention against their definition, on every instruction set.
#include "cistern/kernels/linear_attention.h"

#include "cistern/base/parallel.h"
#include "cistern/kernels/ref/linear_attention_ref.h"
#include "cistern/kernels/slot_test.h"
#include "cistern/kernels/workspace.h"

namespace cistern {
namespace {

using slot_test::Array;
using slot_test::ExpectDifferences;
using slot_test::ForEachIsa;
using slot_test::kInf;
using slot_test::Layout;
using slot_test::Normals;
using slot_test::RelativeRms;
using slot_test::SameBits;

const LinearRule kRules[] = {
    {FeatureMap::kEluPlusOne, 0, DivisorRule::kPlus, 1e-6},
    {FeatureMap::kEluPlusOne, 0.125, DivisorRule::kPlus, 1e-3},
    {FeatureMap::kEluPlusOne, 0, DivisorRule::kNone, 0.25},
    {FeatureMap::kNone, 0, DivisorRule::kNone, 2},
    {FeatureMap::kNone, 0, DivisorRule::kAtLeast, 4},
    {FeatureMap::kNone, 0, DivisorRule::kMagnitude, 8},
    {FeatureMap::kNone, 0, DivisorRule::kSignSafe, 8},
};

struct Problem {
  SlotShape shape;
  LinearRule rule;
  std::vector<double> q, k, v, memory, g, g_memory;
  std::vector<uint8_t> starts;
  std::vector<int64_t> lengths;
  std::string name;
  RowMask Mask() const {
    return {starts.empty() ? nullptr : starts.data(), lengths.empty() ? nullptr : lengths.data()};
  }
  int64_t Columns() const { return rule.Columns(shape.width); }
};

Problem MakeProblem(uint64_t seed, const SlotShape& shape, const LinearRule& rule,
                    bool starts = false, bool lengths = false, int64_t often = 12) {
  Random random(seed);
  Problem p{shape, rule, {}, {}, {}, {}, {}, {}, {}, {}, {}};
  const int64_t rows = shape.batch * shape.heads, tokens = rows * shape.length,
                size = rows * shape.slots * p.Columns();
  p.q = Normals(random, tokens * shape.slots), p.k = Normals(random, tokens * shape.slots);
  p.v = Normals(random, tokens * shape.width), p.g = Normals(random, tokens * shape.width);
  p.memory = Normals(random, size), p.g_memory = Normals(random, size);
  // Sums of features are positive where the map's are.
  if (rule.map == FeatureMap::kEluPlusOne) {
    for (double& m : p.memory) m = std::abs(m);
  }
  for (int64_t i = 0; starts && i < shape.batch * shape.length; ++i)
    p.starts.push_back(random.Below(often) == 0 ? 1 : 0);
  for (int64_t b = 0; lengths && b < shape.batch; ++b)
    p.lengths.push_back(b == 0 ? shape.length : random.Below(shape.length + 1));
  p.name = "seed " + std::to_string(seed) + " rule " + std::to_string(int(rule.map)) + " " +
           std::to_string(int(rule.divisor)) + " B" + std::to_string(shape.batch) + " H" +
           std::to_string(shape.heads) + " T" + std::to_string(shape.length) + " n" +
           std::to_string(shape.slots) + " d" + std::to_string(shape.width) + " isa " + ActiveIsa();
  return p;
}

struct Result {
  std::vector<double> out, memory, dq, dk, dv, dmemory;
};

template <class T>
Result Kernels(const Problem& p, Layout layout = Layout::kBTHW, bool backward = true) {
  const int64_t n = p.shape.slots, d = p.shape.width;
  const Array<T> q(p.shape, n, layout, p.q), k(p.shape, n, layout, p.k), v(p.shape, d, layout, p.v),
      g(p.shape, d, layout, p.g);
  Array<T> out(p.shape, d, layout), z(p.shape, 1, layout), dq(p.shape, n, layout),
      dk(p.shape, n, layout), dv(p.shape, d, layout);
  Result r;
  r.memory = p.memory;
  LinearForward<T>(p.shape, p.rule, q.in(), k.in(), v.in(), p.Mask(), r.memory.data(), out.rows(),
                   z.rows());
  r.out = out.Values();
  if (!backward) return r;
  r.dmemory = p.g_memory;
  LinearBackward<T>(p.shape, p.rule, q.in(), k.in(), v.in(), std::as_const(out).rows(),
                    std::as_const(z).rows(), g.in(), p.Mask(), p.memory.data(), r.dmemory.data(),
                    dq.rows(), dk.rows(), dv.rows());
  r.dq = dq.Values(), r.dk = dk.Values(), r.dv = dv.Values();
  return r;
}

Result Reference(const Problem& p) {
  Result r{p.g, p.memory, p.q, p.k, p.v, p.memory};
  ref::LinearForward(p.shape, p.rule, p.q.data(), p.k.data(), p.v.data(), p.Mask(), r.memory.data(),
                     r.out.data());
  ref::LinearBackward(p.shape, p.rule, p.q.data(), p.k.data(), p.v.data(), p.Mask(),
                      p.memory.data(), p.g.data(), p.g_memory.data(), r.dq.data(), r.dk.data(),
                      r.dv.data(), r.dmemory.data());
  return r;
}

const std::pair<const char*, std::vector<double> Result::*> kParts[] = {
    {"out", &Result::out}, {"memory", &Result::memory}, {"dq", &Result::dq},
    {"dk", &Result::dk},   {"dv", &Result::dv},         {"dmemory", &Result::dmemory}};

// Signed features cancel in z, which the floor of the divisor bounds.
template <class T>
double Tolerance(const LinearRule& rule) {
  const double cancels =
      rule.map == FeatureMap::kNone && rule.divisor != DivisorRule::kNone ? 10 : 1;
  return cancels * (std::is_same_v<T, float> ? 1e-6 : 1e-13);
}

template <class T>
void ExpectDefinition(const Problem& p, Layout layout) {
  const Result got = Kernels<T>(p, layout), want = Reference(p);
  for (const auto& [part, values] : kParts) {
    EXPECT_LE(RelativeRms(got.*values, want.*values), Tolerance<T>(p.rule))
        << p.name << (std::is_same_v<T, float> ? " float " : " double ") << part;
  }
}
void ExpectDefinitionInBoth(const Problem& p, Layout layout = Layout::kBTHW) {
  ExpectDefinition<float>(p, layout);
  ExpectDefinition<double>(p, layout);
}

void ExpectSame(const Result& got, const Result& want, const std::string& name) {
  for (const auto& [part, values] : kParts) {
    EXPECT_TRUE((got.*values).size() == (want.*values).size() &&
                SameBits(got.*values, want.*values, (want.*values).size()))
        << name << " " << part;
  }
}

// One feature, one column: phi(k) = 1, 2, e^-1; a document begins at the third token.
TEST(LinearReference, ByHand) {
  Problem p = MakeProblem(1, {1, 1, 3, 1, 1}, {FeatureMap::kEluPlusOne, 0, DivisorRule::kPlus, 1});
  p.q = {0, 1, -1}, p.k = {0, 1, -1}, p.v = {2, 5, 3}, p.memory = {4, 2}, p.starts = {0, 0, 1};
  const double e = std::exp(-1);
  const std::vector<double> want = {6.0 / 4, 2 * 16.0 / (2 * 5 + 1), e * 3 * e / (e * e + 1)};
  const Result r = Reference(p);
  for (size_t t = 0; t < 3; ++t) EXPECT_NEAR(r.out[t], want[t], 1e-15);
  EXPECT_NEAR(r.memory[0], 3 * e, 1e-15);
  EXPECT_NEAR(r.memory[1], e, 1e-15);
  EXPECT_EQ(r.dmemory.size(), 2u);
  ExpectDefinitionInBoth(p);
}

double Loss(const Problem& p) {
  const Result r = Reference(p);
  double sum = 0;
  for (size_t i = 0; i < r.out.size(); ++i) sum += p.g[i] * r.out[i];
  for (size_t i = 0; i < r.memory.size(); ++i) sum += p.g_memory[i] * r.memory[i];
  return sum;
}

TEST(LinearReference, FiniteDifferences) {
  uint64_t seed = 1;
  for (const LinearRule& rule : kRules) {
    for (const bool masked : {false, true}) {
      Problem p = MakeProblem(seed++, {2, 1, 7, 3, 2}, rule, masked, masked);
      const Result r = Reference(p);
      const auto check = [&](std::vector<double>& x, const std::vector<double>& gradient) {
        ExpectDifferences(x, gradient, p.name, [&] { return Loss(p); });
      };
      check(p.q, r.dq), check(p.k, r.dk), check(p.v, r.dv), check(p.memory, r.dmemory);
    }
  }
}

TEST(LinearAttention, LengthsAndRules) {
  ForEachIsa([] {
    uint64_t seed = 1;
    for (const LinearRule& rule : kRules) {
      for (int64_t T : {0, 1, 2, 31, 32, 33, 40, 64, 65, 129, 200}) {
        ExpectDefinitionInBoth(MakeProblem(seed++, {2, 2, T, 17, 5}, rule),
                               T % 2 == 0 ? Layout::kBHTW : Layout::kBTHW);
        ExpectDefinitionInBoth(MakeProblem(seed++, {1, 1, T, 16, 32}, rule),
                               T % 2 == 0 ? Layout::kBHTW : Layout::kBTHW);
      }
    }
    ExpectDefinitionInBoth(MakeProblem(seed++, {1, 2, 2100, 64, 64}, kRules[0]));
  });
}

TEST(LinearAttention, Widths) {
  ForEachIsa([] {
    uint64_t seed = 1000;
    for (int64_t n : {1, 3, 5, 16, 17, 64, 65}) {
      for (int64_t d : {1, 3, 5, 16, 17, 64, 65}) {
        for (int64_t T : {1, 37}) {
          LinearRule rule = kRules[seed++ % 7];
          // One feature nearly cancels in the quotient, and so does its gradient.
          if (n == 1 && rule.divisor == DivisorRule::kPlus) rule.value = 2;
          ExpectDefinitionInBoth(MakeProblem(seed, {1, 2, T, n, d}, rule));
        }
      }
    }
  });
}

TEST(LinearAttention, RandomShapesWithStartsAndLengths) {
  Workspace::PoisonAll(true);
  ForEachIsa([] {
    Random random(7);
    for (int i = 0; i < 60; ++i) {
      const SlotShape shape{1 + random.Below(3), 1 + random.Below(3), random.Below(200),
                            1 + random.Below(40), 1 + random.Below(80)};
      ExpectDefinitionInBoth(MakeProblem(3000 + uint64_t(i), shape, kRules[random.Below(7)],
                                         random.Below(3) != 0, random.Below(2) == 0),
                             random.Below(2) == 0 ? Layout::kBHTW : Layout::kBTHW);
    }
  });
  Workspace::PoisonAll(false);
}

// Outputs before t do not change by a bit when the tokens from t on become others, NaN or infinite.
TEST(LinearAttention, CausalBitwise) {
  ForEachIsa([] {
    for (const LinearRule& rule : {kRules[0], kRules[5]}) {
      const Problem p = MakeProblem(5000, {1, 1, 140, 18, 21}, rule);
      const Result whole = Kernels<float>(p, Layout::kBTHW, false);
      for (int64_t t : {2, 3, 17, 31, 32, 33, 50, 64, 127, 128, 129, 139}) {
        for (double poison : {0.5, std::numeric_limits<double>::quiet_NaN(), kInf, -kInf, 1e30}) {
          Problem other = p;
          std::fill(other.q.begin() + t * 18, other.q.end(), poison);
          std::fill(other.k.begin() + t * 18, other.k.end(), poison);
          std::fill(other.v.begin() + t * 21, other.v.end(), poison);
          EXPECT_TRUE(
              SameBits(Kernels<float>(other, Layout::kBTHW, false).out, whole.out, size_t(t) * 21))
              << p.name << " t " << t;
        }
      }
    }
  });
}

// One head on several threads is cut into runs of segments; documents and padding fall anywhere.
TEST(LinearAttention, SameBitsForAnyThreadCount) {
  const int threads = NumThreads();
  uint64_t seed = 6000;
  for (const LinearRule& rule : {kRules[0], kRules[3]}) {
    for (const SlotShape& shape : {SlotShape{3, 3, 300, 20, 33}, SlotShape{1, 1, 5000, 20, 16},
                                   SlotShape{2, 1, 4096, 16, 7}, SlotShape{1, 2, 3071, 5, 8}}) {
      for (const int masks : {0, 1, 2, 3}) {
        const Problem p = MakeProblem(seed++, shape, rule, masks & 1, masks & 2, 900);
        SetNumThreads(1);
        const Result one = Kernels<float>(p);
        for (const int count : {2, 3, 5}) {
          SetNumThreads(count);
          ExpectSame(Kernels<float>(p), one, p.name + " threads " + std::to_string(count));
        }
      }
    }
  }
  SetNumThreads(2);
  const Problem p = MakeProblem(seed++, {1, 1, 3000, 9, 6}, kRules[1], true, false, 900);
  ExpectDefinitionInBoth(p);
  SetNumThreads(threads);
}

// A float count stops at 2^24; the memory goes on.
TEST(LinearAttention, CountsBeyondFloat) {
  for (int64_t T : {1, 100}) {
    Problem p = MakeProblem(1, {1, 1, T, 1, 1}, {FeatureMap::kNone, 0, DivisorRule::kPlus, 1e-6});
    p.memory = {16777216.0, 16777216.0};
    for (auto* x : {&p.q, &p.k, &p.v}) std::fill(x->begin(), x->end(), 1);
    const Result r = Kernels<float>(p, Layout::kBTHW, false);
    EXPECT_EQ(r.memory[0], 16777216.0 + double(T));
    EXPECT_EQ(r.memory[1], 16777216.0 + double(T));
  }
}

TEST(LinearAttention, NanIsNotSwallowed) {
  for (const LinearRule& rule : {kRules[0], kRules[4]}) {
    for (int64_t T : {1, 9}) {
      for (auto input : {&Problem::q, &Problem::k, &Problem::v}) {
        Problem p = MakeProblem(1, {1, 1, T, 4, 4}, rule);
        (p.*input)[size_t(T / 2 * 4)] = std::numeric_limits<double>::quiet_NaN();
        EXPECT_TRUE(std::isnan(Kernels<float>(p).out[size_t(T / 2 * 4)])) << p.name;
      }
    }
  }
}

}  // namespace
}  // namespace cistern
