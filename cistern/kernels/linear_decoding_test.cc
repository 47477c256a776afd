// Linear attention with writes put off against its memory in double, on every instruction set.
#include "cistern/kernels/linear_decoding.h"

#include "cistern/base/parallel.h"
#include "cistern/kernels/decoding_test.h"

namespace cistern::slot_test {
namespace {

// Features of queries and keys, or tokens that a map makes features of, and the memory before them.
struct Task {
  SlotShape shape;
  LinearRule rule;
  int64_t directions = 0, channels = 0;  // of Fourier features: m and d_k; slots = 2 m
  std::vector<double> q, k, v, memory, scale, matrices;
  std::vector<uint8_t> starts;
  std::vector<int64_t> lengths;

  int64_t given() const { return rule.map == FeatureMap::kFourier ? channels : shape.slots; }
  std::string Name() const {
    return "T " + std::to_string(shape.length) + " n " + std::to_string(shape.slots) + " d " +
           std::to_string(shape.width) + " map " + std::to_string(int(rule.map)) + " divisor " +
           std::to_string(int(rule.divisor)) + " " + ActiveIsa();
  }
};

struct Decoded {
  std::vector<double> out, memory;
};

template <class T>
std::vector<T> As(const std::vector<double>& x) {
  std::vector<T> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = static_cast<T>(x[i]);
  return y;
}

// run(tokens' rows, map) with everything in T.
template <class T, class Run>
std::vector<double> WithRows(const Task& p, Layout layout, Run&& run) {
  using C = ComputeType<T>;
  const Array<T> q(p.shape, p.given(), layout, p.q), k(p.shape, p.given(), layout, p.k),
      v(p.shape, p.shape.width, layout, p.v);
  Array<T> out(p.shape, p.shape.width, layout);
  const std::vector<C> scale = As<C>(p.scale), matrices = As<C>(p.matrices);
  const FourierMap<C> map = {scale.data(), matrices.data(), p.channels, p.directions, true, 0.3};
  const FourierMap<C>* const fourier = p.rule.map == FeatureMap::kFourier ? &map : nullptr;
  EachToken(p, [&](int64_t t, const RowMask& mask) {
    run(From(q.in(), t), From(k.in(), t), From(v.in(), t), mask, From(out.rows(), t), fourier);
  });
  return out.Values();
}

Decoded InDouble(const Task& p) {
  Decoded r{{}, p.memory};
  r.out = WithRows<double>(p, Layout::kBHTW,
                           [&](const auto& q, const auto& k, const auto& v, const RowMask& mask,
                               const auto& out, const auto* fourier) {
                             LinearForward<double>(OneToken(p.shape), p.rule, q, k, v, mask,
                                                   r.memory.data(), out, {}, fourier);
                           });
  return r;
}

class Held {
 public:
  explicit Held(const SlotShape& shape)
      : shape_(shape),
        bytes_(size_t(shape.batch * shape.heads * DecodingBytes(shape.slots, shape.width, false))) {
  }
  std::byte* data() const { return bytes_.data(); }
  std::vector<std::byte> Copy() const { return bytes_.Copy(); }
  void Begin(const std::vector<double>& memory) {
    BeginLinearDecoding(shape_, memory.data(), data());
  }
  std::vector<double> End() const {
    std::vector<double> memory(
        size_t(shape_.batch * shape_.heads * shape_.slots * (shape_.width + 1)));
    EndLinearDecoding(shape_, data(), memory.data());
    return memory;
  }

 private:
  SlotShape shape_;
  AlignedBytes bytes_;
};

// Token by token. ends: after each token the state is taken to double and back.
template <class T>
Decoded Decode(const Task& p, Layout layout, bool ends = false) {
  Held held(p.shape);
  held.Begin(p.memory);
  Decoded r;
  r.out = WithRows<T>(p, layout,
                      [&](const auto& q, const auto& k, const auto& v, const RowMask& mask,
                          const auto& out, const auto* fourier) {
                        LinearDecode<T>(OneToken(p.shape), p.rule, q, k, v, mask, held.data(), out,
                                        fourier);
                        if (ends) held.Begin(held.End());
                      });
  r.memory = held.End();
  return r;
}

constexpr DivisorRule kRules[] = {DivisorRule::kPlus, DivisorRule::kAtLeast,
                                  DivisorRule::kMagnitude, DivisorRule::kSignSafe};

Task Of(uint64_t seed, FeatureMap map, SlotShape shape, int64_t channels = 12) {
  Task p;
  p.rule = {map, map == FeatureMap::kEluPlusOne ? 0.01 : 0, kRules[seed % 4], 0.1};
  if (map == FeatureMap::kFourier) {
    p.directions = shape.slots, p.channels = channels;
    shape.slots *= 2;
  }
  p.shape = shape;
  Random random(seed);
  const int64_t tokens = shape.batch * shape.heads * shape.length;
  p.q = Normals(random, tokens * p.given()), p.k = Normals(random, tokens * p.given());
  p.v = Normals(random, tokens * shape.width);
  p.memory = Normals(random, shape.batch * shape.heads * shape.slots * (shape.width + 1));
  p.scale = Normals(random, shape.heads * p.channels);
  p.matrices = Normals(random, shape.heads * p.directions * p.channels);
  // Divisors far from zero: what cancels there is not what is tested.
  if (map == FeatureMap::kNone) {
    for (auto* x : {&p.q, &p.k})
      for (double& value : *x) value = std::abs(value);
  }
  const int64_t columns = shape.width + 1;
  for (size_t i = size_t(columns) - 1; i < p.memory.size(); i += size_t(columns))
    p.memory[i] = 3 + std::abs(p.memory[i]);
  if (map == FeatureMap::kFourier) p.rule.divisor = DivisorRule::kPlus, p.rule.value = 40;
  return p;
}

void ExpectAsInDouble(const Task& p, Layout layout = Layout::kBTHW) {
  const Decoded want = InDouble(p);
  for (const bool ends : {false, true}) {
    const Decoded got = Decode<float>(p, layout, ends);
    EXPECT_LE(RelativeRms(got.out, want.out), 2e-6) << p.Name() << " " << ends;
    EXPECT_LE(RelativeRms(got.memory, want.memory), 1e-6) << p.Name() << " " << ends;
  }
}

constexpr FeatureMap kMaps[] = {FeatureMap::kNone, FeatureMap::kEluPlusOne, FeatureMap::kFourier};

TEST(LinearDecoding, LengthsAndMaps) {
  ForEachIsa([] {
    uint64_t seed = 1;
    for (FeatureMap map : kMaps) {
      for (int64_t T : {0, 1, 2, 7, 8, 9, 33, 100}) {
        for (int rule = 0; rule < 4; ++rule)
          ExpectAsInDouble(Of(seed++, map, {2, 2, T, 17, 5}),
                           T % 2 == 0 ? Layout::kBHTW : Layout::kBTHW);
      }
      ExpectAsInDouble(Of(seed++, map, {1, 2, 500, 64, 64}, 64));
    }
  });
}

TEST(LinearDecoding, Widths) {
  ForEachIsa([] {
    uint64_t seed = 1000;
    for (FeatureMap map : kMaps) {
      for (int64_t n : {1, 3, 16, 65}) {
        for (int64_t d : {1, 5, 16, 65, 96}) ExpectAsInDouble(Of(seed++, map, {1, 2, 20, n, d}, d));
      }
    }
  });
}

TEST(LinearDecoding, StartsAndLengths) {
  ForEachIsa([] {
    for (uint64_t seed = 2000; seed < 2012; ++seed) {
      Task p = Of(seed, kMaps[seed % 3], {3, 2, 50, 9, 20});
      Random random(seed);
      for (int64_t i = 0; i < 3 * 50; ++i) p.starts.push_back(random.Below(10) == 0);
      if (seed % 4 != 0) p.lengths = {50, 31, 0};
      ExpectAsInDouble(p);
    }
  });
}

// In bfloat16 the rows are the rounded ones, and all else is as in float.
TEST(LinearDecoding, BFloat16) {
  ForEachIsa([] {
    for (FeatureMap map : kMaps) {
      Task p = Of(3000, map, {2, 2, 40, 32, 64});
      for (auto* x : {&p.q, &p.k, &p.v}) {
        for (double& value : *x) value = static_cast<float>(BFloat16(static_cast<float>(value)));
      }
      const Decoded want = InDouble(p), got = Decode<BFloat16>(p, Layout::kBTHW);
      EXPECT_LE(RelativeRms(got.out, want.out), 3e-3) << p.Name();
      EXPECT_LE(RelativeRms(got.memory, want.memory), 1e-6) << p.Name();
    }
  });
}

// Three million tokens whose sum a float would no longer see grow.
TEST(LinearDecoding, KeepsWhatFloatsLose) {
  const SlotShape shape = {1, 1, 1, 16, 16};
  const LinearRule rule = {FeatureMap::kNone, 0, DivisorRule::kPlus, 1e-6};
  Held held(shape);
  held.Begin(std::vector<double>(16 * 17));
  std::vector<float> ones(16, 1.0f), v(16), out(16);
  const auto rows = [](auto& x) { return Rows<float>{x.data(), 16, 16, 16}; };
  const auto in = [](auto& x) { return Rows<const float>{x.data(), 16, 16, 16}; };
  constexpr int64_t kTokens = 3'000'000;
  double sum = 0;
  for (int64_t t = 0; t < kTokens; ++t) {
    const float x = t < kTokens / 2 ? 7.3f : 21.7f;
    v.assign(16, x);
    sum += double(x);
    LinearDecode<float>(shape, rule, in(ones), in(ones), in(v), {}, held.data(), rows(out));
  }
  EXPECT_NEAR(held.End()[5] / sum, 1, 1e-6);
  EXPECT_NEAR(double(out[5]) / (sum / kTokens), 1, 1e-6);
}

// Columns that a number that is not finite reaches are not finite, as in double, and no others.
TEST(LinearDecoding, WhatIsNotFinite) {
  ForEachIsa([] {
    const int64_t n = 17, d = 20;
    for (const double bad :
         {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
          -std::numeric_limits<double>::infinity()}) {
      for (const bool in_value : {true, false}) {
        Task p = Of(5000, FeatureMap::kNone, {1, 2, 40, n, d});
        if (in_value) {
          p.v[20 * d + 3] = bad;
        } else {
          p.k[20 * n + 3] = bad;
        }
        const Decoded want = InDouble(p), got = Decode<float>(p, Layout::kBHTW);
        for (const auto& [x, y] : {std::pair(got.out, want.out), {got.memory, want.memory}}) {
          ASSERT_EQ(x.size(), y.size());
          for (size_t i = 0; i < x.size(); ++i) {
            if (std::isfinite(y[i])) {
              EXPECT_NEAR(x[i], y[i], 1e-5 * (1 + std::abs(y[i]))) << p.Name() << " " << i;
            } else {
              EXPECT_FALSE(std::abs(x[i]) < std::numeric_limits<float>::max())
                  << p.Name() << " " << i;
            }
          }
        }
      }
    }
  });
}

TEST(LinearDecoding, ThreadsChangeNoBits) {
  const Task p = Of(7000, FeatureMap::kEluPlusOne, {5, 3, 40, 64, 64});
  const auto run = [&](int threads) {
    SetNumThreads(threads);
    return Decode<float>(p, Layout::kBHTW);
  };
  const int threads = NumThreads();
  const Decoded one = run(1), three = run(3);
  SetNumThreads(threads);
  EXPECT_TRUE(SameBits(one.out, three.out, one.out.size()));
  EXPECT_TRUE(SameBits(one.memory, three.memory, one.memory.size()));
}

// The bytes are those of the tokens alone: files of states are the same from run to run, and what
// one instruction set began another one continues.
TEST(LinearDecoding, BytesAreThoseOfTheTokens) {
  const Task p = Of(8000, FeatureMap::kEluPlusOne, {1, 1, 3, 33, 20});
  std::vector<std::byte> begun;
  ForEachIsa([&] {
    std::vector<std::byte> after;
    for (const int leftovers : {0xff, 0x55}) {
      Held held(p.shape);
      std::memset(held.data(), leftovers, 64);
      held.Begin(p.memory);
      if (begun.empty()) begun = held.Copy();
      EXPECT_EQ(held.Copy(), begun) << ActiveIsa();
      WithRows<float>(p, Layout::kBTHW,
                      [&](const auto& q, const auto& k, const auto& v, const RowMask& mask,
                          const auto& out, const auto*) {
                        LinearDecode<float>(OneToken(p.shape), p.rule, q, k, v, mask, held.data(),
                                            out);
                      });
      if (after.empty()) after = held.Copy();
      EXPECT_EQ(held.Copy(), after) << ActiveIsa();
    }
  });
}

}  // namespace
}  // namespace cistern::slot_test
