// Initial weights by named schemes, against what the published models start from: deviations and
// bounds of each kind of weight by the source's formula (spec 1.1, 1.2), and parameter counts.
#include "cistern/models/initial_weights.h"

#include <ATen/Parallel.h>

#include <cmath>

#include "cistern/io/test_folder.h"
#include "cistern/models/testing_models.h"
#include "cistern/tensors/device.h"

namespace cistern {
namespace {

using namespace cistern::testing;

struct Drawn {
  std::string part;  // of the parameter's name; the first that fits holds
  double std = 0;    // 0: all zeros
  double bound = 0;  // no number is beyond it, and some come near; 0: there is none
};

Drawn Uniform(const std::string& part, double bound) {
  return {part, bound / std::sqrt(3.0), bound};
}

// flax's lecun_normal: cut at two deviations and scaled to 1/sqrt(fan in) by a constant that jax
// has as a number.
Drawn Lecun(const std::string& part, double fan_in) {
  const double std = 1 / std::sqrt(fan_in);
  return {part, std, 2 * std / 0.87962566103423978};
}

Drawn Xavier(const std::string& part, double in, double out, double gain = 1) {
  return Uniform(part, gain * std::sqrt(6 / (in + out)));
}

// Every parameter is as one line says, and every line holds for some; norms are 1 and 0.
void ExpectDrawn(const ModelConfig& config, const std::vector<Drawn>& expected) {
  const auto model = MakeModel(config, 5);
  std::vector<int> met(expected.size(), 0);
  for (const auto& p : model->named_parameters()) {
    const std::string& name = p.key();
    const at::Tensor x = p.value().detach().to(at::kDouble).flatten();
    const auto numbers = double(x.numel());
    if (name.find("norm") != std::string::npos) {
      EXPECT_TRUE((x == (name.ends_with("weight") ? 1.0 : 0.0)).all().item<bool>()) << name;
      continue;
    }
    size_t i = 0;
    while (i < expected.size() && name.find(expected[i].part) == std::string::npos) ++i;
    ASSERT_LT(i, expected.size()) << name << " is not expected";
    ++met[i];
    const Drawn& e = expected[i];
    const double std = std::sqrt(x.square().mean().item<double>()),
                 most = x.abs().max().item<double>();
    EXPECT_NEAR(std, e.std, 5 * e.std / std::sqrt(2 * numbers)) << name << " " << e.part;
    EXPECT_LE(std::abs(x.mean().item<double>()), 5 * e.std / std::sqrt(numbers)) << name;
    if (e.bound == 0) {
      // A normal variable: three in a thousand are beyond three deviations.
      if (e.std > 0 && numbers > 20'000) {
        EXPECT_GT(most, 3.5 * e.std) << name;
      }
      continue;
    }
    EXPECT_LE(most, e.bound * 1.000001) << name;
    EXPECT_GT(most, e.bound * (1 - 50 / numbers)) << name << " " << e.part;
  }
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_GT(met[i], 0) << expected[i].part;
}

ModelConfig Classifier(int64_t dim, int64_t heads, int64_t ffn, int64_t layers, int64_t vocab) {
  ModelConfig c;
  c.kind = "encoder_classifier", c.classes = 10, c.vocab_size = vocab, c.attention = {"softmax"};
  c.dim = dim, c.heads = heads, c.ffn_dim = ffn, c.layers = layers, c.max_length = 1024;
  return c;
}

// [R long-range-arena]: no biases in attention, xavier kernels, feed-forward biases N(0, 1e-6),
// embeddings N(0,1), a zero CLS token, learned positions N(0, .02); the head is flax's Dense.
TEST(InitialWeights, LongRangeArena) {
  ModelConfig c = Classifier(256, 4, 1024, 2, 260);
  c.pooling = PoolingKind::kCls, c.positions = PositionKind::kLearned, c.ffn_bias = true;
  c.init.linear = "xavier_uniform", c.init.head = "lecun_normal";
  c.init.embedding = "normal(1)", c.init.positions = "normal(0.02)";
  c.init.ffn_bias = "normal(1e-6)";
  ExpectDrawn(c, {Xavier("attention.", 256, 256),
                  Xavier("up_proj.weight", 256, 1024),
                  Xavier("down_proj.weight", 1024, 256),
                  {"ffn.", 1e-6},
                  {"embed_tokens", 1},
                  {"embed_positions", .02},
                  {"cls_token"},
                  Lecun("dense.weight", 256),
                  Lecun("out_proj.weight", 1024),
                  {"classifier."}});
}

// [R vladyorsh lra/layers.py, models.py]: torch's own Linear, its biases as well; embeddings N(0,1)
// with a pad row of zeros, positions that begin at zero, memory N(0,1), the filter as torch's
// convolution of one channel of 32 taps.
TEST(InitialWeights, ConvLuna) {
  ModelConfig c = Classifier(128, 4, 512, 3, 200);
  c.attention = {"conv_luna"}, c.norm = NormPlace::kPost, c.bias = true;
  c.attention_options = Json{{"conv_luna", {{"slots", 256}, {"kernel", 32}, {"filter", "conv"}}}};
  c.pooling = PoolingKind::kMemory, c.norm_pooled = true, c.head = HeadKind::kGelu;
  c.positions = PositionKind::kLearned;
  c.init.linear = c.init.bias = "torch";
  c.init.embedding = "normal(1)", c.init.positions = "zeros", c.init.zero_pad_row = true;
  const double small = 1 / std::sqrt(128.0), wide = 1 / std::sqrt(512.0);
  ExpectDrawn(c, {Uniform("down_proj", wide),
                  Uniform("out_proj", wide),
                  Uniform("_proj", small),
                  Uniform("dense", small),
                  {"embed_positions"},
                  {"embed_tokens", std::sqrt(199.0 / 200)},
                  {"core.memory", 1},
                  {"core.tau"},
                  Uniform("core.filter", 1 / std::sqrt(32.0))});
  const auto model = MakeModel(c, 5);
  const at::Tensor table = model->named_parameters()["embed_tokens.weight"];
  EXPECT_TRUE((table.select(0, 0) == 0).all().item<bool>());
  EXPECT_FALSE((table.select(0, 1) == 0).any().item<bool>());
}

// The token of P000's Luna baseline: xavier of a [1,1,128] tensor.
TEST(InitialWeights, ClsTokenOfP000) {
  ModelConfig c = Classifier(128, 4, 512, 1, 200);
  c.pooling = PoolingKind::kCls;
  c.init.cls = "xavier_uniform";
  const at::Tensor cls = MakeModel(c, 1)->named_parameters()["cls_token"].detach();
  const double bound = std::sqrt(6.0 / 256);
  EXPECT_LE(cls.abs().max().item<double>(), bound);
  EXPECT_GT(cls.abs().max().item<double>(), .9 * bound);
  EXPECT_NEAR(cls.std().item<double>(), bound / std::sqrt(3.0), .02);
}

// [R fairseq-apollo luna_attention.py, lra/model.py, lra/luna_lra_encoder.py]: maps of attention
// xavier with a gain of 1/sqrt(2), of its output 1 with a bias of zero; all else of the layers as
// torch's Linear; embeddings and memory N(0, 1/D); the head xavier.
TEST(InitialWeights, LunaLongRangeArena) {
  ModelConfig c = Classifier(256, 4, 1024, 2, 260);
  c.attention = {"luna"}, c.norm = NormPlace::kPost, c.bias = true, c.head = HeadKind::kLinear;
  c.attention_options = Json{{"luna", {{"slots", 256}, {"tie_kv", false}, {"init", "embedding"}}}};
  c.embedding_norm = true, c.final_norm = false, c.pooling = PoolingKind::kCls;
  c.positions = PositionKind::kSinusoidal;
  c.init.linear = "torch", c.init.query_key = c.init.value = "xavier_uniform(0.70710678118654752)";
  c.init.attention_out = c.init.head = "xavier_uniform";
  c.init.bias = "torch", c.init.attention_out_bias = c.init.head_bias = "zeros";
  c.init.embedding = "width_normal";
  const double small = 1 / std::sqrt(256.0), wide = 1 / std::sqrt(1024.0);
  ExpectDrawn(c, {Xavier(".o_proj.weight", 256, 256),
                  {".o_proj.bias"},
                  {"core.memory", 1.0 / 16},
                  Uniform("down_proj", wide),
                  Uniform("up_proj", small),
                  Xavier("out_proj.weight", 256, 10),
                  {"out_proj.bias"},
                  {"cls_token"},
                  Xavier("_proj.weight", 256, 256, 1 / std::sqrt(2.0)),
                  Uniform("_proj.bias", small),
                  {"embed_tokens", 1.0 / 16}});
}

TEST(InitialWeights, ValuesOfHeadGroupsAreValues) {
  ModelConfig c = Classifier(32, 4, 64, 1, 20);
  c.attention = {"window:2+latte:2"};
  c.init.value = "zeros";
  const auto zeros = [](const ModelConfig& config, const std::string& name) {
    return MakeModel(config, 1)->named_parameters()["layers.0.attention." + name].eq(0).all();
  };
  for (const char* value : {"window_v_proj.weight", "latte_v_proj.weight"})
    EXPECT_TRUE(zeros(c, value).item<bool>()) << value;
  EXPECT_FALSE(zeros(c, "latte_k_proj.weight").item<bool>());
  c.init.value = "", c.init.query_key = "zeros";
  for (const char* value : {"window_v_proj.weight", "latte_v_proj.weight"})
    EXPECT_FALSE(zeros(c, value).item<bool>()) << value;
  EXPECT_TRUE(zeros(c, "latte_k_proj.weight").item<bool>());
}

// [R latte_transformer]: flax's Dense everywhere, flax's Embed; L = 40 of D = 128.
TEST(InitialWeights, LatteLongRangeArena) {
  ModelConfig c = Classifier(128, 4, 512, 2, 260);
  c.attention = {"latte"}, c.attention_options = Json{{"latte", {{"latents", 40}}}};
  c.ffn_bias = true, c.head = HeadKind::kLinear, c.positions = PositionKind::kSinusoidal;
  c.init.linear = "lecun_normal", c.init.embedding = "width_normal";
  ExpectDrawn(c, {{".bias"},
                  Lecun("down_proj", 512),
                  Lecun("_proj", 128),
                  {"embed_tokens", 1 / std::sqrt(128.0)}});
}

ModelConfig LatteLm(int64_t vocab) {
  ModelConfig c;
  c.vocab_size = vocab, c.dim = 516, c.heads = 12, c.layers = 12, c.ffn_dim = 4 * 516;
  c.attention = {"latte"}, c.attention_options = Json{{"latte", {{"latents", 516}}}};
  c.positions = PositionKind::kSinusoidal, c.tie_embeddings = false;
  c.ffn_bias = c.head_bias = true;
  c.init.linear = "lecun_normal", c.init.embedding = "width_normal";
  return c;
}

// P004 Table 5: 90.31M with GPT-2's vocabulary, 38.61M with enwik8's 205 bytes.
TEST(InitialWeights, LatteLanguageModel) {
  SetActiveDevice(at::kMeta);
  EXPECT_EQ(MakeModel(LatteLm(50'257), 1)->ParameterCount(), 90'313'105);
  EXPECT_EQ(MakeModel(LatteLm(205), 1)->ParameterCount(), 38'609'389);
  SetActiveDevice(at::kCPU);
  ModelConfig c = LatteLm(205);
  c.layers = 2;
  ExpectDrawn(c, {{".bias"},
                  Lecun("down_proj", 4 * 516),
                  Lecun("_proj", 516),
                  Lecun("lm_head", 516),
                  {"embed_tokens", 1 / std::sqrt(516.0)}});
}

// [R fox-rudie dev:core/model.py]: torch's Linear, positions N(0,1).
TEST(InitialWeights, UcuLinearAlgebra) {
  ModelConfig c = Classifier(256, 8, 512, 4, 256);
  c.bias = true, c.head = HeadKind::kLinear, c.norm_pooled = true;
  c.positions = PositionKind::kLearned;
  c.init.linear = c.init.bias = "torch", c.init.positions = "normal(1)";
  ExpectDrawn(c, {Uniform("down_proj", 1 / std::sqrt(512.0)),
                  Uniform("_proj", 1.0 / 16),
                  {"embed_positions", 1},
                  {"embed_tokens", .02}});
}

// Truncated normals of .02 before the cut (TensorFlow's), biases zero.
TEST(InitialWeights, Bert) {
  ModelConfig c;
  c.kind = "masked_lm", c.vocab_size = 3000, c.dim = 768, c.heads = 12, c.layers = 2;
  c.max_length = 512, c.positions = PositionKind::kLearned, c.norm = NormPlace::kPost;
  c.attention = {"softmax"}, c.bias = true, c.embedding_norm = true, c.final_norm = false;
  c.init.linear = c.init.embedding = c.init.positions = "truncated_normal(0.02)";
  const Drawn cut = {"", .02 * .87962566103423978, .04};
  ExpectDrawn(c, {{".bias"}, cut});
}

// [R mlpen LRA/code/model.py]: both embeddings N(0, .02), torch's Linear.
TEST(InitialWeights, NystromLongRangeArena) {
  ModelConfig c = Classifier(64, 2, 128, 2, 260);
  c.attention = {"nystrom"}, c.bias = true, c.positions = PositionKind::kLearned;
  c.attention_options = Json{{"nystrom", {{"conv", 35}}}};
  c.init.linear = c.init.bias = "torch";
  c.init.embedding = c.init.positions = "normal(0.02)";
  const double small = 1 / 8.0, wide = 1 / std::sqrt(128.0);
  ExpectDrawn(c, {Uniform("down_proj", wide),
                  Uniform("out_proj", wide),
                  Uniform("_proj", small),
                  Uniform("dense", small),
                  {"embed_", .02},
                  {"core.filter", 1 / std::sqrt(35 * 3.0)}});
}

TEST(InitialWeights, OneSchemeLeavesAllElseAsItWas) {
  ModelConfig plain = SmallLm(), named = plain;
  named.init.query_key = "torch";
  const auto a = MakeModel(plain, 3), b = MakeModel(named, 3);
  named.init.ffn_up = "xavier_uniform";
  const auto c = MakeModel(named, 3);
  const auto other = b->named_parameters(), third = c->named_parameters();
  for (const auto& p : a->named_parameters()) {
    const bool redrawn = p.key().find("attention.") != std::string::npos &&
                         p.key().find("o_proj") == std::string::npos &&
                         p.key().find("v_proj") == std::string::npos,
               up = p.key().find("up_proj") != std::string::npos;
    EXPECT_EQ(at::equal(p.value(), other[p.key()]), !redrawn) << p.key();
    EXPECT_EQ(at::equal(other[p.key()], third[p.key()]), !up) << p.key();
  }
}

TEST(InitialWeights, AreAFunctionOfTheSeedForAnyNumberOfThreads) {
  ModelConfig c = Classifier(256, 4, 1024, 1, 2000);
  c.init.linear = "lecun_normal", c.init.embedding = "normal(1)";
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const auto one = MakeModel(c, 9);
  at::set_num_threads(2);
  const auto two = MakeModel(c, 9), other = MakeModel(c, 10);
  at::set_num_threads(threads);
  const auto same = two->named_parameters(), different = other->named_parameters();
  for (const auto& p : one->named_parameters()) {
    EXPECT_TRUE(at::equal(p.value(), same[p.key()])) << p.key();
    if (p.value().dim() == 2) {
      EXPECT_FALSE(at::equal(p.value(), different[p.key()])) << p.key();
    }
  }
}

// GPT-2 divides by sqrt(2 layers) what is added to the residual stream.
TEST(InitialWeights, ResidualScalingCanBeLeftOut) {
  ModelConfig c = SmallLm({"softmax"});
  c.layers = 8;
  const auto scaled = MakeModel(c, 3);
  c.init.residual_scaling = false;
  const auto plain = MakeModel(c, 3)->named_parameters();
  for (const auto& p : scaled->named_parameters()) {
    const bool out = p.key().ends_with("o_proj.weight") || p.key().ends_with("down_proj.weight");
    EXPECT_TRUE(at::allclose(p.value() * (out ? 4.0 : 1.0), plain[p.key()], 1e-6, 0)) << p.key();
  }
}

// P000's image model, x w + b with w of N(0,1) and b of N(0, 0.1), beside torch's uniform maps.
TEST(InitialWeights, AMapOfValuesKeepsItsOwn) {
  ModelConfig c = Classifier(1024, 4, 24, 1, 23);
  c.init.linear = c.init.bias = "torch";
  const Json values = {{"input", "values"}, {"channels", 1}};
  for (const double std : {0.0, 1.0}) {
    if (std > 0) c.init.values_std = 1, c.init.values_bias_std = 0.1;
    c.own["encoder_classifier"] = values;
    const auto all = MakeModel(c, 7)->named_parameters();
    const at::Tensor w = all["embed_values.weight"], b = all["embed_values.bias"];
    if (std == 0) {  // the scheme's: U(-1, 1), of a fan in of 1
      EXPECT_LE(w.abs().max().item<double>(), 1);
      EXPECT_NEAR(w.std().item<double>(), 1 / std::sqrt(3.0), 0.05);
      continue;
    }
    EXPECT_GT(w.abs().max().item<double>(), 2);
    EXPECT_NEAR(w.std().item<double>(), 1, 0.1);
    EXPECT_NEAR(b.std().item<double>(), 0.1, 0.01);
  }
}

// torch's padding_idx: the row is zero and no gradient reaches it, although padding is embedded.
TEST(InitialWeights, ThePadRowStaysZero) {
  ModelConfig c = Classifier(12, 2, 24, 1, 23);
  c.init.zero_pad_row = true;
  const auto model = Make<EncoderClassifier>(c);
  NamedTensors batch;
  batch.Set("ids", at::tensor({3, 4, 5, 0, 6, 0, 0, 0}, at::kLong).view({2, 4}));
  batch.Set("lengths", at::tensor({4, 2}, at::kLong));  // two zeros take part
  batch.Set("targets", at::tensor({1, 2}, at::kLong));
  model->TrainingLoss(batch).backward();
  const at::Tensor gradient = model->named_parameters()["embed_tokens.weight"].grad();
  EXPECT_TRUE((gradient.select(0, 0) == 0).all().item<bool>());
  EXPECT_FALSE((gradient.select(0, 6) == 0).all().item<bool>());
}

TEST(InitialWeights, ConfigsThatCannotBeAreRefused) {
  const auto message = [](const std::function<void(ModelConfig&)>& change) {
    ModelConfig c = Classifier(12, 2, 24, 1, 23);
    change(c);
    return ErrorMessage([&] { MakeModel(c, 1); });
  };
  using C = ModelConfig;
  ExpectContains(message([](C& c) { c.init.linear = "lecum_normal"; }),
                 {"init.linear", "lecum_normal", "lecun_normal"});
  ExpectContains(message([](C& c) { c.init.linear = "normal"; }), {"init.linear", "number"});
  ExpectContains(message([](C& c) { c.init.linear = "torch(2)"; }), {"torch takes no number"});
  ExpectContains(message([](C& c) { c.init.value = "normal(0)"; }), {"init.value", "zeros"});
  ExpectContains(message([](C& c) { c.init.value = "normal(1"; }), {"init.value=normal(1"});
  ExpectContains(message([](C& c) { c.init.embedding = "torch"; }),
                 {"init.embedding=torch", "embed_tokens.weight", "no linear map"});
  ExpectContains(message([](C& c) { c.init.bias = "lecun_normal"; }),
                 {"init.bias=lecun_normal", "a bias"});
  ExpectContains(message([](C& c) { c.init.ffn_bias = "torch"; }),
                 {"init.ffn_bias=torch", "fits no weight"});
  ExpectContains(message([](C& c) { c.init.positions = "zeros"; }),
                 {"init.positions=zeros", "positions=learned"});
  ExpectContains(message([](C& c) { c.init.cls = "normal(1)"; }), {"init.cls", "pooling=cls"});
  ExpectContains(message([](C& c) { c.init.embedding = "normal(1)", c.embedding_std = 1; }),
                 {"init.embedding", "embedding_std"});
  ExpectContains(message([](C& c) { c.init.linear = "torch", c.init.residual_scaling = false; }),
                 {"residual_scaling"});
  ExpectContains(
      message([](C& c) { c.kind = "decoder_lm", c.classes = 0, c.init.zero_pad_row = true; }),
      {"init.zero_pad_row", "decoder_lm"});
}

TEST(InitialWeights, ConfigsSayOnlyWhatIsNamed) {
  ModelConfig c = Classifier(12, 2, 24, 1, 23);
  EXPECT_FALSE(c.Describe().Write().contains("init"));
  EXPECT_FALSE(c.Describe().Write().contains("layer_drop"));
  c.init.linear = "torch", c.init.zero_pad_row = true;
  const Json said = c.Describe().Write();
  EXPECT_EQ(said.at("init"), (Json{{"linear", "torch"}, {"zero_pad_row", true}}));
  ModelConfig again = ReadModelConfig(said, "config.json");
  EXPECT_EQ(again.Describe().Write(), said);
}

}  // namespace
}  // namespace cistern
