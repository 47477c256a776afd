// Random features: their kernels, the softmax that they estimate, draws in training, the gate.
#include "cistern/attention/mechanisms/rfa.h"

#include "cistern/attention/random_matrices.h"
#include "cistern/attention/running_max.h"
#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"

namespace cistern {
namespace {

using namespace cistern::testing;

std::shared_ptr<Mechanism> Make(const Json& options, int64_t dim, int64_t heads = 1,
                                const char* name = "rfa") {
  AttentionDims dims;
  dims.dim = dim, dims.heads = heads, dims.max_length = 64;
  const auto m = FindMechanism(name).Make(options, dims);
  m->eval();
  return m;
}

at::Tensor Row(const std::vector<double>& x) {
  return at::tensor(x, at::kDouble).view({1, 1, 1, -1});
}

// One row of them would multiply the features of all.
TEST(Rfa, GatesOfOtherRowsAreRefused) {
  for (const auto& [name, options] : std::vector<std::pair<const char*, Json>>{
           {"rfa", {{"variant", "fork"}, {"input_gate", true}}}, {"rfa_gate", Json::object()}}) {
    const auto m = Make(options, 8, 2, name);
    auto x = Inputs(*m, 2, 3);
    x.back() = x.back().narrow(0, 0, 1);
    State state = m->EmptyState(2, x[0].options());
    ExpectContains(Thrown([&] { m->Extend(x, state, {}); }),
                   {name, "gate of shape [B,2,T,1] with B=2 and T=3", "got [1, 2, 3, 1]"});
  }
}

TEST(RandomMatrix, DependsOnSeedAndIndexAlone) {
  for (const bool orthogonal : {false, true}) {
    const at::Tensor a = RandomMatrix(7, 3, 13, 5, orthogonal);
    EXPECT_EQ(a.sizes(), at::IntArrayRef({13, 5}));
    at::manual_seed(1);
    ExpectSameBits(RandomMatrix(7, 3, 13, 5, orthogonal), a, "again");
    EXPECT_FALSE(at::equal(RandomMatrix(7, 4, 13, 5, orthogonal), a));
    EXPECT_FALSE(at::equal(RandomMatrix(8, 3, 13, 5, orthogonal), a));
  }
}

TEST(RandomMatrix, OrthogonalBlocksOfGaussianRows) {
  const int64_t d = 6;
  const at::Tensor a = RandomMatrix(1, 0, 15, d, true).to(at::kDouble);
  for (int64_t begin = 0; begin < 15; begin += d) {
    const at::Tensor block = a.narrow(0, begin, std::min(d, 15 - begin)),
                     products = at::matmul(block, block.transpose(0, 1));
    EXPECT_LE((products - products.diagonal().diag()).abs().max().item<double>(), 1e-5);
    EXPECT_GT((products.diagonal() - double(d)).abs().max().item<double>(), 0.1)
        << "lengths are drawn, not all sqrt(d)";
  }
  EXPECT_GT(at::matmul(a[0], a[d]).abs().item<double>(), 1e-3) << "blocks are drawn apart";
  // Every row is N(0,I) in every direction: E e^(w.x) = e^(|x|^2/2), which Householder's QR without
  // the signs of R misses.
  const at::Tensor w = RandomMatrix(2, 0, 60000, d, true).to(at::kDouble);
  for (int64_t i = 0; i < d; ++i)
    EXPECT_NEAR(w.select(1, i).exp().mean().item<double>(), std::exp(0.5), 0.04)
        << "direction " << i;
  EXPECT_NEAR(w.square().mean().item<double>(), 1, 0.02);
}

// phi(q) . phi(k), which the variant without a denominator returns for a single key of value one.
double Kernel(const Json& options, const at::Tensor& q, const at::Tensor& k) {
  const auto m = Make(options, q.size(3));
  return m->Bidirectional({q, k, at::ones_like(q)}, {}).select(3, 0).item<double>();
}

TEST(Rfa, KernelIsGaussianWithWidthTau) {
  // |q - k|^2 = 0.4 and tau = 0.7: e^(-0.4 / 0.98) = 0.6649. Rows drawn with tau in place of 1/tau
  // would give 0.906.
  const at::Tensor q = Row({0.3, -0.2, 0.5, 0}), k = Row({0.3, 0.2, 0.1, std::sqrt(0.08)});
  for (const char* matrices : {"iid", "orthogonal"}) {
    const Json options = {
        {"variant", "ucu_code"}, {"features", 40000}, {"tau", 0.7}, {"matrices", matrices}};
    EXPECT_NEAR(Kernel(options, q, k), std::exp(-0.4 / 0.98), 0.01) << matrices;
  }
  // The softmax's exponential: the kernel times e^(|q|^2/2) e^(|k|^2/2) is e^(q.k).
  const double want = std::exp((q * k).sum().item<double>());
  const double factor = std::exp((q.square().sum() + k.square().sum()).item<double>() / 2);
  EXPECT_NEAR(factor * Kernel({{"variant", "ucu_code"}, {"features", 40000}}, q, k), want, 0.02);
}

TEST(Rfa, KernelErrorFallsAsOneOverRootM) {
  at::manual_seed(4);
  const at::Tensor q = Normal({1, 1, 1, 8}, 0.5), k = Normal({1, 1, 1, 8}, 0.5);
  const double exact = std::exp(-(q - k).square().sum().item<double>() / 2);
  auto rms = [&](int64_t features, const char* matrices) {
    double sum = 0;
    for (int64_t seed = 0; seed < 100; ++seed) {
      const Json options = {
          {"variant", "ucu_code"}, {"features", features}, {"seed", seed}, {"matrices", matrices}};
      sum += std::pow(Kernel(options, q, k) - exact, 2);
    }
    return std::sqrt(sum / 100);
  };
  const double few = rms(32, "iid"), many = rms(512, "iid");  // 100 draws: each is known to 7%
  EXPECT_GT(few / many, 3);
  EXPECT_LT(few / many, 5.3);
  EXPECT_LT(rms(32, "orthogonal"), 0.9 * few) << "orthogonal rows have a smaller variance";
}

// Softmax attention with logits q.k * scale.
at::Tensor Softmax(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
  return at::matmul(at::softmax(at::matmul(q, k.transpose(2, 3)) * scale, 3), v);
}

TEST(Rfa, EstimatesSoftmaxAttention) {
  at::manual_seed(5);
  const int64_t d = 4;
  const at::Tensor q = Normal({1, 2, 7, d}, 0.6), k = Normal({1, 2, 9, d}, 0.6),
                   v = Normal({1, 2, 9, d});
  auto cross = [&](const Json& options) {
    const auto m = Make(options, 2 * d, 2);
    State state = m->EmptyState(1, q.options());
    m->Write({q, k, v}, state, {});
    return m->Read({q, k, v}, state);
  };
  auto unit = [](const at::Tensor& x) { return x / at::linalg_vector_norm(x, 2, {-1}, true); };
  const int64_t m = 40000;
  ExpectClose(cross({{"features", m}, {"tau", 0.8}}), Softmax(unit(q), unit(k), v, 1 / 0.64), 0.03,
              "paper: cosines over tau^2");
  ExpectClose(cross({{"variant", "plain"}, {"features", m}, {"tau", 0.8}}),
              Softmax(q, k, v, 1 / 0.64), 0.04, "plain");
  ExpectClose(cross({{"variant", "exact_scale"}, {"features", m}}), Softmax(q, k, v, 0.5), 0.03,
              "exact_scale: 1/sqrt(4)");
  EXPECT_GT(RelRms(cross({{"variant", "ucu_code"}, {"features", m}}), Softmax(q, k, v, 0.5)), 0.2);
}

TEST(Rfa, ArcCosineKernel) {
  // Two keys at angles a and b from the query: the weight of the first is K(a) / (K(a) + K(b)),
  // K(t) = sin t + (pi - t) cos t.
  const double a = 0.4, b = 1.9;
  auto K = [](double t) { return std::sin(t) + (M_PI - t) * std::cos(t); };
  const at::Tensor q = Row({1, 0, 0}) * 1e3;
  const at::Tensor k =
      at::cat({Row({std::cos(a), std::sin(a), 0}), Row({std::cos(b), 0, std::sin(b)})}, 2) * 1e3;
  const at::Tensor v = at::cat({Row({1, 1, 1}), Row({0, 0, 0})}, 2);
  const auto m = Make({{"kernel", "arccos"}, {"features", 60000}}, 3);
  State state = m->EmptyState(1, q.options());
  m->Write({q, k, v}, state, {});
  EXPECT_NEAR(m->Read({q, k, v}, state).select(3, 0).item<double>(), K(a) / (K(a) + K(b)), 0.005);
  EXPECT_EQ(state["memory"].size(2), 60000) << "m features, not 2m";
  // phi.phi itself is |x| |y| K(t) / (2 pi): the features' own scale, 1/sqrt(m).
  EXPECT_NEAR((state["memory"].select(3, 3).square().sum()).item<double>(),
              (K(0) * 2 + 2 * K(std::acos(std::cos(a) * std::cos(b)))) / (2 * M_PI), 0.02);
}

TEST(Rfa, RepositoryConstantsScaleTheFirstTokens) {
  // c^2 = 0.01, m = 16: a single key has a weight of at most 0.16 and the denominator is 1.
  const auto m = Make({{"variant", "repository"}, {"features", 16}}, 5);
  at::manual_seed(6);
  const at::Tensor q = Normal({1, 1, 1, 5}), v = Normal({1, 1, 1, 5});
  ExpectClose(ExtendPieces(*m, {q, q, v}, {0, 1}), v * 0.16, 1e-12,
              "one token: the kernel of a vector with itself is m c^2");
  const at::Tensor many = q.expand({1, 1, 100, 5});
  ExpectClose(ExtendPieces(*m, {many, many, v.expand({1, 1, 100, 5})}, {0, 100}).narrow(2, 99, 1),
              v, 1e-12, "many: normalised");
}

TEST(Rfa, LargeKeysNeitherOverflowNorForget) {
  // |k|^2 / 2 of some ten thousands: the largest factor wins, as in the softmax it estimates.
  // Pieces carry it along.
  const auto m = Make({{"variant", "plain"}, {"features", 8}}, 4);
  at::manual_seed(7);
  const at::Tensor k =
      Normal({1, 1, 12, 4}) +
      at::tensor({0., 10., 300., 20., 5., 0., 300.5, 1., 2., 3., 4., 250.}, at::kDouble)
          .view({1, 1, 12, 1});
  const std::vector<at::Tensor> x = {k, k, Normal({1, 1, 12, 4})};
  const at::Tensor whole = ExtendPieces(*m, x, {0, 12});
  EXPECT_TRUE(whole.isfinite().all().item<bool>());
  ExpectClose(whole.narrow(2, 11, 1), m->Definition(Form::kCausal, x, x).narrow(2, 11, 1), 1e-9,
              "definition");
  ExpectClose(ExtendPieces(*m, x, EachToken(12)), whole, 1e-9, "one at a time");
  EXPECT_TRUE(ExtendPieces(*m, To(x, at::kFloat), {0, 5, 12}).isfinite().all().item<bool>());
}

TEST(Rfa, LearnedScaleMultipliesTheInputs) {
  at::NoGradGuard guard;
  const auto one = Make({{"variant", "plain"}, {"features", 24}}, 10, 2),
             scaled = Make({{"variant", "plain"}, {"features", 24}}, 10, 2);
  at::manual_seed(8);
  const at::Tensor sigma = (Normal({2, 1, 5}) * 0.3 + 1).to(at::kFloat);
  scaled->named_parameters()["sigma"].copy_(sigma);
  auto x = Inputs(*one, 2, 11);
  ExpectClose(
      scaled->Bidirectional(x, {}),
      one->Bidirectional({x[0] * sigma.to(at::kDouble), x[1] * sigma.to(at::kDouble), x[2]}, {}),
      1e-12, "sigma");
  EXPECT_EQ(Make({{"variant", "ucu_code"}}, 10, 2)->parameters().size(), 0u) << "P002's W is fixed";
}

TEST(Rfa, TrainingDrawsMatricesForEachSequence) {
  for (const char* name : {"rfa", "rfa_gate"}) {
    const auto m = Make({{"features", 16}, {"bank", 5}}, 12, 3, name);
    auto draw = [&] {
      const at::Tensor row = m->EmptyState(2, at::kDouble)["draw"];
      EXPECT_TRUE(at::equal(row[0], row[1]));
      return std::vector<int64_t>{row[0][0].item<int64_t>(), row[0][1].item<int64_t>(),
                                  row[0][2].item<int64_t>()};
    };
    EXPECT_EQ(draw(), (std::vector<int64_t>{0, 1, 2}));
    m->train();
    at::manual_seed(1);
    const auto first = draw();
    bool changes = false;
    for (int i = 0; i < 20; ++i) {
      const auto next = draw();
      changes = changes || next != first;
      EXPECT_TRUE(next[0] != next[1] && next[1] != next[2] && next[0] != next[2])
          << "no matrix twice";
      for (const int64_t index : next) EXPECT_TRUE(index >= 0 && index < 5);
    }
    EXPECT_TRUE(changes);
    at::manual_seed(1);
    EXPECT_EQ(draw(), first) << "the draw is torch's generator's";
    // A state keeps its matrices: pieces equal the whole, in training and after it.
    std::vector<at::Tensor> x;
    for (const Projection& p : m->Projections()) x.push_back(Normal({2, 3, 9, p.width / 3}));
    State whole = m->EmptyState(2, at::kDouble), pieces = whole.Clone();
    m->EmptyState(2, at::kDouble);  // another sequence is begun meanwhile
    const at::Tensor want = m->Extend(x, whole, {});
    const at::Tensor head = m->Extend(Narrow(x, 0, 4), pieces, {});
    m->eval();
    const at::Tensor evaluated = ExtendPieces(*m, x, {0, 9});
    EXPECT_GT(RelRms(evaluated, want), 1e-3);
    ExpectClose(at::cat({head, m->Extend(Narrow(x, 4, 5), pieces, {})}, 2), want, 1e-12, name);
  }
  const auto fixed = Make({{"bank", 0}}, 12, 3);
  fixed->train();
  EXPECT_EQ(fixed->EmptyState(1, at::kDouble)["draw"].sum().item<int64_t>(), 3);
}

TEST(Rfa, StatesOfDifferentDrawsDoNotMerge) {
  const auto m = Make({{"features", 16}}, 12, 3);
  const State a = m->EmptyState(1, at::kDouble);
  State b = a.Clone();
  b["draw"].add_(1);
  ExpectContains(Thrown([&] { m->Merge(a, b); }), {"[rfa]", "different random matrices"});
  EXPECT_EQ(Thrown([&] { m->Merge(a, a); }), "no error");
  const auto gate = Make({{"features", 16}}, 12, 3, "rfa_gate");
  ExpectContains(Thrown([&] {
                   gate->Merge(gate->EmptyState(1, at::kDouble), gate->EmptyState(1, at::kDouble));
                 }),
                 {"[rfa_gate]", "merge"});
}

TEST(RfaGate, HalfByHand) {
  // Gates of 1/2: token i weighs 2^-(t-i+1); the kernel of equal vectors is one, so the output is
  // the weighted mean of the values.
  const auto m = Make({{"features", 8}}, 2, 1, "rfa_gate");
  const at::Tensor same = Row({0.5, -1}).expand({1, 1, 3, 2}),
                   zero = at::zeros({1, 1, 3, 1}, at::kDouble);
  const at::Tensor v = at::cat({Row({1, 2}), Row({4, 8}), Row({10, 20})}, 2);
  const at::Tensor want = at::cat({Row({1, 2}), Row({9. / 3, 18. / 3}), Row({49. / 7, 98. / 7})},
                                  2);  // (1+8)/3, (1+8+40)/7
  ExpectClose(ExtendPieces(*m, {same, same, v, zero}, {0, 3}), want, 1e-12, "weights 1 : 2 : 4");
}

TEST(RfaGate, OpenGatesForgetNothing) {
  const auto raw = Make({{"features", 32}}, 10, 2),
             gated = Make({{"features", 32}}, 10, 2, "rfa_gate");
  at::manual_seed(9);
  auto x = Inputs(*raw, 2, 15);
  const at::Tensor want = ExtendPieces(*raw, x, {0, 15});
  double before = kInf;
  for (const double logit : {3.0, 6.0, 9.0}) {  // 1 - g = 0.047, 0.0025, 0.00012
    auto y = x;
    y.push_back(at::full({2, 2, 15, 1}, logit, at::kDouble));
    const double error = RelRms(ExtendPieces(*gated, y, {0, 15}), want);
    EXPECT_LT(error, 20 * (1 - 1 / (1 + std::exp(-logit)))) << logit;
    EXPECT_LT(error, before / 10) << logit;
    before = error;
  }
}

TEST(RunningMax, MatchesPlainLoops) {
  at::manual_seed(10);
  const int64_t B = 3, H = 2, T = 19;
  const at::Tensor s = Normal({B, H, T, 1}, 3), before = Normal({B, H});
  before[2].fill_(-kInf);
  for (const ops::Mask& mask :
       {ops::Mask{}, ops::Mask{Lengths({T, 7, 0}), {}},
        ops::Mask{{}, Starts(B, T, {{0, 0}, {1, 5}, {1, 6}, {2, 18}})},
        ops::Mask{Lengths({T, 12, 5}), Starts(B, T, {{0, 9}, {1, 0}, {1, 8}, {1, 15}, {2, 3}})}}) {
    const RunningMaxResult got = RunningMax(s, before, mask);
    for (int64_t b = 0; b < B; ++b) {
      const int64_t length = mask.lengths ? mask.lengths->index({b}).item<int64_t>() : T;
      for (int64_t h = 0; h < H; ++h) {
        double m = before[b][h].item<double>();
        for (int64_t t = 0; t < T; ++t) {
          const double gate = got.log_gate[b][h][t].item<double>(),
                       weight = got.weight[b][h][t].item<double>();
          if (t >= length) {
            EXPECT_EQ(gate, 0);
            EXPECT_TRUE(std::isfinite(weight));
            continue;
          }
          const bool start = mask.starts && (*mask.starts)[b][t].item<bool>();
          const double value = s[b][h][t].item<double>(), now = start ? value : std::max(m, value);
          EXPECT_DOUBLE_EQ(gate, start ? 0 : m - now) << b << " " << t;
          EXPECT_DOUBLE_EQ(weight, std::exp(value - now)) << b << " " << t;
          m = now;
        }
        EXPECT_DOUBLE_EQ(got.last[b][h].item<double>(), m);
      }
    }
    if (mask.starts) continue;
    const PieceMaxResult piece = PieceMax(s, before, mask);
    ExpectSameBits(piece.last, got.last, "the piece at once");
    const at::Tensor ratio =
        at::where(before == got.last, at::zeros_like(before), before - got.last).exp();
    ExpectClose(piece.decay.squeeze(-1).squeeze(-1), ratio, 1e-15, "decay");
  }
  const PairMaxResult pair = PairMax(at::tensor({1., -kInf, -kInf}, at::kDouble),
                                     at::tensor({3., 2., -kInf}, at::kDouble));
  ExpectClose(pair.first.flatten(), at::tensor({std::exp(-2.), 0., 1.}, at::kDouble), 1e-15,
              "first");
  ExpectClose(pair.second.flatten(), at::tensor({1., 1., 1.}, at::kDouble), 1e-15, "second");
}

}  // namespace
}  // namespace cistern
