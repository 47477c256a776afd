// Linear attention with Fourier features inside: its implementations, and what holds of every
// memory.
#include "cistern/ops/fourier_attention.h"

#include "cistern/ops/fourier_features.h"
#include "cistern/ops/memory_test.h"
#include "cistern/ops/tensor_rows.h"

namespace cistern::ops {
namespace {

using namespace cistern::testing;

struct Case {
  int64_t batch, heads, length, features, width, channels;
  bool empty = false, lengths = false, starts = false, heads_last = false, scaled = true,
       normalise = true;
  LinearRule rule = {FeatureMap::kFourier, 0, DivisorRule::kSignSafe, 2};
};

MemoryProblem MakeProblem(const Case& c) {
  at::manual_seed(23 + c.length);
  MemoryProblem p;
  p.name = "fourier_attention T" + std::to_string(c.length) + " m" + std::to_string(c.features) +
           " d" + std::to_string(c.width) + " from " + std::to_string(c.channels);
  const int64_t B = c.batch, H = c.heads, T = c.length, n = 2 * c.features,
                columns = c.rule.Columns(c.width);
  at::Tensor memory = Normal({B, H, n, columns});
  if (c.empty) memory = at::zeros_like(memory);
  if (c.lengths)
    p.mask.lengths =
        at::cat({Lengths({T, 0}), at::randint(0, T + 1, {B}, at::kLong)}).narrow(0, 0, B);
  if (c.starts) p.mask.starts = at::rand({B, T}) < 0.1;
  p.state = {3};
  p.parts = {"out", "memory", "dq", "dk", "dv", "d_memory"};
  p.x = {Normal({B, H, T, c.channels}), Normal({B, H, T, c.channels}), Normal({B, H, T, c.width}),
         memory};
  p.g = {Normal({B, H, T, c.width}), Normal({B, H, n, columns})};
  const at::Tensor scale = c.scaled ? Normal({H, 1, c.channels}) : at::Tensor(),
                   matrices = Normal({H, c.features, c.channels});
  p.run = [=, rule = c.rule, normalise = c.normalise](const Tensors& x, const Mask& mask) {
    const auto type = ComputeTypeOf(x[0]);
    const FourierFeatureMap map = {scale.defined() ? scale.to(type) : scale, matrices.to(type),
                                   normalise, 0.5};
    const SumResult r = FourierAttention(x[0], x[1], x[2], x[3], map, rule, mask);
    return Tensors{r.out, r.memory};
  };
  return p;
}

TEST(FourierAttention, ThreeImplementationsAgreeForwardAndBackward) {
  for (const int64_t length : {0, 1, 5, 32, 65, 161}) {
    for (int masks = 0; masks < 4; ++masks) {
      const MemoryProblem p = MakeProblem({3, 2, length, 7, 5, 6, length % 2 == 0, (masks & 1) != 0,
                                           (masks & 2) != 0, length != 5, masks != 1, masks != 2});
      ExpectImplementationsAgree(p, length != 5, [](at::ScalarType dtype, size_t) {
        return dtype == at::kDouble ? 1e-11 : 2e-5;
      });
      if (length > 0 && length < 33) ExpectFiniteDifferences(p);
    }
  }
  for (const Case& c : {Case{1, 2, 140, 55, 32, 32, true}, Case{0, 2, 5, 3, 4, 4}}) {
    ExpectImplementationsAgree(MakeProblem(c), true, [](at::ScalarType dtype, size_t) {
      return dtype == at::kDouble ? 1e-11 : 5e-5;
    });
  }
}

TEST(FourierAttention, AsEveryMemory) {
  ExpectGradientsOfOneOutputAlone(MakeProblem({2, 2, 19, 3, 4, 5}));
  ExpectSecondDerivatives(MakeProblem({2, 2, 21, 3, 5, 4, false, true, true}));
  ExpectPiecesEqualWhole(MakeProblem({2, 2, 37, 5, 4, 4, true, false, true}));
  ExpectSameBitsForAnyNumberOfThreads(MakeProblem({3, 5, 200, 16, 20, 16, false, true, true}));
  ExpectSameBitsForAnyNumberOfThreads(MakeProblem({1, 1, 2900, 7, 5, 9, false, false, true}));
  ExpectPaddingHasNoEffect(MakeProblem({3, 2, 23, 4, 5, 5}));
  ExpectDocumentsApart(MakeProblem({1, 2, 40, 4, 5, 5, true}), {{0, 7}, {7, 13}, {20, 20}});
}

TEST(FourierAttention, PastIsBitwiseBlindToTheFuture) {
  ExpectPastIsBlindToTheFuture(MakeProblem({2, 2, 300, 16, 16, 16, true}));
}

// The gradients of scale, and of the matrices, with which the op is composed; of a state that is
// written in place: what it becomes.
TEST(FourierAttention, ScaleAndMatricesWithAGradient) {
  const MemoryProblem p = MakeProblem({2, 3, 40, 5, 4, 6, true});
  const LinearRule rule = {FeatureMap::kFourier, 0, DivisorRule::kAtLeast, 1};
  for (const bool of_matrices : {false, true}) {
    const auto gradients = [&](Impl impl, at::ScalarType type) {
      const ImplScope scope(impl);
      at::manual_seed(5);
      const at::Tensor scale = Leaf(Normal({3, 1, 6}).to(type)), given = Normal({3, 5, 6}).to(type),
                       q = Leaf(p.x[0].to(type)), matrices = of_matrices ? Leaf(given) : given;
      const at::Tensor out = FourierAttention(q, p.x[1].to(type), p.x[2].to(type), p.x[3],
                                              {scale, matrices, true, 0.5}, rule)
                                 .out;
      Tensors leaves = {scale, q};
      if (of_matrices) leaves.push_back(matrices);
      return Gradients(out.square().sum(), leaves);
    };
    const Tensors want = gradients(Impl::kComposite, at::kDouble),
                  got = gradients(Impl::kKernel, at::kDouble),
                  plain = gradients(Impl::kKernel, at::kFloat);
    for (size_t i = 0; i < want.size(); ++i) {
      EXPECT_GT(want[i].abs().max().item<double>(), 0);
      ExpectClose(got[i], want[i], 1e-11, "gradient");
      ExpectClose(plain[i], want[i], 1e-4, "gradient in float");
    }
  }
}

TEST(FourierAttention, ExtendsInPlace) {
  const MemoryProblem p = MakeProblem({2, 3, 9, 5, 4, 6, true});
  const FourierFeatureMap map = {{}, Normal({3, 5, 6}), true, 0.5};
  const LinearRule rule = {FeatureMap::kFourier, 0, DivisorRule::kAtLeast, 1};
  const SumResult want = FourierAttention(p.x[0], p.x[1], p.x[2], p.x[3], map, rule);
  const at::NoGradGuard guard;
  at::Tensor memory = p.x[3].clone();
  const void* const data = memory.data_ptr();
  const at::Tensor out = FourierExtend(p.x[0], p.x[1], p.x[2], memory, map, rule);
  ExpectSameBits(out, want.out, "out");
  ExpectSameBits(memory, want.memory, "memory");
  EXPECT_EQ(memory.data_ptr(), data);
}

TEST(FourierAttention, ShapesAreChecked) {
  const MemoryProblem p = MakeProblem({2, 2, 9, 3, 4, 5});
  const auto error = [&](size_t i, const at::Tensor& instead) {
    Tensors x = p.x;
    x[i] = instead;
    return Thrown([&] { p.run(x, {}); });
  };
  ExpectContains(error(0, p.x[0].narrow(3, 0, 4)), {"[fourier_attention]", "q of shape"});
  ExpectContains(error(2, p.x[2].narrow(2, 0, 8)), {"v [B,H,T,d]", "[2, 2, 8, 4]"});
  ExpectContains(error(3, p.x[3].narrow(2, 0, 2)),
                 {"memory of shape [B,H,2m,d+1]", "[2, 2, 2, 5]"});
  ExpectContains(error(3, p.x[3].to(at::kFloat)), {"in double", "Float"});
  ExpectContains(error(2, p.x[2].to(at::kFloat)), {"one dtype", "Float"});
  const auto with = [&](const at::Tensor& scale, const at::Tensor& matrices) {
    return Thrown([&] {
      FourierAttention(p.x[0], p.x[1], p.x[2], p.x[3], {scale, matrices, true, 1}, Case{}.rule);
    });
  };
  ExpectContains(with({}, at::ones({2, 3, 4}, at::kDouble)), {"matrices [H,m,d]", "[2, 3, 4]"});
  ExpectContains(with(at::ones({2, 1, 4}, at::kDouble), at::ones({2, 3, 5}, at::kDouble)),
                 {"scale [H,1,d]", "[2, 1, 4]"});
}

TEST(FourierAttention, MetaTensorsHaveTheShapes) {
  ExpectMetaTensorsHaveTheShapes(MakeProblem({2, 2, 9, 3, 4, 5}));
}

}  // namespace
}  // namespace cistern::ops
