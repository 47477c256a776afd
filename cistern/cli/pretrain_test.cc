// `cistern train --pretrain`: a run on the inputs before the run on the labels, from outside.
#include "cistern/base/testing_messages.h"
#include "cistern/cli/testing_cli.h"

namespace cistern {
namespace {

using testing::ExpectContains;

class PretrainTest : public CliTest {
 protected:
  Words Command(const std::string& out, const Words& more) {
    Words words = {"train", "--task", "listops", "--out", out, "--threads", "1", "--json"};
    for (const char* s : {"task.length=40", "task.train_examples=24", "task.valid_examples=6",
                          "task.test_examples=12", "model.dim=8", "model.layers=1", "model.heads=2",
                          "model.ffn_dim=8", "train.steps=4", "train.batch=2", "train.eval_every=2",
                          "model.embedding_std=0.1", "model.init_std=0.02", "pretrain.steps=6"})
      words = words + Words{"--set", s};
    return words + more;
  }
  static Json Result(const Outcome& o) { return ParseJson(o.out, "stdout"); }
};

TEST_F(PretrainTest, BothObjectivesTrainAndAreReportedApart) {
  for (const std::string objective : {"masked", "causal"}) {
    const std::string out = folder_ / objective;
    const Outcome o =
        Run(Command(out, {"--pretrain", objective, "--set", "model.attention=latte"}));
    ASSERT_EQ(o.code, 0) << objective << "\n" << o;
    const Json result = Result(o);
    EXPECT_EQ(result["steps"], 4);
    EXPECT_EQ(result["pretrained"]["objective"], objective);
    EXPECT_EQ(result["pretrained"]["steps"], 6);
    EXPECT_GT(result["pretrained"]["valid"]["perplexity"].get<double>(), 1);
    EXPECT_LT(result["pretrained"]["valid"]["perplexity"].get<double>(), 60);
    const Json config = ReadJsonFile(out + "/pretrain/config.json");
    EXPECT_EQ(config["kind"], objective == "masked" ? "masked_lm" : "decoder_lm");
    EXPECT_TRUE(fs::exists(out + "/pretrain/metrics.jsonl"));
    ExpectContains(o.err, {"pretrained: ", "tensors taken"});
    // The same run again, bit for bit; without pretraining another one.
    const std::string twin = folder_ / (objective + "-twin");
    ASSERT_EQ(Run(Command(twin, {"--pretrain", objective, "--set", "model.attention=latte"})).code,
              0);
    EXPECT_EQ(ReadFile(out + "/model.safetensors"), ReadFile(twin + "/model.safetensors"));
    const std::string plain = folder_ / (objective + "-plain");
    Words without = Command(plain, {"--set", "model.attention=latte"});
    without[size_t(std::find(without.begin(), without.end(), "pretrain.steps=6") -
                   without.begin())] = "seed=1";
    ASSERT_EQ(Run(without).code, 0);
    EXPECT_NE(ReadFile(out + "/model.safetensors"), ReadFile(plain + "/model.safetensors"));
  }
}

TEST_F(PretrainTest, AnInterruptedPretrainingGoesOn) {
  const std::string whole = folder_ / "whole", cut = folder_ / "cut";
  const Words more = {"--pretrain", "masked", "--set", "pretrain.steps=300"};
  ASSERT_EQ(Run(Command(whole, more)).code, 0);
  const std::string prefix = folder_ / "run";
  const pid_t child = Start(Command(cut, more), prefix);
  for (int i = 0; i < 6000 && !fs::exists(cut + "/pretrain/checkpoint-0"); ++i) ::usleep(5'000);
  ::kill(child, SIGINT);
  const Outcome o = Wait(child, prefix);
  ASSERT_EQ(o.code, 130) << o;
  EXPECT_FALSE(fs::exists(cut + "/pretrain/result.json"));
  Expect(Command(cut, more), 2, {"already holds a run", "--resume"});
  const Words resume = {"train", "--resume", "--out", cut, "--threads", "1", "--json", "--set"};
  Expect(resume + Words{"train.ema=0.9"}, 2, {cut + " was begun with train.ema=0", "another run"});
  const Outcome rest = Run(resume + Words{"train.patience=9"});
  ASSERT_EQ(rest.code, 0) << rest;
  ExpectContains(rest.err, {"resumed with train.patience=9 (it was 0)"});
  EXPECT_EQ(Result(rest)["pretrained"]["steps"], 300);
  EXPECT_EQ(ReadFile(whole + "/model.safetensors"), ReadFile(cut + "/model.safetensors"));
  // A run that has ended is not pretrained again.
  EXPECT_EQ(Run({"train", "--resume", "--out", cut, "--threads", "1"}).code, 0);
}

// Between its two trainings a run is the same run, too.
TEST_F(PretrainTest, WhatWasPretrainedBelongsToItsSettings) {
  const std::string out = folder_ / "run";
  const Words more = {"--pretrain", "masked"};
  ASSERT_EQ(Run(Command(out, more)).code, 0);
  fs::remove_all(out + "/checkpoint-4");
  fs::remove(out + "/model.safetensors");
  const Words resume = {"train", "--resume", "--out", out, "--threads", "1", "--json"};
  const auto refused = [&](const std::string& setting, const Words& phrases) {
    Expect(resume + Words{"--set", setting}, 2, phrases);
  };
  refused("seed=5", {"begun with", "seed=1", "another run"});
  refused("model.dim=16", {"model.dim=8", "another run"});
  refused("task.train_examples=30", {"begun with"});
  refused("pretrain.steps=9", {"pretrain.steps=6", "another run"});
  refused("pretrain.objective=none", {"pretrain.objective"});
  // What the pretraining itself knows nothing of.
  refused("train.label_smoothing=0.2", {"train.label_smoothing=0", "another run"});
  refused("model.pooling=cls", {"model.pooling=", "another run"});
  const std::string result = out + "/pretrain/result.json", good = ReadFile(result);
  std::string bad = good;
  bad[bad.find('6')] = '7';
  WriteFileAtomically(result, bad);
  Expect(resume, 1, {result + ": the contents do not fit their checksum"});
  WriteFileAtomically(result, good);
  const Outcome o = Run(resume);
  ASSERT_EQ(o.code, 0) << o;
  EXPECT_EQ(Result(o)["pretrained"]["steps"], 6);
}

TEST_F(PretrainTest, RefusesWhatHasNoTokensOrNoEffect) {
  const std::string out = folder_ / "none";
  Expect(Command(out, {}), 2, {"pretrain.objective is none"});
  Expect(Command(out, {"--pretrain", "maskd"}), 2, {"did you mean 'masked'"});
  Expect(Command(out, {"--pretrain", "causal", "--set", "pretrain.mask_share=0.3"}), 2,
         {"pretrain.mask_share has no effect"});
  Expect(Command(out, {"--pretrain", "masked", "--set", "train.schedule=rsqrt"}), 2,
         {"give pretrain.lr"});
  Expect(Command(out, {"--pretrain", "masked", "--from", Trained()}), 2, {"give one of them"});
  Expect(Command(out, {"--pretrain", "causal", "--set", "model.attention=nystrom"}), 2,
         {"causal", "nystrom"});
  Expect({"train", "--task", "pathfinder", "--pretrain", "masked", "--out", out, "--set",
          "task.examples=20", "--set", "task.input=values"},
         2, {"predicts tokens", "input=ids"});
  Expect({"train", "--task", "pathfinder", "--pretrain", "masked", "--out", out, "--set",
          "task.examples=20", "--set", "task.input=ids", "--set", "task.zero_is_padding=true"},
         2, {"zero_is_padding=false"});
  EXPECT_FALSE(fs::exists(out));
  Expect(Train(TrainedText(), out, {"--pretrain", "causal"}), 2, {"predicts tokens already"});
}

}  // namespace
}  // namespace cistern
