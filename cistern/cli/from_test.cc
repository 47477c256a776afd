// train --from and the masked language model, from outside.
#include <ATen/ATen.h>

#include <cmath>

#include "cistern/base/testing_messages.h"
#include "cistern/cli/testing_cli.h"
#include "cistern/tensors/tensor_file.h"

namespace cistern {
namespace {

using testing::ExpectContains;

class FromTest : public CliTest {
 protected:
  // A tiny masked language model in "mlm" and rows with two classes in "rows.tsv".
  void SetUp() override {
    CliTest::SetUp();
    WriteFileAtomically(folder_ / "text.txt", Text());
    std::string rows = "text\tlabel\n";
    for (int i = 0; i < 60; ++i)
      rows += StrCat("a sea of ", i, i % 2 ? " ships\tfleet\n" : " waves\twater\n");
    WriteFileAtomically(folder_ / "rows.tsv", rows);
    const Outcome o =
        Run(Small({"--task", "mlm", "--data", folder_ / "text.txt", "--out", folder_ / "mlm",
                   "--set", "task.vocab_size=300", "--set", "model.dim=16", "--set",
                   "model.heads=2", "--set", "model.layers=1", "--set", "model.attention=latte",
                   "--set", "model.positions=sinusoidal"}));
    ASSERT_EQ(o.code, 0) << o;
    ExpectContains(o.out, {"valid:  perplexity ", "unigram_perplexity"});
  }
  static Words Small(const Words& more) {
    return Words{"train",          "--threads",      "1",     "--steps",       "3",
                 "--set",          "task.length=16", "--set", "train.batch=2", "--set",
                 "train.seconds=0"} +
           more;
  }
  Words Classify(const std::string& out, const Words& more = {}) {
    const Words data = {"--data", folder_ / "rows.tsv", "--from", folder_ / "mlm", "--out", out};
    return Small(data + more);
  }
};

// The rows of a classifier are read as its experiment says, of a checkpoint too; a language model
// reads any text.
TEST_F(FromTest, WithoutTheRecordRowsAreNotReadOtherwise) {
  const std::string out = folder_ / "rows", lm = Copy("lm");
  ASSERT_EQ(Run(Classify(out)).code, 0);
  Expect({"predict", out + "/checkpoint-3", folder_ / "rows.tsv"}, 1, {"classify.json"});
  Expect({"predict", out, folder_ / "rows.tsv", "--set", "task.header = maybe"}, 2,
         {"task.classify.header", "yes"});
  for (const std::string& folder : {out, lm}) fs::remove(folder + "/experiment.json");
  for (const char* command : {"predict", "eval"})
    Expect({command, out, folder_ / "rows.tsv"}, 1, {out + " has no experiment.json", "copy"});
  EXPECT_EQ(Run({"eval", lm, folder_ / "text.txt"}).code, 0);
}

TEST_F(FromTest, AnotherTaskBeginsWithTheWeightsAndTheTokenizer) {
  const std::string out = folder_ / "rows";
  Outcome o = Run(Classify(out));
  ASSERT_EQ(o.code, 0) << o;
  ExpectContains(
      o.err, {"using the tokenizer of", "tensors taken", "new: classifier.", "left: mask_token"});
  EXPECT_EQ(ReadFile(out + "/tokenizer.json"), ReadFile(folder_ / "mlm/tokenizer.json"));
  const Json config = ReadJsonFile(out + "/config.json");
  EXPECT_EQ(config["dim"], 16);  // the folder's, not the task's 64
  // What the run was begun with is in its own folder: it resumes without the other.
  fs::remove_all(folder_ / "mlm");
  o = Run({"train", "--resume", "--out", out, "--steps", "5", "--threads", "1"});
  ASSERT_EQ(o.code, 0) << o;
  EXPECT_EQ(o.err.find("tensors taken"), std::string::npos);
  o = Run({"predict", out, folder_ / "rows.tsv", "--json"});
  ASSERT_EQ(o.code, 0) << o;
  Expect({"analyze", out, folder_ / "rows.tsv", "--length", "8", "--out", folder_ / "seen"}, 2,
         {"--length is of blocks of text", "classify"});
  EXPECT_FALSE(fs::exists(folder_ / "seen"));
}

// A checkpoint has no tokenizer of its own.
TEST_F(FromTest, ACheckpointKnowsTheTokensOfItsRun) {
  const std::string out = folder_ / "rows", alone = folder_ / "alone/checkpoint-3";
  const auto from = [&](const std::string& folder) {
    return Small({"--data", folder_ / "rows.tsv", "--from", folder, "--out", out});
  };
  const Words vocabulary = {"--set", "task.vocab_size=280"};
  Expect(from(folder_ / "mlm/checkpoint-3") + vocabulary, 2, {"task.vocab_size=280", "leave it"});
  fs::create_directories(alone);
  fs::copy(folder_ / "mlm/checkpoint-3", alone);
  Expect(from(alone), 2, {alone + " is a checkpoint", "experiment.json", "copy"});
  fs::copy(folder_ / "mlm/experiment.json", alone);
  Expect(from(alone), 2, {"token ids of " + alone});
  EXPECT_FALSE(fs::exists(out));
  const Outcome o = Run(from(folder_ / "mlm/checkpoint-3"));
  ASSERT_EQ(o.code, 0) << o;
  ExpectContains(o.err, {"using the tokenizer of", "tensors taken"});
  EXPECT_EQ(ReadFile(out + "/tokenizer.json"), ReadFile(folder_ / "mlm/tokenizer.json"));
}

TEST_F(FromTest, WhatDoesNotFitIsRefusedUnlessTold) {
  const std::string out = folder_ / "rows";
  const auto refused = [&](const Words& more, const std::vector<std::string>& parts) {
    const Outcome o = Run(Classify(out, more));
    EXPECT_EQ(o.code, 2) << o;
    ExpectContains(o.err, parts);
    EXPECT_FALSE(fs::exists(out));  // nothing half-written
  };
  refused({"--set", "model.attention=softmax"}, {"latte", "softmax", "--swap-attention"});
  refused({"--set", "model.dim=24"}, {"embed_tokens.weight", "same sizes"});
  refused({"--set", "model.layers=2"}, {"layers.1.", "is not in"});
  refused({"--resume"}, {"--resume", "--from"});
  Outcome o = Run({"train", "--data", folder_ / "rows.tsv", "--out", out, "--new-head"});
  EXPECT_EQ(o.code, 2) << o;
  ExpectContains(o.err, {"--from"});
  o = Run({"train", "--data", folder_ / "rows.tsv", "--out", out, "--set", "new_head=true"});
  EXPECT_EQ(o.code, 2) << o;
  ExpectContains(o.err, {"new_head", "--from"});
  o = Run(Small({"--data", folder_ / "rows.tsv", "--from", folder_ / "none", "--out", out}));
  EXPECT_EQ(o.code, 1) << o;
  ExpectContains(o.err, {"none/config.json"});
  o = Run(Classify(out, {"--swap-attention", "--set", "model.attention=softmax"}));
  EXPECT_EQ(o.code, 0) << o;
  ExpectContains(o.err, {"tensors taken"});
}

TEST_F(FromTest, AFileMaySayWhatIsTaken) {
  WriteFileAtomically(folder_ / "a.toml", "new_head = true\nswap_attention = true\n");
  const Words print = {"train",  folder_ / "a.toml", "--data",        folder_ / "rows.tsv",
                       "--from", folder_ / "mlm",    "--print-config"};
  Outcome o = Run(print);
  ASSERT_EQ(o.code, 0) << o;
  ExpectContains(o.out, {"\nnew_head = true\n", "\nswap_attention = true\n"});
  o = Run(print + Words{"--set", "new_head=false"});
  ASSERT_EQ(o.code, 0) << o;
  ExpectContains(o.out, {"\nnew_head = false\n"});
}

TEST_F(FromTest, WeightsThatAreNotFiniteAreRefused) {
  const std::string path = folder_ / "mlm/model.safetensors", out = folder_ / "rows";
  TensorFile file = LoadTensors(path);
  for (NamedTensor& t : file.tensors) {
    if (t.name.ends_with("embed_tokens.weight")) t.value.view(-1)[5].fill_(std::nan(""));
  }
  SaveTensors(path, file);
  const Outcome o = Run(Classify(out));
  EXPECT_EQ(o.code, 1) << o;
  ExpectContains(o.err, {path + ": tensor '", "embed_tokens.weight", "not finite"});
  EXPECT_EQ(o.err.find("train.lr"), std::string::npos) << o;
  EXPECT_FALSE(fs::exists(out));
}

// What the folder's head had and this one has no place for is not in the way.
TEST_F(FromTest, AnotherPoolingTakesWhatFits) {
  const std::string first = folder_ / "first", second = folder_ / "second";
  Outcome o = Run(Classify(first, {"--set", "model.pooling=cls", "--set", "model.cls_place=after",
                                   "--set", "model.head_dims=[8]"}));
  ASSERT_EQ(o.code, 0) << o;
  const Words again = Small({"--data", folder_ / "rows.tsv", "--from", first, "--new-head"});
  o = Run(again + Words{"--out", folder_ / "same"});
  ASSERT_EQ(o.code, 0) << o;
  EXPECT_EQ(ReadJsonFile(folder_ / "same/config.json")["cls_place"], "after");
  o = Run(again +
          Words{"--out", second, "--set", "model.pooling=mean", "--set", "model.head=linear"});
  ASSERT_EQ(o.code, 0) << o;
  EXPECT_EQ(ReadJsonFile(second + "/config.json")["pooling"], "mean");
  Expect(again + Words{"--out", folder_ / "third", "--set", "model.pooling=mean", "--set",
                       "model.cls_place=after"},
         2, {"cls_place"});
}

// What predicts no tokens reads no settings of an output over them, but while it learns to.
TEST_F(FromTest, AnOutputOverTheVocabularyIsOfLanguageModels) {
  const std::string first = folder_ / "first";
  const Words rows = {"--data", folder_ / "rows.tsv", "--set", "model.dim=8",
                      "--set",  "model.heads=2",      "--set", "model.attention=latte"},
              own = {"--set", "model.tie_embeddings=false"};
  Expect(Small(rows + own + Words{"--out", first}), 2,
         {"model.tie_embeddings has no effect", "encoder_classifier", "leave it out"});
  const Outcome o = Run(Small(rows + own + Words{"--out", first, "--pretrain", "masked"}));
  ASSERT_EQ(o.code, 0) << o;
  const Words from = Small({"--data", folder_ / "rows.tsv", "--from", first});
  Expect(from + own + Words{"--out", folder_ / "said"}, 2, {"model.tie_embeddings"});
  const Outcome taken = Run(from + Words{"--out", folder_ / "taken"});
  ASSERT_EQ(taken.code, 0) << taken;
  EXPECT_EQ(ReadJsonFile(folder_ / "taken/config.json")["tie_embeddings"], true);
}

TEST_F(FromTest, MasksAreFilledIn) {
  WriteFileAtomically(folder_ / "gaps.txt", "line 4 of the <mask> tells\n");
  Outcome o = Run({"predict", folder_ / "mlm", folder_ / "gaps.txt", "--json"});
  ASSERT_EQ(o.code, 0) << o;
  const Json row = Json::parse(o.out);
  EXPECT_EQ(row["line"], 1);
  EXPECT_EQ(row["masks"][0].size(), 5u);
  o = Run({"eval", folder_ / "mlm", folder_ / "text.txt"});
  ASSERT_EQ(o.code, 0) << o;
  ExpectContains(o.out, {"perplexity"});
  WriteFileAtomically(folder_ / "gaps.txt", "fine <mask>\nno gap\n");
  o = Run({"predict", folder_ / "mlm", folder_ / "gaps.txt"});
  EXPECT_EQ(o.code, 1) << o;
  ExpectContains(o.err, {"gaps.txt:2", "<mask>"});
  o = Run({"generate", folder_ / "mlm", "--max-tokens", "3"});
  EXPECT_NE(o.code, 0) << o;
  ExpectContains(o.err, {"masked_lm"});
  o = Run({"verify", "--model", folder_ / "mlm"});
  EXPECT_EQ(o.code, 0) << o;
  ExpectContains(o.out, {"random ids", "ok    padding", "0 failed"});
}

// Embeddings of one shape, whose rows stand for something else.
TEST_F(FromTest, OtherIdsAreRefused) {
  const std::string plain = folder_ / "plain", shifted = folder_ / "shifted";
  const Outcome o = Run(Small({"--data", folder_ / "rows.tsv", "--out", plain, "--set",
                               "task.tokenizer=bytes", "--set", "task.pad_to=length"}));
  ASSERT_EQ(o.code, 0) << o;
  const std::string file = folder_ / "shifted.toml";
  WriteFileAtomically(file, StrCat("[task]\nkind = \"classify\"\ndata = \"", folder_ / "rows.tsv",
                                   "\"\nbyte_ids = \"shifted\"\n[train]\nsteps = 1\n"));
  Expect({"train", file, "--from", plain, "--out", shifted, "--threads", "1"}, 2,
         {"the token ids of " + plain + " are bytes, and here they are bytes+1"});
  EXPECT_FALSE(fs::exists(shifted));
}

}  // namespace
}  // namespace cistern
