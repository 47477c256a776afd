// Tables, classes and settings that look right and are not: what comes of them is refused or said.
#include <cmath>
#include <fstream>

#include "cistern/cli/testing_cli.h"
#include "cistern/io/jsonl.h"

namespace cistern {
namespace {

class HostileTest : public CliTest {
 protected:
  static void Put(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
  }

  // 60 rows of a label and a text.
  template <class F>
  static std::string Rows(const std::string& begin, const F& label, const char* end = "\n") {
    std::string text = begin;
    for (int i = 0; i < 60; ++i)
      text += StrCat(label(i), ",", i % 2 ? "good nice fine w" : "bad awful poor w", i % 7, end);
    return text;
  }
  static std::string PosNeg(int i) { return i % 2 ? "pos" : "neg"; }

  static Words TrainRows(const std::string& data, const std::string& out, const Words& more = {}) {
    Words words = {"train", "--data", data, "--out", out, "--threads", "1", "--steps", "2"};
    for (const char* s : {"model.dim=16", "model.heads=2", "model.layers=1", "train.batch=4",
                          "task.tokenizer=bytes", "task.length=32"}) {
      words = words + Words{"--set", s};
    }
    return words + more;
  }

  static bool Says(const Outcome& o, const std::string& phrase) {
    return o.err.find(phrase) != std::string::npos;
  }

  // A refusal before any work, with the phrase, in our words.
  static void ExpectRefused(const Outcome& o, const std::string& phrase) {
    EXPECT_TRUE(o.code == 1 || o.code == 2) << o;
    EXPECT_TRUE(Says(o, phrase)) << "not said: " << phrase << "\n" << o;
    EXPECT_FALSE(Says(o, "exception")) << o;
  }
};

TEST_F(HostileTest, AResumedRunTakesNoSettingThatWasUnset) {
  const std::string run = folder_ / "run", text = *shared_ / "text.txt";
  ASSERT_EQ(Run(Train(text, run)).code, 0);
  const Words resume = {"train", "--resume", "--out", run, "--threads", "1", "--steps", "5"};
  for (const char* s :
       {"model.layer_drop=0.5", "model.init.linear=xavier_uniform",
        "model.decoder.attention_dropout=0.5", "model.layer_options.0.latte.latents=8",
        "model.attention_options.latte.latents=8"}) {
    ExpectRefused(Run(resume + Words{"--set", s}),
                  "was begun with " + std::string(s).substr(0, std::string(s).find('=')));
  }
  // What the default is, as it was.
  const Outcome same = Run(resume + Words{"--set", "model.layer_drop=0"});
  EXPECT_EQ(same.code, 0) << same;
  // The other way round: what was set may not be unset.
  const std::string drop = folder_ / "drop";
  ASSERT_EQ(Run(Train(text, drop, {"--set", "model.layer_drop=0.25"})).code, 0);
  ExpectRefused(Run({"train", "--resume", "--out", drop, "--threads", "1", "--steps", "5", "--set",
                     "model.layer_drop=0"}),
                "was begun with model.layer_drop=0.25");
}

TEST_F(HostileTest, ByteOrderMarksBelongToNoCell) {
  const auto classes = [&](const std::string& name, const std::string& text, const Words& more) {
    Put(folder_ / name, text);
    const Outcome o = Run(TrainRows(folder_ / name, folder_ / ("of-" + name), more));
    EXPECT_EQ(o.code, 0) << o;
    return ReadJsonFile(folder_ / ("of-" + name + "/classify.json"));
  };
  const std::string mark = "\xef\xbb\xbf";
  const auto quoted = [](int i) { return "\"" + PosNeg(i) + "\""; };
  const Json plain = classes("a.csv", Rows("label,text\n", PosNeg), {}),
             marked = classes("b.csv", Rows(mark + "\"label\",\"text\"\r\n", quoted, "\r\n"), {}),
             bare = classes("c.csv", Rows(mark, PosNeg),
                            {"--set", "task.header=no", "--set", "task.label_column=1"});
  EXPECT_EQ(marked["label_column"], "label");
  EXPECT_EQ(marked, plain);
  EXPECT_EQ(bare["classes"], plain["classes"]);
}

TEST_F(HostileTest, LabelsThatCannotBeWrittenDown) {
  const std::string path = folder_ / "a.csv";
  Put(path, Rows("label,text\n", [](int i) { return i == 4 ? std::string("\xff") : PosNeg(i); }));
  ExpectRefused(Run(TrainRows(path, folder_ / "a")), path + ":6: the label is not valid UTF-8");
  Put(path, Rows("la\xff"
                 "bel,text\n",
                 PosNeg));
  ExpectRefused(Run(TrainRows(path, folder_ / "b")), "is not valid UTF-8");
}

TEST_F(HostileTest, LabelsThatLookAlikeAreSaid) {
  const std::string path = folder_ / "a.csv";
  const char* labels[] = {"1", "1.0", "2"};
  Put(path, Rows("label,text\n", [&](int i) { return labels[i % 3]; }));
  const Outcome numbers = Run(TrainRows(path, folder_ / "a"));
  EXPECT_EQ(numbers.code, 0) << numbers;
  EXPECT_TRUE(Says(numbers, "the labels '1' and '1.0' are two classes")) << numbers;
  Put(path, Rows("label,text\n", [&](int i) { return i % 2 ? "Pos" : i % 4 ? "pos " : "neg"; }));
  const Outcome words = Run(TrainRows(path, folder_ / "b"));
  EXPECT_TRUE(Says(words, "the labels 'Pos' and 'pos ' are two classes")) << words;
  Put(path, Rows("label,text\n", PosNeg));
  EXPECT_FALSE(Says(Run(TrainRows(path, folder_ / "c")), "two classes"));
}

TEST_F(HostileTest, ColumnsOfPredictionsHaveNamesOfTheirOwn) {
  const std::string path = folder_ / "a.csv", run = folder_ / "run";
  Put(path, Rows("label,text\n", [](int i) { return i % 2 ? "\"a\tb\"" : "\"a b\""; }));
  ASSERT_EQ(Run(TrainRows(path, run)).code, 0);
  ExpectRefused(Run({"predict", run, path}), "two columns would be named 'probabilities.a b'");
  const Outcome json = Run({"predict", run, path, "--json"});
  EXPECT_EQ(json.code, 0) << json;
  EXPECT_NE(json.out.find("\"a\\tb\""), std::string::npos) << json;
  // A zero byte ends no line.
  const std::string zero = folder_ / "zero";
  Put(path, Rows("label,text\n", [](int i) { return i % 2 ? std::string("a\0b", 3) : "c"; }));
  ASSERT_EQ(Run(TrainRows(path, zero)).code, 0);
  const Outcome o = Run({"predict", zero, path});
  EXPECT_EQ(o.code, 0) << o;
  EXPECT_NE(o.out.find("probabilities.a b\tprobabilities.c\n"), std::string::npos) << o;
}

TEST_F(HostileTest, ColumnsBeyondTheLengthAreNotLeftOut) {
  const std::string path = folder_ / "a.csv";
  std::string text = "label";
  for (int c = 0; c < 40; ++c) text += StrCat(",c", c);
  for (int i = 0; i < 60; ++i) {
    text += "\n" + PosNeg(i);
    for (int c = 0; c < 40; ++c) text += StrCat(",", (i + c) % 5);
  }
  Put(path, text + "\n");
  const Words numbers = {"--set", "task.input=numbers"};
  ExpectRefused(Run(TrainRows(path, folder_ / "a", numbers)),
                "40 columns of numbers, and task.length=32 would leave out the last 8");
  EXPECT_EQ(Run(TrainRows(path, folder_ / "b", numbers + Words{"--set", "task.length=40"})).code,
            0);
}

// Figures of a regression whose labels are far from 0 and close together, against plain loops over
// the predictions, about the mean of the labels that were trained on.
TEST_F(HostileTest, RegressionFarFromZero) {
  const std::string path = folder_ / "a.csv", run = folder_ / "run";
  const double offset = 1 << 30;  // labels and offset are exact in double
  const auto label = [&](int i) { return offset + (i * 37 % 60) / 64.0; };
  const auto cell = [&](int i) { return Json(label(i)).dump(); };
  Put(path, Rows("label,text\n", cell));
  const Outcome trained = Run(TrainRows(path, run, {"--set", "task.regression=true"}));
  ASSERT_EQ(trained.code, 0) << trained;
  const Outcome eval = Run({"eval", run, path, "--json"}),
                predicted = Run({"predict", run, path, "--json"});
  ASSERT_EQ(eval.code, 0) << eval;
  std::vector<double> values;
  for (size_t begin = 0, end; begin < predicted.out.size(); begin = end + 1) {
    end = predicted.out.find('\n', begin);
    values.push_back(ParseJson(predicted.out.substr(begin, end - begin), "t")["value"]);
  }
  ASSERT_EQ(values.size(), 60u);
  const double mean = ReadJsonFile(run + "/classify.json")["mean"];
  long double squares = 0, own = 0, spread = 0, trained_spread = 0;
  for (int i = 0; i < 60; ++i) own += (label(i) - offset) / 60;
  for (int i = 0; i < 60; ++i) {
    squares += std::pow((long double)(values[size_t(i)]) - label(i), 2);
    spread += std::pow(label(i) - offset - own, 2);
    trained_spread += std::pow((long double)(label(i)) - mean, 2);
  }
  const Json figures = ParseJson(eval.out, "t");
  const std::function<double(const Json&, const std::string&)> find =
      [&](const Json& json, const std::string& key) -> double {
    if (json.is_object() && json.contains(key)) return json[key].get<double>();
    for (const auto& [name, inner] : json.items()) {
      if (inner.is_object()) return find(inner, key);
    }
    return std::nan("");
  };
  // Predictions are read back as they are printed, 2^30 with an error of 2^-23.
  EXPECT_NEAR(find(figures, "rmse"), double(std::sqrt(squares / 60)), 1e-5) << eval;
  EXPECT_NEAR(find(figures, "mean_rmse"), double(std::sqrt(trained_spread / 60)), 1e-5) << eval;
  EXPECT_NEAR(find(figures, "r2"), double(1 - squares / spread), 1e-4) << eval;
}

TEST_F(HostileTest, LabelsBeyondADouble) {
  const std::string path = folder_ / "a.csv";
  Put(path, Rows("label,text\n", [](int i) { return i % 2 ? "1e308" : "-1e308"; }));
  ExpectRefused(Run(TrainRows(path, folder_ / "a", {"--set", "task.regression=true"})),
                "the labels are too large");
}

// Refused before there is a run, whose folder the corrected command would find taken.
TEST_F(HostileTest, SmoothingOfLabelsThatAreNumbers) {
  const std::string path = folder_ / "a.csv", run = folder_ / "a";
  Put(path, Rows("label,text\n", [](int i) { return std::to_string(i % 7); }));
  const Words numbers = {"--set", "task.regression=true"};
  ExpectRefused(Run(TrainRows(path, run, numbers + Words{"--set", "train.label_smoothing=0.1"})),
                "train.label_smoothing is for classes; these labels are numbers");
  EXPECT_FALSE(std::filesystem::exists(run));
  EXPECT_EQ(Run(TrainRows(path, run, numbers)).code, 0);
}

TEST_F(HostileTest, FilesWithoutAnEnd) {
  const std::string path = folder_ / "a.toml";
  Put(path, "extends = \"/dev/zero\"\n");
  ExpectRefused(Run({"train", path, "--print-config"}), "/dev/zero: more than 1 GiB");
  Put(path, "# " + std::string(size_t{17} << 20, 'x'));
  ExpectRefused(Run({"train", path, "--print-config"}), "more than 16 MiB");
}

// What a killed process left of a cache of images goes when the cache is next used.
TEST_F(HostileTest, LeftoversOfAPathfinderCacheGo) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  ::waitpid(child, nullptr, 0);
  const std::string cache = shared_->path() + "/cache/cistern",
                    left =
                        cache + StrCat("/pathfinder-32-14-10-seed1.pathfinder.tmp-", child, "-0");
  fs::create_directories(cache);
  Put(left, "a part");
  Words words = {"train",   "--task", "pathfinder", "--out", folder_ / "run",
                 "--steps", "1",      "--threads",  "1"};
  for (const char* s : {"model.dim=16", "model.heads=2", "model.layers=1", "train.batch=1",
                        "task.examples=10", "train.order=replay", "train.eval_drop_last=true"}) {
    words = words + Words{"--set", s};
  }
  const Outcome o = Run(words);
  EXPECT_EQ(o.code, 0) << o;
  EXPECT_FALSE(fs::exists(left));
}

TEST_F(HostileTest, SkippedDocumentsAreCounted) {
  std::string text = "text\tid\n";
  for (int i = 0; i < 30; ++i)
    text +=
        StrCat("document ", i, " of more than sixty-four bytes about ships and sails and the sea\t",
               i % 10 == 0 ? "one cell too many\t" : "", i, "\n");
  Put(folder_ / "a.tsv", text);
  Words words = {"train", "--task",        "retrieval", "--data", folder_ / "a.tsv",
                 "--out", folder_ / "run", "--steps",   "1",      "--threads",
                 "1"};
  for (const char* s : {"model.dim=16", "model.heads=2", "model.layers=1", "train.batch=2",
                        "task.length=32", "train.order=drop_last", "train.eval_drop_last=true"}) {
    words = words + Words{"--set", s};
  }
  ExpectRefused(Run(words), "a.tsv:2: ");
  const Outcome o = Run(words + Words{"--set", "task.skip_bad_rows=true"});
  EXPECT_EQ(o.code, 0) << o;
  EXPECT_TRUE(Says(o, "3 rows could not be read and were skipped")) << o;
}

TEST_F(HostileTest, RowsThatArePassedOverAreCountedByEveryCommand) {
  const std::string rows = Rows("label,text\n", PosNeg), data = folder_ / "a.csv",
                    bad = folder_ / "bad.csv", model = folder_ / "a";
  Put(data, rows);
  Put(bad, rows + "one cell\n");
  ExpectRefused(Run(TrainRows(bad, folder_ / "refused")), "bad.csv:");
  const Outcome trained = Run(TrainRows(bad, folder_ / "b", {"--skip-bad-rows"}));
  EXPECT_EQ(trained.code, 0) << trained;
  EXPECT_TRUE(Says(trained, "1 rows could not be read and were skipped")) << trained;
  ASSERT_EQ(Run(TrainRows(data, model)).code, 0);
  for (const char* command : {"eval", "predict"}) {
    ExpectRefused(Run({command, model, bad}), "bad.csv:");
    const Outcome o = Run({command, model, bad, "--skip-bad-rows"});
    EXPECT_EQ(o.code, 0) << o;
    EXPECT_TRUE(Says(o, "bad.csv: 1 row could not be read and was passed over")) << o;
    // A model that was trained so passes over them as well, and says so.
    EXPECT_TRUE(Says(Run({command, folder_ / "b", bad}), "bad.csv: 1 row could not be read"));
  }
  const Outcome json = Run({"eval", model, bad, "--skip-bad-rows", "--json"});
  EXPECT_EQ(ParseJson(json.out, "stdout")["skipped_rows"], 1) << json;
  Put(folder_ / "text.txt", "some words");
  ExpectRefused(Run({"train", "--text", folder_ / "text.txt", "--skip-bad-rows"}),
                "tasks that read rows (retrieval, series, forecast, question_answering, classify, "
                "translation); the task lm reads");
}

TEST_F(HostileTest, AFileWithoutRowsIsNoPrediction) {
  const std::string data = folder_ / "a.csv", empty = folder_ / "empty.csv", model = folder_ / "a";
  Put(data, Rows("label,text\n", PosNeg));
  ASSERT_EQ(Run(TrainRows(data, model)).code, 0);
  for (const char* format : {"--quiet", "--json"}) {
    Put(empty, "label,text\n");
    ExpectRefused(Run({"predict", model, empty, format}), "empty.csv has no rows");
    Put(empty, "label,text\none cell\n");
    ExpectRefused(Run({"predict", model, empty, "--skip-bad-rows", format}),
                  "empty.csv has no rows that could be read");
  }
}

TEST_F(HostileTest, AveragesOfFewerEvaluationsAreSaid) {
  const Outcome o = Run(Train(*shared_ / "text.txt", folder_ / "run",
                              {"--set", "train.average_last=5", "--set", "train.eval_every=1"}));
  EXPECT_EQ(o.code, 0) << o;
  EXPECT_TRUE(Says(o, "train.average_last=5: the run has 3 evaluations only")) << o;
}

TEST_F(HostileTest, AHeadOfOtherClassesIsSaid) {
  Put(folder_ / "a.csv", Rows("label,text\n", PosNeg));
  Put(folder_ / "b.csv", Rows("label,text\n", [](int i) { return i % 2 ? "ham" : "spam"; }));
  ASSERT_EQ(Run(TrainRows(folder_ / "a.csv", folder_ / "a")).code, 0);
  const Words from = {"--from", folder_ / "a"};
  const std::string said = "are neg, pos, and here they are ham, spam";
  EXPECT_TRUE(Says(Run(TrainRows(folder_ / "b.csv", folder_ / "b", from)), said));
  EXPECT_FALSE(Says(Run(TrainRows(folder_ / "a.csv", folder_ / "c", from)), "here they are"));
  EXPECT_FALSE(
      Says(Run(TrainRows(folder_ / "b.csv", folder_ / "d", from + Words{"--new-head"})), said));
}

// A model folder's names of classes and edges of bins have a checksum.
TEST_F(HostileTest, ChangedNamesOfClassesAreSaid) {
  const std::string path = folder_ / "a.csv", run = folder_ / "run";
  Put(path, Rows("label,text\n", PosNeg));
  ASSERT_EQ(Run(TrainRows(path, run)).code, 0);
  const Words predict = {"predict", run, path};
  const Outcome whole = Run(predict);
  EXPECT_FALSE(Says(whole, "note: ")) << whole;
  std::string text = ReadFile(run + "/classify.json");
  text.replace(text.find("\"pos\""), 5, "\"pot\"");
  Put(run + "/classify.json", text);
  const Outcome changed = Run(predict);
  EXPECT_EQ(changed.code, 0) << changed;
  EXPECT_TRUE(Says(changed, "classify.json is not as it was written")) << changed;
  EXPECT_NE(changed.out.find("pot"), std::string::npos) << changed;
}

}  // namespace
}  // namespace cistern
