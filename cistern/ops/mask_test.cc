#include "cistern/ops/mask.h"

#include "cistern/ops/testing.h"

namespace cistern::ops {
namespace {

using namespace cistern::testing;

at::Tensor Bools(const std::vector<std::vector<int>>& rows) {
  const at::Tensor x = at::empty({int64_t(rows.size()), int64_t(rows[0].size())}, at::kBool);
  for (size_t b = 0; b < rows.size(); ++b) {
    for (size_t t = 0; t < rows[b].size(); ++t)
      x.select(0, int64_t(b)).select(0, int64_t(t)).fill_(rows[b][t] != 0);
  }
  return x;
}

TEST(Mask, RealTokensAreWithinTheLengthsAndValid) {
  Mask mask;
  EXPECT_FALSE(mask);
  EXPECT_FALSE(mask.Real(4).defined());
  EXPECT_FALSE(mask.HeadsPadding(4).defined());
  mask.lengths = Lengths({3, 0});
  EXPECT_TRUE(mask.Padded());
  ExpectSameBits(mask.Real(4), Bools({{1, 1, 1, 0}, {0, 0, 0, 0}}), "lengths");
  mask.valid = Bools({{0, 1, 1, 1}, {1, 1, 1, 1}});
  ExpectSameBits(mask.Real(4), Bools({{0, 1, 1, 0}, {0, 0, 0, 0}}), "both");
  ExpectSameBits(mask.Padding(4), mask.Real(4).logical_not(), "padding");
  EXPECT_EQ(mask.HeadsPadding(4).sizes(), (at::IntArrayRef{2, 1, 4, 1}));
  mask.lengths.reset();
  ExpectSameBits(mask.Real(4), *mask.valid, "valid");
}

TEST(Mask, WhatIsNoMaskOfThePieceIsRefused) {
  const auto error = [](const Mask& mask) { return Thrown([&] { mask.Check("[op]", 2, 4); }); };
  EXPECT_EQ(error({Lengths({4, 0}), {}}), "no error");
  ExpectContains(error({Lengths({4, 5}), {}}), {"[op] lengths[1] = 5", "0..T = 4"});
  ExpectContains(error({Lengths({-1, 4}), {}}), {"[op] lengths[0] = -1"});
  ExpectContains(error({Lengths({4}), {}}), {"[op]", "[B] = [2]"});
  ExpectContains(error({{}, at::zeros({2, 3}, at::kBool)}), {"starts of shape [B,T] = [2, 4]"});
}

TEST(Mask, AStartAtAMaskedTokenCountsForTheNextRealOne) {
  Mask mask;
  mask.starts = Bools({{1, 0, 1, 1, 0, 0, 1, 0}});
  ExpectSameBits(mask.Documents(8), at::tensor({1, 1, 2, 3, 3, 3, 4, 4}, at::kLong).view({1, 8}),
                 "documents");
  mask.valid = Bools({{0, 1, 0, 0, 1, 1, 0, 0}});
  ExpectSameBits(mask.RealStarts(8), Bools({{0, 1, 0, 0, 1, 0, 0, 0}}), "starts");
  // Without a start before it, the first real token goes on with what was before.
  mask.valid = Bools({{0, 1, 1, 1, 1, 1, 1, 1}});
  mask.starts = Bools({{0, 0, 0, 0, 0, 1, 0, 0}});
  ExpectSameBits(mask.RealStarts(8), *mask.starts, "goes on");
}

TEST(Mask, PiecesAreOfTheWhole) {
  at::manual_seed(2);
  const int64_t T = 11;
  for (int round = 0; round < 50; ++round) {
    Mask mask;
    mask.lengths = at::randint(0, T + 1, {5}, at::kLong);
    mask.starts = at::rand({5, T}) < 0.3;
    if (round % 2 == 0) mask.valid = at::rand({5, T}) < 0.6;
    for (int64_t cut = 0; cut <= T; ++cut) {
      const Mask first = mask.Narrow(0, cut), second = mask.Narrow(cut, T - cut);
      ExpectSameBits(at::cat({first.Real(cut), second.Real(T - cut)}, 1), mask.Real(T), "real");
      ExpectSameBits(at::cat({first.RealStarts(cut), second.RealStarts(T - cut)}, 1),
                     mask.RealStarts(T), "starts");
    }
  }
}

TEST(Mask, RealTokensMoveToTheFrontAndBack) {
  Mask mask;
  mask.lengths = Lengths({5, 6});
  mask.starts = Bools({{1, 0, 0, 1, 0, 0}, {0, 0, 0, 0, 0, 0}});
  mask.valid = Bools({{0, 1, 0, 0, 1, 1}, {0, 0, 1, 1, 1, 1}});
  const TokenMap front = ToFront(mask, 6);
  ExpectSameBits(*front.mask().lengths, Lengths({2, 4}), "lengths");
  ExpectSameBits(front.mask().starts->narrow(1, 0, 2), Bools({{1, 1}, {0, 0}}), "starts");
  EXPECT_FALSE(front.mask().valid);
  const at::Tensor x = Leaf(Normal({2, 3, 6, 4})), moved = front.Move(x, 2);
  ExpectSameBits(moved[0].narrow(1, 0, 2), x[0].index_select(1, at::tensor({1, 4})), "row 0");
  ExpectSameBits(moved[1].narrow(1, 0, 4), x[1].narrow(1, 2, 4), "row 1");
  ExpectSameBits(front.Back(moved, 2), x, "back");
  const at::Tensor g = Normal({2, 3, 6, 4});
  ExpectSameBits(Gradients((front.Back(moved * moved, 2) * g).sum(), {x})[0], 2 * x * g,
                 "gradient");
  const at::Tensor ids = at::arange(12).view({2, 6});
  ExpectSameBits(front.Move(ids, 1)[1].narrow(0, 0, 4), at::arange(8, 12), "ids");
  EXPECT_FALSE(front.Move({}, 1).defined());
  mask.valid = mask.starts = at::zeros({2, 0}, at::kBool), mask.lengths = Lengths({0, 0});
  EXPECT_EQ(ToFront(mask, 0).Move(at::zeros({2, 0, 3}), 1).sizes(), (at::IntArrayRef{2, 0, 3}));
}

TEST(Mask, DocumentsBecomeRowsAndGoBack) {
  Mask mask;
  mask.lengths = Lengths({6, 0, 3});
  mask.starts = Bools({{0, 0, 1, 0, 0, 1}, {1, 0, 0, 0, 0, 0}, {1, 1, 0, 0, 1, 0}});
  const TokenMap rows = EachDocument(mask, 6);
  ExpectSameBits(*rows.mask().lengths, Lengths({2, 3, 1, 1, 2}), "lengths");
  const at::Tensor x = Normal({3, 2, 6, 4}), moved = rows.Move(x, 2);
  EXPECT_EQ(moved.sizes(), (at::IntArrayRef{5, 2, 3, 4}));
  ExpectSameBits(moved[1], x[0].narrow(1, 2, 3), "the second document");
  ExpectSameBits(moved[4].narrow(1, 0, 2), x[2].narrow(1, 1, 2), "the last document");
  EXPECT_EQ(moved[0].narrow(1, 2, 1).abs().sum().item<double>(), 0);
  ExpectSameBits(rows.Back(moved, 2), x.masked_fill(mask.HeadsPadding(6), 0.0), "back");
}

TEST(Mask, WrongShapesAreNamed) {
  Mask mask;
  mask.lengths = Lengths({1, 2, 3});
  ExpectContains(Thrown([&] { mask.Check("[op]", 2, 5); }), {"[op]", "lengths", "[2]", "[3]"});
  mask.lengths = at::zeros({2});
  ExpectContains(Thrown([&] { mask.Check("[op]", 2, 5); }), {"lengths", "int64", "Float"});
  mask.lengths.reset(), mask.valid = at::ones({2, 4}, at::kBool);
  ExpectContains(Thrown([&] { mask.Check("[op]", 2, 5); }), {"valid", "[2, 5]", "[2, 4]"});
  mask.valid.reset(), mask.starts = at::ones({2, 5});
  ExpectContains(Thrown([&] { mask.Check("[op]", 2, 5); }), {"starts", "bool", "Float"});
}

}  // namespace
}  // namespace cistern::ops
