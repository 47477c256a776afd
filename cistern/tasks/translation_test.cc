// Pairs of texts: what is read, how they become batches, what is measured and predicted.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <map>
#include <set>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/io/test_folder.h"
#include "cistern/ops/testing.h"
#include "cistern/tasks/evaluate.h"
#include "cistern/tasks/translation_task.h"
#include "cistern/text/answer_score.h"
#include "cistern/text/translation_score.h"

namespace cistern {
namespace {

using testing::ExpectContains;

constexpr int64_t kEnd = 256;  // behind the bytes

class Translation : public ::testing::Test {
 protected:
  void Write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name, std::ios::binary) << text;
  }
  void SetUp() override {
    std::string pairs;
    for (int i = 0; i < 300; ++i)
      pairs += StrCat("word ", i, " of ", i % 7, "\tWort ", i, " von ", i % 7, "\n");
    Write("pairs.tsv", pairs);
    Write("few.tsv", "ab\tABC\nb\tB\nlonger than most\tL\n");
    options_.data = folder_ / "pairs.tsv";
    options_.valid = options_.test = folder_ / "few.tsv";
    options_.tokenizer = TokenizerKind::kBytes;
  }
  std::unique_ptr<TranslationTask> Prepared() {
    auto task = std::make_unique<TranslationTask>(options_, "");
    task->Prepare();
    return task;
  }
  std::string Refusal() {
    return ErrorMessage([&] { Prepared(); });
  }
  static std::shared_ptr<LanguageModel> ModelOf(
      const Task& task, PositionKind positions = PositionKind::kSinusoidal) {
    ModelConfig c;
    c.kind = "encoder_decoder", c.dim = 12, c.layers = 1, c.heads = 2, c.ffn_dim = 12;
    c.attention = {"softmax"}, c.positions = positions, c.init_std = 0.4, c.max_length = 8;
    c.tie_embeddings = false;
    task.Complete(c);
    auto model = std::dynamic_pointer_cast<LanguageModel>(MakeModel(c, 2));
    model->to(at::kDouble);
    model->eval();
    return model;
  }
  // Source and target of each pair of a split, in its order.
  static std::vector<std::pair<std::string, std::string>> PairsOf(const Task& task, Split split) {
    std::vector<std::pair<std::string, std::string>> out;
    const auto reader = task.Read(split, {});
    while (const auto batch = reader->Next()) {
      for (int64_t r = 0; r < batch->rows; ++r) {
        const auto text = [&](const char* name, const char* lengths) {
          std::string s;
          for (int64_t t = 0; t + 1 < (*batch)[lengths][r].item<int64_t>(); ++t)
            s += char((*batch)[name][r][t].item<int64_t>());
          return s;
        };
        out.emplace_back(text("source", "source_lengths"), text("targets", "lengths"));
      }
    }
    return out;
  }

  TestFolder folder_;
  TranslationTask::Options options_;
};

TEST_F(Translation, SourcesAndTargetsEndAndTargetsBeginWithTheEnd) {
  const auto task = Prepared();
  const Batch batch = *task->Read(Split::kTest, {2, 0, 0})->Next();
  const auto ids = [](std::initializer_list<int64_t> list, int64_t width) {
    return at::tensor(std::vector<int64_t>(list), at::kLong).view({-1, width});
  };
  EXPECT_TRUE(at::equal(batch["source"], ids({'a', 'b', kEnd, 'b', kEnd, 0}, 3)));
  EXPECT_TRUE(at::equal(batch["source_lengths"], at::tensor({3, 2}, at::kLong)));
  EXPECT_TRUE(at::equal(batch["ids"], ids({kEnd, 'A', 'B', 'C', kEnd, 'B', 0, 0}, 4)));
  EXPECT_TRUE(at::equal(batch["lengths"], at::tensor({4, 2}, at::kLong)));
  EXPECT_TRUE(at::equal(batch["targets"], ids({'A', 'B', 'C', kEnd, 'B', kEnd, -100, -100}, 4)));
  EXPECT_TRUE(at::equal(batch["lines"], at::tensor({1, 2}, at::kLong)));
  EXPECT_EQ(batch.rows, 2);
  EXPECT_EQ(batch.tokens, 3 + 2 + 4 + 2);
  EXPECT_EQ(task->Terms(batch), 6);
  ModelConfig config;
  task->Complete(config);
  EXPECT_EQ(config.vocab_size, kEnd + 1);
  EXPECT_EQ(task->DataSummary()["train"], 300);
  // "word 299 of 5" and "Wort 299 von 5" with their ends: what training takes memory for.
  EXPECT_EQ(task->tokens_per_row(), 14 + 15);
  EXPECT_EQ(TranslationTask(options_, "").tokens_per_row(), 2 * 129);
}

TEST_F(Translation, TrainingIsAFunctionOfSeedAndStep) {
  const auto task = Prepared(), again = Prepared();
  std::set<int64_t> seen;
  for (int64_t step = 0; step < 30; ++step) {
    const Batch a = task->TrainBatch(3, step, 10), b = again->TrainBatch(3, step, 10);
    EXPECT_TRUE(at::equal(a["source"], b["source"]) && at::equal(a["targets"], b["targets"]));
    for (int64_t r = 0; r < 10; ++r) seen.insert(a["lines"][r].item<int64_t>());
  }
  EXPECT_EQ(seen.size(), 300u);  // an epoch has every pair once
}

TEST_F(Translation, BatchesOfTokens) {
  options_.length = 20, options_.batch_tokens = 200;
  const auto task = Prepared();
  EXPECT_EQ(task->train_rows(), 0);       // an epoch has no number of batches of so many rows
  EXPECT_EQ(task->rows_of_batch(64), 9);  // 200 / 21
  std::set<int64_t> seen;
  int64_t rows = 0, step = 0;
  for (; rows < 300; ++step) {
    const Batch batch = task->TrainBatch(3, step, 64);
    EXPECT_LE(std::max(batch["source"].numel(), batch["ids"].numel()), 200);
    EXPECT_GT(std::max(batch["source"].numel(), batch["ids"].numel()), 100);
    for (int64_t r = 0; r < batch.rows; ++r) seen.insert(batch["lines"][r].item<int64_t>());
    rows += batch.rows;
  }
  EXPECT_EQ(rows, 300);
  EXPECT_EQ(seen.size(), 300u);
  EXPECT_FALSE(at::equal(task->TrainBatch(3, 0, 64)["lines"], task->TrainBatch(4, 0, 64)["lines"]));
  options_.batch_tokens = 20;
  testing::ExpectContains(testing::Thrown([&] { TranslationTask(options_, ""); }),
                          {"batch_tokens=20 is less than a pair of length=20"});
  options_.batch_tokens = 200, options_.group_by_length = false;
  testing::ExpectContains(testing::Thrown([&] { TranslationTask(options_, ""); }),
                          {"leave out group_by_length=false"});
  options_.batch_tokens = 0, options_.group_by_length = true;
  EXPECT_EQ(Prepared()->rows_of_batch(64), 64);
}

TEST_F(Translation, TablesAndLinesGiveTheSamePairs) {
  const std::vector<std::pair<std::string, std::string>> wanted = {
      {"ab", "ABC"}, {"b, c", "\"B\""}, {"3", "III"}};
  const auto check = [&](const std::string& data, const std::string& target) {
    options_.test = data.empty() ? "" : folder_ / data;
    options_.test_target = target.empty() ? "" : folder_ / target;
    const auto task = Prepared();
    EXPECT_EQ(PairsOf(*task, Split::kTest), wanted) << data;
  };
  Write("a.tsv", "ab\tABC\nb, c\t\"B\"\n3\tIII\n");
  check("a.tsv", "");
  Write("a.en", "ab\nb, c\n3\n");
  Write("a.de", "ABC\n\"B\"\nIII\n");
  check("a.en", "a.de");
  Write("a.jsonl",
        "{\"de\": \"ABC\", \"en\": \"ab\"}\n{\"en\": \"b, c\", \"de\": \"\\\"B\\\"\"}\n"
        "{\"en\": 3, \"de\": \"III\"}\n");
  Write("pairs.jsonl", "{\"de\": \"x\", \"en\": \"y\"}\n{\"de\": \"z\", \"en\": \"q\"}\n");
  options_.data = options_.valid = folder_ / "pairs.jsonl";
  options_.source_column = "en", options_.target_column = "de";
  check("a.jsonl", "");
  Write("a.csv", "id,de,en\n1,ABC,ab\n2,\"\"\"B\"\"\",\"b, c\"\n3,III,3\n");
  options_.data = options_.valid = folder_ / "a.csv";
  options_.header = TableOptions::Header::kYes;
  check("a.csv", "");
}

TEST_F(Translation, WhatCannotBeReadIsRefusedWithTheWay) {
  options_.test = folder_ / "few.tsv";
  options_.source_column = "en";
  EXPECT_EQ(Refusal(), (folder_ / "pairs.tsv") +
                           ": no column 'en' for the source: its columns are 1, 2; if its first "
                           "line names them: --set task.header=yes");
  options_.source_column = "";
  Write("one.tsv", "a\nb\n");
  options_.test = folder_ / "one.tsv";
  ExpectContains(Refusal(), {"no column for the target: its columns are 1"});
  Write("pandas.csv", ",en\n0,a\n1,b\n");
  options_.test = folder_ / "pandas.csv";
  options_.header = TableOptions::Header::kYes;
  ExpectContains(Refusal(), {"no column for the target: its columns are en;"});
  options_.header = TableOptions::Header::kNo;
  Write("a.en", "a\nb\nc\n");
  options_.test = folder_ / "a.en";
  ExpectContains(Refusal(), {"paste source target > pairs.tsv"});
  Write("a.de", "A\nB\n");
  options_.test_target = folder_ / "a.de";
  EXPECT_EQ(Refusal(), (folder_ / "a.de") + " ends after line 2 and " + (folder_ / "a.en") +
                           " does not: their lines have to correspond");
  std::swap(options_.test, options_.test_target);
  EXPECT_EQ(Refusal(), (folder_ / "a.de") + " ends after line 2 and " + (folder_ / "a.en") +
                           " does not: their lines have to correspond");
  options_.test_target = folder_ / "nowhere";
  ExpectContains(Refusal(), {"nowhere"});
  options_.test = "";
  ExpectContains(Refusal(), {"is of the lines of test, which is empty"});
  options_.test_target = "";
  options_.data = "";
  ExpectContains(Refusal(), {"task.translation.data is empty"});
  options_.tokenizer = TokenizerKind::kWords;
  ExpectContains(Refusal(), {"use bpe or bytes"});
  options_.tokenizer = TokenizerKind::kBytes;
  options_.valid_share = options_.test_share = 0.5;
  ExpectContains(Refusal(), {"leave nothing to train on"});
}

TEST_F(Translation, WhatIsLeftOutIsCounted) {
  Write("odd.tsv", "ab\tAB\n\tempty source\nempty target\t\nfar too long for this\tX\nc\tC\n");
  options_.data = folder_ / "odd.tsv";
  options_.length = 16;
  options_.metric = "chrf";
  const auto task = Prepared();
  const Json summary = task->DataSummary();
  EXPECT_EQ(summary["train"], 2);
  EXPECT_EQ(summary["left_out"], 3);
  EXPECT_EQ(summary["notes"],
            (Json{"1 training pairs with more than task.length=16 tokens on a side were left out",
                  "2 pairs with an empty side were left out"}));
  options_.metric = "bleu";  // which knows no pair of one word
  ExpectContains(Prepared()->DataSummary()["notes"].back().get<std::string>(),
                 {"BLEU is 0", "task.metric=exact_match"});
  EXPECT_EQ(summary["test"], 3);  // all, however long
  Write("bad.tsv", "ab\tAB\nthree\tcells\there\nc\tC\n");
  options_.data = folder_ / "bad.tsv";
  ExpectContains(Refusal(), {"bad.tsv:2"});
  options_.skip_bad_rows = true;
  EXPECT_EQ(Prepared()->DataSummary()["skipped_rows"], 1);
  Write("bad.tsv", "ab\tA\nc\tCD\n");
  options_.length = 1;
  ExpectContains(Refusal(), {"task.length=1"});
}

TEST_F(Translation, EqualSourcesStayTogether) {
  std::string pairs;
  for (int i = 0; i < 900; ++i) pairs += StrCat("source ", i / 3, "\ttarget ", i, "\n");
  Write("pairs.tsv", pairs);
  options_.valid = options_.test = "";
  options_.valid_share = 0.2, options_.test_share = 0.1;
  const auto task = Prepared();
  std::map<std::string, std::set<int>> splits;
  std::vector<size_t> sizes;
  for (const Split split : {Split::kTrain, Split::kValid, Split::kTest}) {
    const auto all = PairsOf(*task, split);
    sizes.push_back(all.size());
    for (const auto& [source, target] : all) splits[source].insert(int(split));
  }
  for (const auto& [source, where] : splits) EXPECT_EQ(where.size(), 1u) << source;
  EXPECT_EQ(sizes[0] + sizes[1] + sizes[2], 900u);
  EXPECT_NEAR(double(sizes[1]), 180, 60);
  EXPECT_NEAR(double(sizes[2]), 90, 45);
  options_.split_seed = 2;
  EXPECT_NE(PairsOf(*Prepared(), Split::kTest), PairsOf(*task, Split::kTest));
  options_.valid_share = 0.0001;
  Write("pairs.tsv", "a\tb\nc\td\n");
  ExpectContains(Refusal(), {"no pairs are left for the valid split"});
}

TEST_F(Translation, MeasuresTheLossAndTheTranslations) {
  for (const int64_t beam : {1, 3}) {
    options_.beam = beam, options_.length_penalty = 0.6;
    const auto task = Prepared();
    const auto model = ModelOf(*task);
    const Evaluation done = Evaluate(*task, *model, Split::kTest);
    const Json m = task->Metrics(done.score);
    EXPECT_GT(done.score.At("bleu_ngrams", 0), 0);
    EXPECT_GT(done.score.At("chrf_translation", 0), 0);
    // The loss, as training has it.
    const Batch batch = *task->Read(Split::kTest, {})->Next();
    const double nats = task->Loss(*model, batch, 0).item<double>();
    EXPECT_NEAR(m["nats_per_token"].get<double>(), nats, 1e-9);
    EXPECT_NEAR(m["perplexity"].get<double>(), std::exp(nats), 1e-6);
    EXPECT_EQ(m["tokens"], 4 + 2 + 2);
    EXPECT_GT(m["unigram_perplexity"].get<double>(), 1);
    // Translations are those of `predict`.
    BleuSums bleu;
    ChrfSums chrf;
    const auto sources = task->ReadFile(folder_ / "few.tsv", false, {});
    const std::vector<Json> said = task->Predict(*model, *sources->Next());
    const std::vector<std::string> references = {"ABC", "B", "L"};
    ASSERT_EQ(said.size(), 3u);
    for (size_t r = 0; r < 3; ++r) {
      EXPECT_EQ(said[r]["line"], r + 1);
      bleu.Add(said[r]["translation"].get<std::string>(), references[r]);
      chrf.Add(said[r]["translation"].get<std::string>(), references[r]);
    }
    EXPECT_EQ(said[0]["source"], "ab");
    EXPECT_NEAR(m["chrf"].get<double>(), chrf.Score(), 1e-9);
    EXPECT_NEAR(m["bleu"].get<double>(), bleu.Score(), 1e-9);
    double exact = 0, word_f1 = 0;
    for (size_t r = 0; r < 3; ++r) {
      const AnswerScore answer =
          ScoreAnswer(said[r]["translation"].get<std::string>(), {references[r]});
      exact += answer.exact, word_f1 += answer.f1;
    }
    EXPECT_NEAR(m["exact_match"].get<double>(), 100 * exact / 3, 1e-9);
    EXPECT_NEAR(m["word_f1"].get<double>(), 100 * word_f1 / 3, 1e-9);
    EXPECT_NEAR(m["length_ratio"].get<double>(), double(bleu.length) / 3, 1e-9);
    // Sums do not depend on batches.
    EvalOptions one_by_one;
    one_by_one.read.rows = 1;
    const Json n = task->Metrics(Evaluate(*task, *model, Split::kTest, one_by_one).score);
    EXPECT_NEAR(n["nats_per_token"].get<double>(), nats, 1e-9);
    EXPECT_EQ(n["chrf"], m["chrf"]);
  }
}

// A model that says B, whatever it reads, to the end: after one and two tokens 14 and 16 of them.
TEST_F(Translation, AnswersInWordsAreMeasuredAsSquadDoes) {
  const std::string fourteen(14, 'B'), sixteen(16, 'B');
  Write("few.tsv", "b\t" + fourteen + ".\nab\t" + sixteen + " x\n");
  const auto task = Prepared();
  ModelConfig c;
  c.kind = "encoder_decoder", c.dim = 12, c.layers = 1, c.heads = 2, c.ffn_dim = 12;
  c.attention = {"softmax"}, c.tie_embeddings = false, c.head_bias = true;
  task->Complete(c);
  const auto model = MakeModel(c, 2);
  {
    at::NoGradGuard guard;
    auto parameters = model->named_parameters();
    parameters["lm_head.weight"].zero_();
    parameters["lm_head.bias"].zero_();
    parameters["lm_head.bias"]['B'] = 1;
  }
  const Json m = task->Metrics(Evaluate(*task, *model, Split::kTest).score);
  EXPECT_EQ(m["exact_match"], 50);
  EXPECT_NEAR(m["word_f1"].get<double>(), 50 * (1 + 2.0 / 3), 1e-9);
}

TEST_F(Translation, ReadsOtherFilesWithWhatIsSaved) {
  const auto task = Prepared();
  const auto model = ModelOf(*task);
  task->SaveAssets(folder_.path());
  TranslationTask loaded(options_, "");
  loaded.LoadAssets(folder_.path());
  Write("new.txt", "ab\nb\nlonger than most\n");
  const auto lines = loaded.ReadFile(folder_ / "new.txt", false, {});
  const auto table = task->ReadFile(folder_ / "few.tsv", false, {});
  EXPECT_EQ(Json(loaded.Predict(*model, *lines->Next())),
            Json(task->Predict(*model, *table->Next())));
  EXPECT_FALSE(lines->Next().has_value());
  const auto labelled = loaded.ReadFile(folder_ / "few.tsv", true, {});
  const Json m = loaded.Metrics(Evaluate(loaded, *model, *labelled).score);
  EXPECT_FALSE(m.contains("unigram_perplexity"));  // without the training texts
  EXPECT_EQ(m["chrf"], task->Metrics(Evaluate(*task, *model, Split::kTest).score)["chrf"]);
  ExpectContains(ErrorMessage([&] { loaded.ReadFile(folder_ / "new.txt", true, {}); }),
                 {"paste source target"});
  Write("hole.tsv", "a\tb\nc\t\n");
  ExpectContains(ErrorMessage([&] { loaded.ReadFile(folder_ / "hole.tsv", true, {})->Next(); }),
                 {"hole.tsv:2: the target is empty"});
  Write("hole.tsv", "a\tb\n\tc\n");
  ExpectContains(ErrorMessage([&] { loaded.ReadFile(folder_ / "hole.tsv", true, {})->Next(); }),
                 {"hole.tsv:2: the source is empty"});
  options_.skip_bad_rows = true;
  TranslationTask skips(options_, "");
  skips.LoadAssets(folder_.path());
  const auto holes = skips.ReadFile(folder_ / "hole.tsv", true, {.rows = 1});
  EXPECT_EQ(holes->Next()->rows, 1);
  EXPECT_FALSE(holes->Next().has_value());
  EXPECT_EQ(holes->skipped(), 1);
}

TEST_F(Translation, LearnedPositionsEnd) {
  options_.length = 20;
  const auto task = Prepared();
  const auto model = ModelOf(*task, PositionKind::kLearned);  // max_length 21
  EXPECT_EQ(model->config().max_length, 21);
  const std::vector<Json> said =
      task->Predict(*model, *task->ReadFile(folder_ / "few.tsv", false, {})->Next());
  for (const Json& row : said) EXPECT_LE(row["translation"].get<std::string>().size(), 4u * 21);
  Write("long.txt", std::string(21, 'x') + "\n");
  ExpectContains(ErrorMessage([&] {
                   task->Predict(*model, *task->ReadFile(folder_ / "long.txt", false, {})->Next());
                 }),
                 {"a source of 22 tokens is beyond max_length=21"});
}

// What is measured may be longer than what is trained on, as is known before training.
TEST_F(Translation, LearnedPositionsReachAllParts) {
  Write("long.tsv", "ab\tABC\n" + std::string(29, 'x') + "\ty\n");
  for (std::string* part : {&options_.valid, &options_.test}) {
    options_.length = 20, options_.valid = options_.test = folder_ / "few.tsv";
    *part = folder_ / "long.tsv";
    const auto task = Prepared();
    EXPECT_EQ(ModelOf(*task)->config().max_length, 21);
    const auto model = ModelOf(*task, PositionKind::kLearned);
    EXPECT_EQ(model->config().max_length, 30);
    EXPECT_EQ(Evaluate(*task, *model, Split::kValid, {}).rows, part == &options_.valid ? 2 : 3);
    ModelConfig config;
    config.kind = "encoder_decoder", config.attention = {"softmax"};
    config.encoder.positions = PositionKind::kLearned, config.encoder.max_length = 25;
    ExpectContains(ErrorMessage([&] { task->Complete(config); }),
                   {"long.tsv:2 has 30 tokens", "end at 25", "model.encoder.max_length"});
    config.encoder = {};
    config.cross.attention = {"linformer"};
    config.cross.attention_options = {{"linformer", {{"length", 25}}}};
    ExpectContains(ErrorMessage([&] { task->Complete(config); }), {"long.tsv:2", "end at 25"});
  }
}

TEST_F(Translation, BpeIsLearnedFromBothSides) {
  options_.tokenizer = TokenizerKind::kBpe, options_.vocab_size = 270;
  const auto task = Prepared();
  ModelConfig config;
  task->Complete(config);
  EXPECT_EQ(config.vocab_size, 271);
  const Batch batch = *task->Read(Split::kTest, {})->Next();
  EXPECT_EQ(batch["source"][0][2].item<int64_t>(), 270);  // a, b, end
  // Merges of words of either side.
  const Batch train = task->TrainBatch(1, 0, 4);
  EXPECT_GT(train["source"].max().item<int64_t>(), 256);
  EXPECT_LT(train["source"].size(1), 15);
  // Of each of them alone: no token is longer than they are.
  std::string pairs;
  for (int i = 0; i < 10; ++i) pairs += "qq\tqq\n";
  Write("pairs.tsv", pairs);
  Prepared()->Complete(config);
  EXPECT_EQ(config.vocab_size, 256 + 1 + 1);
}

TEST_F(Translation, KeysWithoutEffectAreRefused) {
  const auto refused = [&](const std::string& key, auto change) {
    const TranslationTask::Options usual = options_;
    change(options_);
    ExpectContains(Refusal(), {"task.translation." + key, "has no effect with"});
    options_ = usual;
  };
  refused("vocab_size=300", [](auto& o) { o.vocab_size = 300; });
  refused("valid_share", [](auto& o) { o.valid_share = 0.3; });
  refused("test_share", [](auto& o) { o.test_share = 0.3; });
  refused("split_seed", [](auto& o) { o.split_seed = 2; });
  Write("a.en",
        "\xef\xbb\xbf"
        "a\nb\n");
  Write("a.de",
        "\xef\xbb\xbf"
        "A\nB\n");
  for (std::string* source : {&options_.data, &options_.valid, &options_.test})
    *source = folder_ / "a.en";
  for (std::string* target : {&options_.target, &options_.valid_target, &options_.test_target})
    *target = folder_ / "a.de";
  refused("source_column", [](auto& o) { o.source_column = "en"; });
  refused("target_column", [](auto& o) { o.target_column = "de"; });
  refused("header", [](auto& o) { o.header = TableOptions::Header::kYes; });
  const auto task = Prepared();  // a byte order mark is no part of the first line
  EXPECT_EQ(PairsOf(*task, Split::kTest)[0], (std::pair<std::string, std::string>("a", "A")));
  // What a record holds is read.
  task->SaveAssets(folder_.path());
  options_.header = TableOptions::Header::kYes;
  TranslationTask loaded(options_, "");
  loaded.LoadAssets(folder_.path());
  EXPECT_EQ(ErrorMessage([&] { loaded.Prepare(); }), "no error");
}

TEST_F(Translation, WordsAreNotTakenFromAnotherModel) {
  TranslationTask task(options_, "");
  bool more = true;
  const auto text = [&] { return std::exchange(more, false) ? "a b" : std::string_view(); };
  const std::shared_ptr<const Tokenizer> words = TrainWords(text, 300);
  ExpectContains(ErrorMessage([&] { task.TakeTokenizer(words); }),
                 {"task.translation: the other model's tokenizer is of words"});
}

}  // namespace
}  // namespace cistern
