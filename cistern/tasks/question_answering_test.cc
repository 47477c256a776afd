// Questions as rows: windows, targets, what a model's logits become, and what is measured.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <set>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/io/test_folder.h"
#include "cistern/ops/testing.h"
#include "cistern/tasks/evaluate.h"
#include "cistern/tasks/question_answering_task.h"
#include "cistern/text/answer_score.h"

namespace cistern {
namespace {

using testing::ExpectContains;

constexpr int64_t kSeparator = 0x1e;

class QuestionAnswering : public ::testing::Test {
 protected:
  void Write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name, std::ios::binary) << text;
  }
  void SetUp() override {
    std::string rows = "context\tquestion\tanswers\n";
    for (int i = 0; i < 60; ++i)
      rows += StrCat("number ", i, " here\twhich\t", i, "\n", "number ", i, " here\twhere\there\n");
    Write("train.tsv", rows);
    Write("test.tsv",
          "context\tquestion\tanswers\n"
          "abcdefghijklmnopqrstuvwxyz\tQ?\tlmn\n"
          "short one\tR\tone\n");
    options_.data = folder_ / "train.tsv";
    options_.valid = options_.test = folder_ / "test.tsv";
    options_.tokenizer = TokenizerKind::kBytes;
    options_.length = 16, options_.question_length = 4, options_.stride = 6;
  }
  std::unique_ptr<QuestionAnsweringTask> Prepared() {
    auto task = std::make_unique<QuestionAnsweringTask>(options_, "");
    task->Prepare();
    return task;
  }
  std::string Refusal() {
    return ErrorMessage([&] { Prepared(); });
  }
  static std::shared_ptr<SpanPredictor> ModelOf(const Task& task,
                                                PositionKind positions = PositionKind::kLearned) {
    ModelConfig c;
    c.kind = "span_predictor", c.dim = 12, c.layers = 1, c.heads = 2, c.ffn_dim = 12;
    c.attention = {"softmax"}, c.positions = positions, c.init_std = 0.4, c.max_length = 8;
    task.Complete(c);
    auto model = std::dynamic_pointer_cast<SpanPredictor>(MakeModel(c, 2));
    model->to(at::kDouble);
    model->eval();
    return model;
  }
  static std::string TextOf(const Batch& batch, int64_t row) {
    std::string s;
    for (int64_t t = 0; t < batch["lengths"][row].item<int64_t>(); ++t) {
      const int64_t id = batch["ids"][row][t].item<int64_t>();
      s += id == kSeparator ? '|' : char(id);
    }
    return s;
  }

  TestFolder folder_;
  QuestionAnsweringTask::Options options_;
};

TEST_F(QuestionAnswering, LongTextsAreReadInWindows) {
  const auto task = Prepared();
  const Batch batch = *task->Read(Split::kTest, {2, 0, 0})->Next();
  ASSERT_EQ(batch.rows, 5);  // 12 of 26 letters, every 6; 13 of the second text
  EXPECT_EQ(TextOf(batch, 0), "|Q?|abcdefghijkl");
  EXPECT_EQ(TextOf(batch, 1), "|Q?|ghijklmnopqr");
  EXPECT_EQ(TextOf(batch, 2), "|Q?|mnopqrstuvwx");
  EXPECT_EQ(TextOf(batch, 3), "|Q?|stuvwxyz");
  EXPECT_EQ(TextOf(batch, 4), "|R|short one");
  // lmn is whole in one window; l or mn alone are none.
  EXPECT_TRUE(at::equal(batch["targets"],
                        at::tensor({0, 0, 9, 11, 0, 0, 0, 0, 9, 11}, at::kLong).view({5, 2})));
  EXPECT_TRUE(at::equal(batch["question"], at::tensor({0, 0, 0, 0, 1}, at::kLong)));
  EXPECT_TRUE(at::equal(batch["begin"], at::tensor({0, 6, 12, 18, 0}, at::kLong)));
  EXPECT_EQ(batch.tokens, 16 * 3 + 12 + 12);
  const Json summary = task->DataSummary();
  EXPECT_EQ(summary["train"], 120);
  EXPECT_EQ(summary["without_answer"], false);
}

// Training knows a question's first answer; figures depend on all of them.
TEST_F(QuestionAnswering, EveryAnswerIsInTheHash) {
  options_.valid = options_.test = folder_ / "test.jsonl";
  const auto summary = [&](const std::string& other) {
    Write("test.jsonl",
          StrCat(R"({"context": "short one", "question": "R", "answers": {"text": ["one", ")",
                 other, R"("], "answer_start": [6, 0]}})", "\n"));
    return Prepared()->DataSummary();
  };
  const Json one = summary("short"), another = summary("sho");
  EXPECT_EQ(one["xxh64"], another["xxh64"]);
  EXPECT_NE(one["xxh64_exact"], another["xxh64_exact"]);
  EXPECT_EQ(one["xxh64_exact"], summary("short")["xxh64_exact"]);
}

TEST_F(QuestionAnswering, BpeIsLearnedFromEachTextAlone) {
  options_.tokenizer = TokenizerKind::kBpe, options_.vocab_size = 300;
  std::string rows = "context\tquestion\tanswers\n";
  for (int i = 0; i < 10; ++i) rows += "qq\tqq\tqq\n";
  Write("train.tsv", rows);
  ModelConfig config;
  Prepared()->Complete(config);
  EXPECT_EQ(config.vocab_size, 256 + 1);  // no token is longer than qq
}

TEST_F(QuestionAnswering, AnswersPartOfATokenTakeAllOfIt) {
  options_.tokenizer = TokenizerKind::kBpe, options_.vocab_size = 300;
  options_.length = 64, options_.stride = 16;
  Write("test.tsv", "context\tquestion\tanswers\nnumber 7 here\twhich\tumb\nx\twhich\tx\n");
  const auto task = Prepared();
  const Batch batch = *task->Read(Split::kTest, {1, 0, 0})->Next();
  const auto model = ModelOf(*task);
  // "number" is one token of the training text's BPE: the first of the text.
  const int64_t place = batch["place"][0].item<int64_t>();
  EXPECT_TRUE(at::equal(batch["targets"], at::tensor({place, place}, at::kLong).view({1, 2})));
  const Json said = task->Predict(*model, batch)[0];
  for (const Json& c : said["candidates"]) {
    const std::string answer = c["answer"];
    EXPECT_EQ(std::string("number 7 here").substr(c["start"].get<size_t>(), answer.size()), answer);
    EXPECT_EQ(answer, answer.substr(answer.find_first_not_of(' ')));
  }
}

TEST_F(QuestionAnswering, TrainingIsAFunctionOfSeedAndStep) {
  const auto task = Prepared(), again = Prepared();
  std::multiset<std::string> seen;
  const int64_t windows = task->train_rows();
  EXPECT_EQ(windows, 240);  // texts of 13 or 14 letters beside 10 of room, two questions each
  for (int64_t step = 0; step < windows / 10; ++step) {
    const Batch a = task->TrainBatch(3, step, 10), b = again->TrainBatch(3, step, 10);
    EXPECT_TRUE(at::equal(a["ids"], b["ids"]) && at::equal(a["targets"], b["targets"]));
    for (int64_t r = 0; r < 10; ++r) seen.insert(TextOf(a, r));
  }
  EXPECT_EQ(seen.size(), size_t(windows));
  for (const std::string& row : seen) EXPECT_EQ(seen.count(row), 1u) << row;
}

// Every span of every window, by hand.
TEST_F(QuestionAnswering, AnswersAreTheBestSpansOfAllWindows) {
  options_.answer_length = 4, options_.n_best = 1000;
  const auto task = Prepared();
  const auto model = ModelOf(*task);
  const Batch batch = *task->Read(Split::kTest, {2, 0, 0})->Next();
  const at::Tensor logits = model->SpanLogits(model->ReadOf(batch.tensors));
  const std::string text = "abcdefghijklmnopqrstuvwxyz";
  // Which window has most letters on both sides of one: 0 up to j, 6 from k on, ...
  const auto window_of = [](int64_t letter) -> int64_t {
    double best = -1;
    int64_t window = -1;
    for (int64_t w = 0; w < 4; ++w) {
      const int64_t begin = 6 * w, end = std::min<int64_t>(begin + 12, 26);
      if (letter < begin || letter >= end) continue;
      const double context =
          double(std::min(letter - begin, end - 1 - letter)) + 0.01 * double(end - begin);
      if (context > best) best = context, window = w;
    }
    return window;
  };
  EXPECT_EQ(window_of(5), 0);
  EXPECT_EQ(window_of(9), 1);
  std::vector<std::pair<double, std::string>> wanted;
  for (int64_t from = 0; from < 26; ++from) {
    const int64_t w = window_of(from), end = std::min<int64_t>(6 * w + 12, 26);
    for (int64_t to = from; to < std::min(from + 4, end); ++to) {
      wanted.emplace_back(logits[w][4 + from - 6 * w][0].item<double>() +
                              logits[w][4 + to - 6 * w][1].item<double>(),
                          text.substr(size_t(from), size_t(to + 1 - from)));
    }
  }
  std::sort(wanted.rbegin(), wanted.rend());
  const Json said = task->Predict(*model, batch)[0];
  ASSERT_EQ(said["candidates"].size(), wanted.size());
  double sum = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const Json& c = said["candidates"][i];
    EXPECT_EQ(c["answer"], wanted[i].second) << i;
    EXPECT_EQ(text.substr(c["start"].get<size_t>(), wanted[i].second.size()), wanted[i].second);
    sum += c["probability"].get<double>();
  }
  EXPECT_NEAR(sum, 1, 1e-12);
  EXPECT_NEAR(said["score"].get<double>(), wanted[0].first, 1e-12);
  EXPECT_EQ(said["answer"], wanted[0].second);
  EXPECT_EQ(said["question"], "Q?");
  EXPECT_EQ(said["id"], "1");
}

TEST_F(QuestionAnswering, NoAnswerIsGivenByItsScore) {
  Write("test.tsv",
        "context\tquestion\tanswers\nabcdefghijklmnopqrstuvwxyz\tQ?\tlmn\nshort one\tR\t\n");
  std::string rows = "context\tquestion\tanswers\n";
  for (int i = 0; i < 30; ++i)
    rows += StrCat("number ", i, " here\twhich\t", i % 2 ? "here" : "", "\n");
  Write("train.tsv", rows);
  const auto make = [&](double threshold) {
    options_.no_answer_threshold = threshold;
    return Prepared();
  };
  const auto task = make(0);
  EXPECT_EQ(task->DataSummary()["without_answer"], true);
  const auto model = ModelOf(*task);
  const Batch batch = *task->Read(Split::kTest, {2, 0, 0})->Next();
  const at::Tensor first = model->SpanLogits(model->ReadOf(batch.tensors)).select(1, 0).sum(1);
  const double none = first.slice(0, 0, 4).min().item<double>();  // the least of its windows
  const auto best_span = [&](const Json& said) {
    for (const Json& c : said["candidates"])
      if (c["start"] != -1) return c["answer"].get<std::string>();
    return std::string();
  };
  const Json never = make(1e9)->Predict(*model, batch), always = make(-1e9)->Predict(*model, batch);
  EXPECT_EQ(always[0]["answer"], "");
  EXPECT_EQ(always[0]["start"], -1);
  EXPECT_NEAR(always[0]["score"].get<double>(), none, 1e-12);
  EXPECT_EQ(never[0]["answer"], best_span(always[0]));
  // The threshold is of the difference of both scores.
  const double margin = none - never[0]["score"].get<double>();
  EXPECT_EQ(make(margin - 1e-9)->Predict(*model, batch)[0]["answer"], "");
  EXPECT_EQ(make(margin + 1e-9)->Predict(*model, batch)[0]["answer"], never[0]["answer"]);
  const Json m = make(-1e9)->Metrics(Evaluate(*make(-1e9), *model, Split::kTest).score);
  EXPECT_EQ(m["f1"], 50);
  EXPECT_EQ(m["has_answer_f1"], 0);
  EXPECT_EQ(m["no_answer_f1"], 100);
  EXPECT_EQ(m["no_answer"], 50);
}

TEST_F(QuestionAnswering, MeasuresAnswersAndTheLoss) {
  const auto task = Prepared();
  const auto model = ModelOf(*task);
  const Json m = task->Metrics(Evaluate(*task, *model, Split::kTest).score);
  const Batch batch = *task->Read(Split::kTest, {})->Next();
  EXPECT_NEAR(m["log_loss"].get<double>(), task->Loss(*model, batch, 0).item<double>(), 1e-12);
  const std::vector<Json> said = task->Predict(*model, batch);
  ASSERT_EQ(said.size(), 2u);
  const AnswerScore a = ScoreAnswer(said[0]["answer"].get<std::string>(), {"lmn"}),
                    b = ScoreAnswer(said[1]["answer"].get<std::string>(), {"one"});
  EXPECT_NEAR(m["f1"].get<double>(), 50 * (a.f1 + b.f1), 1e-9);
  EXPECT_NEAR(m["exact_match"].get<double>(), 50 * (a.exact + b.exact), 1e-9);
  EXPECT_EQ(m["examples"], 2);
  EXPECT_FALSE(m.contains("no_answer"));
  EXPECT_NEAR(m["context_f1"].get<double>(), 50 * (0 + 2.0 / 3), 1e-9);  // one of "short one"
  // Sums do not depend on batches, nor on what else is padded.
  EvalOptions one_by_one;
  one_by_one.read.rows = 1;
  const Json n = task->Metrics(Evaluate(*task, *model, Split::kTest, one_by_one).score);
  EXPECT_NEAR(n["log_loss"].get<double>(), m["log_loss"].get<double>(), 1e-12);
  EXPECT_EQ(n["f1"], m["f1"]);
}

// The question that is left over has more windows than a batch has questions.
TEST_F(QuestionAnswering, WholeBatchesAreOfQuestions) {
  Write("test.tsv",
        "context\tquestion\tanswers\n"
        "short one\tR\tone\n"
        "short two\tR\ttwo\n"
        "abcdefghijklmnopqrstuvwxyz\tQ?\tlmn\n");
  const auto task = Prepared();
  const auto model = ModelOf(*task);
  EvalOptions options;
  options.read.rows = 2, options.whole_batches = true;
  const Evaluation done = Evaluate(*task, *model, Split::kTest, options);
  EXPECT_EQ(task->Metrics(done.score)["examples"], 2);
  EXPECT_EQ(done.rows, 2);
}

TEST_F(QuestionAnswering, AModelLearnsWhereAnswersAre) {
  const auto task = Prepared();
  const auto model = ModelOf(*task);
  model->train();
  double loss = 0;
  for (int64_t step = 0; step < 400; ++step) {
    const at::Tensor now = task->Loss(*model, task->TrainBatch(1, step, 16), 0);
    now.backward();
    at::NoGradGuard guard;
    for (at::Tensor p : model->parameters()) {
      p.sub_(p.grad() * 0.1);
      p.mutable_grad().zero_();
    }
    loss = now.item<double>();
  }
  EXPECT_LT(loss, 1.2);  // of log 16 = 2.8
}

TEST_F(QuestionAnswering, ReadsOtherFilesWithWhatIsSaved) {
  const auto task = Prepared();
  const auto model = ModelOf(*task);
  task->SaveAssets(folder_.path());
  QuestionAnsweringTask loaded(options_, "");
  loaded.LoadAssets(folder_.path());
  Write("new.tsv", "context\tquestion\nabcdefghijklmnopqrstuvwxyz\tQ?\nshort one\tR\n");
  const auto asked = loaded.ReadFile(folder_ / "new.tsv", false, {});
  EXPECT_EQ(Json(loaded.Predict(*model, *asked->Next())),
            Json(task->Predict(*model, *task->Read(Split::kTest, {})->Next())));
  const auto labelled = loaded.ReadFile(folder_ / "test.tsv", true, {});
  EXPECT_EQ(loaded.Metrics(Evaluate(loaded, *model, *labelled).score),
            task->Metrics(Evaluate(*task, *model, Split::kTest).score));
  Write("questions.json", "{\"without_answer\": 3}");
  ExpectContains(ErrorMessage([&] { loaded.LoadAssets(folder_.path()); }), {"without_answer"});
}

TEST_F(QuestionAnswering, TextsStayTogetherInASplit) {
  options_.valid = options_.test = "";
  options_.valid_share = 0.2, options_.test_share = 0.2, options_.length = 64;
  const auto task = Prepared();
  std::set<std::string> texts;
  int64_t questions = 0;
  for (const Split split : {Split::kTrain, Split::kValid, Split::kTest}) {
    std::set<std::string> here;
    const auto reader = task->Read(split, {});
    while (const auto batch = reader->Next()) {
      for (int64_t r = 0; r < batch->rows; ++r, ++questions) {
        const std::string row = TextOf(*batch, r);
        here.insert(row.substr(row.rfind('|')));
      }
    }
    EXPECT_GE(here.size(), 3u);
    for (const std::string& text : here) EXPECT_TRUE(texts.insert(text).second) << text;
  }
  EXPECT_EQ(questions, 120);
  EXPECT_EQ(texts.size(), 60u);
}

TEST_F(QuestionAnswering, WhatDoesNotFitIsRefused) {
  options_.stride = 11;
  ExpectContains(Refusal(), {"length=16 leaves a window of 10 tokens", "stride=11"});
  options_.stride = 6, options_.tokenizer = TokenizerKind::kWords;
  ExpectContains(Refusal(), {"use bpe or bytes"});
  options_.tokenizer = TokenizerKind::kBytes, options_.valid_share = options_.test_share = 0.5;
  ExpectContains(Refusal(), {"leave nothing to train on"});
  options_.valid_share = options_.test_share = 0.02, options_.data = "";
  ExpectContains(Refusal(), {"task.question_answering.data is empty"});
  Write("none.tsv", "context\tquestion\tanswers\nabc\tq\t\n");
  options_.data = folder_ / "none.tsv";
  ExpectContains(Refusal(), {"no answer lies whole in a window"});
  options_.data = folder_ / "train.tsv", options_.valid = "", options_.valid_share = 0.0001;
  ExpectContains(Refusal(), {"no questions are left for the valid split"});
}

TEST_F(QuestionAnswering, KeysWithoutEffectAreRefused) {
  const auto refused = [&](const std::string& key, auto change) {
    const QuestionAnsweringTask::Options usual = options_;
    change(options_);
    ExpectContains(Refusal(), {"task.question_answering." + key, "has no effect with"});
    options_ = usual;
  };
  refused("vocab_size=300", [](auto& o) { o.vocab_size = 300; });
  refused("valid_share", [](auto& o) { o.valid_share = 0.3; });
  refused("split_seed", [](auto& o) { o.split_seed = 2; });
  Write("squad.json", R"({"data": [{"paragraphs": []}]})");
  options_.data = options_.valid = options_.test = folder_ / "squad.json";
  refused("context_column", [](auto& o) { o.context_column = "text"; });
  refused("question_column", [](auto& o) { o.question_column = "asked"; });
  refused("answer_column", [](auto& o) { o.answer_column = "said"; });
  refused("header", [](auto& o) { o.header = TableOptions::Header::kNo; });
}

TEST_F(QuestionAnswering, WordsAreNotTakenFromAnotherModel) {
  QuestionAnsweringTask task(options_, "");
  bool more = true;
  const auto text = [&] { return std::exchange(more, false) ? "a b" : std::string_view(); };
  const std::shared_ptr<const Tokenizer> words = TrainWords(text, 300);
  ExpectContains(ErrorMessage([&] { task.TakeTokenizer(words); }),
                 {"task.question_answering: the other model's tokenizer is of words"});
}

}  // namespace
}  // namespace cistern
