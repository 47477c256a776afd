// Decoding with writes put off against the state in double, on every instruction set.
#include "cistern/kernels/slot_decoding.h"

#include "cistern/base/parallel.h"
#include "cistern/kernels/decoding_test.h"
#include "cistern/kernels/gated_slots.h"
#include "cistern/kernels/slot_attention.h"

namespace cistern::slot_test {
namespace {

struct Decoded {
  std::vector<double> out, keys, values, z;
};

enum class Kind { kLatte, kAbc, kGated, kFavor };
constexpr Kind kKinds[] = {Kind::kLatte, Kind::kAbc, Kind::kGated, Kind::kFavor};
bool HasKeys(Kind kind) { return kind == Kind::kAbc || kind == Kind::kGated; }
constexpr GatedSlotsOptions kGates = {.scale = 0.3, .temperature = 4};

constexpr double kScale = 0.3;

// p.a: queries (FAVOR+: logits), p.s: log-weights or logits of gates, p.u: values. With keys p.g
// are those, and p.dmemory_T their memory.
struct Task : Problem {
  Kind kind;
  bool keyed() const { return HasKeys(kind); }
};

Decoded InDouble(const Task& p) {
  const int64_t n = p.shape.slots, d = p.shape.width;
  constexpr Layout layout = Layout::kBHTW;
  const SlotShape token = OneToken(p.shape);
  const Array<double> q(p.shape, p.AWidth(), layout, p.a), s(p.shape, n, layout, p.s),
      v(p.shape, d, layout, p.u), k(p.shape, d, layout, p.keyed() ? p.g : p.u);
  Array<double> out(p.shape, d, layout);
  Decoded r{{}, p.dmemory_T, p.memory, p.z};
  // What the caller left in slots that hold nothing counts as zero.
  for (auto* memory : {&r.keys, &r.values}) {
    for (size_t i = 0; i < memory->size(); ++i)
      if (p.kind != Kind::kGated && p.z[i / size_t(d)] == -kInf) (*memory)[i] = 0;
  }
  EachToken(p, [&](int64_t t, const RowMask& mask) {
    switch (p.kind) {
      case Kind::kLatte:
        return LatteForward<double>(token, From(q.in(), t), From(s.in(), t), From(v.in(), t), mask,
                                    r.values.data(), r.z.data(), From(out.rows(), t));
      case Kind::kFavor:
        return FavorForward<double>(token, From(q.in(), t), From(s.in(), t), From(v.in(), t), mask,
                                    r.values.data(), r.z.data(), From(out.rows(), t));
      case Kind::kAbc:
        return AbcForward<double>(token, kScale, false, From(q.in(), t), From(k.in(), t),
                                  From(v.in(), t), From(s.in(), t), mask, r.keys.data(),
                                  r.values.data(), r.z.data(), From(out.rows(), t), {});
      case Kind::kGated:
        return GatedSlotsForward<double>(
            token, kGates, {From(q.in(), t), From(k.in(), t), From(v.in(), t), From(s.in(), t)},
            mask, r.keys.data(), r.values.data(), From(out.rows(), t), {});
    }
  });
  r.out = out.Values();
  return r;
}

class Held {
 public:
  explicit Held(const Task& p)
      : shape_(p.shape),
        keys_(p.keyed()),
        gated_(p.kind == Kind::kGated),
        bytes_(size_t(p.shape.batch * p.shape.heads *
                      DecodingBytes(p.shape.slots, p.shape.width, keys_))) {}
  std::byte* data() const { return bytes_.data(); }
  std::vector<std::byte> Copy() const { return bytes_.Copy(); }
  void Begin(const Decoded& from) {
    BeginDecoding(shape_, keys_ ? from.keys.data() : nullptr, from.values.data(),
                  gated_ ? nullptr : from.z.data(), data());
  }
  Decoded End() const {
    const size_t slots = size_t(shape_.batch * shape_.heads * shape_.slots),
                 size = slots * size_t(shape_.width);
    Decoded r{{},
              std::vector<double>(keys_ ? size : 0),
              std::vector<double>(size),
              std::vector<double>(gated_ ? 0 : slots)};
    EndDecoding(shape_, data(), keys_ ? r.keys.data() : nullptr, r.values.data(),
                gated_ ? nullptr : r.z.data());
    return r;
  }

 private:
  SlotShape shape_;
  bool keys_, gated_;
  AlignedBytes bytes_;
};

// Token by token. ends: after each token the state is taken to double and back.
template <class T>
Decoded Decode(const Task& p, Layout layout, bool ends = false) {
  const int64_t n = p.shape.slots, d = p.shape.width;
  const Array<T> q(p.shape, p.AWidth(), layout, p.a), s(p.shape, n, layout, p.s),
      v(p.shape, d, layout, p.u), k(p.shape, d, layout, p.keyed() ? p.g : p.u);
  Array<T> out(p.shape, d, layout);
  const Array<float> x(p.shape, p.AWidth(), layout, p.a), log_weights(p.shape, n, layout, p.s);
  const Array<T> none(p.shape, d, layout, std::vector<double>(size_t(p.Tokens() * d)));
  const SlotShape token = OneToken(p.shape);
  Held held(p);
  held.Begin({{}, p.dmemory_T, p.memory, p.z});
  EachToken(p, [&](int64_t t, const RowMask& mask) {
    if (p.kind == Kind::kLatte) {
      LatteDecode<T>(token, From(q.in(), t), From(s.in(), t), From(v.in(), t), mask, held.data(),
                     From(out.rows(), t));
    } else if (p.kind == Kind::kFavor) {  // of keys 0, so that products are the logits
      FavorDecode<T>(token, {1, d}, From(x.in(), t), From(log_weights.in(), t), From(none.in(), t),
                     From(v.in(), t), mask, held.data(), From(out.rows(), t));
    } else if (p.kind == Kind::kAbc) {
      AbcDecode<T>(token, kScale, From(q.in(), t), From(k.in(), t), From(v.in(), t),
                   From(s.in(), t), mask, held.data(), From(out.rows(), t));
    } else {
      GatedSlotsDecode<T>(token, kGates,
                          {From(q.in(), t), From(k.in(), t), From(v.in(), t), From(s.in(), t)},
                          mask, held.data(), From(out.rows(), t));
    }
    if (ends) held.Begin(held.End());
  });
  Decoded r = held.End();
  r.out = out.Values();
  return r;
}

void ExpectSame(const Decoded& got, const Decoded& want, double tolerance,
                const std::string& name) {
  EXPECT_LE(RelativeRms(got.out, want.out), tolerance) << name;
  EXPECT_LE(RelativeRms(got.values, want.values), tolerance) << name;
  if (!got.z.empty()) {
    EXPECT_LE(RelativeRms(got.z, want.z), tolerance) << name;
  }
  if (got.keys.empty()) return;
  EXPECT_LE(RelativeRms(got.keys, want.keys), tolerance) << name;
}

Task Of(uint64_t seed, Kind kind, const SlotShape& shape, const Options& options = {}) {
  Task p{MakeProblem(seed, HasKeys(kind), shape, options), kind};
  p.name += " kind " + std::to_string(int(kind));
  if (!p.keyed()) p.dmemory_T.clear();
  Random random(seed + 1);
  p.g = Normals(random, p.Tokens() * shape.width);
  return p;
}

void ExpectAsInDouble(const Task& p, Layout layout = Layout::kBTHW) {
  const Decoded want = InDouble(p);
  ExpectSame(Decode<float>(p, layout), want, 4 * Tolerance<float>(p), p.name);
  ExpectSame(Decode<float>(p, layout, true), want, 4 * Tolerance<float>(p), p.name + " ended");
}

TEST(SlotDecoding, LengthsAndWeights) {
  ForEachIsa([] {
    uint64_t seed = 1;
    for (Kind kind : kKinds) {
      for (int64_t T : {0, 1, 2, 7, 8, 9, 33, 100}) {
        for (Weights weights : kAllWeights) {
          ExpectAsInDouble(Of(seed++, kind, {2, 2, T, 17, 5}, {.weights = weights}),
                           T % 2 == 0 ? Layout::kBHTW : Layout::kBTHW);
        }
      }
      ExpectAsInDouble(Of(seed++, kind, {1, 2, 500, 64, 64}, {.start = Start::kEmpty}));
    }
  });
}

TEST(SlotDecoding, Widths) {
  ForEachIsa([] {
    uint64_t seed = 1000;
    for (Kind kind : kKinds) {
      for (int64_t n : {1, 3, 16, 17, 64, 130}) {
        for (int64_t d : {1, 5, 16, 65, 96})
          ExpectAsInDouble(Of(seed++, kind, {1, 2, 40, n, d}, {.weights = Weights::kHoles}));
      }
    }
  });
}

TEST(SlotDecoding, StartsAndLengths) {
  ForEachIsa([] {
    for (uint64_t seed = 2000; seed < 2024; ++seed) {
      ExpectAsInDouble(
          Of(seed, kKinds[seed % 4], {3, 2, 50, 9, 20},
             {.weights = kAllWeights[seed % 6], .starts = true, .lengths = seed % 4 != 0}));
    }
  });
}

// FAVOR+'s logits and log-weights are made of products and keys.
TEST(SlotDecoding, FavorOfProducts) {
  constexpr double kBy = 0.4;
  ForEachIsa([] {
    for (int64_t width : {1, 20, 64}) {
      const Task p = Of(2500, Kind::kFavor, {2, 2, 1, 19, 24}, {.start = Start::kFull});
      Random random(2501);
      const std::vector<double> keys = Normals(random, p.Tokens() * width);
      const Array<float> q(p.shape, p.shape.slots, Layout::kBTHW, p.a),
          s(p.shape, p.shape.slots, Layout::kBTHW, p.s), k(p.shape, width, Layout::kBTHW, keys),
          v(p.shape, p.shape.width, Layout::kBTHW, p.u);
      Array<float> out(p.shape, p.shape.width, Layout::kBTHW);
      Held held(p);
      held.Begin({{}, {}, p.memory, p.z});
      FavorDecode<float>(p.shape, {kBy, width}, q.in(), s.in(), k.in(), v.in(), {}, held.data(),
                         out.rows());
      Task mapped = p;
      for (double& x : mapped.a) x *= kBy;
      for (size_t row = 0; row < size_t(p.Tokens()); ++row) {
        double square = 0;
        for (size_t j = 0; j < size_t(width); ++j)
          square += std::pow(kBy * keys[row * size_t(width) + j], 2);
        for (size_t l = 0; l < size_t(p.shape.slots); ++l) {
          double& x = mapped.s[row * size_t(p.shape.slots) + l];
          x = kBy * x - square / 2;
        }
      }
      Decoded got = held.End();
      got.out = out.Values();
      ExpectSame(got, InDouble(mapped), 4 * Tolerance<float>(p), p.name);
    }
  });
}

// In bfloat16 the rows are the rounded ones, and all else is as in float.
TEST(SlotDecoding, BFloat16) {
  ForEachIsa([] {
    for (Kind kind : kKinds) {
      Task p = Of(3000, kind, {2, 2, 40, 64, 64});
      for (auto* x : {&p.a, &p.s, &p.u, &p.g}) {
        for (double& value : *x) value = static_cast<float>(BFloat16(static_cast<float>(value)));
      }
      const Decoded want = InDouble(p), got = Decode<BFloat16>(p, Layout::kBTHW);
      EXPECT_LE(RelativeRms(got.out, want.out), 3e-3) << p.name;
      EXPECT_LE(RelativeRms(got.values, want.values), 4 * Tolerance<float>(p)) << p.name;
    }
  });
}

// Mild tokens for so long that sums in float would be off: half of them say 1, then half say 3.
TEST(SlotDecoding, KeepsWhatFloatsLose) {
  const SlotShape shape = {1, 1, 1, 16, 16};
  Task p = Of(4000, Kind::kLatte, shape, {.start = Start::kEmpty});
  Held held(p);
  held.Begin({{}, {}, p.memory, p.z});
  std::vector<float> q(16, 0.0f), s(16), v(16), out(16);
  const auto rows = [](auto& x) { return Rows<float>{x.data(), 16, 16, 16}; };
  const auto in = [](auto& x) { return Rows<const float>{x.data(), 16, 16, 16}; };
  constexpr int64_t kTokens = 3'000'000;
  double sum = 0;
  for (int64_t t = 0; t < kTokens; ++t) {
    s.assign(16, -0.7f * static_cast<float>(t % 3));
    v.assign(16, t < kTokens / 2 ? 1.0f : 3.0f);
    sum += std::exp(double(s[0]));
    LatteDecode<float>(shape, in(q), in(s), in(v), {}, held.data(), rows(out));
  }
  const Decoded end = held.End();
  EXPECT_NEAR(end.values[5], 2, 1e-6);
  EXPECT_NEAR(double(out[5]), 2, 1e-6);
  EXPECT_NEAR(end.z[5], std::log(sum), 1e-6);
}

// Number by number: not finite where the state in double is not. (The portable instruction set
// makes the largest float of what exceeds it.)
void ExpectAlike(const std::vector<double>& got, const std::vector<double>& want,
                 const std::string& name) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(want[i]) || std::isinf(want[i])) {
      EXPECT_FALSE(std::abs(got[i]) < std::numeric_limits<float>::max()) << name << " " << i;
    } else {
      EXPECT_NEAR(got[i], want[i], 1e-5 * (1 + std::abs(want[i]))) << name << " " << i;
    }
  }
}

// A token that is not finite goes through double, and spares the slots that it does not write.
TEST(SlotDecoding, WhatIsNotFinite) {
  ForEachIsa([] {
    const int64_t n = 17, d = 20, at = 20;
    for (Kind kind : kKinds) {
      const auto expect_alike = [&](const Task& p, const std::string& what) {
        const Decoded want = InDouble(p), got = Decode<float>(p, Layout::kBTHW);
        ExpectAlike(got.out, want.out, p.name + what + " out");
        ExpectAlike(got.values, want.values, p.name + what + " values");
        if (p.keyed()) ExpectAlike(got.keys, want.keys, p.name + what + " keys");
        if (kind != Kind::kGated) ExpectAlike(got.z, want.z, p.name + what + " z");
      };
      for (const double bad : {std::numeric_limits<double>::quiet_NaN(), kInf, -kInf, 1e30}) {
        const std::string what = " " + std::to_string(bad);
        Task p = Of(5000, kind, {1, 2, 40, n, d});
        for (int64_t j = 0; j < d; ++j) p.u[size_t(at * d + j)] = bad;
        for (int64_t l = 0; l < n; ++l)
          if (l != 3) p.s[size_t(at * n + l)] = kind == Kind::kGated ? kInf : -kInf;
        expect_alike(p, what + " in a value");
        if (bad == -kInf) continue;
        p = Of(6000, kind, {1, 2, 40, n, d}, {.start = Start::kFull});
        p.s[size_t(at * n + 5)] = bad;
        expect_alike(p, what + " in a log-weight");
      }
    }
  });
}

TEST(SlotDecoding, ThreadsChangeNoBits) {
  const Task p = Of(7000, Kind::kAbc, {5, 3, 40, 64, 64});
  const auto run = [&](int threads) {
    SetNumThreads(threads);
    return Decode<float>(p, Layout::kBTHW);
  };
  const int threads = NumThreads();
  const Decoded one = run(1), three = run(3);
  SetNumThreads(threads);
  EXPECT_TRUE(SameBits(one.out, three.out, one.out.size()));
  EXPECT_TRUE(SameBits(one.values, three.values, one.values.size()));
}

// What one instruction set began another one continues, and the bytes are those of the tokens
// alone: files of states move between machines.
TEST(SlotDecoding, BytesAreThoseOfTheTokens) {
  const Task p = Of(8000, Kind::kAbc, {1, 1, 1, 33, 20}, {.start = Start::kFull});
  const int64_t n = p.shape.slots, d = p.shape.width;
  const Array<float> q(p.shape, d, Layout::kBHTW, p.a), s(p.shape, n, Layout::kBHTW, p.s),
      v(p.shape, d, Layout::kBHTW, p.u), k(p.shape, d, Layout::kBHTW, p.g);
  Array<float> out(p.shape, d, Layout::kBHTW);
  std::vector<std::byte> first;
  ForEachIsa([&] {
    Held held(p);
    held.Begin({{}, p.dmemory_T, p.memory, p.z});
    EXPECT_EQ(SizesOfDecoding(held.data()).slots, n) << ActiveIsa();
    EXPECT_EQ(SizesOfDecoding(held.data()).width, d) << ActiveIsa();
    if (first.empty()) first = held.Copy();
    EXPECT_EQ(held.Copy(), first) << ActiveIsa();
    std::vector<std::byte> after;
    for (int i = 0; i < 2; ++i) {
      held.Begin({{}, p.dmemory_T, p.memory, p.z});
      AbcDecode<float>(p.shape, kScale, q.in(), k.in(), v.in(), s.in(), {}, held.data(),
                       out.rows());
      if (i == 0) after = held.Copy();
    }
    EXPECT_EQ(held.Copy(), after) << ActiveIsa();
    Held other(p);  // in memory with other leftovers
    std::memset(other.data(), 0x55, 64);
    other.Begin({{}, p.dmemory_T, p.memory, p.z});
    AbcDecode<float>(p.shape, kScale, q.in(), k.in(), v.in(), s.in(), {}, other.data(), out.rows());
    EXPECT_EQ(other.Copy(), after) << ActiveIsa();
  });
}

}  // namespace
}  // namespace cistern::slot_test
