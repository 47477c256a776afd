// What models of every kind have in common: their declarations, first weights that a seed fixes,
// configs of version 1, a training step without data (meta) and on the composite path.
#include <ATen/Context.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <thread>

#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"
#include "cistern/base/hash.h"
#include "cistern/io/json_text.h"
#include "cistern/io/test_folder.h"
#include "cistern/models/classifier.h"
#include "cistern/models/forecaster.h"
#include "cistern/models/language_model.h"
#include "cistern/models/span_predictor.h"
#include "cistern/tensors/device.h"
#include "cistern/tensors/testing_device.h"

namespace cistern {
namespace {

using namespace cistern::testing;
using ops::Impl;
using ops::ImplScope;

ModelConfig SmallOf(const ModelInfo& info) {
  ModelConfig c;
  c.kind = info.name, c.vocab_size = 23, c.dim = 12, c.heads = 2, c.max_length = 64;
  c.attention_options = Json{{"latte", {{"latents", 6}}}, {"abc_mlp", {{"slots", 4}}}};
  if (info.classifies) c.classes = 5;
  if (info.name == "forecaster") c.own[info.name] = Json{{"inputs", 2}, {"outputs", 2}};
  return c;
}

// A batch of what the kind says it reads: a new name needs a line here.
NamedTensors BatchOf(const ModelInfo& info) {
  const std::map<std::string, at::Tensor> known = {
      {"ids", at::randint(0, 23, {3, 11}, at::kLong)},
      {"lengths", Lengths({11, 4, 1})},
      {"values", at::randn({3, 11, 2})},
      {"positions", at::arange(11).unsqueeze(0) * at::tensor({1, 3, 5}).unsqueeze(1)},
      {"starts", Starts(3, 11, {{0, 0}, {0, 5}, {1, 2}})},
      {"valid", at::arange(11).unsqueeze(0) >= at::tensor({4, 0, 0}).unsqueeze(1)},
      {"second_ids", at::randint(0, 23, {3, 8}, at::kLong)},
      {"second_lengths", Lengths({1, 8, 5})},
      {"source", at::randint(0, 23, {3, 9}, at::kLong)},
      {"second_valid", at::arange(8).unsqueeze(0) >= at::tensor({0, 3, 1}).unsqueeze(1)},
      {"source_lengths", Lengths({9, 2, 5})},
      {"source_valid", at::arange(9).unsqueeze(0) >= at::tensor({2, 0, 1}).unsqueeze(1)}};
  NamedTensors batch;
  for (std::string name : info.inputs) {
    if (name.ends_with("?")) name.pop_back();
    if (known.count(name) == 0) ADD_FAILURE() << info.name << " reads " << name;
    batch.Set(name, known.at(name));
  }
  const bool rows = info.classifies;
  batch.Set("targets",
            at::randint(0, 5, rows ? at::IntArrayRef({3}) : at::IntArrayRef({3, 11}), at::kLong));
  if (info.name == "forecaster") batch.Set("targets", at::randn({3, 11, 2}));
  if (info.name == "span_predictor")  // tokens that are there
    batch.Set("targets", at::tensor({4, 9, 0, 3, 0, 0}, at::kLong).view({3, 2}));
  return batch;
}

uint64_t HashWeights(const Model& model) {
  uint64_t hash = 0;
  const auto add = [&hash](const std::string& name, const at::Tensor& value) {
    const at::Tensor x = value.detach().contiguous();
    hash =
        XxHash64({static_cast<const char*>(x.const_data_ptr()), x.nbytes()}, XxHash64(name, hash));
  };
  for (const auto& p : model.named_parameters()) add(p.key(), p.value());
  for (const auto& b : model.named_buffers()) add(b.key(), b.value());
  return hash;
}

TEST(ModelKinds, AreFoundByName) {
  ASSERT_GE(Models().size(), 3u);
  for (const ModelInfo* info : Models()) {
    EXPECT_EQ(&FindModel(info->name), info);
    EXPECT_FALSE(info->summary.empty() || info->forms.empty() || info->inputs.empty());
    EXPECT_EQ(MakeModel(SmallOf(*info), 1)->info().name, info->name);
  }
  ExpectContains(ErrorMessage([] { FindModel("decoder_ml"); }), {"decoder_ml", "decoder_lm"});
}

// config.json of version 1, and what the program that wrote them made of seed 7: names, order and
// bits of the first weights. (abc_mlp's control then had a bias with the others.)
struct Version1 {
  const char *name, *config;
  uint64_t weights;
};

const std::vector<Version1>& Configs1() {
  static const std::vector<Version1> all = {
      {"lm",
       R"({"version": 1, "kind": "decoder_lm", "vocab_size": 23, "dim": 12, "layers": 3, "heads": 2,
         "max_length": 64, "conv": 3, "positions": "learned", "embedding_norm": true, "bias": true,
         "attention": ["latte", "abc_mlp", "latte"], "tie_embeddings": false,
         "tied_layers": [0, 1, 0],
         "attention_options": {"latte": {"latents": 6}, "abc_mlp": {"slots": 4,
         "control_bias": "model"}},
         "decoder_layers": 0, "decoder_attention": [], "cross_attention": ["softmax"],
         "target_vocab_size": 0, "share_embeddings": true})",
       0xb2070142e4f368e0},
      {"lm_groups",
       R"({"version": 1, "kind": "decoder_lm", "vocab_size": 23, "dim": 12, "layers": 4, "heads": 2,
         "norm": "post",
         "attention_options": {"reuse": {"layers": 1}, "luna_causal": {"slots": 3}},
         "attention": ["softmax", "reuse", "performer:1+gated_slots:1", "luna_causal"],
         "max_length": 64})",
       0x8471e259f80b8086},
      {"classifier",
       R"({"version": 1, "kind": "encoder_classifier", "vocab_size": 23, "classes": 5, "dim": 12,
         "layers": 2, "heads": 2, "norm": "post", "pooling": "memory",
         "head": "gelu", "attention": ["conv_luna"],
         "attention_options": {"conv_luna": {"slots": 3, "kernel": 4}},
         "max_length": 64, "bias": true, "norm_pooled": true, "positions": "sinusoidal"})",
       0xb7769a3d2f137f58},
      {"perceiver",
       R"({"version": 1, "kind": "encoder_classifier", "vocab_size": 23, "classes": 5, "dim": 12,
         "layers": 3, "heads": 2, "attention": ["perceiver", "softmax", "perceiver"],
         "max_length": 64,
         "attention_options": {"perceiver": {"latents": 4}}, "tied_layers": [0, 1, 0],
         "dropout": 0.1})",
       0xb63e640b2b7d4b5e},
      {"cls",
       R"({"version": 1, "kind": "encoder_classifier", "vocab_size": 23, "classes": 5, "dim": 12,
         "layers": 2, "heads": 2, "attention": ["shared_workspace", "softmax"], "max_length": 64,
         "pooling": "cls", "positions": "learned", "head": "linear",
         "attention_options": {"shared_workspace": {"slots": 3}}})",
       0x70d254b5a443a331},
      {"translation",
       R"({"version": 1, "kind": "encoder_decoder", "vocab_size": 23, "target_vocab_size": 19,
         "share_embeddings": false, "dim": 12, "layers": 2, "heads": 2, "max_length": 64, "conv": 2,
         "attention": ["softmax"], "decoder_layers": 3, "decoder_attention": ["latte",
         "abc_mlp", "latte"],
         "cross_attention": ["abc_mlp"], "attention_options": {"abc_mlp": {"slots": 4}},
         "tie_embeddings": false, "head_bias": true, "positions": "learned"})",
       0xee3ee77798913ca7},
      {"translation_alike",
       R"({"version": 1, "kind": "encoder_decoder", "vocab_size": 23, "dim": 12, "layers": 2,
         "heads": 2, "max_length": 64, "decoder_layers": 0, "decoder_attention": [],
         "cross_attention": ["softmax", "latte"], "positions": "rotary", "attention": ["softmax"],
         "norm": "post"})",
       0x0e50a33195464887},
  };
  return all;
}

TEST(ModelConfig, Version1MakesTheSameFirstWeights) {
  // Normal numbers are drawn by other code where a processor lacks AVX2.
  const bool comparable = at::get_cpu_capability() != "DEFAULT";
  for (const Version1& c : Configs1()) {
    ModelConfig config = ReadModelConfig(ParseJson(c.config, c.name), c.name);
    EXPECT_EQ(config.version, kConfigVersion);
    const auto model = MakeModel(config, 7);
    if (comparable) {
      EXPECT_EQ(HashWeights(*model), c.weights) << c.name;
    }
    // What is written is of this version, and the same again.
    const Json written = config.Describe().Write();
    EXPECT_EQ(written["version"], kConfigVersion);
    for (const char* old : {"decoder_layers", "decoder_attention", "cross_attention"})
      EXPECT_FALSE(written.contains(old)) << c.name;
    ModelConfig again = ReadModelConfig(written, c.name);
    EXPECT_EQ(again.Describe().Write(), written) << c.name;
  }
}

TEST(ModelConfig, Version1OfATranslatorFillsTheGroups) {
  const auto find = [](const std::string& name) {
    const auto& all = Configs1();
    const auto at = std::find_if(all.begin(), all.end(), [&](auto& c) { return c.name == name; });
    return ReadModelConfig(ParseJson(at->config, name), name);
  };
  const ModelConfig c = find("translation");
  EXPECT_EQ(c.decoder.layers, 3);
  EXPECT_EQ(c.decoder.attention, (std::vector<std::string>{"latte", "abc_mlp", "latte"}));
  EXPECT_EQ(c.cross.attention, std::vector<std::string>{"abc_mlp"});
  EXPECT_EQ(c.own.at("encoder_decoder"), (Json{{"share_embeddings", false}}));
  EXPECT_EQ(find("translation_alike").decoder.layers, 0);
  // Other kinds wrote these keys down and did not use them.
  EXPECT_TRUE(find("lm").own.at("encoder_decoder").empty());
  EXPECT_EQ(find("lm").target_vocab_size, 0);
}

// The names of the map of values' deviations before they were keys of [init]: what they say is
// kept.
TEST(ModelConfig, ValuesMovedToInit) {
  const std::string text = R"({"version": 2, "kind": "encoder_classifier", "classes": 5, "dim": 12,
      "layers": 1, "heads": 2, "init": {"linear": "torch"},
      "encoder_classifier": {"input": "values", "channels": 1, "values_std": 1.0,
                             "values_bias_std": 0.1}})";
  const Json old = ParseJson(text, "old");
  ModelConfig c = ReadModelConfig(old, "old");
  EXPECT_EQ(c.init.values_std, 1);
  EXPECT_EQ(c.init.values_bias_std, 0.1);
  EXPECT_EQ(c.init.linear, "torch");
  EXPECT_EQ(c.Describe().Write()["init"]["values_std"], 1);
  EXPECT_FALSE(c.Describe().Write()["encoder_classifier"].contains("values_std"));
  Json both = old;
  both["init"]["values_std"] = 2;
  ExpectContains(ErrorMessage([&] { ReadModelConfig(both, "old"); }),
                 {"encoder_classifier.values_std", "init.values_std", "both are given"});
  Json plain = old;  // a folder that wrote the defaults down, without a version as in TOML
  plain.erase("version");
  plain["encoder_classifier"]["values_std"] = plain["encoder_classifier"]["values_bias_std"] = 0.0;
  EXPECT_FALSE(ReadModelConfig(plain, "old").Describe().Write()["init"].contains("values_std"));
}

TEST(ModelConfig, ValuesAreOfTheKindThatReadsThem) {
  ModelConfig lm;
  lm.vocab_size = 9, lm.init.values_std = 1;
  ExpectContains(ErrorMessage([&] { lm.Validate(); }), {"init.values_std", "decoder_lm"});
}

TEST(ModelConfig, ValuesOutOfRangeAreRefused) {
  const auto expect = [](const std::string& key, auto change) {
    ModelConfig c;
    c.vocab_size = 9;
    change(c);
    ExpectContains(ErrorMessage([&] { c.Validate(); }), {"model: '" + key + "' is ", "expected"});
  };
  expect("heads", [](auto& c) { c.heads = 0; });
  expect("layers", [](auto& c) { c.layers = -1; });
  expect("ffn_dim", [](auto& c) { c.ffn_dim = -1; });
  expect("dropout", [](auto& c) { c.dropout = -1; });
  expect("init_std", [](auto& c) { c.init_std = NAN; });
  expect("vocab_size", [](auto& c) { c.vocab_size = -9; });
  expect("decoder.heads", [](auto& c) { c.decoder.heads = -1; });
}

TEST(ModelConfig, KeysOfOtherKindsAreRefused) {
  const auto message = [](const std::string& kind, auto change) {
    ModelConfig c;
    c.kind = kind, c.vocab_size = 9;
    change(c);
    return ErrorMessage([&] { c.Validate(); });
  };
  const auto expect = [&](const std::string& kind, const std::string& key, auto change) {
    ExpectContains(message(kind, change), {key, kind, "leave it out"});
  };
  expect("decoder_lm", "target_vocab_size", [](auto& c) { c.target_vocab_size = 99; });
  expect("decoder_lm", "pooling", [](auto& c) { c.pooling = PoolingKind::kCls; });
  expect("masked_lm", "norm_pooled", [](auto& c) { c.norm_pooled = true; });
  expect("span_predictor", "head", [](auto& c) { c.head = HeadKind::kGelu; });
  expect("encoder_decoder", "classes", [](auto& c) { c.classes = 3; });
  expect("forecaster", "tie_embeddings", [](auto& c) { c.tie_embeddings = false; });
  expect("forecaster", "scale_logits", [](auto& c) { c.scale_logits = true; });
  const auto translates = [](auto& c) {
    c.target_vocab_size = 99, c.own["encoder_decoder"] = Json{{"share_embeddings", false}};
  };
  EXPECT_EQ(message("encoder_decoder", translates), "no error");
}

TEST(ModelConfig, KnowsTheLengthThatAnOptionFixes) {
  ModelConfig c;
  c.kind = "encoder_classifier", c.vocab_size = 9, c.max_length = 12;
  c.attention = {"shared_workspace", "softmax"};
  EXPECT_GT(c.LengthLimit(Form::kBidirectional), 1'000'000);
  c.attention_options["shared_workspace"]["gate_input"] = "flattened";
  EXPECT_EQ(c.LengthLimit(Form::kBidirectional), 12);
  c.Reach(Form::kBidirectional, 15, "a row");
  EXPECT_EQ(c.LengthLimit(Form::kBidirectional), 15);
}

// ---- a training step of each kind

double Step(Model& model, const NamedTensors& batch, std::vector<at::Tensor>* gradients) {
  model.train();
  model.zero_grad();
  const at::Tensor loss = model.TrainingLoss(batch);
  loss.backward();
  for (const auto& p : model.named_parameters()) {
    EXPECT_TRUE(p.value().grad().defined()) << model.info().name << " " << p.key();
    if (p.value().grad().defined()) gradients->push_back(p.value().grad().clone());
  }
  return loss.is_meta() ? 0 : loss.item<double>();
}

// From the same weights and rows.
TEST(ModelKinds, TrainOnTheCompositePathAndOnAnotherDeviceAsOnTheKernels) {
  for (const ModelInfo* info : Models()) {
    ModelConfig config = SmallOf(*info);
    config.positions = PositionKind::kLearned, config.init_std = 0.3;
    const auto model = MakeModel(config, 3);
    model->to(at::kDouble);
    at::manual_seed(5);
    const NamedTensors batch = BatchOf(*info);
    std::vector<at::Tensor> kernel, composite, there;
    const double loss = Step(*model, batch, &kernel);
    {
      const ImplScope scope(Impl::kComposite);
      EXPECT_NEAR(Step(*model, batch, &composite), loss, 1e-11) << info->name;
    }
    model->to(kMadeUpDevice);
    EXPECT_NEAR(Step(*model, batch.To(kMadeUpDevice), &there), loss, 1e-11) << info->name;
    for (size_t i = 0; i < kernel.size(); ++i) {
      // The last bias of a span_predictor moves all places alike: its gradient is rounding.
      const bool nothing = kernel[i].abs().max().item<double>() < 1e-14;
      for (const at::Tensor& other : {composite[i], there[i].cpu()}) {
        if (nothing) {
          EXPECT_LT(other.abs().max().item<double>(), 1e-14) << info->name;
        } else {
          ExpectClose(other, kernel[i], 1e-9, info->name);
        }
      }
    }
  }
}

// Each name by itself, with a letter less or more: left unread, an optional one would change the
// loss without a word.
TEST(ModelKinds, RefuseTensorsThatTheyDoNotRead) {
  for (const ModelInfo* info : Models()) {
    const auto model = MakeModel(SmallOf(*info), 3);
    const NamedTensors batch = BatchOf(*info);
    for (const NamedTensor& t : batch.all()) {
      for (const std::string& wrong : {t.name.substr(0, t.name.size() - 1), t.name + "_"}) {
        NamedTensors misspelt;
        for (const NamedTensor& other : batch.all())
          misspelt.Set(other.name == t.name ? wrong : other.name, other.value);
        ExpectContains(ErrorMessage([&] { model->TrainingLoss(misspelt); }),
                       {info->name, "unknown tensor '" + wrong + "'", t.name});
      }
    }
    NamedTensors more = batch;
    more.Set("attention_mask", batch["targets"]);
    ExpectContains(ErrorMessage([&] { model->TrainingLoss(more); }), {"'attention_mask'"});
    const NamedTensors read = model->ReadOf(more);
    EXPECT_EQ(read.all().size(), batch.all().size()) << info->name;
    for (const NamedTensor& t : batch.all()) EXPECT_TRUE(read.Has(t.name)) << t.name;
  }
}

TEST(ModelKinds, EveryMechanismRunsWithWeightsInBFloat16) {
  const at::NoGradGuard guard;
  for (const MechanismInfo* info : Mechanisms()) {
    if (!info->Supports(Form::kBidirectional)) continue;
    for (const Json& options :
         info->memory == MemoryUse::kNone ? std::vector<Json>{info->cases[0]} : info->cases) {
      ModelConfig c;
      c.kind = "encoder_classifier";
      c.vocab_size = 23, c.classes = 3, c.dim = 48, c.heads = 2, c.layers = 2, c.max_length = 16;
      c.attention = {info->name}, c.attention_options[info->name] = options;
      const auto model = MakeModel(c, 3);
      model->eval();
      const NamedTensors batch = {{"ids", at::randint(0, 23, {2, 12}, at::kLong)},
                                  {"lengths", at::tensor({12, 9}, at::kLong)}};
      auto& classifier = dynamic_cast<Classifier&>(*model);
      const at::Tensor want = classifier.Logits(batch);
      model->to(at::kBFloat16);
      const at::Tensor got = classifier.Logits(batch).to(at::kFloat);
      EXPECT_LT((got - want).abs().max().item<double>(), 0.2 * want.abs().max().item<double>())
          << info->name << " " << options;
    }
  }
}

TEST(ModelKinds, RefuseSmoothingThatIsNoShare) {
  for (const ModelInfo* info : Models()) {
    const auto model = MakeModel(SmallOf(*info), 3);
    for (const double share : {-0.1, 1.0, double(NAN)})
      ExpectContains(ErrorMessage([&] { model->TrainingLoss(BatchOf(*info), share); }),
                     {"label_smoothing", "below 1"});
  }
}

at::Tensor Answer(Model& model, const NamedTensors& inputs) {
  if (auto* m = dynamic_cast<Classifier*>(&model)) return m->Logits(inputs);
  if (auto* m = dynamic_cast<SpanPredictor*>(&model)) return m->SpanLogits(inputs);
  if (auto* m = dynamic_cast<Forecaster*>(&model)) return m->Predict(inputs);
  if (auto* m = dynamic_cast<LanguageModel*>(&model)) return m->HiddenOfRows(inputs);
  return {};  // a MaskedLm takes no batch
}

TEST(ModelKinds, AnswerNoTensorsThatTheyDoNotRead) {
  for (const ModelInfo* info : Models()) {
    const auto model = MakeModel(SmallOf(*info), 3);
    NamedTensors batch = BatchOf(*info);
    if (!Answer(*model, batch).defined()) continue;
    batch.Set("length", at::ones({1}, at::kLong));
    ExpectContains(ErrorMessage([&] { Answer(*model, batch); }),
                   {info->name, "unknown tensor 'length'"});
  }
}

at::Tensor WeightsOf(const Model& model) {
  std::vector<at::Tensor> all;
  for (const auto& p : model.parameters()) all.push_back(p.detach().flatten());
  for (const auto& b : model.buffers()) all.push_back(b.flatten());
  return at::cat(all);
}

TEST(MakeModel, ThreadsMakeTheWeightsOfTheirSeeds) {
  ModelConfig config = SmallOf(FindModel("decoder_lm"));
  config.attention = {"luna_causal"};
  const auto weights = [&](size_t i) { return WeightsOf(*MakeModel(config, i)); };
  std::vector<at::Tensor> alone, together(4);
  for (size_t i = 0; i < together.size(); ++i) alone.push_back(weights(i));
  for (int round = 0; round < 5; ++round) {
    std::vector<std::thread> threads;
    for (size_t i = 0; i < together.size(); ++i)
      threads.emplace_back([&, i] { together[i] = weights(i); });
    for (std::thread& t : threads) t.join();
    for (size_t i = 0; i < together.size(); ++i) EXPECT_TRUE(at::equal(together[i], alone[i])) << i;
  }
}

TEST(MakeModel, LeavesTorchsGeneratorAsItWas) {
  ModelConfig config = SmallOf(FindModel("decoder_lm"));
  const TestFolder folder;
  SaveModel(*MakeModel(config, 1), folder.path());
  at::manual_seed(7);
  const at::Tensor first = at::randn({3}), want = at::randn({40});
  at::manual_seed(7);
  ExpectSameBits(at::randn({3}), first, "the same seed");
  MakeModel(config, 1);
  LoadModel(folder.path());
  config.vocab_size = 0;
  EXPECT_THROW(MakeModel(config, 1), UsageError);
  ExpectSameBits(at::randn({40}), want, "goes on");
}

// A model and its states are made on the active device, all of them. (A whole step there cannot be
// run by a test in C++: torch has the shapes of embeddings and selections on `meta` in Python
// alone.)
TEST(ModelKinds, AreMadeOnTheActiveDevice) {
  for (const ModelInfo* info : Models()) {
    ModelConfig config = SmallOf(*info);
    config.positions = PositionKind::kLearned;
    SetActiveDevice(at::kMeta);
    const auto model = MakeModel(config, 3);
    SetActiveDevice(at::kCPU);
    for (const auto& p : model->named_parameters())
      EXPECT_TRUE(p.value().is_meta()) << info->name << " " << p.key();
    for (const auto& b : model->named_buffers())
      EXPECT_TRUE(b.value().is_meta()) << info->name << " " << b.key();
    EXPECT_TRUE(model->options().device().is_meta()) << info->name;
    if (!info->extends || info->encodes) continue;
    const ModelState state = dynamic_cast<LanguageModel&>(*model).EmptyState(2);
    EXPECT_TRUE(state.positions.is_meta()) << info->name;
    for (const State& layer : state.layers) {
      for (const NamedTensor& t : layer.tensors)
        EXPECT_TRUE(!t.value.defined() || t.value.is_meta()) << info->name << " " << t.name;
    }
  }
}

}  // namespace
}  // namespace cistern
