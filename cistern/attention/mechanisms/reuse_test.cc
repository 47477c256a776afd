// Reuse attention: which layers copy, the core given the scores it copies, what is refused, and the
// paper's lemmas. Whole models are in models/reuse_model_test.cc.
#include "cistern/attention/mechanisms/reuse.h"

#include "cistern/attention/head_groups.h"
#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"

namespace cistern {
namespace {

using namespace cistern::testing;

std::vector<int64_t> Plan(const std::string& placement, int64_t heads, int64_t copying,
                          int64_t layers, int64_t of = 4) {
  return ReusePlan(Json{{"placement", placement}, {"heads", heads}, {"layers", copying}}, of,
                   layers);
}
std::string PlanError(const Json& options, int64_t heads, int64_t layers) {
  return Thrown([&] { ReusePlan(options, heads, layers); });
}

TEST(ReusePlan, ThePapersPlacements) {
  using P = std::vector<int64_t>;
  const int64_t none = AttentionDims::kSkipped;
  EXPECT_EQ(Plan("partial", 3, 0, 6), (P{0, 3, 3, 3, 3, 0}));
  EXPECT_EQ(Plan("partial", 3, 2, 6), (P{0, 3, 3, 0, 0, 0}));
  EXPECT_EQ(Plan("full", -1, 0, 4), (P{0, 4, 4, 4}));
  EXPECT_EQ(Plan("full", 4, 2, 5), (P{0, 4, 4, 0, 0}));
  EXPECT_EQ(Plan("alternate", -1, 0, 5), (P{0, 4, 0, 4, 0}));
  EXPECT_EQ(Plan("alternate", 1, 1, 4), (P{0, 1, 0, 0}));
  EXPECT_EQ(Plan("alternate", -1, 0, 2), (P{0, 4}));
  EXPECT_EQ(Plan("all_end", -1, 3, 8), (P{0, 0, 0, 0, 4, 4, 4, 0}));
  EXPECT_EQ(Plan("all_end", -1, 0, 4), Plan("partial", -1, 0, 4));
  EXPECT_EQ(Plan("skip", -1, 2, 5), (P{0, none, none, 0, 0}));
  EXPECT_EQ(Plan("partial", 0, 0, 4), (P{0, 0, 0, 0}));
  // BERT-base of the paper: 12 layers and 12 heads, K=6 and P=10 by the rule; 13 layers with P=10
  // as its tables have it.
  EXPECT_EQ(Plan("partial", 6, 0, 12, 12), (P{0, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 0}));
  EXPECT_EQ(Plan("partial", 6, 10, 13, 12), (P{0, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 0, 0}));
  EXPECT_EQ(ReusePlan(Json{{"heads", 8}, {"clamp_heads", true}}, 4, 2), (P{0, 4}));  // T5's rows
}

TEST(ReusePlan, WhatDoesNotFitIsRefused) {
  ExpectContains(PlanError(Json::object(), 4, 1), {"[reuse]", "one layer", "softmax"});
  ExpectContains(PlanError(Json{{"heads", 5}}, 4, 4), {"heads=5", "4 heads", "clamp_heads=true"});
  ExpectContains(PlanError(Json{{"placement", "partial"}}, 4, 2),
                 {"placement=partial", "none of 2", "alternate"});
  ExpectContains(PlanError(Json{{"placement", "all_end"}, {"layers", 3}}, 4, 4),
                 {"room for 2 of 4", "not for 3"});
  ExpectContains(PlanError(Json{{"placement", "full"}, {"heads", 2}}, 4, 4),
                 {"placement=full", "heads=2", "partial"});
  ExpectContains(PlanError(Json{{"placement", "skip"}, {"heads", 2}}, 4, 4), {"placement=skip"});
  ExpectContains(PlanError(Json{{"placement", "parital"}}, 4, 4), {"parital", "partial"});
  ExpectContains(PlanError(Json{{"head", 2}}, 4, 4), {"head", "heads"});
  ExpectContains(Thrown([] { HeadGroupsInfo("reuse:2+latte:2"); }), {"reuse", "layer of its own"});
}

// A layer of a model with H heads, C of them copied, which leaves L of its own to the next.
std::shared_ptr<Mechanism> Layer(int64_t copied, int64_t left, const std::string& keep,
                                 int64_t heads = 4) {
  AttentionDims dims;
  dims.dim = heads * kWidth, dims.heads = heads, dims.copied = copied, dims.copied_on = left;
  const auto m = FindMechanism("reuse").Make(Json{{"keep", keep}}, dims);
  m->eval();
  m->to(at::kDouble);
  return m;
}

at::Tensor Probabilities(const at::Tensor& q, const at::Tensor& k) {
  return at::softmax(at::matmul(q, k.transpose(2, 3)) / std::sqrt(double(q.size(3))), 3);
}

// Three layers, H = 4, K = 3: the last copies heads that the second copied itself.
TEST(Reuse, NewHeadsComeFirstThenTheFirstOfTheLayerBefore) {
  for (const ops::Impl impl : kImpls) {
    const ops::ImplScope scope(impl);
    for (const std::string keep : {"handles", "scores"}) {
      at::manual_seed(1);
      const auto x = [](int64_t heads) { return Normal({2, heads, 7, kWidth}); };
      const at::Tensor q0 = x(4), k0 = x(4), q1 = x(1), k1 = x(1), q2 = x(1), k2 = x(1), v0 = x(4),
                       v1 = x(4), v2 = x(4);
      Handles handles;
      const at::Tensor a0 = Probabilities(q0, k0),
                       a1 = at::cat({Probabilities(q1, k1), a0.narrow(1, 0, 3)}, 1),
                       a2 = at::cat({Probabilities(q2, k2), a1.narrow(1, 0, 3)}, 1);
      const Form form = Form::kBidirectional;
      ExpectClose(Layer(0, 3, keep)->Attend(form, {q0, k0, v0}, nullptr, {}, handles),
                  at::matmul(a0, v0), 1e-12, keep);
      ExpectClose(Layer(3, 3, keep)->Attend(form, {q1, k1, v1}, nullptr, {}, handles),
                  at::matmul(a1, v1), 1e-12, keep);
      ExpectClose(Layer(3, 0, keep)->Attend(form, {q2, k2, v2}, nullptr, {}, handles),
                  at::matmul(a2, v2), 1e-12, keep);
      EXPECT_TRUE(handles.empty());
    }
  }
}

// In training the probabilities are handed on before dropout, which every layer draws for itself.
TEST(Reuse, DropoutIsDrawnAnewInEveryLayer) {
  for (const std::string keep : {"handles", "scores"}) {
    AttentionDims dims;
    dims.dim = 2 * kWidth, dims.heads = 2, dims.copied = 0, dims.copied_on = 2, dims.dropout = 0.5;
    const auto first = FindMechanism("reuse").Make(Json{{"keep", keep}}, dims);
    dims.copied = 2, dims.copied_on = 0;
    const auto second = FindMechanism("reuse").Make(Json{{"keep", keep}}, dims);
    first->train(), second->train();
    at::manual_seed(2);
    const at::Tensor q = Normal({1, 2, 400, kWidth}), k = Normal({1, 2, 400, kWidth}),
                     v = at::ones({1, 2, 400, kWidth}, at::kDouble);
    Handles handles;
    const at::Tensor a = first->Attend(Form::kBidirectional, {q, k, v}, nullptr, {}, handles);
    const at::Tensor b = second->Attend(Form::kBidirectional, {v}, nullptr, {}, handles);
    EXPECT_NEAR(a.mean().item<double>(), 1, 0.05) << keep;
    EXPECT_NEAR(b.mean().item<double>(), 1, 0.05)
        << keep;  // dropped once: had it been dropped twice, half of a's zeros were here too
    const double cross =
        ((a - 1) * (b - 1)).mean().item<double>() / (a - 1).square().mean().item<double>();
    EXPECT_NEAR(cross, 0, 0.2) << keep;
  }
}

TEST(Reuse, MemoryOfScoresIsBounded) {
  AttentionDims dims;
  dims.dim = 2 * kWidth, dims.heads = 2, dims.copied = 0, dims.copied_on = 1;
  const auto run = [&](int64_t length, const std::string& keep) {
    return Thrown([&] {
      Json options = {{"keep", keep}};
      if (keep == "scores") options["memory_mib"] = 1;
      const auto m = FindMechanism("reuse").Make(options, dims);
      const at::Tensor x = at::zeros({2, 2, length, kWidth});
      Handles handles;
      m->Attend(Form::kBidirectional, {x, x, x}, nullptr, {}, handles);
    });
  };
  EXPECT_EQ(run(362, "scores"), "no error");  // 2 x 362 x 362 x 4 = 1,048,352 bytes
  ExpectContains(run(363, "scores"), {"[2,1,363,363]", "2 MiB", "memory_mib=1", "keep=handles"});
  EXPECT_EQ(run(363, "handles"), "no error");
  ExpectContains(Thrown([&] {
                   FindMechanism("reuse").Make(Json{{"memory_mib", 1}}, dims);
                 }),
                 {"memory_mib=1", "keep=handles"});
}

TEST(Reuse, NeedsTheScoresOfTheLayerBefore) {
  const at::Tensor v = Normal({1, 4, 3, kWidth});
  Handles none;
  ExpectContains(
      Thrown([&] { Layer(4, 0, "handles")->Attend(Form::kBidirectional, {v}, nullptr, {}, none); }),
      {"[reuse]", "expected the scores of 4 heads", "got those of 0"});
}

// Lemma 1: scores of layers with independent random weights are as far apart as two that have
// nothing in common.
TEST(ReuseLemmas, IndependentScoresAreTwiceAsFarApart) {
  at::manual_seed(3);
  double apart = 0, size = 0;
  const at::Tensor x = Normal({6, 20});
  for (int i = 0; i < 2000; ++i) {
    const auto scores = [&] {
      return at::matmul(at::matmul(x, Normal({20, 4})), at::matmul(x, Normal({20, 4})).t());
    };
    const at::Tensor s1 = scores(), s2 = scores();
    apart += (s1 - s2).square().sum().item<double>(), size += s1.square().sum().item<double>();
  }
  EXPECT_NEAR(apart / size, 2, 0.1);
}

// What takes over scores instead of forming its own is wrong by no more than the scores differ, and
// not at all where they do not (Lemma 3; its proof in the paper takes the norm of a row-stochastic
// matrix for 1, hence the norm of the values here).
TEST(ReuseLemmas, TheErrorIsBoundedByTheDifferenceOfTheScores) {
  at::manual_seed(4);
  const auto x = [] { return Normal({1, 4, 9, kWidth}); };
  const auto norm = [](const at::Tensor& y) { return y.norm().item<double>(); };
  const at::Tensor q1 = x(), k1 = x(), q2 = x(), k2 = x(), v = x();
  for (const double t : {0.0, 1e-3, 0.5, 1.0}) {
    const at::Tensor q = q1 + t * (q2 - q1), k = k1 + t * (k2 - k1);
    Handles handles = {{q1, k1, {}}}, none;
    const at::Tensor exact =
        Layer(0, 0, "handles")->Attend(Form::kBidirectional, {q, k, v}, nullptr, {}, none);
    const at::Tensor copied =
        Layer(4, 0, "handles")->Attend(Form::kBidirectional, {v}, nullptr, {}, handles);
    const double error = norm(copied - exact),
                 bound = norm(Probabilities(q, k) - Probabilities(q1, k1)) * norm(v);
    EXPECT_LE(error, bound + 1e-13) << t;
    EXPECT_EQ(error > 1e-9, t > 0) << t;
  }
}

}  // namespace
}  // namespace cistern
