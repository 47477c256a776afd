// Linformer: its weights by position, its length, its limits.
#include "cistern/attention/mechanisms/linformer.h"

#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"

namespace cistern {
namespace {

using namespace cistern::testing;

std::shared_ptr<Mechanism> Make(const Json& options, int64_t max_length, int64_t dim = 10,
                                int64_t heads = 2) {
  AttentionDims dims;
  dims.dim = dim, dims.heads = heads, dims.max_length = max_length;
  at::manual_seed(1);
  const auto m = FindMechanism("linformer").Make(options, dims);
  m->eval();
  return m;
}

TEST(Linformer, SlotForEachPositionIsSoftmaxAttention) {
  at::NoGradGuard guard;
  const int64_t N = 13;
  const auto m = Make({{"slots", N}}, N);
  m->named_parameters()["key.weight"].copy_(at::eye(N).unsqueeze(1));
  const auto x = Inputs(*m, 2, N);
  ExpectClose(m->Bidirectional(x, {}),
              Small(FindMechanism("softmax"))->Definition(Form::kBidirectional, x, x), 1e-12,
              "E = I");
  // Causal: the slots of later positions are still zero and take part with a logit of zero.
  const at::Tensor causal = ExtendPieces(*m, x, {0, N}),
                   logits = at::matmul(x[0], x[1].transpose(2, 3)).tril() / std::sqrt(5.0);
  ExpectClose(causal, at::matmul(at::softmax(logits, 3).tril(), x[2]), 1e-12, "causal");
}

TEST(Linformer, WhatSharesOneMatrix) {
  at::NoGradGuard guard;
  const int64_t N = 17;
  std::vector<std::shared_ptr<Mechanism>> all;
  const std::pair<const char*, std::vector<int64_t>> want[] = {
      {"none", {2, 2}}, {"headwise", {1, 1}}, {"key_value", {1}}};
  const at::Tensor e = at::randn({N, 1, 4});
  for (const auto& [sharing, heads] : want) {
    all.push_back(Make({{"slots", 4}, {"sharing", sharing}}, N));
    const auto parameters = all.back()->named_parameters();
    ASSERT_EQ(parameters.size(), heads.size()) << sharing;
    EXPECT_EQ(parameters["key.weight"].sizes(), at::IntArrayRef({N, heads[0], 4})) << sharing;
    for (const auto& p : parameters) p.value().copy_(e.expand_as(p.value()));
  }
  // With equal matrices all are one.
  const auto x = Inputs(*all[0], 2, N);
  for (const auto& m : all)
    ExpectClose(ExtendPieces(*m, x, {0, N}), ExtendPieces(*all[0], x, {0, N}), 1e-14,
                "equal matrices");
  all[0]->named_parameters()["value.weight"].select(1, 1).mul_(2);  // the second head's F
  const at::Tensor out = ExtendPieces(*all[0], x, {0, N}),
                   before = ExtendPieces(*all[2], x, {0, N});
  ExpectClose(out.select(1, 0), before.select(1, 0), 1e-14, "first head");
  ExpectClose(out.select(1, 1), before.select(1, 1) * 2, 1e-14, "second head");
}

// All tokens of a row are mixed in pieces of 1,024.
TEST(Linformer, RowsLongerThanAPiece) {
  at::NoGradGuard guard;
  const int64_t N = 1100;
  for (const char* sharing : {"none", "headwise"}) {
    const auto m = Make({{"slots", 3}, {"sharing", sharing}}, N);
    const auto x = Inputs(*m, 2, N);
    ExpectClose(m->Bidirectional(x, {}), m->Definition(Form::kBidirectional, x, x), 1e-12, sharing);
    const ops::Mask mask = {Lengths({N, 1050}), {}};
    State state = m->EmptyState(2, x[0].options());
    m->Write(x, state, mask);
    ExpectClose(m->Bidirectional(x, mask), ZeroPadding(m->Read(x, state), mask), 1e-12,
                std::string(sharing) + " padded");
  }
}

TEST(Linformer, PositionsBeyondTheLongestAreAnError) {
  const auto m = Make({{"slots", 4}}, 8);
  const auto x = Inputs(*m, 2, 9);
  const std::vector<std::string> parts = {"[linformer]", "position 8", "max_length=8", "abc_mlp"};
  ExpectContains(Thrown([&] { m->Bidirectional(x, {}); }), parts);
  ExpectContains(Thrown([&] { ExtendPieces(*m, x, {0, 9}); }), parts);
  ExpectContains(Thrown([&] { ExtendPieces(*m, x, EachToken(9)); }), parts);
  // Padding beyond it is none of its business, and packed documents begin anew.
  EXPECT_EQ(Thrown([&] { ExtendPieces(*m, x, {0, 9}, {Lengths({8, 0}), {}}); }), "no error");
  EXPECT_EQ(Thrown([&] {
              ExtendPieces(*m, x, {0, 9}, {{}, Starts(2, 9, {{0, 3}, {1, 8}})});
            }),
            "no error");
  ExpectContains(Thrown([&] {
                   ExtendPieces(*m, x, EachToken(9), {{}, Starts(2, 9, {{0, 3}})});
                 }),
                 parts);
}

TEST(Linformer, JohnsonLindenstrauss) {
  // |P R^T R w - P w| / |P w| with R of N(0, 1/k): falls as 1/sqrt(k) (P002, theorem 1).
  at::manual_seed(5);
  const int64_t N = 256;
  const at::Tensor P = at::softmax(Normal({N, N}), 1), w = Normal({N, 1}), Pw = at::matmul(P, w);
  auto error = [&](int64_t k) {
    double sum = 0;
    for (int64_t seed = 0; seed < 10; ++seed) {
      AttentionDims dims;
      dims.dim = 4, dims.heads = 1, dims.max_length = N;
      at::manual_seed(uint64_t(seed));
      const auto m =
          FindMechanism("linformer").Make({{"slots", k}, {"init", "johnson_lindenstrauss"}}, dims);
      const at::Tensor R =
          m->named_parameters()["key.weight"].detach().squeeze(1).to(at::kDouble);  // [N,k]
      sum +=
          ((at::matmul(P, at::matmul(R, at::matmul(R.transpose(0, 1), w))) - Pw).norm() / Pw.norm())
              .item<double>();
    }
    return sum / 10;
  };
  const double few = error(64), many = error(1024);
  EXPECT_GT(few / many, 3.2);
  EXPECT_LT(few / many, 5);
}

TEST(Linformer, InitialWeights) {
  const int64_t N = 300, k = 200;
  auto deviation = [&](const char* init) {
    return Make({{"slots", k}, {"init", init}}, N)
        ->named_parameters()["key.weight"]
        .std()
        .item<double>();
  };
  EXPECT_NEAR(deviation("xavier_uniform") / std::sqrt(2.0 / double(N + k)), 1, 0.02);
  EXPECT_NEAR(deviation("xavier_normal") / std::sqrt(2.0 / double(N + k)), 1, 0.02);
  EXPECT_NEAR(deviation("normal") / 0.02, 1, 0.02);
  EXPECT_NEAR(deviation("uniform") / std::sqrt(1.0 / (3 * double(k))), 1, 0.02);
  EXPECT_NEAR(deviation("kaiming") / std::sqrt(2.0 / double(N)), 1, 0.02);
  EXPECT_NEAR(deviation("johnson_lindenstrauss") / std::sqrt(1.0 / double(k)), 1, 0.02);
}

TEST(Linformer, RefusesWithAReason) {
  auto text = [](auto&& f) {
    try {
      f();
    } catch (const UsageError& e) {
      return std::string(e.what());
    }
    return std::string("no UsageError");
  };
  ExpectContains(text([] { Make(Json::object(), 0); }), {"[linformer]", "max_length"});
}

}  // namespace
}  // namespace cistern
