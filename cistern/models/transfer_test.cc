#include "cistern/models/transfer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "cistern/io/atomic_file.h"
#include "cistern/io/json_text.h"
#include "cistern/io/test_folder.h"
#include "cistern/ops/testing.h"
#include "cistern/tensors/tensor_file.h"

namespace cistern {
namespace {

using testing::ExpectContains;

ModelConfig Small(const std::string& kind) {
  ModelConfig c;
  c.kind = kind, c.vocab_size = 19, c.dim = 12, c.layers = 2, c.heads = 2, c.max_length = 16;
  c.attention = {"latte"};
  c.attention_options = Json{{"latte", {{"latents", 6}}}};
  if (c.info().classifies) c.classes = 3;
  return c;
}

class Transfer : public ::testing::Test {
 protected:
  std::string Saved(const ModelConfig& config, uint64_t seed = 5) {
    SaveModel(*MakeModel(config, seed), folder_ / "from");
    return folder_ / "from";
  }
  std::string Refusal(const ModelConfig& config, const TransferOptions& options = {}) {
    const auto model = MakeModel(config, 6);
    const auto before = model->named_parameters();
    std::vector<at::Tensor> values;
    for (const auto& p : before) values.push_back(p.value().detach().clone());
    const std::string message =
        ErrorMessage([&] { TakeWeights(*model, folder_ / "from", options); });
    // A refused transfer changes nothing.
    if (message != "no error") {
      for (size_t i = 0; i < values.size(); ++i)
        EXPECT_TRUE(values[i].equal(before[i].value())) << before[i].key();
    }
    return message;
  }
  TestFolder folder_;
};

bool Holds(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

TEST_F(Transfer, TakesTheTrunkByName) {
  const std::string from = Saved(Small("masked_lm"));
  const auto source = MakeModel(Small("masked_lm"), 5),
             model = MakeModel(Small("encoder_classifier"), 6),
             untouched = MakeModel(Small("encoder_classifier"), 6);
  const TransferReport report = TakeWeights(*model, from, {});
  const auto theirs = source->named_parameters(), first = untouched->named_parameters();
  for (const auto& p : model->named_parameters()) {
    const bool head = p.key().starts_with("classifier.");
    EXPECT_TRUE(p.value().equal(head ? first[p.key()] : theirs[p.key()])) << p.key();
    EXPECT_TRUE(Holds(head ? report.fresh : report.taken, p.key())) << p.key();
  }
  EXPECT_EQ(report.taken.size() + report.fresh.size(), first.size());
  EXPECT_EQ(report.numbers, model->ParameterCount());
  EXPECT_TRUE(Holds(report.left, "mask_token") && Holds(report.left, "transform.weight"));
  EXPECT_TRUE(report.notes.empty());
  ExpectContains(report.Summary(), {"% of the weights", "new: classifier.", "left: mask_token"});
  // From a causal model, too; what no shape shows is said.
  Saved(Small("decoder_lm"));
  ModelConfig other = Small("encoder_classifier");
  other.norm = NormPlace::kPost, other.heads = 3;
  const TransferReport causal = TakeWeights(*MakeModel(other, 1), from, {});
  std::string notes;
  for (const std::string& note : causal.notes) notes += note + "\n";
  ExpectContains(notes, {"model.norm is post here and was pre", "model.heads is 3 here and was 2",
                         "were causal", "are bidirectional"});
}

// A classifier that pools its memory has other weights at the end of its last block than a model
// of tokens: what only one of them has begins anew or is left, both ways; elsewhere it is refused.
TEST_F(Transfer, ThePoolOfAMemoryMayDiffer) {
  const auto with_memory = [](const std::string& kind) {
    ModelConfig c = Small(kind);
    c.attention = {"conv_luna"};
    c.attention_options = Json{{"conv_luna", {{"slots", 3}}}};
    c.norm = NormPlace::kPost;
    return c;
  };
  ModelConfig pooled = with_memory("encoder_classifier");
  pooled.pooling = PoolingKind::kMemory;
  const std::string from = Saved(with_memory("masked_lm"));
  const auto model = MakeModel(pooled, 6);
  const TransferReport report = TakeWeights(*model, from, {});
  EXPECT_TRUE(Holds(report.fresh, "layers.1.memory_norm.weight"));
  EXPECT_TRUE(Holds(report.taken, "layers.0.ffn.up_proj.weight"));
  for (const std::string& name : report.fresh)
    EXPECT_TRUE(name.starts_with("classifier.") || name.starts_with("layers.1.")) << name;
  Saved(pooled);
  const TransferReport back = TakeWeights(*MakeModel(with_memory("masked_lm"), 6), from, {});
  EXPECT_TRUE(Holds(back.left, "layers.1.memory_norm.weight"));
  pooled.layers = 3;  // the block before the last has to fit
  ExpectContains(Refusal(pooled), {"'layers.1.ffn", "is not in"});
}

TEST_F(Transfer, HeadsBeginAnewWhenTold) {
  ModelConfig config = Small("encoder_classifier");
  const std::string from = Saved(config);
  config.classes = 4;
  ExpectContains(Refusal(config), {"classifier.out_proj", "[3, 48]", "[4, 48]", "--new-head"});
  EXPECT_EQ(Refusal(config, {.new_head = true}), "no error");
  // Told so, a head that would fit begins anew as well.
  config.classes = 3;
  const auto model = MakeModel(config, 6);
  const TransferReport report = TakeWeights(*model, from, {.new_head = true});
  EXPECT_TRUE(Holds(report.fresh, "classifier.out_proj.weight"));
  EXPECT_FALSE(model->named_parameters()["classifier.out_proj.weight"].equal(
      MakeModel(config, 5)->named_parameters()["classifier.out_proj.weight"]));
  EXPECT_TRUE(TakeWeights(*model, from, {}).fresh.empty());
}

TEST_F(Transfer, AttentionIsSwappedWhenTold) {
  ModelConfig config = Small("masked_lm");
  const std::string from = Saved(config);
  config.attention_options = Json{{"latte", {{"latents", 12}}}};
  ExpectContains(Refusal(config), {"layer 0", "latte with options", "--swap-attention"});
  config.attention = {"latte", "softmax"}, config.attention_options = Json::object();
  config.attention_options = Json{{"latte", {{"latents", 6}}}};
  ExpectContains(Refusal(config), {"layer 1", "latte", "softmax", "--swap-attention"});
  const TransferReport report = TakeWeights(*MakeModel(config, 6), from, {.swap_attention = true});
  EXPECT_TRUE(Holds(report.taken, "layers.0.attention.q_proj.weight"));
  EXPECT_TRUE(Holds(report.taken, "layers.1.attention.v_proj.weight"));
  EXPECT_TRUE(Holds(report.fresh, "layers.1.attention.q_proj.weight"));  // latents, not width
  EXPECT_TRUE(Holds(report.taken, "layers.1.ffn.up_proj.weight"));
}

// The second attention, and that to a source, have weights of the same shapes as well.
TEST_F(Transfer, EveryStackOfTwoModelsOfAKindIsCompared) {
  ModelConfig config = Small("encoder_decoder");
  config.attention = {"softmax"}, config.attention_options = Json::object();
  const std::string from = Saved(config);
  config.decoder.attention = {"linear"};
  ExpectContains(Refusal(config), {"decoder layer 0", "softmax", "linear", "--swap-attention"});
  config.decoder.attention = {}, config.cross.attention = {"linear"};
  ExpectContains(Refusal(config), {"cross layer 0", "softmax", "linear", "--swap-attention"});
  config.cross.attention = {}, config.decoder.heads = 4;
  const TransferReport report = TakeWeights(*MakeModel(config, 6), from, {});
  ASSERT_EQ(report.notes.size(), 2u);  // cross attention has the heads of the decoder's blocks
  ExpectContains(report.notes[0], {"model.decoder.heads is 4 here and was 2"});
}

TEST_F(Transfer, AModelOfTheSameKindBeginsWithItsHead) {
  ModelConfig lm = Small("decoder_lm");
  lm.tie_embeddings = false, lm.head_bias = true;
  Json start = StartingConfig(Saved(lm), "decoder_lm");
  EXPECT_EQ(start["tie_embeddings"], false);
  EXPECT_EQ(start["head_bias"], true);
  ExpectContains(Refusal(Small("decoder_lm")),
                 {"'lm_head.", "tied to", "--new-head", "without the setting"});
  EXPECT_EQ(Refusal(Small("decoder_lm"), {.new_head = true}), "no error");
  EXPECT_FALSE(StartingConfig(folder_ / "from", "masked_lm").contains("tie_embeddings"));

  ModelConfig masked = Small("masked_lm");
  masked.own["masked_lm"] = Json{{"transform", false}};
  start = StartingConfig(Saved(masked), "masked_lm");
  EXPECT_EQ(start["masked_lm"]["transform"], false);

  ModelConfig classifier = Small("encoder_classifier");
  classifier.pooling = PoolingKind::kCls, classifier.cls_place = ClsPlace::kAfter;
  classifier.head = HeadKind::kTanh, classifier.norm_pooled = true;
  start = StartingConfig(Saved(classifier), "encoder_classifier");
  const Json wanted = {
      {"pooling", "cls"}, {"cls_place", "after"}, {"head", "tanh"}, {"norm_pooled", true}};
  for (const auto& [key, value] : wanted.items()) EXPECT_EQ(start[key], value) << key;
  EXPECT_FALSE(start["encoder_classifier"].contains("input")) << "the task sets it";
  EXPECT_FALSE(StartingConfig(folder_ / "from", "two_tower").contains("pooling"));
  ModelConfig other = classifier;
  other.cls_place = ClsPlace::kBefore, other.norm_pooled = false, other.max_length = 32;
  other.norm_eps = 1e-3;
  std::string notes;
  for (const std::string& note : TakeWeights(*MakeModel(other, 6), folder_ / "from", {}).notes)
    notes += note + "\n";
  ExpectContains(notes, {"model.cls_place is before here and was after",
                         "model.norm_pooled is 0 here and was 1",
                         "model.max_length is 32 here and was 16", "model.norm_eps is 0.001"});
}

// Options of the model and of its one stack hold together (LayerStack).
TEST_F(Transfer, OptionsOfTheStackJoinThoseOfTheModel) {
  ModelConfig config = Small("encoder_classifier");
  config.attention = {"window:1+latte:1"};
  config.attention_options = Json{{"window", {{"window", 4}}}};
  config.encoder.attention_options = Json{{"latte", {{"latents", 6}}}};
  config.encoder.layer_options = Json{{"1", {{"window", {{"window", 2}}}}}};
  const Json start = StartingConfig(Saved(config), "masked_lm");
  EXPECT_EQ(start["attention_options"]["window"]["window"], 4);
  EXPECT_EQ(start["attention_options"]["latte"]["latents"], 6);
  EXPECT_EQ(start["layer_options"]["1"]["window"]["window"], 2);
}

TEST_F(Transfer, RefusesWhatDoesNotFit) {
  Saved(Small("masked_lm"));
  ModelConfig config = Small("encoder_classifier");
  config.vocab_size = 20;
  ExpectContains(Refusal(config), {"embed_tokens.weight", "[19, 12]", "[20, 12]", "same tokens"});
  config = Small("encoder_classifier"), config.dim = 6;
  ExpectContains(Refusal(config), {"embed_tokens.weight", "[19, 12]", "[19, 6]", "same sizes"});
  config = Small("encoder_classifier"), config.layers = 3;
  ExpectContains(Refusal(config), {"'layers.2.", "is not in"});
  config.layers = 1;
  ExpectContains(Refusal(config), {"'layers.1.", "has no place"});
  config.layers = 2, config.ffn_dim = 20;
  ExpectContains(Refusal(config, {true, true}), {"ffn.", "[20, 12]"});
  EXPECT_NE(ErrorMessage([&] {
              TakeWeights(*MakeModel(config, 1), folder_ / "none", {});
            }).find("none/config.json"),
            std::string::npos);
}

TEST_F(Transfer, SaysWhereTheFilesDoNotBelongTogether) {
  const std::string from = Saved(Small("masked_lm")), path = from + "/config.json";
  Json config = ReadJsonFile(path);
  config["heads"] = 3;
  WriteFileAtomically(path, config.dump());
  ModelConfig here = Small("masked_lm");
  here.heads = 3;
  const TransferReport report = TakeWeights(*MakeModel(here, 6), from, {});
  ASSERT_EQ(report.notes.size(), 1u);
  ExpectContains(report.notes[0], {path, "is not the one that"});
  TensorFile file = LoadTensors(from + "/model.safetensors");
  for (NamedTensor& t : file.tensors) t.value = t.value.to(at::kLong);
  SaveTensors(from + "/model.safetensors", file);
  ExpectContains(Refusal(here), {"has type Long, expected floating point"});
}

TEST_F(Transfer, SettingsOfTheStackAreTheNewModels) {
  ModelConfig config = Small("encoder_decoder");
  config.encoder.heads = 3, config.norm = NormPlace::kPost;
  const Json start = StartingConfig(Saved(config), "encoder_classifier");
  EXPECT_EQ(start["heads"], 3);
  EXPECT_EQ(start["norm"], "post");
  EXPECT_EQ(start["attention"], Json::array({"latte"}));
  EXPECT_FALSE(start.contains("pooling") || start.contains("kind") || start.contains("encoder"));
  config = Small("decoder_lm"), config.conv = 4;
  EXPECT_EQ(StartingConfig(Saved(config), "masked_lm")["conv"], 0);
  EXPECT_EQ(StartingConfig(folder_ / "from", "decoder_lm")["conv"], 4);
  ModelConfig made;
  made.kind = "encoder_classifier", made.classes = 2, made.vocab_size = 19;
  Fields fields;
  fields.Group("model", made.Describe());
  fields.Read({{"model", start}}, "start");
  made.Validate();
  EXPECT_EQ(made.dim, 12);
}

}  // namespace
}  // namespace cistern
