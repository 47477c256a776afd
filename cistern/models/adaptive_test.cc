// Adaptive embeddings and the adaptive softmax against their definition in plain loops, against
// torch's own, and as parts of a language model.
#include "cistern/models/adaptive.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/adaptive.h>

#include <cmath>

#include "cistern/base/error.h"
#include "cistern/io/test_folder.h"
#include "cistern/models/testing_models.h"
#include "cistern/models/transfer.h"
#include "cistern/ops/dropout.h"
#include "cistern/tensors/device.h"

namespace cistern {
namespace {

using namespace cistern::testing;

constexpr int64_t kWords = 101, kDim = 12;

// Bands 0..6, 7..29, 30..100 of widths 12, 4, 1.
ModelConfig Adaptive(bool tied, bool tied_projections, double dropout = 0) {
  ModelConfig c = SmallLm();
  c.vocab_size = kWords, c.tie_embeddings = tied;
  c.own["decoder_lm"] = Json{{"embedding", "adaptive"},
                             {"cutoffs", {7, 30}},
                             {"embedding_factor", 3},
                             {"tie_projections", tied_projections},
                             {"adaptive_dropout", dropout}};
  return c;
}

at::Tensor Words(int64_t batch, int64_t length) {
  return at::randint(0, kWords, {batch, length}, at::kLong);
}

// The maps of the bands round under autocast; the stream of tokens does not.
TEST(Adaptive, TheStreamStaysFloatUnderAutocast) {
  at::NoGradGuard guard;
  for (const PositionKind positions : {PositionKind::kNone, PositionKind::kSinusoidalHalves}) {
    ModelConfig config = Adaptive(true, true);
    config.positions = positions;
    const auto m = std::dynamic_pointer_cast<DecoderLm>(MakeModel(config, 1));
    m->eval();
    ModelState state = m->EmptyState(2);
    const BFloat16Scope bfloat16(true, at::kCPU);
    EXPECT_EQ(m->Hidden(Words(2, 9), state).scalar_type(), at::kFloat);
  }
}

struct Band {
  int64_t begin, end, width;
};
const std::vector<Band> kBands = {{0, 7, 12}, {7, 30, 4}, {30, 101, 1}};

using Weights = torch::OrderedDict<std::string, at::Tensor>;

double At(const at::Tensor& x, int64_t i, int64_t j) { return x[i][j].item<double>(); }

// x[d] of one id, by the definition.
std::vector<double> EmbeddingOf(const Weights& w, int64_t id) {
  for (size_t b = 0; b < kBands.size(); ++b) {
    const Band& band = kBands[b];
    if (id < band.begin || id >= band.end) continue;
    const at::Tensor table = w[StrCat("embed_tokens.bands.", b, ".weight")],
                     map = w[StrCat("embed_tokens.projections.", b, ".weight")];
    std::vector<double> x(kDim, 0.0);
    for (int64_t d = 0; d < kDim; ++d) {
      for (int64_t i = 0; i < band.width; ++i)
        x[size_t(d)] += At(table, id - band.begin, i) * At(map, d, i);
    }
    return x;
  }
  return {};
}

double LogSum(const std::vector<double>& x) {
  double sum = 0;
  for (const double v : x) sum += std::exp(v);
  return std::log(sum);
}

// Log-probabilities of all words given h[d], by the definition.
std::vector<double> LogProbabilitiesOf(const Weights& w, const at::Tensor& h, bool tied,
                                       bool tied_projections) {
  const auto table = [&](size_t b) {
    return w[StrCat(tied ? "embed_tokens" : "lm_head", ".bands.", b, ".weight")];
  };
  const auto dot = [&](const at::Tensor& rows, int64_t row, const std::vector<double>& x) {
    double sum = 0;
    for (size_t i = 0; i < x.size(); ++i) sum += At(rows, row, int64_t(i)) * x[i];
    return sum;
  };
  std::vector<double> hidden;
  for (int64_t d = 0; d < kDim; ++d) hidden.push_back(h[d].item<double>());
  std::vector<double> head;
  for (int64_t v = 0; v < kBands[0].end; ++v) head.push_back(dot(table(0), v, hidden));
  for (int64_t c = 0; c < 2; ++c) head.push_back(dot(w["lm_head.clusters.weight"], c, hidden));
  const double all = LogSum(head);
  std::vector<double> p;
  for (int64_t v = 0; v < kBands[0].end; ++v) p.push_back(head[size_t(v)] - all);
  for (size_t b = 1; b < kBands.size(); ++b) {
    std::vector<double> z(size_t(kBands[b].width), 0.0);
    for (int64_t i = 0; i < kBands[b].width; ++i) {
      for (int64_t d = 0; d < kDim; ++d) {
        z[size_t(i)] +=
            hidden[size_t(d)] *
            (tied_projections ? At(w[StrCat("embed_tokens.projections.", b, ".weight")], d, i)
                              : At(w[StrCat("lm_head.projections.", b, ".weight")], i, d));
      }
    }
    std::vector<double> within;
    for (int64_t v = 0; v < kBands[b].end - kBands[b].begin; ++v)
      within.push_back(dot(table(b), v, z));
    const double sum = LogSum(within), entry = head[size_t(kBands[0].end) + b - 1] - all;
    for (const double logit : within) p.push_back(logit - sum + entry);
  }
  return p;
}

const std::pair<bool, bool> kTies[] = {{true, true}, {true, false}, {false, true}, {false, false}};

TEST(Adaptive, EmbeddingsAndProbabilitiesAreTheDefinitions) {
  for (const auto& [tied, maps] : kTies) {
    const auto m = Make<DecoderLm>(Adaptive(tied, maps));
    const Weights w = m->named_parameters();
    at::manual_seed(3);
    const auto embedding =
        std::make_shared<AdaptiveEmbedding>(OwnOptions<DecoderLm>(m->config()), m->config(), kDim);
    embedding->to(at::kDouble);
    {
      const at::NoGradGuard guard;
      for (const auto& p : embedding->named_parameters())
        p.value().copy_(w["embed_tokens." + p.key()]);
    }
    const at::Tensor ids = at::tensor({0, 6, 7, 29, 30, 100}, at::kLong).view({2, 3}),
                     x = embedding->Forward(ids);
    ASSERT_EQ(x.sizes(), at::IntArrayRef({2, 3, kDim}));
    for (int64_t i = 0; i < 6; ++i) {
      const std::vector<double> want = EmbeddingOf(w, ids.view({-1})[i].item<int64_t>());
      for (int64_t d = 0; d < kDim; ++d)
        EXPECT_NEAR(At(x.view({6, kDim}), i, d), want[size_t(d)], 1e-12) << i;
    }
    const at::Tensor hidden = Normal({2, 3, kDim}), p = m->Logits(hidden);
    ASSERT_EQ(p.sizes(), at::IntArrayRef({2, 3, kWords}));
    double loss = 0;
    const at::Tensor targets = at::tensor({2, 29, -100, 100, 7, 30}, at::kLong).view({2, 3});
    for (int64_t i = 0; i < 6; ++i) {
      const std::vector<double> want = LogProbabilitiesOf(w, hidden.view({6, kDim})[i], tied, maps);
      double sum = 0;
      for (int64_t v = 0; v < kWords; ++v) {
        EXPECT_NEAR(At(p.view({6, kWords}), i, v), want[size_t(v)], 1e-11) << i << " " << v;
        sum += std::exp(want[size_t(v)]);
      }
      EXPECT_NEAR(sum, 1, 1e-12);
      const int64_t target = targets.view({-1})[i].item<int64_t>();
      if (target >= 0) loss -= want[size_t(target)] / 5;
    }
    EXPECT_NEAR(m->Loss(hidden, targets).item<double>(), loss, 1e-11);
  }
}

// The loss forms each band's logits for its own targets; its gradients are those of the full
// distribution, also of words and bands that no target is in.
TEST(Adaptive, GradientsOfTheLossAreThoseOfTheDistribution) {
  for (const auto& [tied, maps] : kTies) {
    const auto m = Make<DecoderLm>(Adaptive(tied, maps));
    at::manual_seed(4);
    // All bands; none of the last; none of any but the last; nothing to count.
    for (const std::vector<int64_t>& range :
         std::vector<std::vector<int64_t>>{{0, kWords}, {0, 30}, {30, kWords}, {0, 0}}) {
      at::Tensor targets = range[1] == 0 ? at::full({40}, -100, at::kLong)
                                         : at::randint(range[0], range[1], {40}, at::kLong);
      targets.narrow(0, 3, 4).fill_(-100);
      const at::Tensor hidden = Leaf(Normal({40, kDim}));
      std::vector<at::Tensor> leaves = {hidden};
      for (const auto& p : m->named_parameters()) {
        const bool output = p.key().starts_with("lm_head") ||
                            (p.key().starts_with("embed_tokens.bands") && tied) ||
                            (p.key().starts_with("embed_tokens.projections") && maps &&
                             !p.key().starts_with("embed_tokens.projections.0"));
        if (output) leaves.push_back(p.value());
      }
      const at::Tensor got = m->Loss(hidden, targets);
      const at::Tensor want =
          range[1] == 0 ? (m->Logits(hidden) * 0).sum()
                        : at::nll_loss(m->Logits(hidden), targets, {}, at::Reduction::Mean, -100);
      ExpectClose(got, want, 1e-12, "loss");
      const auto got_g = Gradients(got * 3, leaves), want_g = Gradients(want * 3, leaves);
      for (size_t i = 0; i < leaves.size(); ++i) {
        ASSERT_TRUE(got_g[i].defined()) << i;
        ExpectClose(got_g[i], want_g[i], 1e-12, "gradient " + std::to_string(i));
      }
    }
  }
}

TEST(Adaptive, IsTorchsAdaptiveLogSoftmax) {
  const auto m = Make<DecoderLm>(Adaptive(false, false));
  const Weights w = m->named_parameters();
  // Widths 12 / 3 and 12 / 9, without biases.
  torch::nn::AdaptiveLogSoftmaxWithLoss theirs(
      torch::nn::AdaptiveLogSoftmaxWithLossOptions(kDim, kWords, {7, 30}).div_value(3.0));
  theirs->to(at::kDouble);
  const at::NoGradGuard guard;
  auto parameters = theirs->named_parameters();
  ASSERT_EQ(parameters.size(), 5);
  parameters["head.weight"].copy_(
      at::cat({w["lm_head.bands.0.weight"], w["lm_head.clusters.weight"]}));
  for (const char* band : {"1", "2"}) {
    const std::string tail = StrCat("tail.", std::stoi(band) - 1);
    parameters[tail + ".0.weight"].copy_(w[StrCat("lm_head.projections.", band, ".weight")]);
    parameters[tail + ".1.weight"].copy_(w[StrCat("lm_head.bands.", band, ".weight")]);
  }
  at::manual_seed(5);
  const at::Tensor hidden = Normal({50, kDim}), targets = at::randint(kWords, {50}, at::kLong);
  ExpectClose(m->Logits(hidden), theirs->log_prob(hidden), 1e-12, "log-probabilities");
  EXPECT_NEAR(m->Loss(hidden, targets).item<double>(), theirs->forward(hidden, targets).loss,
              1e-12);
}

TEST(Adaptive, DropoutFallsOnTheInputAndOnTheNarrowBands) {
  const auto m = Make<DecoderLm>(Adaptive(true, true, 0.4));
  const Weights w = m->named_parameters();
  at::manual_seed(6);
  const at::Tensor hidden = Normal({60, kDim}), targets = at::randint(kWords, {60}, at::kLong);
  const auto plain = Make<DecoderLm>(Adaptive(true, true));
  ExpectClose(m->Loss(hidden, targets), plain->Loss(hidden, targets), 0, "not in evaluation");
  m->train();
  at::manual_seed(7);
  const double got = m->Loss(hidden, targets).item<double>();
  at::manual_seed(7);
  const at::Tensor h = ops::Dropout(hidden, 0.4, true);
  const at::Tensor head = at::log_softmax(
      at::linear(h, at::cat({w["embed_tokens.bands.0.weight"], w["lm_head.clusters.weight"]})), 1);
  double want = 0;
  for (int64_t i = 0; i < 60; ++i) {
    const int64_t t = targets[i].item<int64_t>();
    want -= At(head, i, t < 7 ? t : t < 30 ? 7 : 8);
  }
  for (size_t b = 1; b < 3; ++b) {
    std::vector<int64_t> rows;
    for (int64_t i = 0; i < 60; ++i) {
      const int64_t t = targets[i].item<int64_t>();
      if (t >= kBands[b].begin && t < kBands[b].end) rows.push_back(i);
    }
    const at::Tensor some = at::tensor(rows),
                     full = at::matmul(h, w[StrCat("embed_tokens.projections.", b, ".weight")]),
                     z = ops::Dropout(full, 0.4, true).index_select(0, some);
    const at::Tensor within =
        at::log_softmax(at::linear(z, w[StrCat("embed_tokens.bands.", b, ".weight")]), 1);
    for (size_t i = 0; i < rows.size(); ++i)
      want -= At(within, int64_t(i), targets[rows[i]].item<int64_t>() - kBands[b].begin);
  }
  EXPECT_NEAR(got, want / 60, 1e-11);
}

TEST(Adaptive, PiecesWithCarriedStateEqualTheWhole) {
  const auto m = Make<DecoderLm>(Adaptive(true, true));
  at::manual_seed(8);
  const at::Tensor ids = Words(2, 21);
  const at::Tensor whole = ExtendInPieces(*m, ids, {0, 21});
  ExpectClose(ExtendInPieces(*m, ids, EachToken(21)), whole, 1e-12, "one token at a time");
  ExpectClose(ExtendInPieces(*m, ids, {0, 5, 5, 20, 21}), whole, 1e-12, "pieces");
  // Masked tokens on the left move, with their ids.
  NamedTensors batch;
  batch.Set("ids", ids), batch.Set("targets", Words(2, 21));
  const double plain = m->TrainingLoss(batch).item<double>();
  at::Tensor padded = at::cat({at::zeros({2, 4}, at::kLong), ids}, 1);
  NamedTensors left;
  left.Set("ids", padded);
  left.Set("targets", at::cat({at::full({2, 4}, -100, at::kLong), batch["targets"]}, 1));
  left.Set("valid", (at::arange(25) >= 4).unsqueeze(0).expand({2, 25}));
  EXPECT_NEAR(m->TrainingLoss(left).item<double>(), plain, 1e-12);
}

// A model file, bit for bit; with fewer numbers than vocab_size x dim.
TEST(Adaptive, IsSavedAndLoaded) {
  for (const auto& [tied, maps] : kTies) {
    ModelConfig config = Adaptive(tied, maps);
    config.vocab_size = 4000;
    const TestFolder folder;
    const auto m = MakeModel(config, 7);
    EXPECT_EQ(double(m->ParameterCount() - Make<DecoderLm>(SmallLm())->ParameterCount()),
              config.info().tables(config) - 23 * kDim);
    EXPECT_LT(config.info().tables(config), 4000 * kDim);
    SaveModel(*m, folder / "model");
    const auto loaded = LoadModel(folder / "model");
    const Weights a = m->named_parameters(), b = loaded->named_parameters();
    ASSERT_EQ(a.size(), b.size());
    for (const auto& p : a) ExpectSameBits(b[p.key()], p.value(), p.key());
    ModelConfig x = config, y = loaded->config();
    EXPECT_EQ(x.Describe().Write(), y.Describe().Write());
    EXPECT_EQ(a.contains("lm_head.bands.2.weight"), !tied);
    EXPECT_EQ(a.contains("lm_head.projections.2.weight"), !maps);
  }
}

TEST(Adaptive, WeightsAreTakenByName) {
  const TestFolder folder;
  SaveModel(*MakeModel(Adaptive(true, true), 3), folder / "from");
  // What is left out of [model] is the folder's, bands included.
  ModelConfig config;
  config.kind = "decoder_lm", config.vocab_size = kWords;
  config.Describe().Read(StartingConfig(folder / "from", "decoder_lm"), "start");
  const auto model = MakeModel(config, 4);
  const TransferReport report = TakeWeights(*model, folder / "from", {});
  EXPECT_TRUE(report.fresh.empty() && report.left.empty());
  EXPECT_EQ(report.numbers_taken, model->ParameterCount());
  ExpectContains(ErrorMessage([&] { StartingConfig(folder / "from", "encoder_classifier"); }),
                 {"from", "embedding=adaptive", "encoder_classifier"});
}

// On the active device; a step on meta needs the shapes that torch has in Python alone.
TEST(Adaptive, IsMadeOnTheActiveDevice) {
  for (const auto& [tied, maps] : kTies) {
    SetActiveDevice(at::kMeta);
    const auto m = MakeModel(Adaptive(tied, maps, 0.1), 1);
    SetActiveDevice(at::kCPU);
    for (const auto& p : m->named_parameters()) EXPECT_TRUE(p.value().is_meta()) << p.key();
  }
}

// P003's language models of WikiText-103 (spec 4.8): 246.9M and 448.5M, counted here by hand as
// well: each layer has 4 D^2 + 4 D of attention, 8 D^2 + 5 D of feed-forward, two norms.
TEST(Adaptive, SizesOfTheLanguageModelsOfP003) {
  const auto count = [](int64_t layers) {
    ModelConfig c;
    c.vocab_size = 267'744, c.dim = 1024, c.heads = 8, c.layers = layers, c.ffn_dim = 4096;
    c.attention = {"softmax"}, c.bias = true, c.final_norm = false;
    c.positions = PositionKind::kSinusoidal;
    c.own["decoder_lm"] = Json{{"embedding", "adaptive"}, {"cutoffs", {20'000, 60'000}}};
    SetActiveDevice(at::kMeta);
    const int64_t parameters = MakeModel(c, 0)->ParameterCount();
    SetActiveDevice(at::kCPU);
    return parameters;
  };
  const int64_t bands = 20'000 * 1024 + 40'000 * 256 + 207'744 * 64,
                maps = 1024 * (1024 + 256 + 64), clusters = 2 * 1024, one = count(1),
                layer = count(2) - one;
  EXPECT_EQ(layer, 12 * 1024 * 1024 + 9 * 1024 + 4 * 1024);
  EXPECT_EQ(one, bands + maps + clusters + layer);
  EXPECT_EQ(one + 15 * layer, 246'933'504);
  EXPECT_EQ(one + 31 * layer, 448'473'088);
}

TEST(Adaptive, OptionsThatDoNotFit) {
  const auto refusal = [](const Json& own, auto&& change) {
    ModelConfig c = SmallLm();
    c.own["decoder_lm"] = own;
    change(c);
    return ErrorMessage([&] { c.Validate(); });
  };
  const auto as_is = [](ModelConfig&) {};
  const Json good = {{"embedding", "adaptive"}, {"cutoffs", {7, 12}}, {"embedding_factor", 2}};
  EXPECT_EQ(refusal(good, as_is), "no error");
  ExpectContains(refusal({{"cutoffs", {7}}}, as_is), {"decoder_lm.cutoffs", "embedding=adaptive"});
  ExpectContains(refusal({{"adaptive_dropout", 0.1}}, as_is), {"adaptive_dropout", "adaptive"});
  ExpectContains(refusal({{"tie_projections", false}}, as_is), {"tie_projections", "adaptive"});
  ExpectContains(refusal({{"embedding", "adaptive"}}, as_is), {"decoder_lm.cutoffs", "[20000"});
  ExpectContains(refusal({{"embedding", "adaptiv"}}, as_is), {"adaptiv", "adaptive"});
  ExpectContains(refusal({{"embedding", "adaptive"}, {"cutoffs", {7, 7}}}, as_is),
                 {"[7, 7]", "ascend"});
  ExpectContains(refusal({{"embedding", "adaptive"}, {"cutoffs", {7, 23}}}, as_is),
                 {"[7, 23]", "vocab_size=23"});
  ExpectContains(refusal({{"embedding", "adaptive"}, {"cutoffs", {3, 9}}}, as_is),
                 {"embedding_factor=4", "dim=12"});
  ExpectContains(refusal(good, [](ModelConfig& c) { c.scale_logits = true; }), {"scale_logits"});
  ExpectContains(
      refusal(good, [](ModelConfig& c) { c.head_bias = true, c.tie_embeddings = false; }),
      {"head_bias", "embedding=table"});
  ExpectContains(refusal(good, [](ModelConfig& c) { c.kind = "masked_lm"; }),
                 {"decoder_lm", "masked_lm"});
  const auto m = Make<DecoderLm>(Adaptive(true, true));
  ExpectContains(ErrorMessage([&] {
                   m->Loss(Normal({2, kDim}), at::zeros({2}, at::kLong), 0.1);
                 }),
                 {"label_smoothing=0.1", "adaptive"});
  ModelState state = m->EmptyState(1);
  ExpectContains(ErrorMessage([&] {
                   m->Hidden(at::full({1, 2}, kWords, at::kLong), state);
                 }),
                 {"[embedding] token id 101", "vocabulary of 101", "0 to 100"});
}

}  // namespace
}  // namespace cistern
