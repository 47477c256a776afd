#include "cistern/ops/linear_attention.h"

#include <torch/csrc/autograd/forward_grad.h>

#include <functional>

#include "cistern/ops/memory_test.h"

namespace cistern::ops {
namespace {

using namespace cistern::testing;

const LinearRule kElu{FeatureMap::kEluPlusOne, 0, DivisorRule::kPlus, 1e-6};
const LinearRule kRules[] = {kElu,
                             {FeatureMap::kEluPlusOne, 0.125, DivisorRule::kPlus, 1e-3},
                             {FeatureMap::kNone, 0, DivisorRule::kNone, 0.5},
                             {FeatureMap::kNone, 0, DivisorRule::kAtLeast, 2},
                             {FeatureMap::kNone, 0, DivisorRule::kMagnitude, 8},
                             {FeatureMap::kNone, 0, DivisorRule::kSignSafe, 8}};

struct Case {
  LinearRule rule = kElu;
  int64_t batch = 2, heads = 2, length = 19, slots = 3, width = 4;
  bool empty = false, lengths = false, starts = false, heads_last = false;
};

MemoryProblem MakeProblem(const Case& c) {
  at::manual_seed(29 + c.length);
  MemoryProblem p;
  p.name = "map " + std::to_string(int(c.rule.map)) + " divisor " +
           std::to_string(int(c.rule.divisor)) + " T" + std::to_string(c.length) + " n" +
           std::to_string(c.slots) + " d" + std::to_string(c.width) + (c.empty ? " empty" : "") +
           (c.lengths ? " lengths" : "") + (c.starts ? " starts" : "") +
           (c.heads_last ? " heads last" : "");
  const int64_t B = c.batch, H = c.heads, T = c.length, n = c.slots, d = c.width,
                columns = c.rule.Columns(d);
  at::Tensor memory = Normal({B, H, n, columns});
  if (c.rule.map == FeatureMap::kEluPlusOne) memory = memory.abs();
  if (c.empty) memory = at::zeros_like(memory);
  if (c.lengths)
    p.mask.lengths =
        at::cat({Lengths({T, 0}), at::randint(0, T + 1, {B}, at::kLong)}).narrow(0, 0, B);
  if (c.starts) p.mask.starts = at::rand({B, T}) < 0.1;
  p.state = {3};
  p.parts = {"out", "memory", "dq", "dk", "dv", "d_memory"};
  p.x = {Normal({B, H, T, n}), Normal({B, H, T, n}), Normal({B, H, T, d}), memory};
  p.g = {Normal({B, H, T, d}), Normal({B, H, n, columns})};
  p.run = [rule = c.rule](const Tensors& x, const Mask& mask) {
    const SumResult r = LinearAttention(x[0], x[1], x[2], x[3], rule, mask);
    return Tensors{r.out, r.memory};
  };
  return p;
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const LinearRule& rule : kRules) {
    for (const int64_t length : {0, 1, 5, 32, 33, 161}) {
      for (int masks = 0; masks < 4; ++masks) {
        cases.push_back({rule, 3, 2, length, 7, 5, length % 2 == 0, (masks & 1) != 0,
                         (masks & 2) != 0, length != 5});
      }
    }
    cases.push_back({rule, 1, 1, 37, 2, 1});
    cases.push_back({rule, 2, 1, 130, 33, 43, true});
    cases.push_back({rule, 0, 2, 5, 3, 4});
  }
  return cases;
}

TEST(LinearAttention, ThreeImplementationsAgreeForwardAndBackward) {
  for (const Case& c : Cases()) {
    // Signed features cancel in the divisor.
    const double cancels =
        c.rule.map == FeatureMap::kNone && c.rule.divisor != DivisorRule::kNone ? 10 : 1;
    ExpectImplementationsAgree(MakeProblem(c), c.heads_last, [&](at::ScalarType dtype, size_t) {
      return cancels * (dtype == at::kDouble ? 1e-12 : 2e-6);
    });
    if (HasFailure()) break;
  }
}

TEST(LinearAttention, GradientsMatchFiniteDifferences) {
  for (const Case& c : Cases()) {
    if (c.length <= 33 && c.batch > 0 && c.heads_last) ExpectFiniteDifferences(MakeProblem(c));
  }
}

TEST(LinearAttention, EveryRule) {
  for (const LinearRule& rule : kRules) {
    ExpectGradientsOfOneOutputAlone(MakeProblem({rule}));
    ExpectPiecesEqualWhole(MakeProblem({rule, 2, 2, 37, 5, 4, true, false, true}));
    ExpectSameBitsForAnyNumberOfThreads(MakeProblem({rule, 3, 5, 200, 16, 20, false, true, true}));
    ExpectPaddingHasNoEffect(MakeProblem({rule, 3, 2, 23, 4, 5}));
    ExpectDocumentsApart(MakeProblem({rule, 1, 2, 40, 4, 5, true}), {{0, 7}, {7, 13}, {20, 20}});
  }
  ExpectSecondDerivatives(MakeProblem({kElu, 2, 2, 21, 3, 5, false, true, true}));
  ExpectSecondDerivatives(MakeProblem({kRules[2], 2, 2, 21, 3, 5, false, true, true}));
}

// One head is cut into segments for several threads.
TEST(LinearAttention, SameBitsWhereThreadsShareAHead) {
  ExpectSameBitsForAnyNumberOfThreads(MakeProblem({kElu, 1, 1, 3500, 6, 5, false, false, false}));
  ExpectSameBitsForAnyNumberOfThreads(MakeProblem({kElu, 2, 1, 2500, 6, 5, true, true, true}));
}

// The feature map and the division, where gradients are recorded as well: their own functions have
// no forward mode, and a tangent that is left out would be a silent zero.
TEST(LinearAttention, PartsHaveTangents) {
  const at::Tensor x = Normal({2, 3, 4}).requires_grad_(), direction = Normal({2, 3, 4});
  const auto tangent = [&](const std::function<at::Tensor(const at::Tensor&)>& f) {
    const uint64_t level = torch::autograd::ForwardADLevel::get_next_idx();
    const at::Tensor y = f(at::_make_dual(x, direction, int64_t(level)));
    const at::Tensor t = std::get<1>(at::_unpack_dual(y, int64_t(level)));
    torch::autograd::ForwardADLevel::release_idx(level);
    return t;
  };
  constexpr double kStep = 1e-6;
  for (const auto& f : {std::function<at::Tensor(const at::Tensor&)>(EluPlusOne),
                        std::function<at::Tensor(const at::Tensor&)>([](const at::Tensor& s) {
                          return DivideSums(s, DivisorRule::kMagnitude, 0.25);
                        })}) {
    const at::Tensor got = tangent(f);
    ASSERT_TRUE(got.defined());
    const at::NoGradGuard guard;
    ExpectClose(got, (f(x + kStep * direction) - f(x - kStep * direction)) / (2 * kStep), 1e-7,
                "tangent");
  }
}

TEST(LinearAttention, ShapesAreChecked) {
  const MemoryProblem p = MakeProblem({});
  for (size_t i = 0; i < p.x.size(); ++i) {
    Tensors x = p.x;
    x[i] = x[i].narrow(-1, 0, x[i].size(-1) - 1);
    EXPECT_THROW(p.run(x, {}), c10::Error) << i;
  }
  Tensors x = p.x;
  x[0] = x[0].to(at::kFloat);
  EXPECT_THROW(p.run(x, {}), c10::Error);
  ExpectContains(Thrown([&] {
                   LinearAttention(p.x[0], p.x[1], p.x[2], p.x[3],
                                   {FeatureMap::kNone, 0, DivisorRule::kNone, 1});
                 }),
                 {"expected memory of shape [B,H,n,d] "});
}

TEST(LinearAttention, MetaTensorsHaveTheShapes) { ExpectMetaTensorsHaveTheShapes(MakeProblem({})); }

}  // namespace
}  // namespace cistern::ops
