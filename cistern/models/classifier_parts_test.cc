// Parts of classifiers as single sources have them: padding that takes part, poolings, the place of
// the learned token, heads.
#include <cmath>

#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"
#include "cistern/models/testing_models.h"

namespace cistern {
namespace {

using namespace cistern::testing;

ModelConfig Classifier(const std::string& mechanism = "softmax",
                       const std::string& pooling = "mean") {
  ModelConfig c = SmallLm({mechanism});
  c.kind = "encoder_classifier", c.classes = 5, c.pooling = ValueOf(pooling, PoolingKinds());
  c.positions = PositionKind::kLearned, c.head = HeadKind::kLinear;
  return c;
}

// A model with the weights of another one, as far as it has them.
std::shared_ptr<EncoderClassifier> With(const ModelConfig& config, const EncoderClassifier& from) {
  const auto m = Make<EncoderClassifier>(config);
  at::NoGradGuard guard;
  const auto weights = from.named_parameters();
  for (const auto& p : m->named_parameters()) p.value().copy_(weights[p.key()]);
  return m;
}

TEST(Padding, IsTokensLikeAnyWhereItIsSeen) {
  at::NoGradGuard guard;
  for (const char* mechanism : {"softmax", "latte", "nystrom", "only_scaling", "conv_luna"}) {
    for (const char* pooling : {"mean", "cls", "memory"}) {
      const MechanismInfo& info = FindMechanism(mechanism);
      if (std::string(pooling) == "memory" && !info.HandsOnMemory()) continue;
      ModelConfig c = Classifier(mechanism, pooling);
      const auto masked = Make<EncoderClassifier>(c);
      at::manual_seed(3);
      at::Tensor ids = Ids(3, 11);
      const at::Tensor lengths = Lengths({11, 4, 1}), whole = Lengths({11, 11, 11});
      c.padding = PaddingKind::kSeen;
      const auto seen = With(c, *masked);
      const at::Tensor got = seen->Forward(ids, lengths);
      ExpectClose(got, masked->Forward(ids, whole), 1e-13, mechanism);
      EXPECT_GT(RelRms(masked->Forward(ids, lengths)[1], got[1]), 1e-4) << mechanism;
      // Zeros: as if padding had an id whose embedding is zero.
      c.padding = PaddingKind::kZeros;
      const auto zeros = With(c, *masked);
      const at::Tensor other = zeros->Forward(ids, lengths);
      masked->named_parameters()["embed_tokens.weight"][22].zero_();
      zeros->named_parameters()["embed_tokens.weight"][22].zero_();
      ids = ids.clamp_max(21);
      const at::Tensor pad = at::arange(11).unsqueeze(0) >= lengths.unsqueeze(1);
      ExpectClose(zeros->Forward(ids, lengths), masked->Forward(ids.masked_fill(pad, 22), whole),
                  1e-13, mechanism);
      EXPECT_GT(RelRms(other[1], got[1]), 1e-4) << mechanism;
    }
  }
}

TEST(Padding, WhatDoesNotFitIsRefused) {
  ModelConfig c = Classifier("nystrom");
  c.padding = PaddingKind::kReads;
  ExpectContains(Thrown([&] { c.Validate(); }), {"padding=reads", "nystrom", "masked", "softmax"});
  c = Classifier();
  c.padding = PaddingKind::kReads, c.positions = PositionKind::kRelative;
  ExpectContains(Thrown([&] { c.Validate(); }), {"padding=reads", "positions=relative"});
  c = SmallLm();
  c.padding = PaddingKind::kSeen;
  ExpectContains(Thrown([&] { c.Validate(); }), {"padding", "classifiers", "decoder_lm"});
}

// A row whose tokens have given positions is that row with blanks in between, wherever the learned
// token stands.
TEST(Pooling, GivenPositionsAreThoseOfTheTokens) {
  at::NoGradGuard guard;
  const at::Tensor ids = Ids(1, 3), lengths = Lengths({3});
  const auto at_places = [](std::vector<int64_t> places) {
    return at::tensor(places, at::kLong).view({1, -1});
  };
  for (const ClsPlace place : {ClsPlace::kBefore, ClsPlace::kAfter}) {
    ModelConfig c = Classifier("softmax", "cls");
    c.cls_place = place;
    const auto m = Make<EncoderClassifier>(c);
    ExpectClose(m->Forward(ids, lengths, at_places({0, 1, 2})), m->Forward(ids, lengths), 1e-13,
                NameOf(place, ClsPlaces()));
    const at::Tensor got = m->Forward(ids, lengths, at_places({2, 4, 9})),
                     last = m->Forward(ids, lengths, at_places({2, 4, 8}));
    EXPECT_GT(RelRms(got, last), 1e-4) << NameOf(place, ClsPlaces());
    // The same table with its rows 2, 4 and 9 first.
    const auto moved = With(c, *m);
    at::Tensor table = moved->named_parameters()["embed_positions.weight"];
    const int64_t before = place == ClsPlace::kBefore ? 1 : 0;
    const at::Tensor rows = at::tensor({2, 4, 9}, at::kLong) + before;
    table.narrow(0, before, 3).copy_(table.index_select(0, rows));
    ExpectClose(got, moved->Forward(ids, lengths), 1e-13, NameOf(place, ClsPlaces()));
  }
  ModelConfig c = Classifier("softmax");
  c.positions = PositionKind::kRelative;
  const auto relative = Make<EncoderClassifier>(c);
  ExpectContains(Thrown([&] {
                   relative->Forward(ids, lengths, at_places({2, 4, 9}));
                 }),
                 {"positions=relative", "rotary"});
}

// A block by its formulas, with softmax in plain sums.
TEST(Pooling, MeansOverTheWholeLengthByTheirFormulas) {
  at::NoGradGuard guard;
  for (const char* padding : {"masked", "reads"}) {
    ModelConfig c = Classifier("softmax", "mean_all");
    c.layers = 1, c.padding = ValueOf(padding, PaddingKinds());
    const auto m = Make<EncoderClassifier>(c);
    auto p = m->named_parameters();
    at::manual_seed(3);
    const at::Tensor ids = Ids(2, 7);
    const std::vector<int64_t> lengths = {7, 3};
    const auto norm = [&](const std::string& name, const at::Tensor& y) {
      return at::layer_norm(y, {12}, p[name + ".weight"], p[name + ".bias"], c.norm_eps);
    };
    for (int64_t b = 0; b < 2; ++b) {
      const at::Tensor x = p["embed_tokens.weight"].index_select(0, ids[b]) +
                           p["embed_positions.weight"].narrow(0, 0, 7);
      const at::Tensor h = norm("layers.0.attention_norm", x);
      const auto map = [&](const char* name) {
        return at::matmul(h, p[std::string("layers.0.attention.") + name + "_proj.weight"].t());
      };
      const at::Tensor q = map("q"), k = map("k"), v = map("v"), y = at::zeros_like(x);
      for (int64_t t = 0; t < 7; ++t) {
        if (t >= lengths[size_t(b)] && std::string(padding) == "masked") continue;
        for (int64_t head = 0; head < 2; ++head) {
          double sum = 0;
          at::Tensor out = at::zeros({6}, at::kDouble);
          for (int64_t s = 0; s < lengths[size_t(b)]; ++s) {
            const double weight = std::exp(
                (q[t].narrow(0, 6 * head, 6) * k[s].narrow(0, 6 * head, 6)).sum().item<double>() /
                std::sqrt(6.0));
            sum += weight;
            out += weight * v[s].narrow(0, 6 * head, 6);
          }
          y[t].narrow(0, 6 * head, 6).copy_(out / sum);
        }
      }
      at::Tensor z = x + at::matmul(y, p["layers.0.attention.o_proj.weight"].t());
      z = z + at::matmul(at::gelu(at::matmul(norm("layers.0.ffn_norm", z),
                                             p["layers.0.ffn.up_proj.weight"].t())),
                         p["layers.0.ffn.down_proj.weight"].t());
      z = norm("norm", z);
      for (const char* pooling : {"mean_all", "mean_zeros", "first", "mean"}) {
        c.pooling = ValueOf(pooling, PoolingKinds());
        const std::string kind = pooling;
        const int64_t real = lengths[size_t(b)];
        const at::Tensor sum = z.narrow(0, 0, kind == "mean_all" ? 7 : real).sum(0);
        const at::Tensor pooled =
            kind == "first" ? z[0] : sum / (kind == "mean" ? double(real) : 7.0);
        const at::Tensor want =
            at::linear(pooled, p["classifier.out_proj.weight"], p["classifier.out_proj.bias"]);
        ExpectClose(With(c, *m)->Forward(ids, Lengths(lengths))[b], want, 1e-12,
                    kind + " " + padding);
      }
    }
  }
}

TEST(Pooling, TheTokenComesBeforeOrAfterPositions) {
  at::NoGradGuard guard;
  ModelConfig c = Classifier("softmax", "cls");
  const auto before = Make<EncoderClassifier>(c);
  EXPECT_EQ(before->named_parameters()["embed_positions.weight"].size(0), 65);
  c.cls_place = ClsPlace::kAfter;
  const auto after = Make<EncoderClassifier>(c);
  const at::Tensor table = after->named_parameters()["embed_positions.weight"];
  EXPECT_EQ(table.size(0), 64);
  // The same model where the token's position is zero and the others are one place on.
  auto from = after->named_parameters();
  for (const auto& p : before->named_parameters()) {
    if (p.key() == "embed_positions.weight") {
      p.value()[0].zero_();
      p.value().narrow(0, 1, 64).copy_(table);
    } else {
      p.value().copy_(from[p.key()]);
    }
  }
  const at::Tensor ids = Ids(2, 64), lengths = Lengths({64, 5});
  ExpectClose(after->Forward(ids, lengths), before->Forward(ids, lengths), 1e-13, "cls_place");
  c = Classifier("softmax", "mean");
  c.cls_place = ClsPlace::kAfter;
  ExpectContains(Thrown([&] { c.Validate(); }), {"cls_place", "pooling=cls"});
}

TEST(Embeddings, AreScaledButNotTheLearnedToken) {
  at::NoGradGuard guard;
  for (const char* pooling : {"mean", "cls"}) {
    ModelConfig c = Classifier("softmax", pooling);
    const auto plain = Make<EncoderClassifier>(c);
    c.scale_embeddings = true;
    const auto scaled = With(c, *plain);
    plain->named_parameters()["embed_tokens.weight"].mul_(std::sqrt(12.0));
    const at::Tensor ids = Ids(2, 9), lengths = Lengths({9, 4});
    ExpectClose(scaled->Forward(ids, lengths), plain->Forward(ids, lengths), 1e-13, pooling);
  }
}

TEST(Heads, HiddenLayersByTheirFormulas) {
  at::NoGradGuard guard;
  for (const auto& [head, dims] : std::vector<std::pair<std::string, std::vector<int64_t>>>{
           {"gelu", {7, 4}}, {"relu", {3}}, {"relu", {6, 5, 4}}, {"tanh", {}}, {"tanh", {8}}}) {
    ModelConfig c = Classifier();
    const auto linear = Make<EncoderClassifier>(c);  // its output is the pooled vector
    c.head = ValueOf(head, HeadKinds()), c.head_dims = dims;
    const auto m = Make<EncoderClassifier>(c);
    auto mine = linear->named_parameters(), p = m->named_parameters();
    for (const auto& q : mine) {
      if (!q.key().starts_with("classifier.")) q.value().copy_(p[q.key()]);
    }
    const at::Tensor ids = Ids(2, 9), lengths = Lengths({9, 4});
    const at::Tensor weight = mine["classifier.out_proj.weight"];
    std::vector<at::Tensor> channels;
    mine["classifier.out_proj.bias"].zero_();
    for (int64_t i = 0; i < 12; ++i) {
      weight.zero_();
      weight[0][i] = 1;
      channels.push_back(linear->Forward(ids, lengths).select(1, 0));
    }
    at::Tensor y = at::stack(channels, 1);
    std::vector<int64_t> widths = dims.empty() ? std::vector<int64_t>{12} : dims;
    for (size_t i = 0; i < widths.size(); ++i) {
      const std::string name =
          "classifier.dense" + (i == 0 ? "" : "_" + std::to_string(i + 1)) + ".";
      ASSERT_EQ(p[name + "weight"].size(0), widths[i]);
      y = at::matmul(y, p[name + "weight"].t()) + p[name + "bias"];
      y = head == "gelu"   ? 0.5 * y * (1 + at::erf(y / std::sqrt(2.0)))
          : head == "tanh" ? (y.exp() - (-y).exp()) / (y.exp() + (-y).exp())
                           : y.clamp_min(0);
    }
    const at::Tensor want =
        at::matmul(y, p["classifier.out_proj.weight"].t()) + p["classifier.out_proj.bias"];
    ExpectClose(m->Forward(ids, lengths), want, 1e-12, head);
  }
}

// Of 4,096 hidden numbers that are all 1, one classifier of ones adds up those that are kept.
TEST(Heads, DropoutIsTheirOwn) {
  at::NoGradGuard guard;
  for (const auto& [dropout, own, dims, expected] :
       std::vector<std::tuple<double, double, std::vector<int64_t>, double>>{
           {0.5, -1, {4096}, 0.5},
           {0.5, 0, {4096}, 0},
           {0, 0.25, {4096}, 0.25},
           {0, 0.25, {4096, 4096}, 0}}) {  // of several, none after the last
    ModelConfig c = Classifier();
    c.head = HeadKind::kRelu, c.head_dims = dims, c.dropout = dropout, c.head_dropout = own;
    ClassifierHead head(c, 12, 48);
    for (const auto& p : head.named_parameters())
      p.value().fill_(p.key().ends_with("weight") ? 0 : 1);
    head.named_parameters()["out_proj.weight"].fill_(1.0 / 4096);
    head.named_parameters()["out_proj.bias"].zero_();
    head.train();
    at::manual_seed(2);
    const at::Tensor y = head.Forward(at::zeros({400, 12}));
    // The mean of n numbers that are 0 or 1/(1-p), each 1 on average: variance p / ((1-p) n).
    const double variance = y.select(1, 0).var().item<double>();
    // Of 400 rows: their variance is known to 7%.
    const double want = expected / (1 - expected);
    EXPECT_NEAR(variance * 4096, want, 0.3 * want + 1e-6) << dropout << " " << own;
  }
}

// Luna's encoders (post-norm, norms after the embedding, none at the end) and Latte's on Long Range
// Arena (pre-norm, no norm before the head): spec 1.1.
TEST(Norms, AsThePublishedEncodersHaveThem) {
  ModelConfig luna = Classifier("luna", "first");
  luna.attention_options = Json{{"luna",
                                 {{"norm", true},
                                  {"dropout", 0.1},
                                  {"init", "scaled"},
                                  {"sinusoid", true},
                                  {"tie_kv", false}}}};
  luna.norm = NormPlace::kPost, luna.embedding_norm = true, luna.final_norm = false;
  luna.scale_embeddings = true, luna.positions = PositionKind::kSinusoidalHalves;
  const auto names = [](const ModelConfig& c) {
    std::vector<std::string> found;
    for (const auto& p : Make<EncoderClassifier>(c)->named_parameters()) {
      if (p.key().find("norm") != std::string::npos && p.key().ends_with("weight") &&
          p.key().find("layers.1") == std::string::npos)
        found.push_back(p.key());
    }
    std::sort(found.begin(), found.end());
    return found;
  };
  EXPECT_EQ(names(luna), (std::vector<std::string>{
                             "embed_norm.weight", "layers.0.attention.core.memory_norm.weight",
                             "layers.0.attention_norm.weight", "layers.0.ffn_norm.weight",
                             "layers.0.memory_norm.weight"}));
  ModelConfig latte = Classifier("latte");
  latte.final_norm = false;
  EXPECT_EQ(names(latte), (std::vector<std::string>{"layers.0.attention_norm.weight",
                                                    "layers.0.ffn_norm.weight"}));
}

// Long Range Arena's image and pathfinder models: 128/64 and 32/16 (spec 4.4), of kernels alone.
TEST(Widths, ParametersOfLongRangeArena) {
  for (const auto& [dim, qkv, ffn, layers, heads] :
       std::vector<std::array<int64_t, 5>>{{128, 64, 128, 1, 8}, {32, 16, 32, 4, 4}}) {
    ModelConfig c = Classifier();
    c.attention_options = Json::object();
    c.dim = dim, c.qkv_dim = qkv, c.ffn_dim = ffn, c.layers = layers, c.heads = heads;
    const auto m = MakeModel(c, 1);
    int64_t count = 0;
    for (const auto& p : m->named_parameters()) {
      if (p.key().starts_with("layers.") && p.value().dim() == 2) count += p.value().numel();
    }
    EXPECT_EQ(count, layers * (4 * dim * qkv + 2 * dim * ffn));
  }
}

}  // namespace
}  // namespace cistern
