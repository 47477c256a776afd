#include "cistern/ops/slot_attention.h"

#include <array>

#include "cistern/ops/memory_test.h"
#include "cistern/ops/output_memory.h"
#include "cistern/ops/tensor_rows.h"

namespace cistern::ops {
namespace {

using namespace cistern::testing;

enum class Op { kLatte, kFavor, kAbc, kAbcMasked };
constexpr Op kOps[] = {Op::kLatte, Op::kFavor, Op::kAbc, Op::kAbcMasked};
const char* NameOf(Op op) { return std::array{"latte", "favor", "abc", "abc masked"}[size_t(op)]; }
bool IsAbc(Op op) { return op == Op::kAbc || op == Op::kAbcMasked; }
enum class Weights { kMild, kJumps, kHoles };

struct Case {
  Op op;
  int64_t batch, heads, length, slots, width;
  Weights weights = Weights::kMild;
  bool empty = false, lengths = false, starts = false, heads_last = false;
  std::string Name() const {
    return std::string(NameOf(op)) + " T" + std::to_string(length) + " n" + std::to_string(slots) +
           " d" + std::to_string(width) + " weights " + std::to_string(int(weights)) +
           (empty ? " empty" : "") + (lengths ? " lengths" : "") + (starts ? " starts" : "") +
           (heads_last ? " heads last" : "");
  }
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const Op op : kOps) {
    for (const int64_t length : {0, 1, 5, 31, 32, 33, 65, 161}) {
      for (int masks = 0; masks < 4; ++masks) {
        cases.push_back({op, 3, 2, length, 7, 5, Weights::kMild, length % 2 == 0, (masks & 1) != 0,
                         (masks & 2) != 0, length != 5});
      }
    }
    for (const Weights w : {Weights::kJumps, Weights::kHoles}) {
      for (int masks = 0; masks < 4; ++masks)
        cases.push_back(
            {op, 3, 2, 150, 7, 5, w, masks == 0, (masks & 1) != 0, (masks & 2) != 0, masks == 3});
    }
    if (IsAbc(op)) cases.push_back({op, 3, 2, 1, 7, 5, Weights::kHoles});
    // With one slot the gradient of favor's x is 0, beside which nothing is close.
    cases.push_back({op, 1, 1, 37, op == Op::kFavor ? 2 : 1, 1});
    cases.push_back({op, 2, 1, 130, 33, 43, Weights::kMild, true});
    cases.push_back({op, 1, 2, 300, 64, 32, Weights::kMild, true});
    cases.push_back({op, 0, 2, 5, 3, 4});
  }
  return cases;
}

MemoryProblem MakeProblem(const Case& c) {
  at::manual_seed(23 + c.length);
  MemoryProblem p;
  p.name = c.Name();
  const int64_t B = c.batch, H = c.heads, T = c.length, n = c.slots, d = c.width;
  at::Tensor s = Normal({B, H, T, n}, 2);
  if (c.weights == Weights::kJumps)
    s = s + (at::rand({B, H, T, n}) < 0.1).to(at::kDouble) * 300 -
        (at::rand({B, H, T, n}) < 0.1).to(at::kDouble) * 900;
  if (c.weights == Weights::kHoles)
    s = s.masked_fill((at::rand({B, H, T, n}) < 0.5).logical_or(at::arange(n) % 5 == 4), -kInf);
  at::Tensor keys = Normal({B, H, n, d}), values = Normal({B, H, n, d}), z = Normal({B, H, n}, 2);
  const at::Tensor fresh = c.empty ? at::ones({B, H, n}, at::kBool) : at::rand({B, H, n}) < 0.3;
  z = z.masked_fill(fresh, -kInf);
  keys = keys.masked_fill(fresh.unsqueeze(-1), 0.0);
  values = values.masked_fill(fresh.unsqueeze(-1), 0.0);
  if (c.lengths)
    p.mask.lengths =
        at::cat({Lengths({T, 0}), at::randint(0, T + 1, {B}, at::kLong)}).narrow(0, 0, B);
  if (c.starts) p.mask.starts = at::rand({B, T}) < 0.1;
  if (IsAbc(c.op)) {
    p.state = {4, 5, 6};
    p.parts = {"out", "keys", "values", "z", "dq", "dk", "dv", "ds", "d_keys", "d_values", "dz"};
    p.x = {Normal({B, H, T, d}), Normal({B, H, T, d}), Normal({B, H, T, d}), s, keys, values, z};
    p.g = {Normal({B, H, T, d}), Normal({B, H, n, d}), Normal({B, H, n, d}), Normal({B, H, n})};
    p.run = [masked = c.op == Op::kAbcMasked](const Tensors& x, const Mask& mask) {
      const AbcResult r =
          AbcAttention(x[0], x[1], x[2], x[3], {x[4], x[5], x[6]}, 0.4, mask, masked);
      return Tensors{r.out, r.state.keys, r.state.values, r.state.z};
    };
  } else {
    p.state = {3, 4};
    p.parts = {"out", "memory", "z", "dq", "ds", "dv", "d_memory", "dz"};
    at::Tensor q = Normal({B, H, T, n}, 2);
    if (c.op == Op::kFavor && c.weights == Weights::kJumps)
      q = q + (at::rand({B, H, T, n}) < 0.1).to(at::kDouble) * 500;
    p.x = {q, s, Normal({B, H, T, d}), values, z};
    p.g = {Normal({B, H, T, d}), Normal({B, H, n, d}), Normal({B, H, n})};
    p.run = [favor = c.op == Op::kFavor](const Tensors& x, const Mask& mask) {
      const AttentionResult r =
          (favor ? FavorAttention : LatteAttention)(x[0], x[1], x[2], {x[3], x[4]}, mask);
      return Tensors{r.out, r.state.memory, r.state.z};
    };
  }
  return p;
}

size_t LogWeights(const MemoryProblem& p) { return p.state.size() == 3 ? 3 : 1; }

TEST(SlotAttention, ThreeImplementationsAgreeForwardAndBackward) {
  for (const Case& c : Cases()) {
    const MemoryProblem p = MakeProblem(c);
    const at::Tensor s = Finite(p.x[LogWeights(p)]);
    const double largest = s.numel() > 0 ? s.abs().max().item<double>() : 0;
    ExpectImplementationsAgree(p, c.heads_last, [&](at::ScalarType dtype, size_t) {
      return dtype == at::kDouble ? 1e-12 : 2e-6 + largest * std::ldexp(1.0, -21);
    });
    if (HasFailure()) break;
  }
}

TEST(SlotAttention, GradientsMatchFiniteDifferences) {
  for (const Case& c : Cases()) {
    if (c.length <= 33 && c.batch > 0 && c.weights == Weights::kMild && c.heads_last)
      ExpectFiniteDifferences(MakeProblem(c));
  }
}

TEST(SlotAttention, AllAlike) {
  for (const Op op : kOps) {
    ExpectGradientsOfOneOutputAlone(MakeProblem({op, 2, 2, 19, 3, 4}));
    ExpectSecondDerivatives(MakeProblem({op, 2, 2, 21, 3, 5, Weights::kMild, false, true, true}));
    ExpectPiecesEqualWhole(MakeProblem({op, 2, 2, 37, 5, 4, Weights::kMild, true, false, true}));
    ExpectSameBitsForAnyNumberOfThreads(
        MakeProblem({op, 3, 5, 200, 16, 20, Weights::kMild, false, true, true}));
    ExpectPaddingHasNoEffect(MakeProblem({op, 3, 2, 23, 4, 5}));
    MemoryProblem p = MakeProblem({op, 1, 2, 40, 4, 5, Weights::kMild, true});
    at::Tensor& s = p.x[LogWeights(p)];
    s = at::cat({s.narrow(2, 0, 7) + 1000, s.narrow(2, 7, 13) - 1000, s.narrow(2, 20, 20)}, 2);
    ExpectDocumentsApart(p, {{0, 7}, {7, 13}, {20, 20}});
  }
}

// Fewer heads than threads: parts of a head, where documents and padding begin anywhere.
TEST(SlotAttention, SameBitsWhereThreadsShareAHead) {
  for (const Op op : kOps) {
    for (const Weights w : {Weights::kMild, Weights::kJumps, Weights::kHoles}) {
      ExpectSameBitsForAnyNumberOfThreads(MakeProblem({op, 1, 1, 1900, 7, 5, w}));
      ExpectSameBitsForAnyNumberOfThreads(MakeProblem({op, 1, 1, 1600, 16, 16, w, true}));
      ExpectSameBitsForAnyNumberOfThreads(
          MakeProblem({op, 2, 1, 1200, 16, 5, w, false, true, true, true}));
    }
  }
}

TEST(SlotAttention, PastIsBitwiseBlindToTheFuture) {
  ImplScope scope(Impl::kKernel);
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    for (const Op op : kOps) {
      const MemoryProblem p = MakeProblem({op, 2, 2, 300, 16, 16, Weights::kJumps, true});
      Tensors x;
      for (size_t i = 0; i < p.x.size(); ++i) x.push_back(p.IsState(i) ? p.x[i] : p.x[i].to(dtype));
      const at::Tensor want = p.run(x, {})[0];
      for (const int64_t t : {1, 31, 32, 33, 127, 128, 129, 299}) {
        Tensors changed = x;
        for (size_t i = 0; i < x.size(); ++i) {
          if (p.IsState(i)) continue;
          changed[i] =
              at::cat({x[i].narrow(2, 0, t), x[i].narrow(2, t, 300 - t) * -37.0 + 11.0}, 2);
        }
        const at::Tensor got = p.run(changed, {})[0];
        ExpectSameBits(got.narrow(2, 0, t), want.narrow(2, 0, t),
                       p.name + " before " + std::to_string(t));
        EXPECT_FALSE(at::equal(got, want));
      }
    }
  }
}

// As ones in the values make of a row of weights: all of them, or none.
TEST(SlotAttention, FavorReadsNothingWhereNoSlotHoldsAnything) {
  for (const Impl impl : kImpls) {
    ImplScope scope(impl);
    for (const auto dtype : {at::kFloat, at::kDouble}) {
      for (const int64_t length : {1, 4}) {
        const at::Tensor x = Normal({1, 1, length, 3}).to(dtype),
                         s = Normal({1, 1, length, 3}).to(dtype),
                         v = at::ones({1, 1, length, 2}, dtype);
        s.select(2, 0).fill_(-kInf);  // nobody has written yet
        if (length == 4) {
          s.select(2, 1).narrow(-1, 0, 2).fill_(-kInf);  // one slot alone is written
          x.select(2, 1).fill_(-300), x.select(2, 3).fill_(-kInf);
        }
        const Tensors leaves = {Leaf(x), Leaf(s), Leaf(v)};
        const at::Tensor out = FavorAttention(leaves[0], leaves[1], leaves[2],
                                              EmptySlots(1, 1, 3, 2, x.options()))
                                   .out,
                         want = length == 1 ? at::zeros({1}, dtype)
                                            : at::tensor({0.0, 1.0, 1.0, 0.0}, at::kDouble);
        ExpectClose(out.detach().select(3, 1).flatten(), want, dtype == at::kFloat ? 1e-6 : 1e-14,
                    ImplName(impl));
        for (const at::Tensor& g : Gradients(out.square().sum(), leaves)) {
          EXPECT_TRUE(g.isfinite().all().item<bool>()) << ImplName(impl);
          EXPECT_EQ(g.select(2, 0).abs().sum().item<double>(), 0) << ImplName(impl);
        }
      }
    }
  }
}

// What all log-weights have in common leaves the read as it is, though no float holds both.
TEST(SlotAttention, FavorIsTheSameBesideLargeLogWeights) {
  MemoryProblem p = MakeProblem({Op::kFavor, 1, 2, 200, 7, 5, Weights::kMild, true});
  at::Tensor &x = p.x[0], &s = p.x[1];
  x = x.mul(8).round() / 8, s = s.mul(8).round() / 8;  // floats beside 1e5, too
  for (const Impl impl : kImpls) {
    const at::Tensor want = Everything(p, impl, at::kFloat)[0];
    MemoryProblem far = p;
    far.x[1] = s + 1e5;
    ExpectClose(Everything(far, impl, at::kFloat)[0], want, 1e-6, ImplName(impl));
    far.x[1] = s - 1e5;
    ExpectClose(Everything(far, impl, at::kFloat)[0], want, 1e-6, ImplName(impl));
  }
}

TEST(SlotAttention, ShapesAreChecked) {
  const MemoryProblem p = MakeProblem({Op::kAbc, 2, 2, 9, 3, 4});
  for (size_t i = 0; i < p.x.size(); ++i) {
    Tensors x = p.x;
    x[i] = x[i].narrow(-1, 0, x[i].size(-1) - 1);
    EXPECT_THROW(p.run(x, {}), c10::Error) << p.parts[4 + i];
  }
  Tensors x = p.x;
  x[0] = x[0].to(at::kFloat);
  EXPECT_THROW(p.run(x, {}), c10::Error);
}

TEST(SlotAttention, MetaTensorsHaveTheShapes) {
  for (const Op op : kOps) ExpectMetaTensorsHaveTheShapes(MakeProblem({op, 2, 2, 9, 3, 4}));
}

TEST(OutputMemory, LargeBlocksAreUsedAgainAndNeverTwiceAtOnce) {
  const c10::SymInt sizes[] = {1, 8, 4096, 64};
  void* first = nullptr;
  {
    const at::Tensor x = EmptyHeads(sizes, at::kFloat), y = EmptyHeads(sizes, at::kFloat);
    first = x.data_ptr();
    EXPECT_NE(first, y.data_ptr());
    x.fill_(1), y.fill_(2);
    EXPECT_EQ(x.sum().item<float>(), float(x.numel()));
  }
  EXPECT_GE(WaitingOutputBytes(), size_t{16} << 20);
  const at::Tensor x = EmptyHeads(sizes, at::kFloat), y = EmptyHeads(sizes, at::kFloat);
  EXPECT_TRUE(x.data_ptr() == first || y.data_ptr() == first);
  EXPECT_NE(x.data_ptr(), y.data_ptr());
}

}  // namespace
}  // namespace cistern::ops
