// Question answering from outside: train, eval, predict, pretraining, and what is refused.
#include "cistern/base/testing_messages.h"
#include "cistern/cli/testing_cli.h"

namespace cistern {
namespace {

using testing::ExpectContains;

class QuestionAnsweringCliTest : public CliTest {
 protected:
  void SetUp() override {
    CliTest::SetUp();
    std::string rows = "id\tcontext\tquestion\tanswers\n", text;
    for (int i = 0; i < 120; ++i) {
      const std::string context = StrCat("the town number ", i, " lies by the river ", i % 5);
      rows += StrCat("n", i, "\t", context, "\twhich number?\t", i, "\n");
      rows += StrCat("w", i, "\t", context, "\twhere?\t", i % 3 == 0 ? "" : "by the river", "\n");
      text += context + "\n";
    }
    WriteFileAtomically(folder_ / "rows.tsv", rows);
    WriteFileAtomically(folder_ / "text.txt", text);
  }
  static Words Small() {
    Words words = {"--threads", "1"};
    for (const char* s : {"model.dim=16", "model.heads=2", "model.layers=1", "train.seconds=0",
                          "train.batch=8", "task.vocab_size=280", "task.valid_share=0.15",
                          "task.test_share=0.15", "model.attention=softmax"})
      words = words + Words{"--set", s};
    return words;
  }
  std::string Trained(const Words& more = {}) {
    const std::string out = folder_ / "run";
    const Outcome o = Run(Words{"train", "--task", "question_answering", "--out", out, "--steps",
                                "6", "--data", folder_ / "rows.tsv"} +
                          Small() + more);
    EXPECT_EQ(o.code, 0) << o;
    ExpectContains(o.out, {"valid:  f1 ", "test:  f1 ", "exact_match", "no_answer_f1"});
    return out;
  }
};

TEST_F(QuestionAnsweringCliTest, TrainsMeasuresAndAnswers) {
  const std::string run = Trained();
  WriteFileAtomically(folder_ / "new.tsv",
                      "context\tquestion\nthe town number 7 lies here\twhich number?\n");
  Outcome o = Run({"predict", run, folder_ / "new.tsv", "--json", "--set", "task.n_best=3", "--set",
                   "task.no_answer_threshold=1e9"});
  ASSERT_EQ(o.code, 0) << o;
  const Json said = ParseJson(o.out, "stdout");
  EXPECT_EQ(said["question"], "which number?");
  EXPECT_NE(said["answer"], "");
  EXPECT_GE(said["start"], 0);
  EXPECT_LE(said["candidates"].size(), 4u);  // no answer besides
  o = Run({"eval", run, folder_ / "rows.tsv", "--json"});
  ASSERT_EQ(o.code, 0) << o;
  EXPECT_EQ(ParseJson(o.out, "stdout")["examples"], 240);
  Expect({"eval", run, folder_ / "new.tsv"}, 1, {"new.tsv", "answers"});
  Expect({"eval", run, "--set", "task.stride=9"}, 2, {"task.answer_length, task.n_best"});
}

// Tokens of one byte are parts of characters; an answer is made of whole ones.
TEST_F(QuestionAnsweringCliTest, AnswersAreWholeCharacters) {
  std::string rows = "context\tquestion\tanswers\n";
  for (int i = 0; i < 60; ++i)
    rows += StrCat("řeka číslo ", i, " teče údolím\tkteré číslo?\t",
                   i % 3 == 0 ? "" : std::to_string(i), "\n");
  WriteFileAtomically(folder_ / "rows.tsv", rows);
  const std::string run =  // no vocabulary but the default
      Trained({"--set", "task.tokenizer=bytes", "--set", "task.vocab_size=4096"});
  WriteFileAtomically(folder_ / "new.tsv",
                      "context\tquestion\nřeka číslo 7 teče údolím\tkteré číslo?\n");
  const Outcome o = Run({"predict", run, folder_ / "new.tsv"});
  EXPECT_EQ(o.code, 0) << o;
  EXPECT_EQ(o.out.find("\xef\xbf\xbd"), std::string::npos) << o;
  const Outcome json = Run({"predict", run, folder_ / "new.tsv", "--json"});
  for (const Json& c : ParseJson(json.out, "stdout")["candidates"]) {
    const auto answer = c["answer"].get<std::string>();
    EXPECT_NE(std::string("řeka číslo 7 teče údolím").find(answer), std::string::npos) << answer;
  }
}

// An answer may look like a list and be a part of the text.
TEST_F(QuestionAnsweringCliTest, AnAnswerInBracketsIsText) {
  std::string rows;
  for (int i = 0; i < 60; ++i)
    rows += StrCat("{\"context\": \"see note [", i, "] below\", \"question\": \"which?\", ",
                   "\"answers\": \"[", i, "]\"}\n");
  WriteFileAtomically(folder_ / "rows.jsonl", rows);
  const Outcome o = Run(Words{"train", "--task", "question_answering", "--out", folder_ / "run",
                              "--steps", "2", "--data", folder_ / "rows.jsonl"} +
                        Small());
  EXPECT_EQ(o.code, 0) << o;
}

TEST_F(QuestionAnsweringCliTest, BeginsWithAPretrainedModel) {
  const std::string mlm = folder_ / "mlm";
  Words words = {"train",   "--task", "mlm",       "--data", folder_ / "text.txt", "--out", mlm,
                 "--steps", "3",      "--threads", "1"};
  for (const char* s :
       {"model.dim=16", "model.heads=2", "model.layers=1", "model.attention=softmax",
        "train.batch=4", "task.vocab_size=280", "task.length=32"})
    words = words + Words{"--set", s};
  Outcome o = Run(words);
  ASSERT_EQ(o.code, 0) << o;
  const std::string out = folder_ / "tuned";
  o = Run({"train", "--task", "question_answering", "--data", folder_ / "rows.tsv", "--from", mlm,
           "--out", out, "--steps", "3", "--threads", "1", "--set", "train.seconds=0", "--set",
           "task.valid_share=0.15", "--set", "task.test_share=0.15"});
  ASSERT_EQ(o.code, 0) << o;
  ExpectContains(o.out + o.err, {"tensors taken", "span_head"});
  EXPECT_EQ(ReadFile(out + "/tokenizer.json"), ReadFile(mlm + "/tokenizer.json"));
}

TEST_F(QuestionAnsweringCliTest, WhatDoesNotFitIsRefused) {
  const Words train =
      Words{"train", "--task", "question_answering", "--out", folder_ / "none", "--steps", "3"} +
      Small();
  WriteFileAtomically(folder_ / "bad.tsv", "context\tquestion\tanswers\nsome text\twhat?\tother\n");
  Expect(train + Words{"--data", folder_ / "bad.tsv"}, 1,
         {"bad.tsv:2: the answer 'other' is not in its context"});
  Expect(train + Words{"--data", folder_ / "text.txt"}, 2, {"text.txt", ".tsv"});
  Expect(train + Words{"--data", folder_ / "rows.tsv", "--set", "model.kind=masked_lm"}, 2,
         {"span_predictor"});
  Expect(train + Words{"--data", folder_ / "rows.tsv", "--set", "train.label_smoothing=0.1"}, 2,
         {"label_smoothing", "places"});
  EXPECT_FALSE(fs::exists(folder_ / "none"));
  const std::string run = Trained();
  Expect({"generate", run, "--prompt", "the"}, 2, {"`cistern predict`"});
}

}  // namespace
}  // namespace cistern
