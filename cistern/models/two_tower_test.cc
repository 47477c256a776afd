// Two texts through one encoder: every head against its definition (spec 1.3), in plain loops.
#include "cistern/models/two_tower.h"

#include <cmath>

#include "cistern/base/error.h"
#include "cistern/io/test_folder.h"
#include "cistern/models/testing_models.h"

namespace cistern {
namespace {

using namespace cistern::testing;

ModelConfig Config(const std::string& match) {
  ModelConfig c = SmallLm({"latte"});
  c.kind = "two_tower", c.classes = 2, c.ffn_dim = 10;
  c.own["two_tower"] = Json{{"match", match}};
  return c;
}

using Row = std::vector<double>;

Row RowOf(const at::Tensor& x) {
  const at::Tensor y = x.detach().to(at::kDouble).contiguous();
  return {y.const_data_ptr<double>(), y.const_data_ptr<double>() + y.numel()};
}

// The vectors that an encoder_classifier of the same weights would give its head: its own head is
// made the identity.
at::Tensor Pooled(const TwoTower& model, const at::Tensor& ids, const at::Tensor& lengths) {
  ModelConfig c = model.config();
  const int64_t dim = c.dim;
  c.kind = "encoder_classifier", c.classes = dim, c.head = HeadKind::kLinear, c.own.clear();
  const auto encoder = Make<EncoderClassifier>(c);
  const at::NoGradGuard guard;
  const auto from = model.named_parameters();
  for (auto& p : encoder->named_parameters()) {
    if (p.key() == "classifier.out_proj.weight") {
      p.value().copy_(at::eye(dim));
    } else if (p.key() == "classifier.out_proj.bias") {
      p.value().zero_();
    } else {
      p.value().copy_(from[p.key()]);
    }
  }
  return encoder->Forward(ids, lengths);
}

double Apply(const std::string& activation, double x) {
  if (activation == "relu") return x > 0 ? x : 0;
  if (activation == "gelu") return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
  if (activation == "tanh")
    return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
  return x;
}

Row Through(const TwoTower& model, const std::string& name, const Row& x,
            const std::string& activation) {
  const auto parameters = model.named_parameters();
  const Row w = RowOf(parameters["classifier." + name + ".weight"]);
  const bool bias = parameters.contains("classifier." + name + ".bias");
  const Row b = bias ? RowOf(parameters["classifier." + name + ".bias"]) : Row();
  Row y(w.size() / x.size());
  for (size_t o = 0; o < y.size(); ++o) {
    double sum = bias ? b[o] : 0;
    for (size_t i = 0; i < x.size(); ++i) sum += w[o * x.size() + i] * x[i];
    y[o] = Apply(activation, sum);
  }
  return y;
}

TEST(TwoTower, HeadsAreTheirDefinitions) {
  for (const std::string match : {"lra", "nli", "conv_luna", "latte", "luna", "nystrom"}) {
    for (const PoolingKind pooling : {PoolingKind::kMean, PoolingKind::kCls}) {
      ModelConfig config = Config(match);
      config.pooling = pooling;
      const auto model = Make<TwoTower>(config);
      at::manual_seed(5);
      const at::Tensor first = Ids(3, 9), second = Ids(3, 14), n1 = Lengths({9, 4, 1}),
                       n2 = Lengths({6, 14, 3});
      const at::Tensor logits = model->Logits(
          {{"ids", first}, {"lengths", n1}, {"second_ids", second}, {"second_lengths", n2}});
      ASSERT_EQ(logits.sizes(), (std::vector<int64_t>{3, 2}));
      const at::Tensor pa = Pooled(*model, first, n1), pb = Pooled(*model, second, n2);
      for (int64_t r = 0; r < 3; ++r) {
        const Row a = RowOf(pa[r]), b = RowOf(pb[r]);
        Row product, difference, x = a;
        for (size_t i = 0; i < a.size(); ++i)
          product.push_back(a[i] * b[i]), difference.push_back(a[i] - b[i]);
        const auto append = [&x](const Row& more) { x.insert(x.end(), more.begin(), more.end()); };
        append(b);
        if (match == "nli" || match == "luna" || match == "nystrom")
          append(product), append(difference);
        if (match == "latte") append(difference), append(product);
        if (match == "lra" || match == "nli") {
          x = Through(*model, "dense_2", Through(*model, "dense", x, "relu"), "relu");
        } else if (match == "conv_luna") {
          x = Through(*model, "dense_2", Through(*model, "dense", x, "gelu"), "gelu");
        } else if (match == "latte") {
          x = Through(*model, "dense", x, "tanh");
        } else if (match == "nystrom") {
          x = Through(*model, "dense", x, "relu");
        }
        const Row want = Through(*model, "out_proj", x, "");
        for (size_t c = 0; c < 2; ++c)
          EXPECT_NEAR(logits[r][int64_t(c)].item<double>(), want[c], 1e-11) << match << " " << r;
      }
    }
  }
}

// Widths of the papers: P000's 512 and 256, Latte's D, one map of Luna without bias.
TEST(TwoTower, WidthsOfTheHeads) {
  const auto shapes = [](const std::string& match) {
    ModelConfig c = Config(match);
    c.dim = 128, c.heads = 4, c.ffn_dim = 512;
    c.attention_options = Json{{"latte", {{"latents", 8}}}};
    std::map<std::string, std::vector<int64_t>> all;
    double numbers = 0;
    for (const auto& p : MakeModel(c, 0)->named_parameters()) {
      if (!p.key().starts_with("classifier.")) continue;
      all[p.key().substr(11)] = p.value().sizes().vec();
      if (p.value().dim() == 2) numbers += double(p.value().numel());
    }
    EXPECT_EQ(numbers, MatchHead::Numbers(ValueOf(match, MatchKinds()), 128, 512, 2));
    return all;
  };
  using Shapes = std::map<std::string, std::vector<int64_t>>;
  EXPECT_EQ(shapes("conv_luna"), (Shapes{{"dense.weight", {512, 256}},
                                         {"dense.bias", {512}},
                                         {"dense_2.weight", {256, 512}},
                                         {"dense_2.bias", {256}},
                                         {"out_proj.weight", {2, 256}},
                                         {"out_proj.bias", {2}}}));
  EXPECT_EQ(shapes("latte"), (Shapes{{"dense.weight", {128, 512}},
                                     {"dense.bias", {128}},
                                     {"out_proj.weight", {2, 128}},
                                     {"out_proj.bias", {2}}}));
  EXPECT_EQ(shapes("luna"), (Shapes{{"out_proj.weight", {2, 512}}}));
  EXPECT_EQ(shapes("nli")["dense.weight"], (std::vector<int64_t>{512, 512}));
}

TEST(TwoTower, ThePaddingIsNotSeen) {
  const auto model = Make<TwoTower>(Config("nli"));
  at::manual_seed(5);
  const at::Tensor a = Ids(1, 5), b = Ids(1, 7);
  const at::Tensor want = model->Logits(
      {{"ids", a}, {"lengths", Lengths({5})}, {"second_ids", b}, {"second_lengths", Lengths({7})}});
  const at::Tensor got = model->Logits({{"ids", at::cat({a, Ids(1, 6)}, 1)},
                                        {"lengths", Lengths({5})},
                                        {"second_ids", at::cat({b, Ids(1, 2)}, 1)},
                                        {"second_lengths", Lengths({7})}});
  ExpectClose(got, want, 1e-12, "padded");
}

// Of Luna's head: a sum of ones, some of which are dropped, differs from row to row.
TEST(TwoTower, HeadDropoutIsLunas) {
  const auto spread = [](double dropout, double own) {
    ModelConfig c = Config("luna");
    c.dropout = dropout, c.head_dropout = own;
    MatchHead head(c, MatchKind::kLuna);
    const at::NoGradGuard guard;
    head.named_parameters()["out_proj.weight"].fill_(1);
    head.train();
    at::manual_seed(2);
    const at::Tensor ones = at::ones({400, c.dim});
    return head.Forward(ones, ones).var().item<double>();
  };
  EXPECT_EQ(spread(0, -1), 0);
  EXPECT_GT(spread(0.5, -1), 1);
  EXPECT_EQ(spread(0.5, 0), 0);
  EXPECT_GT(spread(0, 0.5), 1);
}

TEST(TwoTower, WhatDoesNotFitIsRefused) {
  const auto message = [](auto change) {
    ModelConfig c = Config("lra");
    change(c);
    return ErrorMessage([&] { MakeModel(c, 0); });
  };
  ExpectContains(message([](ModelConfig& c) { c.head = HeadKind::kGelu; }),
                 {"two_tower.match", "head=gelu"});
  ExpectContains(message([](ModelConfig& c) { c.head_dims = {16}; }), {"head_dims", "ffn_dim"});
  ExpectContains(message([](ModelConfig& c) { c.head_dropout = 0.3; }),
                 {"head_dropout=0.3", "two_tower.match=lra"});
  EXPECT_EQ(message([](ModelConfig& c) { c.head_dropout = 0; }),
            "no error");  // which protocols set
  ExpectContains(message([](ModelConfig& c) { c.ffn_dim = 1; }), {"ffn_dim of at least 2"});
  ExpectContains(message([](ModelConfig& c) { c.pooling = PoolingKind::kMemory; }),
                 {"pooling=memory"});
  ExpectContains(message([](ModelConfig& c) { c.own["two_tower"]["match"] = "lunar"; }),
                 {"lunar", "luna"});
  const auto model = Make<TwoTower>(Config("lra"));
  ExpectContains(ErrorMessage([&] {
                   model->Logits({{"ids", Ids(1, 3)}, {"lengths", Lengths({3})}});
                 }),
                 {"second_ids"});
}

}  // namespace
}  // namespace cistern
