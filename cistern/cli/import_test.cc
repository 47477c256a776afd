// cistern import, from outside.
#include <ATen/ATen.h>

#include "cistern/base/testing_messages.h"
#include "cistern/cli/testing_cli.h"
#include "cistern/tensors/tensor_file.h"
#include "cistern/text/tokenizer.h"

namespace cistern {
namespace {

using testing::ExpectContains;

class ImportTest : public CliTest {
 protected:
  // A tiny GPT-2 of bytes in "gpt2", and what of a RoBERTa config.json and tokenizer say.
  void SetUp() override {
    CliTest::SetUp();
    const std::string gpt2 = folder_ / "gpt2";
    fs::create_directories(gpt2);
    WriteFileAtomically(gpt2 + "/config.json",
                        R"({"model_type": "gpt2", "vocab_size": 256, "n_positions": 32,
                            "n_embd": 8, "n_layer": 1, "n_head": 2})");
    MakeByteTokenizer()->Save(gpt2 + "/tokenizer.json");
    TensorFile file;
    const auto add = [&](const std::string& name, at::IntArrayRef shape) {
      file.tensors.push_back({"transformer." + name, at::randn(shape)});
    };
    const auto both = [&](const std::string& name, at::IntArrayRef shape, int64_t out) {
      add(name + ".weight", shape), add(name + ".bias", {out});
    };
    add("wte.weight", {256, 8}), add("wpe.weight", {32, 8}), both("ln_f", {8}, 8);
    both("h.0.ln_1", {8}, 8), both("h.0.ln_2", {8}, 8);
    both("h.0.attn.c_attn", {8, 24}, 24), both("h.0.attn.c_proj", {8, 8}, 8);
    both("h.0.mlp.c_fc", {8, 32}, 32), both("h.0.mlp.c_proj", {32, 8}, 8);
    add("extra.weight", {3});
    SaveTensors(gpt2 + "/model.safetensors", file);
  }
};

TEST_F(ImportTest, AnImportedModelIsOneToGenerateMeasureAndStartFrom) {
  const std::string text = *shared_ / "text.txt", out = folder_ / "ours";
  Outcome o = Run({"import", folder_ / "gpt2", "--out", out});
  ASSERT_EQ(o.code, 0) << o;
  ExpectContains(o.out, {"decoder_lm, softmax, 1 layers x 8", "at most 32 tokens",
                         "left: extra.weight", "cistern generate " + out});
  o = Run({"generate", out, "--prompt", "a", "--max-tokens", "3", "--threads", "1"});
  EXPECT_EQ(o.code, 0) << o;
  o = Run({"eval", out, text, "--threads", "1"});
  EXPECT_EQ(o.code, 0) << o;
  ExpectContains(o.out, {"perplexity"});
  o = Run({"train",
           "--text",
           text,
           "--from",
           out,
           "--out",
           folder_ / "more",
           "--steps",
           "1",
           "--threads",
           "1",
           "--swap-attention",
           "--set",
           "model.attention=latte",
           "--set",
           "train.batch=1",
           "--set",
           "task.length=16",
           "--set",
           "train.seconds=0"});
  EXPECT_EQ(o.code, 0) << o;
  ExpectContains(o.err, {"using the tokenizer of " + out, "tensors taken"});
  o = Run({"import", folder_ / "gpt2", "--out", out, "--json"});  // again into the same folder
  ASSERT_EQ(o.code, 0) << o;
  EXPECT_EQ(Json::parse(o.out)["kind"], "decoder_lm");
}

TEST_F(ImportTest, NothingIsWrittenWhereTheFolderCannotBeRead) {
  const std::string out = folder_ / "ours";
  const auto error = [&](const Words& words, int code) {
    const Outcome o = Run(words);
    EXPECT_EQ(o.code, code) << o;
    EXPECT_FALSE(fs::exists(out));
    return o.err;
  };
  ExpectContains(error({"import", folder_ / "nowhere", "--out", out}, 1),
                 {"no " + (folder_ / "nowhere/config.json")});
  ExpectContains(error({"import", folder_ / "gpt2", "--out", *shared_ / "model"}, 2),
                 {"files of something else"});
  const std::string config = folder_ / "gpt2/config.json", before = ReadFile(config);
  const Outcome o = Run({"import", folder_ / "gpt2", "--out", folder_ / "gpt2"});
  EXPECT_EQ(o.code, 2) << o;
  ExpectContains(o.err, {"another program's model"});
  EXPECT_EQ(ReadFile(config), before);
  WriteFileAtomically(config, R"({"model_type": "roberta", "vocab_size": 256})");
  ExpectContains(error({"import", folder_ / "gpt2", "--out", out}, 1), {"<mask>"});
  WriteFileAtomically(config, R"({"model_type": "gpt2", "vocab_size": 300})");
  ExpectContains(error({"import", folder_ / "gpt2", "--out", out}, 1),
                 {"'wte.weight'", "[256, 8]", "[300, 768]"});
  fs::remove(folder_ / "gpt2/tokenizer.json");
  ExpectContains(error({"import", folder_ / "gpt2", "--out", out}, 1),
                 {"no tokenizer", "vocab.json and merges.txt"});
}

}  // namespace
}  // namespace cistern
