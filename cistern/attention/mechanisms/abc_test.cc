// Identities of the ABC mechanisms (spec 2.12-2.14, 2.18).
#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"

namespace cistern {
namespace {

using namespace cistern::testing;

std::shared_ptr<Mechanism> Make(const std::string& name, const Json& options, int64_t layer = 0,
                                bool cross = false) {
  AttentionDims dims;
  dims.dim = kDim, dims.heads = kHeads, dims.max_length = 64, dims.layer = layer,
  dims.cross = cross;
  const auto m = FindMechanism(name).make(options, dims);
  m->eval();
  return m;
}

at::Tensor Cross(Mechanism& m, const std::vector<at::Tensor>& queries,
                 const std::vector<at::Tensor>& x) {
  State state = m.EmptyState(x[0].size(0), x[0].options());
  m.Write(x, state, {});
  return m.Read(queries, state);
}

TEST(Abc, ASlotForEachTokenIsSoftmax) {
  const int64_t T = 20;
  const auto softmax = Make("softmax", Json::object());
  const std::vector<std::pair<std::string, Json>> cases = {
      {"abc_compressive", {{"slots", T}, {"ratio", 1}}},
      {"abc_compressive", {{"slots", T}, {"ratio", 1}, {"divisor", "ratio"}}},
      {"local_to_global", {{"slots", T}}},
      {"local_to_global", {{"slots", T + 7}}},
      {"abc_mlp", {{"slots", T}, {"activation", "relu"}}}};
  for (const auto& [name, options] : cases) {
    at::manual_seed(1);
    const auto m = Make(name, options);
    auto x = Inputs(*m, 2, T), queries = Inputs(*m, 2, 6);
    if (name == "abc_mlp")
      x[3] = at::eye(T, at::kDouble).expand({2, kHeads, T, T});  // token i writes slot i
    for (const ops::Impl impl : kImpls) {
      ops::ImplScope scope(impl);
      const std::string what = name + options.dump() + " " + ops::ImplName(impl);
      ExpectClose(ExtendPieces(*m, x, {0, 7, T}), ExtendPieces(*softmax, x, {0, 7, T}), 1e-12,
                  what + " causal");
      ExpectClose(m->Bidirectional(x, {}), softmax->Bidirectional(x, {}), 1e-12,
                  what + " bidirectional");
      ExpectClose(Cross(*m, queries, x), Cross(*softmax, queries, x), 1e-12, what + " cross");
    }
  }
}

TEST(Abc, EmptySlotsTakePartAsZeros) {
  const int64_t T = 6, n = 9;
  const auto m = Make("local_to_global", Json{{"slots", n}, {"empty_slots", "take_part"}});
  at::manual_seed(2);
  const auto x = Inputs(*m, 2, T);
  // Softmax over the T tokens and n - T keys of zeros, whose values are zeros.
  std::vector<at::Tensor> padded;
  for (const at::Tensor& y : x) padded.push_back(at::constant_pad_nd(y, {0, 0, 0, n - T}, 0));
  const at::Tensor scores = at::matmul(x[0], padded[1].transpose(2, 3)) / std::sqrt(double(kWidth));
  ExpectClose(m->Bidirectional(x, {}), at::matmul(at::softmax(scores, 3), padded[2]), 1e-13,
              "bidirectional");
  const at::Tensor masked = Make("local_to_global", Json{{"slots", n}})->Bidirectional(x, {});
  EXPECT_GT(RelRms(m->Bidirectional(x, {}), masked), 0.01);
}

TEST(Abc, OneSlotIsTheMeanOfAllValues) {
  at::manual_seed(3);
  const int64_t T = 30;
  for (const auto& [name, options] :
       std::vector<std::pair<std::string, Json>>{{"abc_cluster", {{"slots", 1}}},
                                                 {"abc_compressive", {{"slots", 1}}},
                                                 {"abc_random", {{"slots", 1}, {"mean", true}}}}) {
    const auto m = Make(name, options);
    const auto x = Inputs(*m, 2, T);
    const at::Tensor count = at::arange(1, T + 1, at::kDouble).unsqueeze(1);
    ExpectClose(ExtendPieces(*m, x, {0, 11, T}), x[2].cumsum(2) / count, 1e-12, name + " causal");
    ExpectClose(m->Bidirectional(x, {}), x[2].mean({2}, true).expand_as(x[2]), 1e-12,
                name + " bidirectional");
  }
}

TEST(AbcCompressive, FullSlotsAreMeansOfNeighbours) {
  at::manual_seed(4);
  const auto m = Make("abc_compressive", Json{{"slots", 5}, {"ratio", 4}}),
             literal =
                 Make("abc_compressive", Json{{"slots", 5}, {"ratio", 4}, {"divisor", "ratio"}});
  const auto x = Inputs(*m, 2, 20), queries = Inputs(*m, 2, 3);
  const at::Tensor keys = x[1].view({2, kHeads, 5, 4, kWidth}).mean(3),
                   values = x[2].view({2, kHeads, 5, 4, kWidth}).mean(3);
  const at::Tensor want = at::matmul(
      at::softmax(at::matmul(queries[0], keys.transpose(2, 3)) / std::sqrt(double(kWidth)), 3),
      values);
  ExpectClose(Cross(*m, queries, x), want, 1e-13, "running count");
  ExpectClose(Cross(*literal, queries, x), want, 1e-13,
              "divided by the ratio: the same where slots are full");
  EXPECT_GT(
      RelRms(Cross(*literal, queries, Narrow(x, 0, 18)), Cross(*m, queries, Narrow(x, 0, 18))),
      1e-3);
  ExpectContains(
      Thrown([] {
        FindMechanism("abc_compressive").make(Json::object(), AttentionDims{kDim, kHeads});
      }),
      {"[abc_compressive]", "max_length", "ratio"});
}

TEST(LocalToGlobal, OnlyGlobalTokensAreSeen) {
  at::manual_seed(5);
  const auto m = Make("local_to_global", Json{{"slots", 4}, {"stride", 3}}),
             spread = Make("local_to_global", Json{{"slots", 4}, {"stride", 0}});
  const auto x = Inputs(*m, 1, 50), queries = Inputs(*m, 1, 3);
  auto attend = [&](const std::vector<int64_t>& tokens) {
    const at::Tensor index = at::tensor(tokens, at::kLong), keys = x[1].index_select(2, index);
    return at::matmul(
        at::softmax(at::matmul(queries[0], keys.transpose(2, 3)) / std::sqrt(double(kWidth)), 3),
        x[2].index_select(2, index));
  };
  ExpectClose(Cross(*m, queries, x), attend({0, 3, 6, 9}), 1e-13, "every third");
  ExpectClose(Cross(*spread, queries, x), attend({0, 16, 32, 48}), 1e-13,
              "spread over max_length 64");
}

TEST(AbcMlp, ReluGradientsAreFiniteAtZero) {
  const auto m = Make("abc_mlp", Json{{"slots", 4}, {"activation", "relu"}});
  at::manual_seed(6);
  for (const ops::Impl impl : kImpls) {
    ops::ImplScope scope(impl);
    auto x = Inputs(*m, 2, 12);
    x[3] = x[3].clamp_min(0);
    x[3].select(3, 0).zero_();        // a slot that nobody writes
    x[3].select(2, 3).fill_(1e-300);  // and one token that hardly does
    x[3].select(2, 5).zero_();
    x = Leaves(x);
    for (const at::Tensor& g : Gradients(ExtendPieces(*m, x, {0, 5, 12}).square().sum(), x))
      EXPECT_TRUE(g.isfinite().all().item<bool>());
    for (const at::Tensor& g : Gradients(m->Bidirectional(x, {}).square().sum(), x))
      EXPECT_TRUE(g.isfinite().all().item<bool>());
  }
}

// A control of -inf writes nothing into its slot: one that nobody has written is empty in every
// form.
TEST(AbcMlp, ControlsOfMinusInfinityWriteNothing) {
  const int64_t T = 15;
  for (const char* empty : {"masked", "take_part"}) {
    const auto m = Make("abc_mlp", Json{{"slots", 4}, {"empty_slots", empty}});
    at::manual_seed(12);
    auto x = Inputs(*m, 2, T), queries = Inputs(*m, 2, 3);
    x[3].select(3, 0).fill_(-kInf);                                  // never written
    x[3].select(3, 1).narrow(2, 0, 9).fill_(-kInf);                  // from token 9 on
    x[3].select(3, 2).narrow(1, 1, 1).narrow(2, 3, 4).fill_(-kInf);  // left out for a while
    const at::Tensor causal = m->Definition(Form::kCausal, x, x),
                     whole = m->Definition(Form::kBidirectional, x, x),
                     cross = m->Definition(Form::kCross, queries, x);
    EXPECT_TRUE(causal.isfinite().all().item<bool>());
    for (const ops::Impl impl : kImpls) {
      ops::ImplScope scope(impl);
      const std::string what = std::string(empty) + " " + ops::ImplName(impl);
      ExpectClose(ExtendPieces(*m, x, {0, T}), causal, 1e-12, what + " causal");
      ExpectClose(ExtendPieces(*m, x, {0, 4, 11, T}), causal, 1e-12, what + " pieces");
      ExpectClose(ExtendPieces(*m, x, EachToken(T)), causal, 1e-12, what + " token by token");
      ExpectClose(m->Bidirectional(x, {}), whole, 1e-12, what + " bidirectional");
      ExpectClose(Cross(*m, queries, x), cross, 1e-12, what + " cross");
      const auto leaves = Leaves(x);
      for (const at::Tensor& g :
           Gradients(ExtendPieces(*m, leaves, {0, 4, T}).square().sum(), leaves))
        EXPECT_TRUE(g.isfinite().all().item<bool>()) << what;
    }
  }
}

TEST(AbcMlp, OneControlServesAllHeads) {
  const auto shared = Make("abc_mlp", Json{{"slots", 4}, {"shared_heads", true}}),
             own = Make("abc_mlp", Json{{"slots", 4}});
  EXPECT_EQ(shared->Projections()[3].width, 4);
  at::manual_seed(7);
  auto x = Inputs(*shared, 2, 15);
  auto y = x;
  y[3] = x[3].expand({2, kHeads, 15, 4});
  ExpectSameBits(ExtendPieces(*shared, x, {0, 15}), ExtendPieces(*own, y, {0, 15}), "causal");
}

TEST(AbcRandom, DrawsAreFixedInEvaluationAndNewInTraining) {
  const auto m = Make("abc_random", Json{{"slots", 5}});
  at::manual_seed(8);
  const auto x = Inputs(*m, 2, 40);
  const at::Tensor first = ExtendPieces(*m, x, {0, 40});
  ExpectSameBits(ExtendPieces(*m, x, {0, 40}), first, "again");
  EXPECT_FALSE(at::equal(
      ExtendPieces(*Make("abc_random", Json{{"slots", 5}, {"seed", 1}}), x, {0, 40}), first));
  EXPECT_FALSE(
      at::equal(ExtendPieces(*Make("abc_random", Json{{"slots", 5}}, 1), x, {0, 40}), first));
  EXPECT_FALSE(
      at::equal(ExtendPieces(*Make("abc_random", Json{{"slots", 5}}, 0, true), x, {0, 40}), first));
  m->train();
  const at::Tensor trained = ExtendPieces(*m, x, {0, 40});
  EXPECT_FALSE(at::equal(trained, first));
  EXPECT_FALSE(at::equal(ExtendPieces(*m, x, {0, 40}), trained));
  // Every slot gets its share, in both heads and in their own order. Values count the tokens of a
  // slot: z is its logarithm.
  m->eval();
  State state;
  const int64_t T = 20000;
  ExtendPieces(*m, Inputs(*m, 1, T), {0, T}, {}, &state);
  const at::Tensor share = state["z"].exp() / double(T);
  EXPECT_LT((share - 0.2).abs().max().item<double>(), 0.02);
  EXPECT_FALSE(at::equal(share[0][0], share[0][1]));
}

TEST(AbcRandom, SlotsHoldSums) {
  const auto sum = Make("abc_random", Json{{"slots", 1}});
  at::manual_seed(9);
  const auto x = Inputs(*sum, 2, 25);
  ExpectClose(ExtendPieces(*sum, x, {0, 10, 25}), x[2].cumsum(2), 1e-12,
              "one slot holds the sum of all values");
}

TEST(AbcCluster, KMeansFindsClustersFarApart) {
  at::manual_seed(10);
  // Three groups of ten keys around far points; a query then attends to their means.
  const auto m = Make("abc_cluster", Json{{"slots", 3}});
  auto x = Inputs(*m, 1, 30);
  const at::Tensor centre = Normal({1, kHeads, 3, 1, kWidth}, 10.0);
  x[1] = (centre + Normal({1, kHeads, 3, 10, kWidth}, 1e-3)).reshape({1, kHeads, 30, kWidth});
  const at::Tensor keys = x[1].view({1, kHeads, 3, 10, kWidth}).mean(3),
                   values = x[2].view({1, kHeads, 3, 10, kWidth}).mean(3);
  const at::Tensor want = at::matmul(
      at::softmax(at::matmul(x[0], keys.transpose(2, 3)) / std::sqrt(double(kWidth)), 3), values);
  ExpectClose(m->Bidirectional(x, {}), want, 1e-12, "bidirectional");
  // Causal: equal keys share a slot wherever they stand.
  auto same = x;
  same[1] = x[1].narrow(2, 0, 1).expand({1, kHeads, 30, kWidth});
  const at::Tensor count = at::arange(1, 31, at::kDouble).unsqueeze(1);
  ExpectClose(ExtendPieces(*m, same, {0, 9, 30}), x[2].cumsum(2) / count, 1e-12, "causal");
}

TEST(Abc, MergesWhereThePositionDoesNotMatter) {
  for (const char* name :
       {"abc_mlp", "abc_cluster", "abc_compressive", "abc_random", "local_to_global"}) {
    at::manual_seed(11);
    const auto m = Make(name, FindMechanism(name).cases[0]);
    const auto x = Inputs(*m, 2, 30), more = Inputs(*m, 2, 5);
    State first, second, whole;
    ExtendPieces(*m, Narrow(x, 0, 12), {0, 12}, {}, &first);
    ExtendPieces(*m, Narrow(x, 12, 18), {0, 18}, {}, &second);
    ExtendPieces(*m, x, {0, 30}, {}, &whole);
    if (m->info().merges) {
      State merged = m->Merge(first, second);
      ExpectClose(m->Extend(more, merged, {}), m->Extend(more, whole, {}), 1e-12, name);
    } else {
      ExpectContains(Thrown([&] { m->Merge(first, second); }), {name, "do not merge"});
    }
  }
}

}  // namespace
}  // namespace cistern
