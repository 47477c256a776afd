#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "cistern/base/error.h"
#include "cistern/io/test_folder.h"
#include "cistern/models/classifier.h"
#include "cistern/tasks/classify_task.h"
#include "cistern/tasks/confusion.h"
#include "cistern/tasks/evaluate.h"

namespace cistern {
namespace {

void WriteText(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// 60 rows of three classes of very different sizes.
std::string Reviews() {
  std::string text = "text\tlabel\n";
  for (int i = 0; i < 60; ++i) {
    text += "row " + std::to_string(i) + (i % 2 ? " is fine" : " is bad, all of it") + "\t" +
            (i < 42   ? "good"
             : i < 54 ? "bad"
                      : "odd") +
            "\n";
  }
  return text;
}

ClassifyTask::Options Options(const std::string& data) {
  ClassifyTask::Options o;
  o.data = data;
  o.length = 32;
  return o;
}

std::shared_ptr<Classifier> ModelOf(const ClassifyTask& task) {
  ModelConfig c;
  c.kind = "encoder_classifier";
  c.dim = 16, c.layers = 1, c.heads = 2, c.init_std = 0.3;
  task.Complete(c);
  auto model = std::dynamic_pointer_cast<Classifier>(MakeModel(c, 3));
  model->eval();
  return model;
}

// Every row of a split, as (line, target).
std::map<int64_t, int64_t> Rows(const ClassifyTask& task, Split split) {
  std::map<int64_t, int64_t> rows;
  const auto reader = task.Read(split, {});
  while (const auto batch = reader->Next()) {
    for (int64_t r = 0; r < batch->rows; ++r)
      rows[(*batch)["lines"][r].item<int64_t>()] = (*batch)["targets"][r].item<int64_t>();
  }
  return rows;
}

TEST(Confusion, FiguresByHand) {
  // scikit-learn 1.5 on expected 0 0 0 1 1 2, predicted 0 0 1 1 1 0: f1 of 2/3, 4/5, 0.
  const Confusion c{3, {2, 1, 0, 0, 2, 0, 1, 0, 0}};
  EXPECT_NEAR(c.Accuracy(), 4.0 / 6, 1e-12);
  EXPECT_NEAR(c.MacroF1(), (2.0 / 3 + 0.8) / 3, 1e-12);
  // (4*6 - (3*3 + 2*3 + 1*0)) / sqrt((36 - 14) (36 - 18))
  EXPECT_NEAR(c.Matthews(), 9 / std::sqrt(22.0 * 18.0), 1e-12);
  EXPECT_EQ((Confusion{2, {5, 0, 3, 0}}).Matthews(), 0);
  // A class that is neither expected nor predicted has no F1; one that is either has one, of 0.
  EXPECT_NEAR((Confusion{3, {2, 1, 0, 0, 2, 0, 0, 0, 0}}).MacroF1(), 0.8, 1e-12);
  EXPECT_NEAR((Confusion{2, {5, 0, 3, 0}}).MacroF1(), 10.0 / 13 / 2, 1e-12);
  EXPECT_TRUE(std::isnan((Confusion{2, {0, 0, 0, 0}}).MacroF1()));
}

TEST(Classify, SplitsKeepTheSharesOfTheClassesAndLeaveNothingOut) {
  const TestFolder folder;
  const std::string path = folder / "reviews.tsv";
  WriteText(path, Reviews());
  ClassifyTask task(Options(path), "");
  task.Prepare();
  std::set<int64_t> all;
  const std::map<int64_t, int64_t> sizes[] = {Rows(task, Split::kTrain), Rows(task, Split::kValid),
                                              Rows(task, Split::kTest)};
  for (const auto& rows : sizes) {
    for (const auto& [line, target] : rows) {
      EXPECT_TRUE(all.insert(line).second) << "line " << line << " is in two splits";
      // classes in the order of their names: bad, good, odd; the header is line 1
      EXPECT_EQ(target, line - 2 < 42 ? 1 : line - 2 < 54 ? 0 : 2);
    }
  }
  EXPECT_EQ(all.size(), 60u);
  for (const int split : {1, 2}) {
    std::map<int64_t, int> counts;
    for (const auto& [line, target] : sizes[split]) ++counts[target];
    EXPECT_EQ(counts[1], 4);
    EXPECT_EQ(counts[0], 1);
    EXPECT_EQ(counts[2], 1);
  }
  ClassifyTask again(Options(path), "");
  again.Prepare();
  EXPECT_EQ(Rows(again, Split::kTest), sizes[2]);
  ClassifyTask::Options other = Options(path);
  other.split_seed = 2;
  ClassifyTask reseeded(other, "");
  reseeded.Prepare();
  EXPECT_NE(Rows(reseeded, Split::kTest), sizes[2]);
}

TEST(Classify, RowsArePaddedToTheLengthWhereItIsAsked) {
  const TestFolder folder;
  const std::string path = folder / "reviews.tsv";
  WriteText(path, Reviews());
  ClassifyTask::Options options = Options(path);
  ClassifyTask longest(options, "");
  longest.Prepare();
  options.pad_to = PadTo::kLength;
  ClassifyTask task(options, "");
  task.Prepare();
  ModelConfig plain, whole;
  longest.Complete(plain);
  task.Complete(whole);
  EXPECT_EQ(whole.vocab_size, plain.vocab_size + 1);  // padding has an id of its own
  const Batch want = longest.TrainBatch(1, 2, 8), got = task.TrainBatch(1, 2, 8);
  ASSERT_EQ(got["ids"].sizes(), at::IntArrayRef({8, 32}));
  EXPECT_LT(want["ids"].size(1), 32);
  EXPECT_TRUE(at::equal(got["lengths"], want["lengths"]));
  EXPECT_EQ(got.tokens, want.tokens);
  for (int64_t r = 0; r < 8; ++r) {
    const int64_t n = got["lengths"][r].item<int64_t>();
    EXPECT_TRUE(at::equal(got["ids"][r].narrow(0, 0, n), want["ids"][r].narrow(0, 0, n)));
    EXPECT_TRUE((got["ids"][r].narrow(0, n, 32 - n) == plain.vocab_size).all().item<bool>());
  }
  plain.padding = PaddingKind::kSeen;
  try {
    longest.Complete(plain);
    FAIL() << "padding without a number was accepted";
  } catch (const UsageError& e) {
    EXPECT_NE(std::string(e.what()).find("task.pad_to=length"), std::string::npos);
  }
  task.Complete(plain);
}

TEST(Classify, MetricsAreThoseOfTheRows) {
  const TestFolder folder;
  WriteText(folder / "reviews.tsv", Reviews());
  ClassifyTask task(Options(folder / "reviews.tsv"), "");
  task.Prepare();
  const auto model = ModelOf(task);
  double nats = 0, right = 0, rows = 0, majority = 0;
  const auto reader = task.Read(Split::kTrain, {1});
  at::NoGradGuard guard;
  while (const auto batch = reader->Next()) {
    const at::Tensor p =
        at::softmax(model->Logits(model->ReadOf(batch->tensors)).to(at::kDouble), 1)[0];
    const int64_t target = (*batch)["targets"].item<int64_t>();
    nats -= std::log(p[target].item<double>());
    right += p.argmax().item<int64_t>() == target;
    majority += target == 1;
    ++rows;
  }
  for (const int64_t at_once : {1, 7, 100}) {
    const Json m = task.Metrics(Evaluate(task, *model, Split::kTrain, {{at_once}}).score);
    EXPECT_EQ(m["examples"], int64_t(rows));
    EXPECT_NEAR(m["accuracy"].get<double>(), 100 * right / rows, 1e-9);
    EXPECT_NEAR(m["log_loss"].get<double>(), nats / rows, 1e-5);
    EXPECT_NEAR(m["majority"].get<double>(), 100 * majority / rows, 1e-9);
  }
}

TEST(Classify, AModelFolderPredictsWithoutTheData) {
  const TestFolder folder;
  const std::string path = folder / "reviews.tsv", assets = folder / "model";
  WriteText(path, Reviews());
  std::filesystem::create_directories(assets);
  ClassifyTask task(Options(path), "");
  task.Prepare();
  task.SaveAssets(assets);
  const auto model = ModelOf(task);
  std::filesystem::remove(path);
  WriteText(folder / "new.csv", "label,text\nodd,\"two, \"\"three\"\"\nlines\"\ngood,four\n");
  WriteText(folder / "bare.csv", "text\nfour\n");
  ClassifyTask loaded(Options(path), "");
  loaded.LoadAssets(assets);
  at::NoGradGuard guard;
  const auto batch = loaded.ReadFile(folder / "new.csv", false, {})->Next();
  const std::vector<Json> said = loaded.Predict(*model, *batch);
  ASSERT_EQ(said.size(), 2u);
  EXPECT_EQ(said[0]["line"], 2);
  EXPECT_EQ(said[1]["line"], 4);
  double sum = 0;
  for (const auto& [name, p] : said[0]["probabilities"].items()) sum += p.get<double>();
  EXPECT_NEAR(sum, 1, 1e-9);
  EXPECT_TRUE(said[0]["probabilities"].contains("odd"));
  const std::vector<Json> alone =
      loaded.Predict(*model, *loaded.ReadFile(folder / "bare.csv", false, {})->Next());
  EXPECT_NEAR(alone[0]["probability"].get<double>(), said[1]["probability"].get<double>(), 1e-6);
  const auto reader = loaded.ReadFile(folder / "new.csv", true, {});
  EXPECT_EQ(loaded.Metrics(Evaluate(loaded, *model, *reader).score)["examples"], 2);
  EXPECT_THROW(loaded.ReadFile(folder / "bare.csv", true, {}), Error);
}

TEST(Classify, NumbersAndRegression) {
  const TestFolder folder;
  std::string table = "a,b,y\n";
  for (int i = 0; i < 100; ++i) {
    table += std::to_string(i) + "," + (i == 7 ? "" : std::to_string(i % 10)) + "," +
             std::to_string(2.5 * i) + "\n";
  }
  WriteText(folder / "n.csv", table);
  ClassifyTask::Options o = Options(folder / "n.csv");
  o.input = ClassifyTask::Input::kNumbers, o.regression = true, o.label_column = "y", o.bins = 4;
  ClassifyTask task(o, "");
  task.Prepare();
  const auto model = ModelOf(task);
  EXPECT_EQ(model->config().classes, 1);
  EXPECT_EQ(model->config().vocab_size, 2 * 5);
  const Batch batch = *task.Read(Split::kTrain, {100})->Next();
  for (int64_t r = 0; r < batch.rows; ++r) {
    const int64_t i = batch["lines"][r].item<int64_t>() - 2;
    const int64_t a = batch["ids"][r][0].item<int64_t>(), b = batch["ids"][r][1].item<int64_t>();
    EXPECT_NEAR(double(a), 1 + double(i) / 25, 1.2) << i;  // quarters
    EXPECT_EQ(b == 5, i == 7);                             // the missing one
  }
  // Of a model that always says 0 (the mean): rmse is that of the mean, r2 about 0.
  at::NoGradGuard guard;
  for (at::Tensor& p : model->parameters()) p.zero_();
  const Json m = task.Metrics(Evaluate(task, *model, Split::kTest).score);
  EXPECT_NEAR(m["rmse"].get<double>(), m["mean_rmse"].get<double>(), 1e-6);
  EXPECT_LT(m["r2"].get<double>(), 0.01);
}

TEST(Classify, NumbersAreDecimalWhateverTheirSize) {
  const TestFolder folder;
  const std::string path = folder / "n.csv";
  const auto message = [&](const std::string& cell) {
    std::string table = "a,y\n" + cell + ",0\n";
    for (int i = 0; i < 40; ++i) table += StrCat(i, ",", i % 2, "\n");
    WriteText(path, table);
    ClassifyTask::Options o = Options(path);
    o.input = ClassifyTask::Input::kNumbers, o.label_column = "y", o.bins = 4;
    return ErrorMessage([&] { ClassifyTask(o, "").Prepare(); });
  };
  for (const char* cell : {"1e-310", "1e-400", " 2", "2 ", "+2"})
    EXPECT_EQ(message(cell), "no error") << cell;
  for (const char* cell : {"0x10", "1e400", "nan", "2x"})
    EXPECT_EQ(message(cell), path + ":2: expected a number as column a, got '" + cell + "'");
}

TEST(Classify, FoldersOfClasses) {
  const TestFolder folder;
  for (const char* c : {"ham", "spam"}) {
    std::filesystem::create_directories(folder / "mail" + "/" + c);
    for (int i = 0; i < 10; ++i)
      WriteText(folder / "mail" + "/" + c + "/" + std::to_string(i) + ".txt",
                (i % 2 ? "\xef\xbb\xbf" : "") + std::string(c) + "!");
  }
  std::filesystem::create_directories(folder / "mail/ham/more");
  ClassifyTask task(Options(folder / "mail"), "");
  task.Prepare();
  EXPECT_EQ(task.DataSummary()["classes"]["ham"], 8);
  const Batch train = *task.Read(Split::kTrain, {})->Next();
  EXPECT_LE(train["ids"].max().item<int64_t>(), 'z');  // no byte order marks
  EXPECT_NE(task.DataSummary()["notes"].dump().find("skipped 1 folder: "), std::string::npos);
  EXPECT_EQ(&TaskOfData(folder / "mail"), &FindTask("classify"));
}

// aclImdb's folders, in the protocol of Long Range Arena's Text: bytes + 1 and 0 for padding, the
// test reviews also for validation, the reviews without a label left out.
TEST(Classify, ReviewsInBytesAsInLongRangeArena) {
  const TestFolder folder;
  const std::string root = folder / "aclImdb";
  for (const char* part : {"train", "test"}) {
    for (const char* c : {"pos", "neg", "unsup"}) {
      if (part == std::string("test") && c == std::string("unsup")) continue;
      std::filesystem::create_directories(root + "/" + part + "/" + c);
      for (int i = 0; i < 6; ++i)
        WriteText(root + "/" + part + "/" + c + "/" + std::to_string(i) + "_7.txt",
                  std::string(1, c[0]) + part[1] + std::string(size_t(i), '\xff'));
    }
    WriteText(root + "/" + part + "/urls_pos.txt", "http://example.org");
  }
  WriteText(root + "/README", "about");
  EXPECT_EQ(&TaskOfData(root), &FindTask("classify"));
  ClassifyTask::Options o = Options(root);
  o.length = 5;
  o.byte_ids = ClassifyTask::ByteIds::kShifted;
  o.valid_from = ClassifyTask::ValidFrom::kTest;
  ClassifyTask task(o, "");
  task.Prepare();
  EXPECT_EQ(task.DataSummary()["classes"], (Json{{"neg", 6}, {"pos", 6}}));
  EXPECT_EQ(task.DataSummary()["valid"], 12);
  EXPECT_EQ(task.DataSummary()["test"], 12);
  EXPECT_NE(task.DataSummary()["notes"].dump().find("not honest"), std::string::npos);
  const Batch valid = *task.Read(Split::kValid, {12})->Next(),
              test = *task.Read(Split::kTest, {12})->Next();
  EXPECT_TRUE(at::equal(valid["ids"], test["ids"]));
  EXPECT_EQ(test["ids"].size(1), 5);
  for (int64_t r = 0; r < 12; ++r) {  // sorted by name: neg, then pos
    const int64_t count = std::min<int64_t>(5, 2 + r % 6);
    EXPECT_EQ(test["lengths"][r].item<int64_t>(), count);
    for (int64_t t = 0; t < 5; ++t) {
      const int64_t byte = t == 0 ? (r < 6 ? 'n' : 'p') : t == 1 ? 'e' : 0xff;
      EXPECT_EQ(test["ids"][r][t].item<int64_t>(), t < count ? byte + 1 : 0) << r << " " << t;
    }
  }
  EXPECT_EQ(ModelOf(task)->config().vocab_size, 257);
  const auto message = [&](auto change) {
    ClassifyTask::Options x = Options(root);
    change(x);
    return ErrorMessage([&] { ClassifyTask(x, ""); });
  };
  const auto expect = [](const std::string& said, const std::string& phrase) {
    EXPECT_NE(said.find(phrase), std::string::npos) << said;
  };
  expect(message([](auto& x) {
           x.byte_ids = ClassifyTask::ByteIds::kShifted, x.tokenizer = TokenizerKind::kBpe;
         }),
         "tokenizer=bytes");
  expect(message([](auto& x) { x.test = "other.tsv"; }), "omit test");
  expect(
      message([](auto& x) { x.valid_from = ClassifyTask::ValidFrom::kTest, x.valid_share = 0.3; }),
      "omit valid and valid_share");
  expect(message([](auto& x) { x.tokenizer = TokenizerKind::kBytes, x.vocab_size = 300; }),
         "vocab_size=300");
  expect(message([](auto& x) {
           x.input = ClassifyTask::Input::kNumbers, x.tokenizer = TokenizerKind::kBpe;
           x.vocab_size = 300;
         }),
         "vocab_size=300");
  expect(message([](auto& x) { x.bins = 9; }), "bins=9");
  expect(message([](auto& x) {
           x.regression = true, x.class_weights = ClassifyTask::ClassWeights::kBalanced;
         }),
         "class_weights=balanced");
}

// Two texts in a row, with a byte between them that no text has.
TEST(Classify, PairsOfTexts) {
  const TestFolder folder;
  std::string rows = "id\tlabel\tasked\tsaid\n";
  for (int i = 0; i < 30; ++i) rows += StrCat(i, "\t", i % 2 ? "yes" : "no", "\tq", i, "\ts\n");
  WriteText(folder / "rows.tsv", rows);
  WriteText(folder / "few.tsv",
            "id\tlabel\tasked\tsaid\n0\tno\tab\tcde\n1\tyes\tabcdefgh\txyz\n"
            "2\tno\tab\tuvwxyz\n3\tyes\tabcdefgh\tstuvwxyz\n");
  ClassifyTask::Options o = Options(folder / "rows.tsv");
  o.test = folder / "few.tsv";
  o.text_column = "asked", o.second_column = "said", o.length = 8;
  ClassifyTask task(o, "");
  task.Prepare();
  const Batch batch = *task.Read(Split::kTest, {})->Next();
  const auto text = [&](int64_t r) {
    std::string s;
    for (int64_t t = 0; t < batch["lengths"][r].item<int64_t>(); ++t)
      s += char(batch["ids"][r][t].item<int64_t>());
    return s;
  };
  EXPECT_EQ(text(0),
            "ab\x1e"
            "cde");
  EXPECT_EQ(text(1), "abcd\x1exyz");  // the longer one is cut
  EXPECT_EQ(text(2), "ab\x1euvwxy");
  EXPECT_EQ(text(3), "abc\x1estuv");  // both are
  ModelConfig config;
  task.Complete(config);
  EXPECT_EQ(config.vocab_size, 256);
  EXPECT_EQ(task.DataSummary()["notes"][0], "label: column label; input: columns asked and said");
  // From the model's folder alone, without labels.
  const auto model = ModelOf(task);
  task.SaveAssets(folder.path());
  ClassifyTask loaded(o, "");
  loaded.LoadAssets(folder.path());
  WriteText(folder / "new.tsv", "said\tasked\ncde\tab\n");
  const Batch one = *loaded.ReadFile(folder / "new.tsv", false, {})->Next();
  EXPECT_TRUE(at::equal(one["ids"][0], batch["ids"][0].narrow(0, 0, 6)));
  EXPECT_EQ(loaded.Predict(*model, one).size(), 1u);
  // BPE is learned from both.
  o.tokenizer = TokenizerKind::kBpe, o.vocab_size = 257;
  WriteText(folder / "rows.tsv", std::string("label\tasked\tsaid\n") +
                                     "a\tx\tzz zz zz\nb\ty\tzz zz\na\tx\tzz\nb\ty\tzz\n"
                                     "a\tx\tzz\nb\ty\tzz\na\tx\tzz\nb\ty\tzz\n");
  o.test = "";
  ClassifyTask bpe(o, "");
  bpe.Prepare();
  EXPECT_EQ((*bpe.Read(Split::kTest, {})->Next())["ids"].max().item<int64_t>(), 256);
  // And from each alone: no more than "zz" and " zz" occurs twice.
  o.vocab_size = 300;
  ClassifyTask alone(o, "");
  alone.Prepare();
  alone.Complete(config);
  EXPECT_LE(config.vocab_size, 258);
  o.vocab_size = 257;
  o.text_column = "";
  const auto refusal = [&] { return ErrorMessage([&] { ClassifyTask(o, ""); }); };
  EXPECT_NE(refusal().find("name the other text's column too"), std::string::npos);
  o.text_column = "said";
  EXPECT_NE(refusal().find("name the other text's column too"), std::string::npos);
  o.text_column = "asked", o.input = ClassifyTask::Input::kNumbers;
  o.tokenizer = TokenizerKind::kBytes;
  EXPECT_NE(refusal().find("second_column is of texts"), std::string::npos);
}

TEST(Classify, ErrorsNameThePlace) {
  const TestFolder folder;
  const std::string path = folder / "t.tsv";
  const auto message = [&](const std::string& text, auto change) {
    WriteText(path, text);
    ClassifyTask::Options o = Options(path);
    change(o);
    return ErrorMessage([&] { ClassifyTask(o, "").Prepare(); });
  };
  const auto as_is = [](ClassifyTask::Options&) {};
  const auto expect = [](const std::string& said, const std::string& phrase) {
    EXPECT_NE(said.find(phrase), std::string::npos) << said;
  };
  expect(message("text\tlabel\na b\tx\nonly\n", as_is), path + ":3: 1 cells, and 2 columns");
  expect(message("text\tlabel\na b\tx\nc d\t\n", as_is), path + ":3: the label is empty");
  expect(message("text\tlabel\na\tx\nb\tx\n", as_is), "every row has the label 'x'");
  expect(message("text\tlabel\na\t1.5\nb\t2.5\nc\t3.5\n", as_is), "regression=true");
  expect(message("one\ttwo\tthree\naaaa\tb\tc\n", as_is), "label_column=one");
  expect(message("text\tlabel\na\tx\n", [](auto& o) { o.label_column = "lable"; }),
         "did you mean 'label'?");
  expect(message("", as_is), "has no rows");
  expect(message("text\tlabel\na\tmany\nb\t2\n", [](auto& o) { o.regression = true; }),
         path + ":2: expected a number as the label, got 'many'");
  // A bad row is passed over, and counted, where asked.
  WriteText(path, Reviews() + "broken\n");
  ClassifyTask::Options o = Options(path);
  o.skip_bad_rows = true;
  ClassifyTask task(o, "");
  task.Prepare();
  EXPECT_EQ(task.DataSummary()["skipped_rows"], 1);
}

// Not only what the table cannot read: with skip_bad_rows a cell or a label that is no number stops
// nothing, nor, once classes are known, does another class.
TEST(Classify, RowsThatTheTaskCannotReadAreSkippedWhereAsked) {
  const TestFolder folder;
  const std::string path = folder / "n.csv", head = "a,b,y\n";
  const auto rows = [](int count) {
    std::string text;
    for (int i = 0; i < count; ++i) text += StrCat(i, ",", 2 * i, ",", i % 2, "\n");
    return text;
  };
  ClassifyTask::Options o = Options(path);
  o.input = ClassifyTask::Input::kNumbers, o.label_column = "y", o.bins = 4;
  for (const bool regression : {false, true}) {
    o.regression = regression, o.skip_bad_rows = false;
    WriteText(path, head + rows(40));
    ClassifyTask strict(o, "");
    strict.Prepare();
    WriteText(path, head + "n/a,2,0\n" + rows(40) + (regression ? "3,4,unknown\n" : ""));
    EXPECT_NE(ErrorMessage([&] {
                ClassifyTask(o, "").Prepare();
              }).find("n.csv:2: expected a number as column a, got 'n/a'"),
              std::string::npos);
    o.skip_bad_rows = true;
    ClassifyTask task(o, "");
    task.Prepare();
    EXPECT_EQ(task.DataSummary()["skipped_rows"], regression ? 2 : 1);
    EXPECT_EQ(task.DataSummary()["xxh64"], strict.DataSummary()["xxh64"]);
    const std::string file = folder / "more.csv";
    WriteText(file, head + "1,2,1\n1,x,1\n3,4,many\n5,6,0\n");
    const auto lines = [&](bool labelled, int64_t skipped) {
      const auto reader = task.ReadFile(file, labelled, {});
      const Batch batch = *reader->Next();
      EXPECT_EQ(reader->skipped(), skipped);
      EXPECT_FALSE(reader->Next());
      return batch["lines"];
    };
    EXPECT_TRUE(at::equal(lines(true, 2), at::tensor({2, 5}, at::kLong)));
    EXPECT_TRUE(at::equal(lines(false, 1), at::tensor({2, 4, 5}, at::kLong)));
    EXPECT_NE(ErrorMessage([&] { strict.ReadFile(file, true, {})->Next(); }).find("more.csv:3"),
              std::string::npos);
  }
}

TEST(Classify, KeysWithoutEffectAreRefused) {
  const TestFolder folder;
  ClassifyTask::Options o = Options(folder / "mail");
  for (const char* c : {"ham", "spam"}) {
    std::filesystem::create_directories(o.data + "/" + c);
    for (int i = 0; i < 10; ++i) WriteText(StrCat(o.data, "/", c, "/", i, ".txt"), "!");
  }
  const auto refused = [&](const std::string& key, auto change) {
    ClassifyTask::Options x = o;
    change(x);
    const std::string said = ErrorMessage([&] { ClassifyTask(x, "").Prepare(); });
    EXPECT_NE(said.find("task.classify." + key + " has no effect with"), std::string::npos) << said;
  };
  const auto header = [](auto& x) { x.header = TableOptions::Header::kYes; };
  refused("text_column", [](auto& x) { x.text_column = "text"; });
  refused("label_column", [](auto& x) { x.label_column = "label"; });
  refused("header", header);
  o.test = o.data, o.valid_from = ClassifyTask::ValidFrom::kTest;
  refused("split_seed", [](auto& x) { x.split_seed = 3; });
  o.test = "", o.valid_from = ClassifyTask::ValidFrom::kShare;
  WriteText(folder / "rows.jsonl", "{\"text\": \"a\", \"label\": \"b\"}\n");
  o.data = folder / "rows.jsonl";
  refused("header", header);
  o.valid = o.data;
  refused("valid_share", [](auto& x) { x.valid_share = 0.2; });
  o.test = o.data;
  refused("test_share", [](auto& x) { x.test_share = 0.2; });
  refused("split_seed", [](auto& x) { x.split_seed = 2; });
  // What a record holds is read.
  WriteText(folder / "reviews.tsv", Reviews());
  o = Options(folder / "reviews.tsv");
  ClassifyTask task(o, "");
  task.Prepare();
  task.SaveAssets(folder.path());
  o.valid = o.data, o.valid_share = 0.2;
  ClassifyTask loaded(o, "");
  loaded.LoadAssets(folder.path());
  EXPECT_EQ(ErrorMessage([&] { loaded.Prepare(); }), "no error");
}

}  // namespace
}  // namespace cistern
