// Attention by feature maps: denominators, linear attention and T2R by hand, refusals.
#include "cistern/attention/feature_attention.h"

#include "cistern/attention/folding.h"
#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"

namespace cistern {
namespace {

using namespace cistern::testing;
using Rule = Denominator::Rule;

std::shared_ptr<Mechanism> Make(const std::string& name, const Json& options, int64_t dim,
                                int64_t heads = 1, int64_t max_length = 64, double dropout = 0) {
  AttentionDims dims;
  dims.dim = dim, dims.heads = heads, dims.max_length = max_length, dims.dropout = dropout;
  const auto m = FindMechanism(name).Make(options, dims);
  m->eval();
  return m;
}

at::Tensor Rows(const std::vector<double>& x, int64_t width) {
  return at::tensor(x, at::kDouble).view({1, 1, -1, width});
}

TEST(Denominator, RulesByHand) {
  // One feature: the memory holds (sum of the values, z), and the query weighs it by one.
  auto divide = [](double z, Rule rule, double value) {
    const at::Tensor memory =
        rule == Rule::kNone ? at::full({1, 1, 1, 1}, 6.0, at::kDouble) : Rows({6, z}, 2);
    return FeatureRead(at::ones({1, 1, 1, 1}, at::kDouble), memory, {rule, value}).item<double>();
  };
  struct Row {
    double z, plus, at_least, magnitude, sign_safe;
  };
  for (const Row& r :
       {Row{2, 2.5, 2, 2, 2}, Row{-2, -1.5, 0.5, 2, -2}, Row{0.25, 0.75, 0.5, 0.5, 0.5},
        Row{-0.25, 0.25, 0.5, 0.5, -0.5}, Row{0, 0.5, 0.5, 0.5, 0.5}}) {
    EXPECT_DOUBLE_EQ(divide(r.z, Rule::kPlus, 0.5), 6 / r.plus) << r.z;
    EXPECT_DOUBLE_EQ(divide(r.z, Rule::kAtLeast, 0.5), 6 / r.at_least) << r.z;
    EXPECT_DOUBLE_EQ(divide(r.z, Rule::kMagnitude, 0.5), 6 / r.magnitude) << r.z;
    EXPECT_DOUBLE_EQ(divide(r.z, Rule::kSignSafe, 0.5), 6 / r.sign_safe) << r.z;
    EXPECT_DOUBLE_EQ(divide(r.z, Rule::kNone, 0.5), 3) << r.z;
  }
}

TEST(Linear, ByHand) {
  const auto m = Make("linear", Json{{"eps", 1e-12}}, 2);
  // phi(x) = x + 1 above zero, e^x below.
  const std::vector<at::Tensor> x = {Rows({1, -1, 0, 3}, 2), Rows({-2, 0, 0.5, -0.5}, 2),
                                     Rows({1, 10, 2, 20}, 2)};
  const double k0[] = {std::exp(-2), 1}, k1[] = {1.5, std::exp(-0.5)}, q0[] = {2, std::exp(-1)},
               q1[] = {1, 4};
  auto weight = [](const double* q, const double* k) { return q[0] * k[0] + q[1] * k[1]; };
  auto mean = [](double a, double b, double first, double second) {
    return (a * first + b * second) / (a + b);
  };
  const at::Tensor both = m->Bidirectional(x, {}), causal = ExtendPieces(*m, x, {0, 2});
  const double q0_mean = mean(weight(q0, k0), weight(q0, k1), 1, 2),
               q1_mean = mean(weight(q1, k0), weight(q1, k1), 1, 2);
  ExpectClose(both, Rows({q0_mean, 10 * q0_mean, q1_mean, 10 * q1_mean}, 2), 1e-11,
              "bidirectional");
  ExpectClose(causal, Rows({1, 10, q1_mean, 10 * q1_mean}, 2), 1e-11, "causal");
}

TEST(Linear, WithoutADenominatorIsTheSumOverTheRootOfTheLongestLength) {
  const auto with = Make("linear", Json{{"eps", 0.25}}, 10, 2),
             without = Make("linear", Json{{"denominator", false}}, 10, 2);
  at::manual_seed(3);
  const auto x = Inputs(*with, 2, 23);
  auto phi = [](const at::Tensor& y) { return at::elu(y) + 1; };
  const at::Tensor z = (phi(x[0]) * phi(x[1]).cumsum(2)).sum(3, true);
  ExpectClose(ExtendPieces(*without, x, {0, 23}) * 8, ExtendPieces(*with, x, {0, 23}) * (z + 0.25),
              1e-12, "sqrt(64) = 8");
}

TEST(Linear, FarBelowZeroFeaturesKeepTheirDigits) {
  // In float, expm1(-20) + 1 is zero or a multiple of 2^-24; e^-20 is exact to rounding.
  const auto m = Make("linear", Json{{"eps", 1e-12}}, 1);
  const std::vector<at::Tensor> x = {Rows({0, 0}, 1), Rows({-20, -20.5}, 1), Rows({1, 3}, 1)};
  const double a = std::exp(-20), b = std::exp(-20.5), want = (a + 3 * b) / (a + b + 1e-12);
  EXPECT_NEAR(m->Bidirectional(To(x, at::kFloat), {})[0][0][1].item<double>(), want, 1e-5);
}

TEST(T2r, ByHand) {
  const auto m = Make("t2r", Json{{"features", 2}, {"minimum", 0.01}}, 4,
                      2);  // d = 2: queries are multiplied by 1/sqrt(2)
  at::NoGradGuard guard;
  auto parameters = m->named_parameters();
  ASSERT_EQ(parameters["map.weight"].sizes(), at::IntArrayRef({2, 2, 2}));
  ASSERT_EQ(parameters["map.bias"].sizes(), at::IntArrayRef({2, 2}));
  for (const auto& p : parameters) EXPECT_LE(p.value().abs().max().item<double>(), std::sqrt(0.5));
  m->to(at::kDouble);
  parameters["map.weight"].copy_(
      at::tensor({1., 0., 0., 1., 2., -1., -1., 1.}, at::kDouble).view({2, 2, 2}));
  parameters["map.bias"].copy_(at::tensor({0., 1., 0.5, -3.}, at::kDouble).view({2, 2}));
  const at::Tensor q =
      at::tensor({1., 2.}, at::kDouble).view({1, 1, 1, 2}).expand({1, 2, 2, 2}) * std::sqrt(2.0);
  const at::Tensor k =
      at::tensor({1., -3., 2., 0.}, at::kDouble).view({1, 1, 2, 2}).expand({1, 2, 2, 2});
  const at::Tensor v =
      at::tensor({1., 5., 3., 7.}, at::kDouble).view({1, 1, 2, 2}).expand({1, 2, 2, 2});
  // Head 0: phi(q) = (1, 3); phi(k) = (1, 0), (2, 1): weights 1 and 5. Head 1: phi(q) = (0.5, 0);
  // phi(k) = (5.5, 0), (4.5, 0).
  const at::Tensor out = m->Bidirectional({q, k, v}, {});
  EXPECT_NEAR(out[0][0][0][0].item<double>(), (1 * 1 + 5 * 3) / 6.0, 1e-12);
  EXPECT_NEAR(out[0][0][1][1].item<double>(), (1 * 5 + 5 * 7) / 6.0, 1e-12);
  EXPECT_NEAR(out[0][1][0][0].item<double>(), (5.5 * 1 + 4.5 * 3) / 10.0, 1e-12);
  const at::Tensor causal = ExtendPieces(*m, {q, k, v}, {0, 1, 2});
  EXPECT_NEAR(causal[0][0][0][1].item<double>(), 5, 1e-12);
  // A query without a positive feature weighs nothing: zeros over the smallest denominator.
  EXPECT_EQ(m->Bidirectional({q * 0 - 100, k, v}, {})[0][0].abs().sum().item<double>(), 0);
}

// What a layer runs whose projections have the map in them.
TEST(T2r, AfterTheMapItIsTheSame) {
  const auto m = std::dynamic_pointer_cast<FoldingMechanism>(Small(FindMechanism("t2r")));
  const auto after = m->AfterMaps();
  EXPECT_TRUE(after->weights().empty());
  at::manual_seed(3);
  const auto x = Inputs(*m, 2, 9);
  std::vector<at::Tensor> mapped;
  for (size_t i = 0; i < x.size(); ++i) {
    const auto map = m->FirstMap(i);
    mapped.push_back(map.weight.defined()
                         ? at::matmul(x[i], map.weight.transpose(1, 2)) + map.bias.unsqueeze(1)
                         : x[i]);
    EXPECT_EQ(after->Projections()[i].width, mapped[i].size(1) * mapped[i].size(3));
  }
  for (const Form form : {Form::kBidirectional, Form::kCausal, Form::kCross})
    ExpectClose(after->Definition(form, mapped, mapped), m->Definition(form, x, x), 1e-12,
                FormName(form));
  ExpectClose(after->Bidirectional(mapped, {}), m->Bidirectional(x, {}), 1e-12, "bidirectional");
  State a, b;
  ExpectClose(ExtendPieces(*after, mapped, {0, 4, 9}, {}, &a),
              ExtendPieces(*m, x, {0, 4, 9}, {}, &b), 1e-12, "causal");
  ExpectClose(a["memory"], b["memory"], 1e-12, "state");
}

TEST(T2r, NormalisedInputsHaveNoLength) {
  const auto m = Make("t2r", Json{{"features", 6}, {"norm", true}, {"minimum", 1e-9}}, 10, 2);
  at::manual_seed(3);
  auto x = Inputs(*m, 2, 9);
  const at::Tensor want = m->Bidirectional({x[0] * 1e4, x[1] * 1e4, x[2]}, {});
  ExpectClose(m->Bidirectional({x[0] * 1e6, x[1] * 1e5, x[2]}, {}), want, 1e-6,
              "lengths far above 1e-3");
}

TEST(FeatureAttention, RefusesWithAReason) {
  auto text = [](auto&& f) {
    try {
      f();
    } catch (const UsageError& e) {
      return std::string(e.what());
    }
    return std::string("no UsageError");
  };
  for (const char* name : {"linear", "t2r", "rfa", "rfa_gate"}) {
    ExpectContains(text([&] { Make(name, Json::object(), 8, 2, 64, 0.1); }),
                   {name, "attention_dropout=0.1", "attention_dropout=0"});
  }
  ExpectContains(text([] {
                   Make("linear", Json{{"denominator", false}}, 8, 2, 0);
                 }),
                 {"[linear]", "max_length"});
  ExpectContains(text([] {
                   Make("linear", Json{{"denominator", false}, {"eps", 1e-3}}, 8, 2);
                 }),
                 {"[linear]", "eps=0.001", "denominator=false"});
  ExpectContains(text([] {
                   Make("rfa", Json{{"variant", "ucu_code"}, {"bank", 9}}, 8, 4);
                 }),
                 {"[rfa]", "bank=9", "variant=ucu_code"});
  ExpectContains(text([] {
                   Make("rfa", Json{{"bank", 3}}, 8, 4);
                 }),
                 {"[rfa]", "bank=3", "heads=4"});
  ExpectContains(text([] {
                   Make("rfa", Json{{"kernel", "arccos"}, {"variant", "plain"}}, 8, 4);
                 }),
                 {"[rfa]", "plain", "gaussian"});
  ExpectContains(text([] {
                   Make("rfa_gate", Json{{"variant", "plain"}}, 8, 4);
                 }),
                 {"rfa_gate", "variant"});
  for (const char* name : {"rfa_gate", "gated_slots"}) {
    ExpectContains(text([&] { RequireForm(FindMechanism(name), Form::kBidirectional); }),
                   {name, "bidirectional", "instead"});
    ExpectContains(text([&] { RequireForm(FindMechanism(name), Form::kCross); }),
                   {name, "cross", "instead"});
  }
}

}  // namespace
}  // namespace cistern
