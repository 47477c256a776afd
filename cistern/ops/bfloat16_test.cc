// Tokens in half precision, of ops that take bfloat16 and of those that make floats of them: what
// they make of the same numbers in float, rounded once, to the bit; gradients too. Exact attention
// by products of bfloat16 is near it, and so are walks over chunks where they multiply pairs.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cistern/base/parallel.h"
#include "cistern/kernels/isa.h"
#include "cistern/ops/exact_attention.h"
#include "cistern/ops/gated_slots.h"
#include "cistern/ops/impl.h"
#include "cistern/ops/linear_attention.h"
#include "cistern/ops/rotary.h"
#include "cistern/ops/rounded_tokens_test.h"
#include "cistern/ops/short_conv.h"
#include "cistern/ops/slot_attention.h"
#include "cistern/ops/sum_memory.h"
#include "cistern/ops/testing.h"

namespace cistern::ops {
namespace {

using namespace rounded_tokens;

template <class Attention>
void ExpectRoundedReads(Attention attention, const std::string& what,
                        const std::vector<Shape>& shapes) {
  at::manual_seed(2);
  for (const Shape& s : shapes) {
    for (const Mask& mask : Masks(s.length)) {
      const auto run = [&](const Tensors& x) {
        const AttentionResult r =
            attention(HeadsFirst(x[0]), HeadsFirst(x[1]), HeadsFirst(x[2]), {x[3], x[4]}, mask);
        return Tensors{r.out, r.state.memory, r.state.z};
      };
      ExpectRounded({Heads(s.length, s.slots), Heads(s.length, s.slots), Heads(s.length, s.width)},
                    {at::randn({3, 2, s.slots, s.width}, at::kDouble),
                     at::randn({3, 2, s.slots}, at::kDouble)},
                    run, what + " " + std::to_string(s.length), OfWalks());
    }
  }
}

TEST(BFloat16Tokens, Latte) {
  WithAndWithoutPairs([] { ExpectRoundedReads(LatteAttention, "latte", kShapes); });
}
TEST(BFloat16Tokens, Favor) {
  WithAndWithoutPairs([] { ExpectRoundedReads(FavorAttention, "favor", kShapes); });
}

void ExpectRoundedAbc(const std::vector<Shape>& shapes) {
  at::manual_seed(2);
  for (const Shape& s : shapes) {
    for (const Mask& mask : Masks(s.length)) {
      const auto run = [&](const Tensors& x) {
        const AbcResult r = AbcAttention(HeadsFirst(x[0]), HeadsFirst(x[1]), HeadsFirst(x[2]),
                                         HeadsFirst(x[3]), {x[4], x[5], x[6]}, 0.3, mask);
        return Tensors{r.out, r.state.keys, r.state.values, r.state.z};
      };
      ExpectRounded({Heads(s.length, s.width), Heads(s.length, s.width), Heads(s.length, s.width),
                     Heads(s.length, s.slots)},
                    {at::randn({3, 2, s.slots, s.width}, at::kDouble),
                     at::randn({3, 2, s.slots, s.width}, at::kDouble),
                     at::randn({3, 2, s.slots}, at::kDouble)},
                    run, "abc " + std::to_string(s.length), OfWalks());
    }
  }
}

TEST(BFloat16Tokens, Abc) {
  WithAndWithoutPairs([] { ExpectRoundedAbc(kShapes); });
}

void ExpectRoundedGatedSlots(const std::vector<Shape>& shapes) {
  at::manual_seed(2);
  for (const Shape& s : shapes) {
    for (const Mask& mask : Masks(s.length)) {
      const auto run = [&](const Tensors& x) {
        const GatedSlotsResult r =
            GatedSlotsAttention(HeadsFirst(x[0]), HeadsFirst(x[1]), HeadsFirst(x[2]),
                                HeadsFirst(x[3]), x[4], x[5], 0.3, 4, mask);
        return Tensors{r.out, r.keys, r.values};
      };
      ExpectRounded({Heads(s.length, s.width), Heads(s.length, s.width), Heads(s.length, s.width),
                     Heads(s.length, s.slots)},
                    {at::randn({3, 2, s.slots, s.width}, at::kDouble),
                     at::randn({3, 2, s.slots, s.width}, at::kDouble)},
                    run, "gated slots " + std::to_string(s.length));
    }
  }
}

TEST(BFloat16Tokens, GatedSlots) { ExpectRoundedGatedSlots(kShapes); }

// The gradients of a quotient take the output, as it was rounded.
constexpr Tolerance kByOutput = {1e-2, 1e-2};
const LinearRule kElu = {FeatureMap::kEluPlusOne, 0, DivisorRule::kPlus, 1e-6};
const std::vector<std::pair<LinearRule, Tolerance>> kLinearRules = {
    {kElu, kByOutput},
    {{FeatureMap::kEluPlusOne, 0.25, DivisorRule::kNone, 0.1}, {}},
    {{FeatureMap::kNone, 0, DivisorRule::kSignSafe, 0.5}, kByOutput}};

at::Tensor LinearSums(const Shape& s, const LinearRule& rule) {
  return at::rand({3, 2, s.slots, rule.Columns(s.width)}, at::kDouble);
}

void ExpectRoundedLinear(const std::vector<Shape>& shapes) {
  at::manual_seed(2);
  for (const auto& [given, tolerance] : kLinearRules) {
    const LinearRule& rule = given;
    for (const Shape& s : shapes) {
      for (const Mask& mask : Masks(s.length)) {
        const auto run = [&](const Tensors& x) {
          const SumResult r = LinearAttention(HeadsFirst(x[0]), HeadsFirst(x[1]), HeadsFirst(x[2]),
                                              x[3], rule, mask);
          return Tensors{r.out, r.memory};
        };
        ExpectRounded(
            {Heads(s.length, s.slots), Heads(s.length, s.slots), Heads(s.length, s.width)},
            {LinearSums(s, rule)}, run, "linear " + std::to_string(s.length), OfWalks(tolerance));
      }
    }
  }
}

TEST(BFloat16Tokens, Linear) {
  WithAndWithoutPairs([] { ExpectRoundedLinear(kShapes); });
}

TEST(BFloat16Tokens, ThreadsThatShareAHead) {
  const int threads = NumThreads();
  SetNumThreads(8);
  WithAndWithoutPairs([] {
    ExpectRoundedReads(LatteAttention, "latte", {kShared});
    ExpectRoundedAbc({kShared});
    ExpectRoundedGatedSlots({kShared});
    ExpectRoundedLinear({kShared, {2100, 3, 7}});
  });
  SetNumThreads(threads);
}

// The walks as functions of q, k and v [3,2,T,w], all of one width.
using Walk =
    std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v)>;
std::vector<std::pair<std::string, Walk>> Walks(int64_t width) {
  const at::Tensor memory = at::randn({3, 2, width, width}, at::kDouble),
                   z = at::randn({3, 2, width}, at::kDouble),
                   sums = at::rand({3, 2, width, width + 1}, at::kDouble);
  return {{"latte",
           [=](const auto& q, const auto& k, const auto& v) {
             return LatteAttention(q, k, v, {memory, z}).out;
           }},
          {"abc",
           [=](const auto& q, const auto& k, const auto& v) {
             return AbcAttention(q, k, v, k, {memory, memory, z}, 0.3).out;
           }},
          {"gated slots",
           [=](const auto& q, const auto& k, const auto& v) {
             return GatedSlotsAttention(q, k, v, k, memory, memory, 0.3, 4).out;
           }},
          {"linear", [=](const auto& q, const auto& k, const auto& v) {
             return LinearAttention(q, k, v, sums, kElu).out;
           }}};
}

// No bit of an output or a gradient depends on the number of threads.
TEST(BFloat16Tokens, ThreadsChangeNoBits) {
  at::manual_seed(3);
  const int threads = NumThreads();
  for (const auto& [name, walk] : Walks(16)) {
    const auto tokens = [] { return HeadsFirst(Heads(1100, 16)).to(at::kBFloat16); };
    const Tensors x = {Leaf(tokens()), Leaf(tokens()), Leaf(tokens())};
    const at::Tensor g = tokens();
    const auto all = [&, &of = walk](int count) {
      SetNumThreads(count);
      const at::Tensor out = of(x[0], x[1], x[2]);
      Tensors results = torch::autograd::grad({out}, x, {g});
      results.push_back(out.detach());
      return results;
    };
    const Tensors one = all(1), many = all(8);
    for (size_t i = 0; i < one.size(); ++i) ExpectSameBits(many[i], one[i], name);
  }
  SetNumThreads(threads);
}

// Tokens lie as far apart as all maps of their product together are wide: an odd number, too.
TEST(BFloat16Tokens, RowsAnOddNumberApart) {
  at::manual_seed(3);
  const auto apart = [](const at::Tensor& x, int64_t more) {  // x [3,T,2,w]
    const at::Tensor wide =
        at::zeros({x.size(0), x.size(1), x.size(2) * x.size(3) + more}, x.options());
    const at::Tensor rows = wide.narrow(2, 0, wide.size(2) - more).view(x.sizes());
    return HeadsFirst(rows.copy_(x));
  };
  for (const int64_t width : {32, 64}) {
    for (const auto& [name, walk] : Walks(width)) {
      Tensors tokens;
      for (int i = 0; i < 4; ++i) tokens.push_back(Heads(70, width).to(at::kBFloat16));
      const auto all = [&, &of = walk](int64_t more) {
        Tensors x;
        for (int i = 0; i < 3; ++i) x.push_back(apart(tokens[i], more).requires_grad_());
        const at::Tensor out = of(x[0], x[1], x[2]);
        Tensors results = torch::autograd::grad({out}, x, {apart(tokens[3], more)});
        results.push_back(out.detach());
        return results;
      };
      const Tensors want = all(0);
      for (const int64_t more : {1, 2, 7}) {
        const Tensors got = all(more);
        for (size_t i = 0; i < got.size(); ++i)
          ExpectSameBits(got[i], want[i], name + " " + std::to_string(more));
      }
    }
  }
}

// What later tokens hold, NaN and infinity too, is in no bit of an output.
TEST(BFloat16Tokens, LaterTokensChangeNoBits) {
  at::manual_seed(3);
  constexpr int64_t kLength = 50;
  for (const int64_t width : {7, 16, 32}) {
    for (const auto& [name, walk] : Walks(width)) {
      Tensors x;
      for (int i = 0; i < 3; ++i) x.push_back(Heads(kLength, width).to(at::kBFloat16));
      const auto out = [&, &of = walk](const Tensors& y) {
        return of(HeadsFirst(y[0]), HeadsFirst(y[1]), HeadsFirst(y[2]));
      };
      const at::Tensor whole = out(x);
      for (const int64_t t : {1, 2, 5, 31, 32, 33, 49}) {
        for (size_t which = 0; which < x.size(); ++which) {
          for (const double value : {100.0, std::nan(""), kInf}) {
            Tensors changed = x;
            changed[which] = x[which].clone();
            changed[which].narrow(1, t, kLength - t).fill_(value);
            ExpectSameBits(out(changed).narrow(2, 0, t), whole.narrow(2, 0, t),
                           name + " " + std::to_string(width) + " at " + std::to_string(t) +
                               ", input " + std::to_string(which));
          }
        }
      }
    }
  }
}

// All tokens are written, then all read: shapes with more than one segment among them.
std::vector<Shape> ShapesOfAllTokens() {
  std::vector<Shape> shapes = kShapes;
  shapes.push_back({2100, 16, 7});
  return shapes;
}
std::vector<Mask> MasksOfOneDocument(int64_t length) {
  return {{}, {Lengths({length, length / 2, 0}), {}}};
}

void ExpectRoundedLinearOfAll() {
  at::manual_seed(2);
  for (const auto& [given, tolerance] : kLinearRules) {
    const LinearRule& rule = given;
    for (const Shape& s : ShapesOfAllTokens()) {
      const std::string what = " " + std::to_string(s.length);
      for (const Mask& mask : MasksOfOneDocument(s.length)) {
        const auto write = [&](const Tensors& x) {
          return Tensors{LinearWrite(HeadsFirst(x[0]), HeadsFirst(x[1]), x[2], rule, mask)};
        };
        ExpectRounded({Heads(s.length, s.slots), Heads(s.length, s.width)}, {LinearSums(s, rule)},
                      write, "linear write" + what, OfWalks());
      }
      const auto read = [&](const Tensors& x) {
        return Tensors{LinearRead(HeadsFirst(x[0]), x[1], rule)};
      };
      ExpectRounded({Heads(s.length, s.slots)}, {LinearSums(s, rule)}, read, "linear read" + what,
                    OfWalks(tolerance));
    }
  }
}

TEST(BFloat16Tokens, LinearWriteAndRead) { WithAndWithoutPairs(ExpectRoundedLinearOfAll); }

void ExpectRoundedSlotsOfAll() {
  at::manual_seed(2);
  for (const Shape& s : ShapesOfAllTokens()) {
    const std::string what = " " + std::to_string(s.length);
    const at::Tensor keys = at::randn({3, 2, s.slots, s.width}, at::kDouble),
                     values = at::randn({3, 2, s.slots, s.width}, at::kDouble),
                     z = at::randn({3, 2, s.slots}, at::kDouble);
    at::Tensor some = z.clone();
    some.select(2, 0).fill_(-kInf);
    for (const Mask& mask : MasksOfOneDocument(s.length)) {
      const auto write = [&](const Tensors& x) {
        const SlotState after = SlotWrite(HeadsFirst(x[0]), HeadsFirst(x[1]), {x[2], x[3]}, mask);
        return Tensors{after.memory, after.z};
      };
      ExpectRounded({Heads(s.length, s.slots), Heads(s.length, s.width)}, {keys, z}, write,
                    "slot write" + what, OfWalks());
      const auto write_both = [&](const Tensors& x) {
        const AbcState after = AbcWrite(HeadsFirst(x[0]), HeadsFirst(x[1]), HeadsFirst(x[2]),
                                        {x[3], x[4], x[5]}, mask);
        return Tensors{after.keys, after.values, after.z};
      };
      ExpectRounded({Heads(s.length, s.slots), Heads(s.length, s.width), Heads(s.length, s.width)},
                    {keys, values, z}, write_both, "abc write" + what, OfWalks());
      const auto pack = [&](const Tensors& x) {
        const SlotState after =
            SlotPack(x[2], HeadsFirst(x[0]), HeadsFirst(x[1]), 0.3, {x[3], x[4]}, mask);
        return Tensors{after.memory, after.z};
      };
      ExpectRounded({Heads(s.length, s.width), Heads(s.length, s.width)}, {keys, values, z}, pack,
                    "slot pack" + what, OfWalks());
    }
    const auto read = [&](const Tensors& x) {
      return Tensors{SlotSoftmaxRead(HeadsFirst(x[0]), x[1])};
    };
    ExpectRounded({Heads(s.length, s.slots)}, {values}, read, "slot read" + what, OfWalks());
    for (const at::Tensor& written : {at::Tensor(), some}) {
      const auto attend = [&](const Tensors& x) {
        return Tensors{AbcRead(HeadsFirst(x[0]), x[1], x[2], written, 0.3)};
      };
      ExpectRounded({Heads(s.length, s.width)}, {keys, values}, attend, "abc read" + what,
                    OfWalks());
    }
  }
}

TEST(BFloat16Tokens, SlotWriteAndRead) { WithAndWithoutPairs(ExpectRoundedSlotsOfAll); }

void ExpectKernelsOfFloats() {
  at::manual_seed(2);
  constexpr int64_t kLength = 70, kSlots = 16, kWidth = 16;
  const Tensors tokens = {Heads(kLength, kSlots), Heads(kLength, kSlots), Heads(kLength, kWidth)};
  const at::Tensor memory = at::randn({3, 2, kSlots, kWidth}, at::kDouble),
                   z = at::randn({3, 2, kSlots}, at::kDouble),
                   sums = at::rand({3, 2, kSlots, kWidth + 1}, at::kDouble);
  struct Case {
    const char* name;
    Tensors others;
    std::function<Tensors(const Tensors& x, const Mask& mask)> run;
  };
  const auto slots = [](const auto& r) { return Tensors{r.out, r.state.memory, r.state.z}; };
  const auto with_sums = [](const SumResult& r) { return Tensors{r.out, r.memory}; };
  const std::vector<Case> cases = {
      {"sum read",
       {memory},
       [&](const Tensors& x, const Mask& mask) {
         return with_sums(SumRead(x[0], x[1], x[2], x[3], mask));
       }},
      {"slot read",
       {memory, z},
       [&](const Tensors& x, const Mask& mask) {
         return slots(SlotRead(x[0], x[1], x[2], {x[3], x[4]}, mask));
       }},
      {"latte",
       {memory, z},
       [&](const Tensors& x, const Mask& mask) {
         return slots(LatteAttention(x[0], x[1], x[2], {x[3], x[4]}, mask));
       }},
      {"linear", {sums}, [&](const Tensors& x, const Mask& mask) {
         return with_sums(LinearAttention(x[0], x[1], x[2], x[3], kElu, mask));
       }}};
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    for (const Case& c : cases) {
      for (const Mask& mask : Masks(kLength)) {
        const auto run = [&](Tensors x) {
          for (size_t i = 0; i < tokens.size(); ++i) x[i] = HeadsFirst(x[i]);
          return c.run(x, mask);
        };
        // Latte and linear attention take bfloat16 (above).
        const std::string name = c.name;
        Tolerance tolerance;
        if (type == at::kBFloat16 && (name == "latte" || name == "slot read"))
          tolerance = OfWalks();
        if (type == at::kBFloat16 && name == "linear") tolerance = OfWalks(kByOutput);
        ExpectRounded(tokens, c.others, run, c.name, tolerance, type);
      }
    }
  }
}
TEST(HalfPrecisionTokens, GoThroughTheKernelsAsFloats) {
  WithAndWithoutPairs(ExpectKernelsOfFloats);
}

TEST(BFloat16Tokens, Rotary) {
  at::manual_seed(2);
  for (const int64_t width : {2, 14, 64, 70}) {
    const at::Tensor angles = at::randn({1, 9, width / 2}),
                     table = at::cat({angles.cos(), angles.sin()}, 2);
    const auto run = [&](const Tensors& x) { return Tensors{Rotary(HeadsFirst(x[0]), table)}; };
    ExpectRounded({Heads(9, width)}, {}, run, "rotary " + std::to_string(width));
  }
}

TEST(BFloat16Tokens, ShortConvolution) {
  at::manual_seed(2);
  for (const int64_t length : {1, 3, 64, 200, 1500}) {
    for (const int64_t taps : {1, 4, 9}) {
      for (const int64_t ahead : {int64_t{0}, taps / 2}) {
        for (const Mask& mask : Masks(length)) {
          if (ahead > 0 && mask.starts) continue;
          const auto run = [&](const Tensors& x) {
            const auto [y, after] = ShortConv(x[0], x[1], x[2], mask, ahead);
            return Tensors{y, after};
          };
          ExpectRounded({at::randn({3, length, 21})},
                        {at::randn({21, taps}), at::randn({3, taps - 1, 21})}, run,
                        "conv " + std::to_string(length) + ", " + std::to_string(taps), {0, 1e-6});
        }
      }
    }
  }
}

at::Tensor CausalRanges(int64_t length) {
  const at::Tensor ranges = at::zeros({1, length, 3}, at::kLong);
  ranges.select(2, 1).copy_(at::arange(1, length + 1));
  return ranges;
}

// Near it: by products of bfloat16, and in float, whose gradients take the output as it was
// rounded. Widths with and without whole pairs.
void ExpectNearExactAttention(bool rounded_once) {
  at::manual_seed(3);
  for (const int64_t length : {1, 3, 70, 200}) {
    for (const int64_t width : {16, 33}) {
      const SeenKeys seen = {CausalRanges(length)};
      Tensors half, whole;
      for (const int64_t w : {width, width, width + 3}) {
        half.push_back(Leaf(Heads(length, w).to(at::kBFloat16)));
        whole.push_back(Leaf(half.back().detach().to(at::kFloat)));
      }
      const auto run = [&](const Tensors& x) {
        return ExactAttention(HeadsFirst(x[0]), HeadsFirst(x[1]), HeadsFirst(x[2]), 0.3, seen,
                              {0.1, 7});
      };
      const at::Tensor got = run(half), want = run(whole),
                       g = at::randn(want.sizes()).to(at::kBFloat16);
      ASSERT_EQ(got.scalar_type(), at::kBFloat16);
      ASSERT_EQ(got.strides(), want.strides()) << "the layout of heads";
      const auto close = [](const at::Tensor& x, const at::Tensor& y, const at::Tensor& beside,
                            const char* what) {
        EXPECT_LE((x.to(at::kFloat) - y).norm().item<double>(),
                  1e-2 * (y.norm() + beside.norm()).item<double>())
            << what;
      };
      close(got, want, want * 0, "out");
      if (rounded_once) ExpectSameBits(got, want.to(at::kBFloat16), "out");
      const Tensors dx = torch::autograd::grad({got}, half, {g}),
                    want_dx = torch::autograd::grad({want}, whole, {g.to(at::kFloat)});
      for (size_t i = 0; i < 3; ++i) {
        ASSERT_EQ(dx[i].scalar_type(), at::kBFloat16);
        close(dx[i], want_dx[i], want_dx[2] * (i < 2), "gradient");
      }
    }
  }
}

TEST(BFloat16Tokens, ExactAttentionInBFloat16) {
  if (!MultipliesBFloat16()) GTEST_SKIP() << "no products of bfloat16 on this processor";
  ExpectNearExactAttention(false);
}

TEST(BFloat16Tokens, ExactAttentionInFloat) {
  ForceIsa("portable");
  EXPECT_FALSE(MultipliesBFloat16());
  ExpectNearExactAttention(true);
  ForceIsa("");
}

// Where there is no kernel: composed in float, rounded at the end.
TEST(BFloat16Tokens, Composite) {
  at::manual_seed(2);
  const Mask mask = {Lengths({9, 4, 0}), {}};
  const at::Tensor q = HeadsFirst(Heads(9, 4)).to(at::kBFloat16),
                   v = HeadsFirst(Heads(9, 6)).to(at::kBFloat16),
                   memory = at::zeros({3, 2, 4, 6}, at::kDouble),
                   z = at::full({3, 2, 4}, -kInf, at::kDouble);
  const auto run = [&] { return LatteAttention(q, q, v, {memory, z}, mask).out; };
  const at::Tensor kernel = run();
  const ImplScope scope(Impl::kComposite);
  const at::Tensor composed = run();
  EXPECT_EQ(composed.scalar_type(), at::kBFloat16);
  ExpectClose(composed, kernel, 6e-3, "composed");
}

// Second derivatives go through what is composed, in float: composed of bfloat16, the read of
// linear attention is 0.0068 away.
TEST(BFloat16Tokens, SecondDerivatives) {
  at::manual_seed(2);
  const auto second = [](const at::Tensor& x, const std::function<at::Tensor(at::Tensor)>& f) {
    const at::Tensor leaf = Leaf(x), y = f(leaf).to(at::kFloat);
    const at::Tensor dx =
        torch::autograd::grad({y.square().sum()}, {leaf}, {}, true, /*create_graph=*/true)[0];
    return torch::autograd::grad({dx.to(at::kFloat).square().sum()}, {leaf})[0].to(at::kFloat);
  };
  const at::Tensor x = Heads(9, 4).to(at::kBFloat16), v = Heads(9, 6).to(at::kBFloat16),
                   sums = at::rand({3, 2, 4, 7}, at::kDouble),
                   memory = at::randn({3, 2, 4, 6}, at::kDouble),
                   z = at::randn({3, 2, 4}, at::kDouble);
  const auto values = [&](const at::Tensor& of) { return HeadsFirst(v).to(of.scalar_type()); };
  const std::vector<std::pair<const char*, std::function<at::Tensor(at::Tensor)>>> cases = {
      {"linear",
       [&](const at::Tensor& t) {
         const at::Tensor q = HeadsFirst(t);
         return LinearAttention(q, q, values(q), sums, kElu, {}).out;
       }},
      {"linear write",
       [&](const at::Tensor& t) {
         const at::Tensor k = HeadsFirst(t);
         return LinearWrite(k, values(k), sums, kElu, {});
       }},
      {"linear read", [&](const at::Tensor& t) { return LinearRead(HeadsFirst(t), sums, kElu); }},
      {"slot write",
       [&](const at::Tensor& t) {
         const at::Tensor s = HeadsFirst(t);
         return SlotWrite(s, values(s), {memory, z}, {}).memory;
       }},
      {"slot read", [&](const at::Tensor& t) { return SlotSoftmaxRead(HeadsFirst(t), memory); }},
      {"abc read", [&](const at::Tensor& t) {
         const at::Tensor q = HeadsFirst(t).repeat({1, 1, 1, 2}).narrow(3, 0, 6);
         return AbcRead(q, memory, memory, {}, 0.3);
       }}};
  ForceIsa("portable");  // whose first derivatives are those of floats
  for (const auto& [name, f] : cases) {
    const at::Tensor want = second(x.to(at::kFloat), f);
    ExpectClose(second(x, f), want, 6e-3, name);
  }
  ForceIsa("");
}

}  // namespace
}  // namespace cistern::ops
