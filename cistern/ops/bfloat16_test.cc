// Tokens in half precision, of ops that take bfloat16 and of those that make floats of them: what
// they make of the same numbers in float, rounded once, to the bit; gradients too. Exact attention
// by products of bfloat16 is near it.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cistern/base/parallel.h"
#include "cistern/kernels/isa.h"
#include "cistern/ops/exact_attention.h"
#include "cistern/ops/gated_slots.h"
#include "cistern/ops/impl.h"
#include "cistern/ops/linear_attention.h"
#include "cistern/ops/rotary.h"
#include "cistern/ops/short_conv.h"
#include "cistern/ops/slot_attention.h"
#include "cistern/ops/sum_memory.h"
#include "cistern/ops/testing.h"

namespace cistern::ops {
namespace {

using namespace cistern::testing;

using Tensors = std::vector<at::Tensor>;
// Tokens in, tokens and states out.
using Run = std::function<Tensors(const Tensors&)>;

// `tokens` are rounded; `run` of them in bfloat16, and in float. The outputs after the first are
// states, which are not rounded. Gradients of `others` may differ by `tolerance`: sums in another
// order.
void ExpectRounded(const Tensors& tokens, const Tensors& others, const Run& run,
                   const std::string& what, double tolerance = 0,
                   at::ScalarType type = at::kBFloat16) {
  Tensors half, whole, half_all, whole_all;
  for (const at::Tensor& t : tokens) {
    half.push_back(Leaf(t.to(type)));
    whole.push_back(Leaf(half.back().detach().to(at::kFloat)));
  }
  half_all = half, whole_all = whole;
  for (const at::Tensor& t : others) half_all.push_back(Leaf(t)), whole_all.push_back(Leaf(t));
  const Tensors got = run(half_all), want = run(whole_all);
  ASSERT_EQ(got[0].scalar_type(), type) << what;
  ExpectSameBits(got[0], want[0].to(type), what);
  for (size_t i = 1; i < got.size(); ++i) ExpectSameBits(got[i], want[i], what + " state");
  // The gradient that comes back is in bfloat16, too.
  at::manual_seed(9);
  Tensors g_half, g_whole;
  for (const at::Tensor& y : got) {
    g_half.push_back(at::randn(y.sizes()).to(y.scalar_type()));
    g_whole.push_back(y.scalar_type() == type ? g_half.back().to(at::kFloat) : g_half.back());
  }
  const Tensors dx = torch::autograd::grad(got, half_all, g_half),
                want_dx = torch::autograd::grad(want, whole_all, g_whole);
  for (size_t i = 0; i < dx.size(); ++i) {
    ASSERT_EQ(dx[i].scalar_type(), half_all[i].scalar_type()) << what;
    if (i < tokens.size()) {
      ExpectSameBits(dx[i], want_dx[i].to(dx[i].scalar_type()), what + " gradient");
    } else {
      ExpectClose(dx[i], want_dx[i], tolerance, what + " gradient");
    }
  }
}

struct Shape {
  int64_t length, slots, width;
};
const std::vector<Shape> kShapes = {{1, 16, 16}, {5, 3, 7}, {70, 32, 16}, {300, 16, 33}};
constexpr Shape kShared = {1100, 16, 7};  // six heads; with eight threads, two for each

std::vector<Mask> Masks(int64_t length) {
  std::vector<Mask> masks = {{}};
  if (length > 1) {
    masks.push_back({Lengths({length, length / 2, 0}), {}});
    masks.push_back({{}, Starts(3, length, {{0, 0}, {1, 2}, {2, length - 1}})});
  }
  return masks;
}

at::Tensor Heads(int64_t length, int64_t width) { return at::randn({3, length, 2, width}); }
at::Tensor HeadsFirst(const at::Tensor& x) { return x.transpose(1, 2); }

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
                    run, what + " " + std::to_string(s.length));
    }
  }
}

TEST(BFloat16Tokens, Latte) { ExpectRoundedReads(LatteAttention, "latte", kShapes); }
TEST(BFloat16Tokens, Favor) { ExpectRoundedReads(FavorAttention, "favor", kShapes); }

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
                    run, "abc " + std::to_string(s.length));
    }
  }
}

TEST(BFloat16Tokens, Abc) { ExpectRoundedAbc(kShapes); }

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

TEST(BFloat16Tokens, ThreadsThatShareAHead) {
  const int threads = NumThreads();
  SetNumThreads(8);
  ExpectRoundedReads(LatteAttention, "latte", {kShared});
  ExpectRoundedAbc({kShared});
  ExpectRoundedGatedSlots({kShared});
  SetNumThreads(threads);
}

TEST(HalfPrecisionTokens, GoThroughTheKernelsAsFloats) {
  at::manual_seed(2);
  constexpr int64_t kLength = 70, kSlots = 16, kWidth = 16;
  const Tensors tokens = {Heads(kLength, kSlots), Heads(kLength, kSlots), Heads(kLength, kWidth)};
  const at::Tensor memory = at::randn({3, 2, kSlots, kWidth}, at::kDouble),
                   z = at::randn({3, 2, kSlots}, at::kDouble),
                   sums = at::rand({3, 2, kSlots, kWidth + 1}, at::kDouble);
  const LinearRule linear = {FeatureMap::kEluPlusOne, 0, DivisorRule::kPlus, 1e-6};
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
         return with_sums(LinearAttention(x[0], x[1], x[2], x[3], linear, mask));
       }}};
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    for (const Case& c : cases) {
      for (const Mask& mask : Masks(kLength)) {
        const auto run = [&](Tensors x) {
          for (size_t i = 0; i < tokens.size(); ++i) x[i] = HeadsFirst(x[i]);
          return c.run(x, mask);
        };
        ExpectRounded(tokens, c.others, run, c.name, 0, type);
      }
    }
    const auto read = [&](const Tensors& x) {
      return Tensors{LinearRead(HeadsFirst(x[0]), x[1], linear)};
    };
    ExpectRounded({tokens[0]}, {sums}, read, "linear read", 0, type);
  }
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
                        "conv " + std::to_string(length) + ", " + std::to_string(taps), 1e-6);
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

TEST(BFloat16Tokens, ExactAttentionByPairs) {
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
  EXPECT_TRUE(at::allclose(composed.to(at::kFloat), kernel.to(at::kFloat), 0.01, 1e-3));
}

}  // namespace
}  // namespace cistern::ops
