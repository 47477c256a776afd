// `cistern train --pretrain` on every task: it trains and goes on after an interruption, before and
// between its two parts, or it is refused with the reason.
#include <cmath>

#include "cistern/base/testing_messages.h"
#include "cistern/cli/testing_cli.h"

namespace cistern {
namespace {

class PretrainTasksTest : public CliTest {
 protected:
  void SetUp() override {
    CliTest::SetUp();
    std::string rows, images, labels, table = "series,label,x\n", docs;
    for (int i = 0; i < 60; ++i) {
      rows += StrCat(i % 2 ? "good" : "bad", "\ttext number ", i * i, " is ",
                     i % 2 ? "fine and " : "dull and ", i, "\n");
      labels += char(i % 3);
      for (int p = 0; p < 36; ++p) images += char(1 + (i * 37 + p * (i % 3)) % 200);
      table += StrCat(i, ",", i % 2 ? "a" : "b", ",", i, "\n", i, ",", i % 2 ? "a" : "b", ",3\n");
      docs += StrCat("{\"text\":\"", std::string(80, char('a' + i % 26)), i, " document ", i * i,
                     std::string(60, 'z'), "\"}\n");
    }
    WriteFileAtomically(folder_ / "rows.tsv", "label\ttext\n" + rows);
    WriteFileAtomically(folder_ / "series.csv", table);
    WriteFileAtomically(folder_ / "docs.jsonl", docs);
    std::string steps = "x\n";
    for (int t = 0; t < 60; ++t) steps += StrCat(t * t % 17, "\n");
    WriteFileAtomically(folder_ / "steps.csv", steps);
    fs::create_directories(folder_ / "idx");
    for (const std::string part : {"train", "t10k"}) {
      WriteFileAtomically(folder_ / ("idx/" + part + "-images-idx3-ubyte"),
                          std::string("\0\0\x08\x03\0\0\0\x3c\0\0\0\x06\0\0\0\x06", 16) + images);
      WriteFileAtomically(folder_ / ("idx/" + part + "-labels-idx1-ubyte"),
                          std::string("\0\0\x08\x01\0\0\0\x3c", 8) + labels);
    }
  }

  Words Command(const std::string& out, const Words& task, const Words& set) {
    Words words = Words{"train", "--out", out, "--threads", "1", "--json"} + task;
    for (const char* s : {"model.dim=8", "model.layers=1", "model.heads=2", "model.ffn_dim=8",
                          "model.attention=latte", "train.seconds=0", "train.steps=4",
                          "train.batch=2", "train.eval_every=100", "train.eval_tokens=64"})
      words = words + Words{"--set", s};
    for (const std::string& s : set) words = words + Words{"--set", s};
    return words;
  }

  // Starts, is interrupted once `file` is there, goes on, and has ended like `whole`.
  void Cut(const Words& command, const std::string& cut, const std::string& file,
           const std::string& whole) {
    const std::string prefix = cut + "-log";
    const pid_t child = Start(command, prefix);
    for (int i = 0; i < 20000 && !fs::exists(cut + file); ++i) ::usleep(5'000);
    ::kill(child, SIGINT);
    const Outcome o = Wait(child, prefix);
    ASSERT_EQ(o.code, 130) << o;
    const Outcome rest = Run({"train", "--resume", "--out", cut, "--threads", "1", "--json"});
    ASSERT_EQ(rest.code, 0) << rest;
    EXPECT_EQ(ReadFile(whole + "/model.safetensors"), ReadFile(cut + "/model.safetensors"));
  }

  void Both(const std::string& name, const Words& task, const Words& set) {
    for (const std::string objective : {"masked", "causal"}) {
      const std::string whole = folder_ / (name + objective), cut = whole + "-cut";
      const Words more = {"pretrain.objective=" + objective, "pretrain.steps=120",
                          "train.steps=120"};
      const Outcome o = Run(Command(whole, task, set + more));
      ASSERT_EQ(o.code, 0) << name << " " << objective << "\n" << o;
      const Json result = ParseJson(o.out, "stdout");
      EXPECT_EQ(result["pretrained"]["steps"], 120);
      EXPECT_TRUE(std::isfinite(result["pretrained"]["valid"]["perplexity"].get<double>()));
      // Masked: within the first part; causal: between the two.
      Cut(Command(cut, task, set + more), cut,
          objective == "masked" ? "/pretrain/checkpoint-0" : "/pretrain/result.json", whole);
    }
  }

  void Refused(const Words& task, const Words& set, const Words& phrases) {
    for (const std::string objective : {"masked", "causal"}) {
      const std::string out = folder_ / "refused";
      Expect(Command(out, task, set + Words{"pretrain.objective=" + objective}), 2, phrases);
      EXPECT_FALSE(fs::exists(out));
    }
  }
};

TEST_F(PretrainTasksTest, ImageOfIds) {
  Both("image", {"--task", "image", "--data", folder_ / "idx"}, {"task.input=ids"});
  Refused({"--task", "image", "--data", folder_ / "idx"}, {"task.input=values"}, {"input=ids"});
}

TEST_F(PretrainTasksTest, ClassifyTextAndNumbers) {
  Both("text", {"--task", "classify", "--data", folder_ / "rows.tsv"},
       {"task.tokenizer=bytes", "task.length=40", "model.positions=sinusoidal"});
}

TEST_F(PretrainTasksTest, QuestionAnswering) {
  std::string rows = "context\tquestion\tanswers\n";
  for (int i = 0; i < 40; ++i) rows += StrCat("the number is ", i, "\twhich?\t", i, "\n");
  WriteFileAtomically(folder_ / "questions.tsv", rows);
  Both("questions", {"--task", "question_answering", "--data", folder_ / "questions.tsv"},
       {"task.tokenizer=bytes", "task.length=24", "task.question_length=6", "task.stride=8",
        "task.valid_share=0.2", "task.test_share=0.2", "model.attention=softmax",
        "model.positions=sinusoidal"});
}

TEST_F(PretrainTasksTest, Pathfinder) {
  Both("pathfinder", {"--task", "pathfinder"},
       {"task.examples=20", "task.input=ids", "train.batch=1"});
}

TEST_F(PretrainTasksTest, OtherTasksAreRefusedWithTheReason) {
  Refused({"--task", "series", "--data", folder_ / "series.csv"}, {},
          {"real values or pairs", "such as listops"});
  Refused({"--task", "forecast", "--data", folder_ / "steps.csv"}, {"task.length=4"},
          {"real values or pairs"});
  Refused({"--task", "translation", "--data", folder_ / "rows.tsv"},
          {"task.header=yes", "task.source_column=text", "task.target_column=label",
           "task.valid_share=0.2", "task.test_share=0.2"},
          {"predicts tokens already"});
  Refused({"--task", "retrieval", "--data", folder_ / "docs.jsonl"}, {}, {"real values or pairs"});
  for (const std::string task : {"copy", "recall"})
    Refused({"--task", task}, {"model.kind=decoder_lm", "model.positions=none"},
            {"predicts tokens already"});
  Refused({"--task", "span_corruption", "--data", TrainedText()},
          {"task.length=16", "task.vocab_size=300", "model.positions=none"},
          {"predicts tokens already"});
  Refused({"--task", "mlm", "--data", TrainedText()},
          {"task.length=16", "task.vocab_size=300", "model.positions=none"},
          {"predicts tokens already"});
}

}  // namespace
}  // namespace cistern
