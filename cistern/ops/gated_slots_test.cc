#include "cistern/ops/gated_slots.h"

#include "cistern/ops/memory_test.h"

namespace cistern::ops {
namespace {

using namespace cistern::testing;

enum class Gates { kMild, kStrong, kJumps };

struct Case {
  int64_t batch, heads, length, slots, width;
  Gates gates = Gates::kMild;
  bool empty = false, lengths = false, starts = false, heads_last = false;
  std::string Name() const {
    return "T" + std::to_string(length) + " n" + std::to_string(slots) + " d" +
           std::to_string(width) + " gates " + std::to_string(int(gates)) +
           (empty ? " empty" : "") + (lengths ? " lengths" : "") + (starts ? " starts" : "") +
           (heads_last ? " heads last" : "");
  }
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const int64_t length : {0, 1, 5, 31, 32, 33, 64, 65, 161}) {
    for (const Gates gates : {Gates::kMild, Gates::kStrong, Gates::kJumps}) {
      for (int masks = 0; masks < 4; ++masks) {
        cases.push_back({3, 2, length, 7, 5, gates, length % 2 == 0, (masks & 1) != 0,
                         (masks & 2) != 0, length != 5});
      }
    }
  }
  // With one slot the gradients of q and k are 0, beside which nothing is close.
  cases.push_back({1, 1, 37, 2, 1});
  cases.push_back({2, 1, 130, 33, 43, Gates::kMild, true});
  cases.push_back({1, 2, 300, 64, 32, Gates::kMild, true});
  cases.push_back({0, 2, 5, 3, 4});
  return cases;
}

double TemperatureOf(const Case& c) { return c.gates == Gates::kMild ? 8 : 1; }

MemoryProblem MakeProblem(const Case& c) {
  at::manual_seed(31 + c.length);
  MemoryProblem p;
  p.name = c.Name();
  p.state = {4, 5};
  p.parts = {"out", "keys", "values", "d_q", "d_k", "d_v", "d_logits", "d_keys", "d_values"};
  const int64_t B = c.batch, H = c.heads, T = c.length, n = c.slots, d = c.width;
  at::Tensor logits = Normal({B, H, T, n}, 2);
  if (c.gates == Gates::kJumps) {
    // Gates that are 1 or all but 0 in every precision, or 0 at once.
    logits = logits.masked_fill(at::rand_like(logits) < 0.05, 400.0)
                 .masked_fill(at::rand_like(logits) < 0.05, -25.0)
                 .masked_fill(at::rand_like(logits) < 0.05, -1e4)
                 .masked_fill(at::rand_like(logits) < 0.05, -kInf)
                 .masked_fill(at::rand_like(logits) < 0.05, kInf);
  }
  const double scale = c.empty ? 0 : 1;
  p.x = {Normal({B, H, T, d}),        Normal({B, H, T, d}),       Normal({B, H, T, d}), logits,
         Normal({B, H, n, d}, scale), Normal({B, H, n, d}, scale)};
  if (c.lengths)
    p.mask.lengths =
        at::cat({Lengths({T, 0}), at::randint(0, T + 1, {B}, at::kLong)}).narrow(0, 0, B);
  if (c.starts) p.mask.starts = at::rand({B, T}) < 0.1;
  p.g = {Normal({B, H, T, d}), Normal({B, H, n, d}), Normal({B, H, n, d})};
  p.run = [temperature = TemperatureOf(c)](const Tensors& x, const Mask& mask) {
    const GatedSlotsResult r =
        GatedSlotsAttention(x[0], x[1], x[2], x[3], x[4], x[5], 0.4, temperature, mask);
    return Tensors{r.out, r.keys, r.values};
  };
  return p;
}

TEST(GatedSlots, ThreeImplementationsAgreeForwardAndBackward) {
  for (const Case& c : Cases()) {
    // A gate's gradient is summed over all later tokens, whose rounding adds up.
    ExpectImplementationsAgree(MakeProblem(c), c.heads_last, [](at::ScalarType dtype, size_t i) {
      return dtype == at::kDouble ? 1e-12 : i == 6 ? 4e-6 : 2e-6;
    });
    if (HasFailure()) break;
  }
}

TEST(GatedSlots, GradientsMatchFiniteDifferences) {
  for (const Case& c : Cases()) {
    if (c.length <= 33 && c.batch > 0 && c.gates != Gates::kJumps && c.heads_last)
      ExpectFiniteDifferences(MakeProblem(c));
  }
}

TEST(GatedSlots, AsAllMemories) {
  for (const Gates gates : {Gates::kMild, Gates::kStrong, Gates::kJumps}) {
    ExpectPiecesEqualWhole(MakeProblem({2, 2, 37, 5, 4, gates, true, false, true}));
    ExpectSameBitsForAnyNumberOfThreads(MakeProblem({3, 5, 200, 16, 20, gates, false, true, true}));
    if (gates == Gates::kJumps) continue;
    ExpectGradientsOfOneOutputAlone(MakeProblem({2, 2, 19, 3, 4, gates}));
    ExpectSecondDerivatives(MakeProblem({2, 2, 21, 3, 5, gates, false, true, true}));
    ExpectPaddingHasNoEffect(MakeProblem({3, 2, 23, 4, 5, gates}));
    ExpectDocumentsApart(MakeProblem({1, 2, 90, 4, 5, gates, true}), {{0, 7}, {7, 13}, {20, 70}});
  }
}

// Fewer heads than threads: parts of a head, where documents and padding begin anywhere.
TEST(GatedSlots, SameBitsWhereThreadsShareAHead) {
  for (const Gates gates : {Gates::kMild, Gates::kStrong, Gates::kJumps}) {
    ExpectSameBitsForAnyNumberOfThreads(MakeProblem({1, 1, 1900, 7, 5, gates}));
    ExpectSameBitsForAnyNumberOfThreads(MakeProblem({1, 1, 1600, 16, 16, gates, true}));
    ExpectSameBitsForAnyNumberOfThreads(
        MakeProblem({2, 1, 1200, 16, 5, gates, false, true, true, true}));
  }
}

TEST(GatedSlots, PastIsBitwiseBlindToTheFuture) {
  ImplScope scope(Impl::kKernel);
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const MemoryProblem p = MakeProblem({2, 2, 300, 16, 16, Gates::kStrong, true});
    Tensors x;
    for (size_t i = 0; i < p.x.size(); ++i) x.push_back(p.IsState(i) ? p.x[i] : p.x[i].to(dtype));
    const at::Tensor want = p.run(x, {})[0];
    for (const int64_t t : {1, 31, 32, 33, 63, 64, 65, 299}) {
      Tensors changed = x;
      for (size_t i = 0; i < x.size(); ++i) {
        if (p.IsState(i)) continue;
        changed[i] = at::cat({x[i].narrow(2, 0, t), x[i].narrow(2, t, 300 - t) * -37.0 + 11.0}, 2);
      }
      const at::Tensor got = p.run(changed, {})[0];
      ExpectSameBits(got.narrow(2, 0, t), want.narrow(2, 0, t), "before " + std::to_string(t));
      EXPECT_FALSE(at::equal(got, want));
    }
  }
}

// A NaN stays with its own token and those after it, and is seen there.
TEST(GatedSlots, NotANumberStaysInItsFuture) {
  ImplScope scope(Impl::kKernel);
  for (size_t i = 0; i < 4; ++i) {
    const MemoryProblem p = MakeProblem({1, 2, 100, 16, 16, Gates::kMild, true});
    Tensors x;
    for (size_t j = 0; j < p.x.size(); ++j)
      x.push_back(p.IsState(j) ? p.x[j] : p.x[j].to(at::kFloat));
    x[i] = x[i].clone();
    x[i].select(2, 70).fill_(std::nan(""));
    const at::Tensor out = p.run(x, {})[0];
    EXPECT_TRUE(out.narrow(2, 0, 70).isfinite().all().item<bool>()) << i;
    EXPECT_TRUE(out.select(2, 70).isnan().all().item<bool>()) << i;
    EXPECT_EQ(out.narrow(2, 71, 29).isnan().all().item<bool>(), i != 0) << i;  // not after a query
  }
}

TEST(GatedSlots, TheStateIsWrittenInPlaceWhereNobodyElseHoldsIt) {
  at::NoGradGuard no_grad;
  for (const int64_t length : {1, 40}) {
    const MemoryProblem p = MakeProblem({2, 2, length, 7, 5});
    at::Tensor keys = p.x[4].clone(), values = p.x[5].clone();
    const void *const key_data = keys.data_ptr(), *const value_data = values.data_ptr();
    const Tensors want = p.run(p.x, {});
    const at::Tensor out = GatedSlotsExtend(p.x[0], p.x[1], p.x[2], p.x[3], keys, values, 0.4, 8);
    ExpectSameBits(out, want[0], "out");
    ExpectSameBits(keys, want[1], "keys");
    ExpectSameBits(values, want[2], "values");
    EXPECT_EQ(keys.data_ptr(), key_data);
    EXPECT_EQ(values.data_ptr(), value_data);
    const at::Tensor held = keys, before = keys.clone();
    GatedSlotsExtend(p.x[0], p.x[1], p.x[2], p.x[3], keys, values, 0.4, 8);
    ExpectSameBits(held, before, "held");
    EXPECT_FALSE(at::equal(keys, before));
  }
}

TEST(GatedSlots, WrongShapesNameTheOpAndTheShape) {
  const MemoryProblem p = MakeProblem({2, 2, 9, 3, 4});
  for (size_t i = 0; i < p.x.size(); ++i) {
    Tensors x = p.x;
    x[i] = x[i].narrow(-1, 0, x[i].size(-1) - 1);
    ExpectContains(Thrown([&] { p.run(x, {}); }), {"[gated_slots]", "expected"});
  }
  Tensors x = p.x;
  x[0] = x[0].to(at::kFloat);
  ExpectContains(Thrown([&] { p.run(x, {}); }), {"[gated_slots]", "one dtype", "Float"});
  ExpectContains(
      Thrown([&] { GatedSlotsAttention(p.x[0], p.x[1], p.x[2], p.x[3], p.x[4], p.x[5], 1, 0); }),
      {"[gated_slots]", "temperature > 0"});
}

TEST(GatedSlots, MetaTensorsHaveTheShapes) {
  ExpectMetaTensorsHaveTheShapes(MakeProblem({2, 2, 9, 3, 4}));
}

}  // namespace
}  // namespace cistern::ops
