// FAVOR+ from queries and keys: three implementations, and what holds of every memory.
#include "cistern/ops/memory_test.h"
#include "cistern/ops/slot_attention.h"

namespace cistern::ops {
namespace {

using namespace cistern::testing;

struct Case {
  int64_t batch, heads, length, slots, width, query_width;
  bool empty = false, lengths = false, starts = false, heads_last = false;
  double scale = 0.5;
};

MemoryProblem MakeProblem(const Case& c) {
  at::manual_seed(23 + c.length);
  MemoryProblem p;
  p.name = "favor_queries T" + std::to_string(c.length) + " n" + std::to_string(c.slots) + " d" +
           std::to_string(c.width) + " from " + std::to_string(c.query_width);
  const int64_t B = c.batch, H = c.heads, T = c.length, n = c.slots, d = c.width;
  const at::Tensor fresh = c.empty ? at::ones({B, H, n}, at::kBool) : at::rand({B, H, n}) < 0.3,
                   memory = Normal({B, H, n, d}).masked_fill(fresh.unsqueeze(-1), 0.0),
                   z = Normal({B, H, n}, 2).masked_fill(fresh, -kInf),
                   matrix = Normal({n, c.query_width});
  if (c.lengths)
    p.mask.lengths =
        at::cat({Lengths({T, 0}), at::randint(0, T + 1, {B}, at::kLong)}).narrow(0, 0, B);
  if (c.starts) p.mask.starts = at::rand({B, T}) < 0.1;
  p.state = {3, 4};
  p.parts = {"out", "memory", "z", "dq", "dk", "dv", "d_memory", "dz"};
  p.x = {Normal({B, H, T, c.query_width}), Normal({B, H, T, c.query_width}), Normal({B, H, T, d}),
         memory, z};
  p.g = {Normal({B, H, T, d}), Normal({B, H, n, d}), Normal({B, H, n})};
  p.run = [matrix, scale = c.scale](const Tensors& x, const Mask& mask) {
    const AttentionResult r = FavorQueriesAttention(x[0], x[1], x[2], matrix.to(x[0].options()),
                                                    scale, {x[3], x[4]}, mask);
    return Tensors{r.out, r.state.memory, r.state.z};
  };
  return p;
}

TEST(FavorQueries, ThreeImplementationsAgreeForwardAndBackward) {
  for (const int64_t length : {0, 1, 5, 32, 65, 161}) {
    for (int masks = 0; masks < 4; ++masks) {
      const MemoryProblem p = MakeProblem({3, 2, length, 7, 5, 6, length % 2 == 0, (masks & 1) != 0,
                                           (masks & 2) != 0, length != 5});
      ExpectImplementationsAgree(p, length != 5, [](at::ScalarType dtype, size_t) {
        return dtype == at::kDouble ? 1e-12 : 2e-5;
      });
      if (length > 0 && length < 33) ExpectFiniteDifferences(p);
    }
  }
  for (const Case& c : {Case{1, 2, 140, 110, 32, 32, true}, Case{0, 2, 5, 3, 4, 4}}) {
    ExpectImplementationsAgree(MakeProblem(c), true, [](at::ScalarType dtype, size_t) {
      return dtype == at::kDouble ? 1e-12 : 5e-5;
    });
  }
}

TEST(FavorQueries, AsEveryMemory) {
  ExpectGradientsOfOneOutputAlone(MakeProblem({2, 2, 19, 3, 4, 5}));
  ExpectSecondDerivatives(MakeProblem({2, 2, 21, 3, 5, 4, false, true, true}));
  ExpectPiecesEqualWhole(MakeProblem({2, 2, 37, 5, 4, 4, true, false, true}));
  ExpectSameBitsForAnyNumberOfThreads(MakeProblem({3, 5, 200, 16, 20, 16, false, true, true}));
  ExpectSameBitsForAnyNumberOfThreads(MakeProblem({1, 1, 1900, 7, 5, 9, false, false, true}));
  ExpectSameBitsForAnyNumberOfThreads(
      MakeProblem({1, 1, 1600, 16, 16, 16, true, false, false, false, 6}));
  ExpectPaddingHasNoEffect(MakeProblem({3, 2, 23, 4, 5, 5}));
  ExpectDocumentsApart(MakeProblem({1, 2, 40, 4, 5, 5, true}), {{0, 7}, {7, 13}, {20, 20}});
}

TEST(FavorQueries, PastIsBitwiseBlindToTheFuture) {
  ExpectPastIsBlindToTheFuture(MakeProblem({2, 2, 300, 16, 16, 16, true, false, false, false, 3}));
}

// A gradient of the matrix composes the op.
TEST(FavorQueries, MatrixWithAGradient) {
  const MemoryProblem p = MakeProblem({1, 2, 9, 5, 4, 6, true});
  const auto gradients = [&](Impl impl) {
    const ImplScope scope(impl);
    at::manual_seed(5);
    const at::Tensor matrix = Leaf(Normal({5, 6})), q = Leaf(p.x[0]);
    const at::Tensor out =
        FavorQueriesAttention(q, p.x[1], p.x[2], matrix, 0.5, {p.x[3], p.x[4]}).out;
    return Gradients(out.square().sum(), {matrix, q});
  };
  const Tensors want = gradients(Impl::kComposite), got = gradients(Impl::kKernel);
  EXPECT_GT(want[0].abs().max().item<double>(), 0);
  for (size_t i = 0; i < want.size(); ++i) ExpectClose(got[i], want[i], 1e-11, "gradient");
}

TEST(FavorQueries, ShapesAreChecked) {
  const MemoryProblem p = MakeProblem({2, 2, 9, 3, 4, 5});
  const auto error = [&](size_t i, const at::Tensor& instead) {
    Tensors x = p.x;
    x[i] = instead;
    return Thrown([&] { p.run(x, {}); });
  };
  ExpectContains(error(0, p.x[0].narrow(3, 0, 4)), {"[favor_queries]", "q and k of one shape"});
  ExpectContains(error(2, p.x[2].narrow(2, 0, 8)), {"v of shape [B,H,T,d]", "[2, 2, 9, 5]"});
  ExpectContains(error(3, p.x[3].narrow(2, 0, 2)), {"memory [B,H,n,d]", "[3, 5]"});
  ExpectContains(error(4, p.x[4].to(at::kFloat)), {"in double", "Float"});
  ExpectContains(error(2, p.x[2].to(at::kFloat)), {"one dtype", "v Float"});
  ExpectContains(Thrown([&] {
                   FavorQueriesAttention(p.x[0], p.x[1], p.x[2], at::ones({3, 4}, at::kDouble), 1,
                                         {p.x[3], p.x[4]});
                 }),
                 {"matrix [n,d]", "[3, 4]"});
}

TEST(FavorQueries, MetaTensorsHaveTheShapes) {
  ExpectMetaTensorsHaveTheShapes(MakeProblem({2, 2, 9, 3, 4, 5}));
}

}  // namespace
}  // namespace cistern::ops
