// The groups of config.json: mechanisms and options for each stack and for single layers.
#include "cistern/models/stack.h"

#include "cistern/attention/testing_mechanisms.h"
#include "cistern/base/error.h"
#include "cistern/io/test_folder.h"
#include "cistern/models/encoder_decoder.h"

namespace cistern {
namespace {

using namespace cistern::testing;

ModelConfig Translator() {
  ModelConfig c;
  c.kind = "encoder_decoder";
  c.vocab_size = 19, c.dim = 12, c.heads = 2, c.max_length = 64;
  return c;
}

// With the assignments of a command line.
ModelConfig With(ModelConfig config, const std::vector<std::string>& assignments) {
  Fields fields = config.Describe();
  for (const std::string& a : assignments) fields.Set(a);
  config.Validate();
  return config;
}

int64_t Rows(const Model& model, const std::string& parameter) {
  const auto all = model.named_parameters();
  const at::Tensor* found = all.find(parameter);
  return found ? found->size(0) : -1;
}

TEST(Groups, OneMechanismHasOtherOptionsAcrossThanInTheDecoder) {
  const ModelConfig c =
      With(Translator(),
           {"attention=softmax", "attention_options.abc_mlp.slots=8", "decoder.attention=abc_mlp",
            "cross.attention=abc_mlp", "cross.attention_options.abc_mlp.slots=32"});
  const auto m = MakeModel(c, 1);
  EXPECT_EQ(Rows(*m, "decoder.layers.1.attention.control_proj.weight"), 2 * 8);
  EXPECT_EQ(Rows(*m, "decoder.layers.1.cross_attention.control_proj.weight"), 2 * 32);
  EXPECT_EQ(Rows(*m, "encoder.layers.1.attention.control_proj.weight"), -1);
}

TEST(Groups, AStackSaysOtherwiseThanTheModel) {
  const ModelConfig c = With(
      Translator(),
      {"attention=latte", "attention_options.latte.latents=6", "encoder.layers=1",
       "decoder.heads=3", "decoder.ffn_dim=20", "decoder.conv=3", "decoder.positions=sinusoidal",
       "decoder.attention_options.latte.latents=9", "decoder.dropout=0.5", "cross.heads=4"});
  const LayerStack encoder = c.Stack(Form::kBidirectional), decoder = c.Stack(Form::kCausal),
                   cross = c.Stack(Form::kCross);
  EXPECT_EQ(encoder.layers(), 1);
  EXPECT_EQ(decoder.layers(), 2);
  EXPECT_EQ(cross.layers(), 2);
  EXPECT_EQ(encoder.options().heads, 2);
  EXPECT_EQ(decoder.options().heads, 3);
  EXPECT_EQ(cross.options().heads, 4);
  EXPECT_EQ(encoder.Options(0), (Json{{"latents", 6}}));
  EXPECT_EQ(decoder.Options(1), (Json{{"latents", 9}}));
  EXPECT_EQ(decoder.Block(0).dropout, 0.5);
  EXPECT_EQ(encoder.Block(0).dropout, 0.0);
  EXPECT_EQ(decoder.Block(0).ffn_dim, 20);
  EXPECT_EQ(decoder.Attention(0).conv, 3);
  EXPECT_EQ(cross.Attention(0).conv, 0);
  EXPECT_EQ(encoder.Attention(0).positions, PositionKind::kNone);
  EXPECT_EQ(decoder.Attention(0).positions, PositionKind::kSinusoidal);
  EXPECT_EQ(c.Summary(),
            "encoder latte, 1 layers x 12, 2 heads; decoder latte, 2 layers x 12, 3 heads and "
            "softmax to the source, 4 heads, conv 3");
  MakeModel(c, 1);
}

// positions=auto: each stack for itself, by its mechanisms.
TEST(Groups, PositionsThatFit) {
  const auto positions = [](const std::vector<std::string>& assignments, Form form) {
    std::vector<std::string> all = {"positions=auto"};
    all.insert(all.end(), assignments.begin(), assignments.end());
    return *With(Translator(), all).Stack(form).options().positions;
  };
  const auto decoder = [&](const std::string& attention) {
    return positions({"attention=softmax", "decoder.attention=" + attention}, Form::kCausal);
  };
  EXPECT_EQ(decoder("softmax"), PositionKind::kRotary);
  EXPECT_EQ(decoder("latte"), PositionKind::kNone);
  EXPECT_EQ(decoder("window:1+latte:1"), PositionKind::kRotary);
  EXPECT_EQ(decoder("window,latte"), PositionKind::kNone);
  EXPECT_EQ(positions({"attention=latte", "decoder.attention=softmax"}, Form::kBidirectional),
            PositionKind::kNone);
  EXPECT_EQ(positions({"attention=softmax"}, Form::kCross), PositionKind::kNone);
  // A head of odd width has no pairs.
  EXPECT_EQ(positions({"attention=softmax", "decoder.heads=4"}, Form::kCausal),
            PositionKind::kNone);
  // Said for one stack, the other has the model's.
  EXPECT_EQ(*With(Translator(), {"attention=softmax", "decoder.positions=auto"})
                 .Stack(Form::kBidirectional)
                 .options()
                 .positions,
            PositionKind::kNone);
}

TEST(Groups, SingleLayersHaveOptionsOfTheirOwn) {
  ModelConfig c;
  c.vocab_size = 19, c.dim = 12, c.heads = 2, c.layers = 3;
  c = With(c, {"attention_options.latte.latents=6", "layer_options.1.latte.latents=10"});
  const auto m = MakeModel(c, 1);
  EXPECT_EQ(Rows(*m, "layers.0.attention.q_proj.weight"), 6);
  EXPECT_EQ(Rows(*m, "layers.1.attention.q_proj.weight"), 10);
  EXPECT_EQ(Rows(*m, "layers.2.attention.q_proj.weight"), 6);
  // The stack's own layers win; what layers tie is shared by those with the same options.
  c.decoder.layer_options = Json{{"1", {{"latte", {{"latents", 8}}}}}};
  EXPECT_EQ(Rows(*MakeModel(c, 1), "layers.1.attention.q_proj.weight"), 8);
  c = With(c, {"attention=abc_mlp", "layer_options={}", "decoder.layer_options={}",
               "attention_options.abc_mlp={\"slots\": 4, \"tied\": true}",
               "layer_options.1.abc_mlp.slots=5"});
  const auto tied = MakeModel(c, 1);
  EXPECT_EQ(Rows(*tied, "layers.0.attention.control_proj.weight"), 2 * 4);
  EXPECT_EQ(Rows(*tied, "layers.1.attention.control_proj.weight"), 2 * 5);
  EXPECT_EQ(Rows(*tied, "layers.2.attention.control_proj.weight"), -1);
}

TEST(Groups, EncoderAndDecoderMayHaveOtherWidths) {
  for (const char* cross : {"softmax", "latte", "luna", "t2r"}) {
    const ModelConfig c =
        With(Translator(),
             {"encoder.dim=8", "encoder.heads=4", "positions=learned",
              "encoder_decoder.share_embeddings=false", StrCat("cross.attention=", cross)});
    const auto m = std::dynamic_pointer_cast<EncoderDecoder>(MakeModel(c, 1));
    m->to(at::kDouble);
    m->eval();
    EXPECT_EQ(m->named_parameters()["embed_tokens.weight"].sizes(), at::IntArrayRef({19, 12}));
    EXPECT_EQ(m->named_parameters()["source_embed_tokens.weight"].sizes(),
              at::IntArrayRef({19, 8}));
    at::manual_seed(3);
    const at::Tensor source = at::randint(0, 19, {2, 7}, at::kLong),
                     target = at::randint(0, 19, {2, 5}, at::kLong), lengths = Lengths({7, 4});
    const at::NoGradGuard guard;
    ModelState state = m->Encode(source, {lengths, {}});
    const at::Tensor whole = m->Extend(target, state);
    state = m->Encode(source, {lengths, {}});
    std::vector<at::Tensor> steps;
    for (int64_t t = 0; t < 5; ++t) steps.push_back(m->Extend(target.narrow(1, t, 1), state));
    ExpectClose(at::cat(steps, 1), whole, 1e-11, cross);
    const TestFolder folder;
    SaveModel(*m, folder.path());
    const auto loaded = std::dynamic_pointer_cast<EncoderDecoder>(LoadModel(folder.path()));
    state = loaded->Encode(source, {lengths, {}});
    ExpectSameBits(loaded->Extend(target, state), whole, cross);
  }
}

TEST(Groups, TiedLayersOfADecoder) {
  const ModelConfig c =
      With(Translator(), {"decoder.layers=3", "decoder.tied_layers=0,1,0", "attention=latte"});
  const auto m = std::dynamic_pointer_cast<EncoderDecoder>(MakeModel(c, 1));
  EXPECT_EQ(Rows(*m, "decoder.layers.2.attention.o_proj.weight"), -1);
  EXPECT_EQ(m->state_layers().size(), 6u);
  EXPECT_EQ(&m->decoder_block(2), &m->decoder_block(0));
}

TEST(Groups, AreWrittenOnlyWhereSomethingIsSaid) {
  ModelConfig c;
  for (const char* group : {"encoder", "decoder", "cross", "encoder_decoder", "layer_options"})
    EXPECT_FALSE(c.Describe().Write().contains(group)) << group;
  c = With(c, {"decoder.heads=2"});
  EXPECT_EQ(c.Describe().Write()["decoder"], (Json{{"heads", 2}}));
}

TEST(Groups, WhatDoesNotFitIsRefused) {
  const auto error = [](const std::vector<std::string>& assignments, bool translator = true) {
    return ErrorMessage([&] { With(translator ? Translator() : ModelConfig(), assignments); });
  };
  EXPECT_EQ(error({}), "no error");
  EXPECT_EQ(error({}, false), "no error");
  // What only the making of the model used to find.
  ExpectContains(error({"positions=sinusoidal", "dim=33", "heads=1"}, false),
                 {"positions=sinusoidal", "even dim", "dim=33"});
  ExpectContains(error({"attention=rfa", "layers=3", "attention_options.rfa.bank=4",
                        "attention_options.rfa.draws=model", "dim=16", "heads=4"},
                       false),
                 {"bank=4", "draws=model"});
  ExpectContains(error({"attention=linformer:1+window:1", "dim=16", "heads=2",
                        "attention_options.linformer.normalise=true"},
                       false),
                 {"linformer:1+window:1", "length one"});
  ExpectContains(error({"encoder.attention=latte"}, false),
                 {"decoder_lm", "no encoder", "encoder.attention"});
  for (const char* said : {"cross.attention=latte", "cross.attention=softmax", "cross.heads=2",
                           "cross.attention_dropout=0.1", "cross.attention_options.softmax={}"}) {
    ExpectContains(error({said}, false), {"decoder_lm", "has no cross attention",
                                          "leave out cross.", "a kind that has: encoder_decoder"});
  }
  ExpectContains(error({"cross_attention=latte"}, false),
                 {"unknown key 'cross_attention'", "cross.attention"});
  ExpectContains(error({"encoder_decoder.share_embeddings=false"}, false),
                 {"encoder_decoder", "decoder_lm"});
  ExpectContains(error({"encoder_decoder.share_embedings=false"}),
                 {"share_embedings", "share_embeddings"});
  ExpectContains(error({"decoder.atention=latte"}), {"decoder.atention", "decoder.attention"});
  ExpectContains(error({"decoder.attention=lattte"}), {"lattte", "latte"});
  ExpectContains(error({"decoder.heads=5"}), {"decoder.heads=5", "dim=12"});
  ExpectContains(error({"decoder.positions=rotary"}), {"rotary", "latte"});
  ExpectContains(error({"decoder.positions=learnd"}), {"decoder.positions", "learned"});
  ExpectContains(error({"decoder.attention_options.latte.latent=3"}), {"latent", "latents"});
  ExpectContains(error({"decoder.attention_options.lattte.latents=3"}), {"lattte", "latte"});
  ExpectContains(error({"layer_options.2.latte.latents=3"}), {"layer_options", "'2'"});
  ExpectContains(error({"decoder.layer_options.2.latte.latents=3"}),
                 {"decoder.layer_options", "'2'", "0 to 1"});
  ExpectContains(error({"layer_options.1.softmax={}"}), {"layer_options.1.softmax", "latte"});
  ExpectContains(error({"cross.layer_options.1.latte.latents=3"}),
                 {"cross.layer_options.1.latte", "softmax"});
  ExpectContains(error({"layer_options=3"}), {"layer_options", "object"});
  for (const char* options : {"3", "softmax", "[0, 1]"}) {
    ExpectContains(error({StrCat("cross.attention_options.softmax=", options)}),
                   {"cross.attention_options.softmax", "must be an object"});
    ExpectContains(error({StrCat("decoder.attention_options.latte=", options)}),
                   {"decoder.attention_options.latte", "must be an object"});
  }
  ExpectContains(error({"encoder.dim=8"}), {"dim=8", "dim=12", "share_embeddings=false"});
  ExpectContains(error({"encoder.attention=reuse", "encoder.layers=4",
                        "encoder.layer_options.1.reuse.heads=1"}),
                 {"reuse", "attention_options"});
  ExpectContains(error({"encoder.attention=luna", "encoder.layer_options.1.luna.slots=3"}),
                 {"luna", "one memory"});
}

}  // namespace
}  // namespace cistern
