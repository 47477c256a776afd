// Translation from outside: train, eval, predict, compare, and what is refused.
#include "cistern/base/testing_messages.h"
#include "cistern/cli/testing_cli.h"
#include "cistern/tensors/tensor_file.h"

namespace cistern {
namespace {

using testing::ExpectContains;

class TranslationCliTest : public CliTest {
 protected:
  void SetUp() override {
    CliTest::SetUp();
    std::string pairs, sources, targets;
    const std::vector<std::string> words = {"one", "two", "three"}, other = {"uno", "dos", "tres"};
    for (int i = 0; i < 120; ++i) {
      const auto line = [&](const std::vector<std::string>& of) {
        return StrCat(of[size_t(i % 3)], " ", of[size_t(i / 3 % 3)], " ", of[size_t(i / 9 % 3)],
                      " ", i);
      };
      pairs += line(words) + "\t" + line(other) + "\n";
      sources += line(words) + "\n", targets += line(other) + "\n";
    }
    WriteFileAtomically(folder_ / "pairs.tsv", pairs);
    WriteFileAtomically(folder_ / "a.en", sources);
    WriteFileAtomically(folder_ / "a.es", targets);
  }
  static Words Small() {
    Words words = {"--task", "translation", "--threads", "1"};
    for (const char* s :
         {"model.dim=16", "model.heads=2", "model.layers=1", "train.seconds=0", "train.batch=8",
          "task.vocab_size=280", "task.valid_share=0.1", "task.test_share=0.1"})
      words = words + Words{"--set", s};
    return words;
  }
  std::string Trained(const Words& more = {}) {
    const std::string out = folder_ / "run";
    const Outcome o = Run(Words{"train", "--out", out, "--steps", "6"} + Small() +
                          Words{"--data", folder_ / "pairs.tsv"} + more);
    EXPECT_EQ(o.code, 0) << o;
    ExpectContains(o.out, {"valid:  bleu ", "test:  bleu ", "chrf", "unigram_perplexity"});
    return out;
  }
};

TEST_F(TranslationCliTest, TrainsMeasuresAndTranslates) {
  const std::string run = Trained({"--set", "model.cross.attention=latte"});
  Outcome o = Run({"predict", run, folder_ / "a.en", "--json", "--set", "task.beam=3"});
  ASSERT_EQ(o.code, 0) << o;
  EXPECT_EQ(std::count(o.out.begin(), o.out.end(), '\n'), 120);
  const Json first = ParseJson(o.out.substr(0, o.out.find('\n')), "stdout");
  EXPECT_EQ(first["source"], "one one one 0");
  EXPECT_EQ(first["line"], 1);
  EXPECT_TRUE(first.contains("translation") && first["logprob"].get<double>() < 0);
  o = Run({"eval", run, folder_ / "pairs.tsv", "--json"});
  ASSERT_EQ(o.code, 0) << o;
  const Json pairs = ParseJson(o.out, "stdout");
  EXPECT_FALSE(pairs.contains("unigram_perplexity"));
  EXPECT_GT(pairs["tokens"], 120);
  o = Run({"eval", run, "--json"});
  ASSERT_EQ(o.code, 0) << o;
  EXPECT_TRUE(ParseJson(o.out, "stdout").contains("unigram_perplexity"));
}

TEST_F(TranslationCliTest, LinesOfTwoTextsAreThePairsOfATable) {
  const std::string table = Trained(), lines = folder_ / "lines";
  const Outcome o =
      Run(Words{"train", "--out", lines, "--steps", "6"} + Small() +
          Words{"--data", folder_ / "a.en", "--set", "task.target=" + (folder_ / "a.es")});
  ASSERT_EQ(o.code, 0) << o;
  EXPECT_EQ(ReadFile(table + "/model.safetensors"), ReadFile(lines + "/model.safetensors"));
}

TEST_F(TranslationCliTest, GoesOnWhereItEnded) {
  const std::string part = folder_ / "part";
  Outcome o = Run(Words{"train", "--out", part, "--steps", "3"} + Small() +
                  Words{"--data", folder_ / "pairs.tsv", "--set", "train.schedule=constant"});
  ASSERT_EQ(o.code, 0) << o;
  o = Run({"train", "--resume", "--out", part, "--steps", "6", "--threads", "1"});
  ASSERT_EQ(o.code, 0) << o;
  const std::string again = folder_ / "again";
  o = Run(Words{"train", "--out", again, "--steps", "6"} + Small() +
          Words{"--data", folder_ / "pairs.tsv", "--set", "train.schedule=constant"});
  ASSERT_EQ(o.code, 0) << o;
  EXPECT_EQ(ReadFile(part + "/model.safetensors"), ReadFile(again + "/model.safetensors"));
}

TEST_F(TranslationCliTest, BeginsWithSpanCorruption) {
  const std::string spans = folder_ / "spans";
  Words words = {"train",   "--task", "span_corruption", "--data", folder_ / "a.en", "--out", spans,
                 "--steps", "3",      "--threads",       "1"};
  for (const char* s : {"model.dim=16", "model.heads=2", "model.layers=1", "train.seconds=0",
                        "train.batch=4", "task.vocab_size=280", "task.length=16",
                        "model.norm_kind=rms", "model.positions=none", "model.attention=softmax",
                        "model.decoder.attention=latte", "model.cross.attention=abc_mlp"})
    words = words + Words{"--set", s};
  Outcome o = Run(words);
  ASSERT_EQ(o.code, 0) << o;
  const std::string out = folder_ / "tuned";
  words = {"train", "--task", "translation", "--data", folder_ / "pairs.tsv", "--from", spans,
           "--out", out,      "--threads",   "1"};
  for (const char* s : {"train.steps=1", "train.seconds=0", "train.lr=1e-9", "task.valid_share=0.1",
                        "task.test_share=0.1"})
    words = words + Words{"--set", s};
  o = Run(words);
  ASSERT_EQ(o.code, 0) << o;
  ExpectContains(o.err, {"100.0 % of the weights"});
  const Json config = ParseJson(ReadFile(out + "/config.json"), "config.json");
  EXPECT_EQ(config["decoder"]["attention"][0], "latte");
  EXPECT_EQ(config["cross"]["attention"][0], "abc_mlp");
  EXPECT_EQ(config["norm_kind"], "rms");
  // The first rows of the embedding are those of the same tokens; the sentinels' are left.
  const at::Tensor was = LoadTensors(spans + "/model.safetensors").tensors[0].value,
                   is = LoadTensors(out + "/model.safetensors").tensors[0].value;
  EXPECT_EQ(was.size(0), is.size(0) + 100);
  EXPECT_TRUE(at::allclose(was.narrow(0, 0, is.size(0)), is, 1e-3, 1e-3));
}

TEST_F(TranslationCliTest, ComparesMechanisms) {
  const std::string out = folder_ / "compared";
  const Outcome o = Run(Words{"compare", folder_ / "pairs.tsv", "--out", out, "--seconds", "0.2",
                              "--mechanisms", "softmax,abc_mlp"} +
                        Small());
  ASSERT_EQ(o.code, 0) << o;
  ExpectContains(o.out, {"softmax", "abc_mlp", "BLEU"});
  EXPECT_TRUE(fs::exists(out + "/report.html"));
}

TEST_F(TranslationCliTest, ALengthPenaltyWithoutBeamsIsNoted) {
  const std::string note = "task.length_penalty=0.6 compares beams";
  const Words set = {"--set", "task.length_penalty=0.6"}, beams = {"--set", "task.beam=2"};
  const auto notes = [&](const Words& words) {
    const Outcome o = Run(words);
    EXPECT_EQ(o.code, 0) << o;
    return o.err.find(note) != std::string::npos;
  };
  const Words train =
      Words{"train", "--steps", "1"} + Small() + Words{"--data", folder_ / "pairs.tsv", "--out"};
  EXPECT_TRUE(notes(train + Words{folder_ / "run"} + set));
  EXPECT_FALSE(notes(train + Words{folder_ / "beams"} + set + beams));
  WriteFileAtomically(folder_ / "few.tsv", "one\tuno\n");
  for (const char* command : {"eval", "predict"}) {
    const Words use = {command, folder_ / "beams", folder_ / "few.tsv"};
    EXPECT_TRUE(notes(use + Words{"--set", "task.beam=1"})) << command;
    EXPECT_FALSE(notes(use)) << command;
  }
}

TEST_F(TranslationCliTest, WhatDoesNotFitIsRefused) {
  const std::string run = Trained();
  Expect({"eval", run, "--set", "task.length=9"}, 2,
         {"the model was trained with its settings", "task.beam, task.length_penalty"});
  Expect({"eval", run, "--set", "task.beam=0"}, 2, {"beam"});
  Expect({"eval", run, folder_ / "a.en"}, 2, {"paste source target > pairs.tsv"});
  Expect({"generate", run, "--prompt", "one"}, 2, {"`cistern predict`"});
  WriteFileAtomically(folder_ / "bad.tsv", "one\tuno\nonly one cell\n");
  Expect({"eval", run, folder_ / "bad.tsv"}, 1, {"bad.tsv:2"});
  const Outcome o = Run({"eval", run, folder_ / "bad.tsv", "--skip-bad-rows", "--json"});
  ASSERT_EQ(o.code, 0) << o;
  EXPECT_EQ(ParseJson(o.out, "stdout")["skipped_rows"], 1);
  Expect(Words{"train", "--out", folder_ / "none"} + Small() + Words{"--data", folder_ / "a.en"}, 2,
         {"paste source target"});
  Expect(Words{"train", "--out", folder_ / "none", "--set", "model.kind=decoder_lm"} + Small() +
             Words{"--data", folder_ / "pairs.tsv"},
         2, {"encoder_decoder"});
  EXPECT_FALSE(fs::exists(folder_ / "none"));
}

}  // namespace
}  // namespace cistern
