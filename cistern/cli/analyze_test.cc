// cistern analyze and cistern statistics, from outside.
#include <sys/resource.h>
#include <sys/stat.h>

#include <chrono>
#include <sstream>
#include <thread>

#include "cistern/base/testing_messages.h"
#include "cistern/cli/testing_cli.h"
#include "cistern/io/file_lock.h"

namespace cistern {
namespace {

using testing::ExpectContains;

class AnalyzeTest : public CliTest {
 protected:
  static Words Analyze(const std::string& model, const std::string& out, const Words& more = {}) {
    return Words{"analyze", model, TrainedText(), "--out", out, "--threads", "1"} + more;
  }
  // Two layers of softmax with two heads.
  std::string TrainSoftmax() {
    const std::string out = folder_ / "softmax";
    const Outcome o = Run(
        Train(TrainedText(), out, {"--set", "model.attention=softmax", "--set", "model.layers=2"}));
    EXPECT_EQ(o.code, 0) << o;
    return out;
  }
};

TEST_F(AnalyzeTest, MapsOfATextModel) {
  const std::string out = folder_ / "seen";
  const Outcome o = Run(Analyze(Trained(), out, {"--of", "maps", "--rows", "3"}));
  ASSERT_EQ(o.code, 0) << o;
  ExpectContains(o.out, {"Implied attention maps", "layer 1", "report: "});
  const std::string page = ReadFile(out + "/report.html");
  ExpectContains(page, {"<svg", "Words by weight", "data:image/png;base64,", "3 rows of "});
  EXPECT_EQ(page.find("src=\"http"), std::string::npos);
  EXPECT_EQ(page.find("<script"), std::string::npos);
  const Json maps = ReadJsonFile(out + "/maps.json"), index = ReadJsonFile(out + "/analyze.json");
  EXPECT_EQ(maps["rows"], 3);
  EXPECT_EQ(maps["tables"]["heads"].size(), 2u);
  EXPECT_NEAR(maps["tables"]["heads"][0]["row sum"].get<double>(), 1, 1e-4);
  EXPECT_EQ(index["complete"], true);
  for (const Json& file : index["analyses"]["maps"]["files"])
    EXPECT_TRUE(fs::exists(out + "/" + file.get<std::string>())) << file;
  ExpectContains(ReadFile(out + "/maps-heads.csv"), {"layer,mechanism,head,entropy"});
  // The folder is its own: another run replaces what is there.
  EXPECT_EQ(Run(Analyze(Trained(), out, {"--of", "maps", "--rows", "1", "-q"})).code, 0);
  EXPECT_EQ(ReadJsonFile(out + "/maps.json")["rows"], 1);
}

TEST_F(AnalyzeTest, FiguresOfAnEarlierAnalysisGo) {
  const std::string out = folder_ / "seen";
  ASSERT_EQ(Run(Analyze(Trained(), out, {"--of", "maps,slots", "--rows", "1"})).code, 0);
  WriteFileAtomically(out + "/notes.txt", "mine");
  ASSERT_EQ(Run(Analyze(Trained(), out, {"--of", "slots", "--rows", "1"})).code, 0);
  for (const auto& entry : Contents(out))
    EXPECT_FALSE(fs::path(entry.first).filename().string().starts_with("maps")) << entry.first;
  EXPECT_TRUE(fs::exists(out + "/slots.json"));
  EXPECT_EQ(ReadFile(out + "/notes.txt"), "mine");
  // A list that is none, or names what is not in the folder, is refused before any work.
  const auto files = Contents(out);
  for (const char* index :
       {"{", "[]", R"({"analyses": 3})", R"({"analyses": {"slots": {"files": ["../notes.txt"]}}})",
        R"({"analyses": {"slots": {"files": [3]}}})", R"({"models": {"..": {"analyses": {}}}})"}) {
    WriteFileAtomically(out + "/analyze.json", index);
    Expect(Analyze(Trained(), out, {"--of", "slots", "--rows", "1"}), 1, {out + "/analyze.json"});
  }
  // Nor one with a changed name: another file of the folder would go, and that one stay.
  std::string changed = files.at(out + "/analyze.json");
  changed.replace(changed.find("slots.json"), 10, "notes.txt");
  WriteFileAtomically(out + "/analyze.json", changed);
  Expect(Analyze(Trained(), out, {"--of", "slots", "--rows", "1"}), 1,
         {out + "/analyze.json", "do not fit their checksum"});
  auto after = Contents(out);
  after[out + "/analyze.json"] = files.at(out + "/analyze.json");
  EXPECT_EQ(after, files);
}

TEST_F(AnalyzeTest, AnAnalysisThatCouldNotBeWrittenIsBegunAgain) {
  const Words more = {"--of", "maps", "--rows", "1"};
  ASSERT_EQ(Run(Analyze(Trained(), folder_ / "whole", more)).code, 0);
  // The page does not fit, the figures before it do.
  const auto page = fs::file_size(folder_ / "whole/report.html");
  const std::string out = folder_ / "seen", prefix = folder_ / "run";
  rlimit unlimited;
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &unlimited), 0);
  const rlimit limit = {page - 1, unlimited.rlim_max};
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const pid_t child = Start(Analyze(Trained(), out, more), prefix);
  ::setrlimit(RLIMIT_FSIZE, &unlimited);
  ::signal(SIGXFSZ, handler);
  const Outcome o = Wait(child, prefix);
  ASSERT_EQ(o.code, 1) << o;
  ExpectContains(o.err, {"cannot write " + out + "/report.html"});
  EXPECT_TRUE(fs::exists(out + "/maps.json"));
  EXPECT_EQ(ReadJsonFile(out + "/analyze.json")["complete"], false);
  // The list has the figures that were written: they go.
  ASSERT_EQ(Run(Analyze(Trained(), out, {"--of", "slots", "--rows", "1"})).code, 0);
  EXPECT_FALSE(fs::exists(out + "/maps.json"));
  EXPECT_EQ(ReadJsonFile(out + "/analyze.json")["complete"], true);
}

TEST_F(AnalyzeTest, OneAnalysisAtATimeInAFolder) {
  const std::string out = folder_ / "seen";
  fs::create_directories(out);
  const FileLock lock(out + "/lock", "it");
  Expect(Analyze(Trained(), out, {"--of", "maps", "--rows", "1"}), 1,
         {"the analysis in " + out + " is in use by process"});
}

TEST_F(AnalyzeTest, TheModelsOwnDataAndJson) {
  const Outcome o = Run({"analyze", Trained(), "--out", folder_ / "own", "--of", "maps", "--rows",
                         "2", "--split", "valid", "--json", "--threads", "1"});
  ASSERT_EQ(o.code, 0) << o;
  const Json line = ParseJson(o.out, "out");
  EXPECT_EQ(line["data"], "its own data, valid");
  EXPECT_EQ(line["results"]["maps"]["rows"], 2);
}

TEST_F(AnalyzeTest, WhatDoesNotFitIsRefused) {
  const std::string out = folder_ / "out";
  Expect(Analyze(Trained(), out, {"--of", "mapps"}), 2, {"did you mean 'maps'"});
  Expect(Analyze(Trained(), out, {"--of", "memory"}), 2, {"memory does not fit", "conv_luna"});
  Expect(Analyze(Trained(), out, {"--of", "similarity"}), 2, {"of one layer", "use maps"});
  Expect(Analyze(Trained(), out, {"--of", "maps", "--set", "memory.row=1"}), 2,
         {"memory does not run"});
  Expect(Analyze(Trained(), out, {"--of", "maps", "--set", "maps.rwo=1"}), 2, {"maps.row"});
  Expect(Analyze(Trained(), out, {"--of", "maps", "--set", "maps.layers=7", "--rows", "1"}), 2,
         {"maps.layers=7", "1 layers"});
  Expect(Analyze(Trained(), out, {"--rows", "-1"}), 2, {"--rows"});
  Expect(Analyze(Trained(), out, {"--of", "maps", "--split", "valid"}), 2,
         {"--split", "give one of the two"});
  Expect({"analyze", Trained(), TrainedText()}, 2, {"--out"});
  Expect({"analyze", folder_ / "none", TrainedText(), "--out", out}, 1, {"none"});
  EXPECT_FALSE(fs::exists(out));
  // A folder of something else stays as it is.
  const auto before = Contents(Trained());
  Expect(Analyze(Trained(), Trained(), {"--of", "maps"}), 2, {"something else"});
  EXPECT_EQ(Contents(Trained()), before);
}

TEST_F(AnalyzeTest, ListTeaches) {
  const Outcome o = Run({"analyze", "--list"});
  ASSERT_EQ(o.code, 0) << o;
  ExpectContains(o.out, {"maps: ", "similarity: ", "memory: ", "slots: ", "reach: ",
                         "approximation: ", "similarity.threshold", "fits: "});
}

// What is recommended can be trained as it is printed.
TEST_F(AnalyzeTest, RecommendedReuse) {
  const std::string model = TrainSoftmax(), out = folder_ / "alike";
  const Outcome o = Run(Analyze(
      model, out, {"--of", "similarity", "--rows", "5", "--set", "similarity.threshold=0.1"}));
  ASSERT_EQ(o.code, 0) << o;
  const Json result = ReadJsonFile(out + "/similarity.json");
  const std::string settings = result["reuse_settings"].get<std::string>();
  ExpectContains(settings, {"--set model.attention=reuse"});
  ExpectContains(o.out, {settings});
  EXPECT_LT(result["reuse_parameters_share"].get<double>(), 1);
  Words words;
  for (size_t begin = 0; begin < settings.size();) {
    const size_t end = std::min(settings.find(' ', begin), settings.size());
    words.push_back(settings.substr(begin, end - begin));
    begin = end + 1;
  }
  const Outcome trained =
      Run(Train(TrainedText(), folder_ / "reuse", words + Words{"--set", "model.layers=2"}));
  ASSERT_EQ(trained.code, 0) << trained;
  EXPECT_EQ(ReadJsonFile(folder_ / "reuse/config.json")["attention"][0], "reuse");
}

TEST_F(AnalyzeTest, TrainTakesWhatIsRecommended) {
  const std::string model = TrainSoftmax(), out = folder_ / "reuse";
  const auto train = [&](const std::string& attention, const Words& from) {
    return Words{"train",
                 "--text",
                 TrainedText(),
                 "--out",
                 out,
                 "--steps",
                 "2",
                 "--set",
                 "task.length=16",
                 "--set",
                 "train.batch=2",
                 "--threads",
                 "1",
                 "--set",
                 "model.attention=" + attention} +
           from;
  };
  Expect(train("reuse:recommended", {}), 2, {"needs --from"});
  Expect(train("reuse:recommended:x", {"--from", model}), 2, {"reuse:recommended:S"});
  Expect(train("reuse:recommended", {"--from", Trained()}), 2, {"reuse:recommended"});
  EXPECT_FALSE(fs::exists(out));
  const Outcome o = Run(train("reuse:recommended:0.1", {"--from", model}));
  ASSERT_EQ(o.code, 0) << o;
  ExpectContains(o.err, {"recommends model.attention=reuse", "tensors taken"});
  EXPECT_EQ(ReadJsonFile(out + "/config.json")["attention"][0], "reuse");
}

TEST_F(AnalyzeTest, ModelsBesideEachOther) {
  const std::string other = TrainSoftmax(), out = folder_ / "both";
  const Outcome o =
      Run(Analyze(Trained(), out, {"--beside", other, "--of", "reach,slots,maps", "--rows", "2"}));
  EXPECT_EQ(o.code, 2) << o;  // softmax has no slots
  ExpectContains(o.err, {"slots does not fit", "memory of slots"});
  EXPECT_FALSE(fs::exists(out));
  const Outcome both =
      Run(Analyze(Trained(), out, {"--beside", other, "--rows", "2", "--set", "reach.changes=2"}));
  ASSERT_EQ(both.code, 0) << both;
  const Json index = ReadJsonFile(out + "/analyze.json");
  const std::string first = fs::path(Trained()).filename().string();
  EXPECT_TRUE(index["models"]["softmax"]["analyses"].contains("similarity"));
  EXPECT_TRUE(index["models"][first]["analyses"].contains("slots"));
  EXPECT_FALSE(index["models"][first]["analyses"].contains("approximation"));
  for (const char* file : {"maps.json", "reach.json", "reach-distance.csv", "reach-words.svg"})
    EXPECT_TRUE(fs::exists(out + "/softmax/" + file)) << file;
  ExpectContains(ReadFile(out + "/report.html"),
                 {"Implied attention maps: softmax", "Effective memory length: " + first,
                  "Slots at work", "Approximation to softmax"});
}

// P001 Fig 4: a model trained on text and one on random ids, each on both.
TEST_F(AnalyzeTest, FourCellsOfSimilarity) {
  const std::string model = TrainSoftmax(), random = folder_ / "random", out = folder_ / "cells";
  const Outcome trained = Run(Train(TrainedText(), random,
                                    {"--set", "model.attention=softmax", "--set", "model.layers=2",
                                     "--set", "task.random_ids=true"}));
  ASSERT_EQ(trained.code, 0) << trained;
  EXPECT_EQ(ReadJsonFile(random + "/experiment.json")["task"]["lm"]["random_ids"], true);
  const Outcome o = Run(Analyze(
      model, out,
      {"--beside", random, "--of", "similarity", "--rows", "3", "--set", "similarity.data=both"}));
  ASSERT_EQ(o.code, 0) << o;
  const Json together = ReadJsonFile(out + "/similarity-together.json")["tables"];
  ASSERT_EQ(together["cells"].size(), 4u);
  EXPECT_EQ(together["cells"][2]["model"], "random");
  EXPECT_EQ(together["cells"][3]["data"], "random ids");
  EXPECT_TRUE(fs::exists(out + "/similarity-together-cells.svg"));
  ExpectContains(o.out, {"similarity depends more on the model than on the data"});
  ExpectContains(ReadFile(out + "/report.html"), {"all models", "random on random ids"});
  EXPECT_TRUE(ReadJsonFile(out + "/analyze.json")["together"].contains("similarity"));
}

// Slots beside a vanilla Transformer: P000's claims with answers.
TEST_F(AnalyzeTest, MemoryBesideSoftmax) {
  const std::string softmax = TrainSoftmax(), abc = folder_ / "abc", out = folder_ / "both";
  ASSERT_EQ(Run(Train(TrainedText(), abc, {"--set", "model.attention=abc_mlp"})).code, 0);
  const Outcome o = Run(Analyze(abc, out, {"--beside", softmax, "--of", "memory", "--rows", "2"}));
  ASSERT_EQ(o.code, 0) << o;
  const Json together = ReadJsonFile(out + "/memory-together.json");
  EXPECT_EQ(together["tables"]["arms"].size(), 2u);
  EXPECT_TRUE(together["tables"]["arms"][0]["result"].is_number());
  ExpectContains(o.out, {"Does P000's explanation hold", "outputs are more alike"});
  // By itself it has nothing to show, unless it is asked for.
  const Outcome alone = Run(Analyze(softmax, folder_ / "alone", {"--rows", "1"}));
  ASSERT_EQ(alone.code, 0) << alone;
  EXPECT_FALSE(ReadJsonFile(folder_ / "alone/analyze.json")["analyses"].contains("memory"));
}

TEST_F(AnalyzeTest, CapacityOfTwoMechanisms) {
  const std::string out = folder_ / "capacity";
  const Outcome o = Run({"compare",
                         "--task",
                         "copy",
                         "--mechanisms",
                         "softmax,abc_mlp",
                         "--seconds",
                         "1",
                         "--threads",
                         "1",
                         "--out",
                         out,
                         "--set",
                         "model.dim=16",
                         "--set",
                         "task.sizes=2,4",
                         "--set",
                         "task.distance=3",
                         "--set",
                         "task.test_examples=16",
                         "--set",
                         "task.valid_examples=16",
                         "--decode-tokens",
                         "40"});
  ASSERT_EQ(o.code, 0) << o;
  const Json test = ReadJsonFile(out + "/compare.json")["mechanisms"]["abc_mlp"]["test"];
  ASSERT_EQ(test["capacity"]["points"].size(), 2u);
  EXPECT_EQ(test["capacity"]["points"][1][0], 4);
  EXPECT_NEAR(test["accuracy"].get<double>(),
              (test["capacity"]["points"][0][1].get<double>() +
               test["capacity"]["points"][1][1].get<double>()) /
                  2,
              1e-9);
  ExpectContains(ReadFile(out + "/report.html"), {"What each memory holds", "tokens to copy"});
}

TEST_F(AnalyzeTest, MemoryOfAModelWithSlots) {
  const std::string model = folder_ / "abc", out = folder_ / "slots";
  const Outcome o = Run(Train(TrainedText(), model, {"--set", "model.attention=abc_mlp"}));
  ASSERT_EQ(o.code, 0) << o;
  const Outcome a = Run(Analyze(model, out, {"--rows", "2"}));  // all that fit
  ASSERT_EQ(a.code, 0) << a;
  const Json index = ReadJsonFile(out + "/analyze.json");
  EXPECT_TRUE(index["analyses"].contains("maps"));
  EXPECT_TRUE(index["analyses"].contains("memory"));
  EXPECT_FALSE(index["analyses"].contains("similarity"));
  EXPECT_EQ(ReadJsonFile(out + "/memory.json")["tables"]["slots"].size(), 4u);
}

// Queries of gated slots that begin with little in their memory attend to less than 1 in all.
TEST_F(AnalyzeTest, AnAnalysisThatFailsIsLeftOut) {
  const std::string gated = folder_ / "gated", out = folder_ / "seen";
  const Outcome trained = Run(Train(
      TrainedText(), gated, {"--set", "model.attention=gated_slots", "--set", "model.layers=2"}));
  ASSERT_EQ(trained.code, 0) << trained;
  const Outcome o = Run(Analyze(gated, out, {"--rows", "2"}));
  ASSERT_EQ(o.code, 0) << o;
  ExpectContains(o.err, {"note: similarity is left out", "no probabilities"});
  const Json index = ReadJsonFile(out + "/analyze.json");
  EXPECT_EQ(index["rows"], 2);
  EXPECT_TRUE(index["analyses"].contains("maps"));
  EXPECT_FALSE(index["analyses"].contains("similarity"));
  ExpectContains(index["left_out"]["similarity"].get<std::string>(), {"no probabilities"});
  EXPECT_FALSE(fs::exists(out + "/similarity.json"));
  ExpectContains(ReadFile(out + "/report.html"), {"Left out: ", "no probabilities"});
  // Its folder is read again by the next one. A setting that helps is taken, a wrong one is said.
  const Outcome helped =
      Run(Analyze(gated, out, {"--rows", "2", "--set", "similarity.normalise=true"}));
  ASSERT_EQ(helped.code, 0) << helped;
  EXPECT_TRUE(ReadJsonFile(out + "/analyze.json")["analyses"].contains("similarity"));
  Expect(Analyze(gated, out, {"--rows", "1", "--set", "maps.layers=7"}), 2, {"maps.layers=7"});
  // What was asked for by its name fails.
  const std::string none = folder_ / "none";
  Expect(Analyze(gated, none, {"--rows", "2", "--of", "similarity"}), 1, {"no probabilities"});
  Expect(Analyze(gated, none, {"--rows", "2", "--of", "maps,similarity"}), 1, {"no probabilities"});
  EXPECT_FALSE(fs::exists(none));
  // Of several models, that one alone.
  const std::string softmax = TrainSoftmax();
  const Outcome both = Run(Analyze(gated, out, {"--beside", softmax, "--rows", "2", "--json"}));
  ASSERT_EQ(both.code, 0) << both;
  ExpectContains(both.err, {"note: similarity of gated is left out"});
  const Json models = ReadJsonFile(out + "/analyze.json")["models"];
  EXPECT_TRUE(models["gated"]["left_out"].contains("similarity"));
  EXPECT_TRUE(models["gated"]["analyses"].contains("maps"));
  EXPECT_TRUE(models["softmax"]["analyses"].contains("similarity"));
  EXPECT_FALSE(models["softmax"].contains("left_out"));
  EXPECT_FALSE(ParseJson(both.out, "out")["results"]["gated"].contains("similarity"));
}

TEST_F(AnalyzeTest, MemoryLoggedOverTraining) {
  const std::string model = folder_ / "abc", out = folder_ / "slots";
  const Words log = {"--set", "train.log_memory=true", "--set", "train.eval_every=1"};
  Expect(Train(TrainedText(), folder_ / "none", Words{"--set", "model.attention=latte"} + log), 2,
         {"train.log_memory", "memory of slots"});
  const Outcome o =
      Run(Train(TrainedText(), model, Words{"--set", "model.attention=abc_mlp"} + log));
  ASSERT_EQ(o.code, 0) << o;
  // The figures of random weights come once, also where the run goes on.
  const std::string longer = folder_ / "longer";
  fs::copy(model, longer, fs::copy_options::recursive);
  const Outcome on = Run({"train", "--resume", "--out", longer, "--threads", "1", "--steps", "4"});
  ASSERT_EQ(on.code, 0) << on;
  const std::string log_of_both = ReadFile(longer + "/metrics.jsonl");
  const size_t random = log_of_both.find("memory_random/");
  ASSERT_NE(random, std::string::npos);
  EXPECT_EQ(log_of_both.find("memory_random/", log_of_both.find('\n', random)), std::string::npos);
  std::istringstream lines(ReadFile(model + "/metrics.jsonl"));
  const std::string name = "/layer 1/key_memory/effective rank";
  int64_t evaluations = 0, references = 0;
  for (std::string line; std::getline(lines, line);) {
    const Json row = ParseJson(line, "metrics.jsonl");
    if (row["event"] != "valid") continue;
    ++evaluations;
    EXPECT_GT(row["memory" + name].get<double>(), 1) << line;
    references += row.contains("memory_random" + name) ? 1 : 0;
  }
  EXPECT_EQ(evaluations, 3);
  EXPECT_EQ(references, 1);
  // The same weights with and without the log.
  const std::string plain = folder_ / "plain";
  ASSERT_EQ(Run(Train(TrainedText(), plain,
                      {"--set", "model.attention=abc_mlp", "--set", "train.eval_every=1"}))
                .code,
            0);
  EXPECT_EQ(ReadFile(plain + "/model.safetensors"), ReadFile(model + "/model.safetensors"));
  const Outcome a = Run(Analyze(model, out, {"--rows", "2", "--of", "memory"}));
  ASSERT_EQ(a.code, 0) << a;
  ExpectContains(ReadFile(out + "/report.html"), {"Over training", "effective rank"});
  EXPECT_TRUE(fs::exists(out + "/memory-log-training.csv"));
}

// As in evaluation: nothing is dropped.
TEST_F(AnalyzeTest, MemoryLoggedWithDropout) {
  Words words = {"train", "--task",        "mlm",       "--data", TrainedText(),
                 "--out", folder_ / "run", "--threads", "1",      "--steps",
                 "2"};
  for (const char* s :
       {"model.dim=16", "model.heads=2", "model.layers=1", "task.length=16", "task.vocab_size=300",
        "train.batch=2", "model.attention=conv_luna", "model.attention_dropout=0.5",
        "model.positions=none", "train.log_memory=true"})
    words = words + Words{"--set", s};
  const Outcome o = Run(words);
  ASSERT_EQ(o.code, 0) << o;
  ExpectContains(ReadFile(folder_ / "run/metrics.jsonl"), {"memory/layer 1/"});
}

TEST_F(AnalyzeTest, CtrlCKeepsWhatIsDone) {
  std::string text;
  for (int i = 0; i < 300; ++i) text += Text();
  WriteFileAtomically(folder_ / "long.txt", text);
  const std::string out = folder_ / "cut", prefix = folder_ / "run";
  const pid_t child = Start({"analyze", Trained(), folder_ / "long.txt", "--of", "maps", "--rows",
                             "0", "--out", out, "--threads", "1"},
                            prefix);
  std::this_thread::sleep_for(std::chrono::seconds(8));
  ASSERT_EQ(::kill(child, SIGINT), 0);
  const Outcome o = Wait(child, prefix);
  EXPECT_EQ(o.code, 130) << o;
  ExpectContains(o.err, {"interrupted"});
  if (!fs::exists(out)) return;  // the signal came before the first rows
  EXPECT_EQ(ReadJsonFile(out + "/analyze.json")["complete"], false);
  EXPECT_GT(ReadJsonFile(out + "/maps.json")["rows"].get<int64_t>(), 0);
  ExpectContains(ReadFile(out + "/report.html"), {"then interrupted"});
}

TEST_F(AnalyzeTest, StatisticsOfResults) {
  std::string csv = "model,slots,seed,value\n";
  for (const char* model : {"luna", "conv_luna"}) {
    for (int slots : {1, 16, 256}) {
      for (int seed = 1; seed <= 5; ++seed)
        csv += StrCat(model, ",", slots, ",", seed, ",", slots + 0.1 * seed, "\n");
    }
  }
  WriteFileAtomically(folder_ / "results.csv", csv);
  const Words words = {"statistics", folder_ / "results.csv", "--method", "slots", "--cell",
                       "model"};
  const Outcome o = Run(words + Words{"--json", "--out", folder_ / "tested"});
  ASSERT_EQ(o.code, 0) << o;
  const Json tests = ParseJson(o.out, "out")["tables"]["tests"];
  ASSERT_EQ(tests.size(), 4u);
  EXPECT_EQ(tests[0]["test"], "Friedman");
  EXPECT_NEAR(tests[0]["statistic"].get<double>(), 10, 1e-9);
  EXPECT_NEAR(tests[0]["p exact"].get<double>(), 1.0 / 1296, 1e-9);
  EXPECT_NEAR(tests[0]["Holm"].get<double>(), 2 * std::exp(-5), 1e-9);
  EXPECT_EQ(tests[0]["rejected"], "yes");
  EXPECT_TRUE(fs::exists(folder_ / "tested/report.html"));
  EXPECT_TRUE(fs::exists(folder_ / "tested/statistics-runs-2.svg"));  // one for each model
  EXPECT_FALSE(fs::exists(folder_ / "tested/statistics-runs-3.svg"));
  // Again into its own folder, but not over what another command has written.
  EXPECT_EQ(Run(words + Words{"--out", folder_ / "tested"}).code, 0);
  WriteFileAtomically(folder_ / "tested/results.json", "{}");
  Expect(words + Words{"--out", folder_ / "tested"}, 2, {"files of something else"});
  // Three runs: 1/36 is the least exact p, and two cells need .025.
  std::string few = "method,seed,value\n";
  for (int m = 0; m < 2; ++m) {
    for (int seed = 0; seed < 3; ++seed) few += StrCat(m, ",", seed, ",", m, "\n");
  }
  WriteFileAtomically(folder_ / "few.csv", few);
  const Outcome cannot = Run({"statistics", folder_ / "few.csv"});
  ASSERT_EQ(cannot.code, 0) << cannot;
  ExpectContains(cannot.out, {"could not reject whatever the data", "cannot"});
  // Least p 1/32 and 1/1296: Holm compares the greater with .05, so that it could reject.
  std::string uneven = "model,method,seed,value\n";
  for (int run = 0; run < 12; ++run) uneven += StrCat("a,", run % 2, ",", run / 2, ",", run, "\n");
  for (int run = 0; run < 15; ++run)
    uneven += StrCat("b,", run % 3, ",", run / 3, ",", 7 * run % 5, "\n");
  uneven.replace(uneven.find(",11\n"), 4, ",0\n");
  WriteFileAtomically(folder_ / "uneven.csv", uneven);
  const Outcome could = Run({"statistics", folder_ / "uneven.csv", "--cell", "model", "--json"});
  ASSERT_EQ(could.code, 0) << could;
  EXPECT_EQ(could.out.find("could not reject"), std::string::npos) << could;
  const Json of_two = ParseJson(could.out, "out")["tables"]["tests"];
  EXPECT_EQ(of_two[0]["least p exact"], 0.03125);
  EXPECT_EQ(of_two[0]["rejected"], "no");
  // Seven values of eight are equal: the test could reject others.
  std::string ties = "method,seed,value,outcome\n";
  for (int run = 0; run < 8; ++run)
    ties += StrCat(run % 2, ",", run / 2, ",", run == 7 ? 1 : 0, ",finished\n");
  WriteFileAtomically(folder_ / "ties.csv", ties);
  const Outcome tied = Run({"statistics", folder_ / "ties.csv", "--json"});
  ASSERT_EQ(tied.code, 0) << tied;
  const Json of_ties = ParseJson(tied.out, "out")["tables"]["tests"][1];
  EXPECT_EQ(of_ties["rejected"], "no");
  EXPECT_NEAR(of_ties["least p exact"].get<double>(), 2.0 / 70, 1e-12);
  // A method with a run that did not finish is left out, and named.
  WriteFileAtomically(folder_ / "wild.csv", ties + "wild,0,,diverged\nwild,1,0.5,finished\n");
  const Outcome wild = Run({"statistics", folder_ / "wild.csv"});
  ASSERT_EQ(wild.code, 0) << wild;
  ExpectContains(wild.out,
                 {"Left out: method wild, whose seed 0 has diverged.",
                  "these values, in any order, give at least p = 1, ", "ties are part of it"});
  const Json figures = ParseJson(Run({"statistics", folder_ / "wild.csv", "--json"}).out, "out");
  EXPECT_EQ(figures["left_out"], (Json{"Left out: method wild, whose seed 0 has diverged."}));
  ExpectContains(figures["notes"].dump(), {"ties are part of it"});
  WriteFileAtomically(folder_ / "none.csv",
                      "method,seed,value,outcome\na,1,2,finished\nb,1,,failed\n");
  Expect({"statistics", folder_ / "none.csv"}, 1,
         {"no cell has two values of method whose runs have all finished", "Left out"});
  // More cells than are drawn: the page says so.
  std::string many = "model,method,seed,value\n";
  for (int cell = 0; cell < 26; ++cell) {
    for (int run = 0; run < 6; ++run)
      many += StrCat(cell, ",", run % 2, ",", run / 2, ",", run * cell % 7, "\n");
  }
  WriteFileAtomically(folder_ / "many.csv", many);
  ASSERT_EQ(
      Run({"statistics", folder_ / "many.csv", "--cell", "model", "--out", folder_ / "26"}).code,
      0);
  ExpectContains(ReadFile(folder_ / "26/report.html"), {"The first 24 of 26 cells are drawn"});
  EXPECT_TRUE(fs::exists(folder_ / "26/statistics-runs-24.svg"));
  EXPECT_FALSE(fs::exists(folder_ / "26/statistics-runs-25.svg"));
  WriteFileAtomically(folder_ / "hole.csv", few + "3,1,5\n");
  Expect({"statistics", folder_ / "hole.csv"}, 1, {folder_ / "hole.csv", "has no value of seed 0"});
  WriteFileAtomically(folder_ / "twice.csv", few + "1,1,5\n");
  Expect({"statistics", folder_ / "twice.csv"}, 1, {"a second value", "--cell"});
  WriteFileAtomically(folder_ / "text.csv", "method,seed,value\na,1,x\n");
  Expect({"statistics", folder_ / "text.csv"}, 1, {"not a finite number"});
  // A signal ends it, here while it waits for its table.
  const std::string pipe = folder_ / "pipe.csv", prefix = folder_ / "waits";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const pid_t child = Start({"statistics", pipe}, prefix);
  const int table = ::open(pipe.c_str(), O_WRONLY | O_CLOEXEC);
  ::kill(child, SIGTERM);
  ::close(table);
  EXPECT_EQ(Wait(child, prefix).code, 128 + SIGTERM);
}

}  // namespace
}  // namespace cistern
