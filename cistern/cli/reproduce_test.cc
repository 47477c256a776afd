// `cistern reproduce` from outside: tables that it finds, refusals before any work, runs with known
// sums, failed runs, resuming.
#include <cmath>
#include <fstream>
#include <optional>
#include <sstream>

#include "cistern/base/testing_messages.h"
#include "cistern/cli/testing_cli.h"
#include "cistern/io/file_lock.h"

namespace cistern {
namespace {

using testing::ExpectContains;

class ReproduceTest : public CliTest {
 protected:
  void SetUp() override {
    CliTest::SetUp();
    File("experiments/base.toml",
         "[task]\nkind = \"listops\"\nlength = 40\ntrain_examples = 24\nvalid_examples = 6\n"
         "test_examples = 12\n[model]\nattention = \"softmax\"\ndim = 8\nlayers = 1\nheads = 2\n"
         "ffn_dim = 8\nfinal_norm = false\n[train]\nsteps = 4\nbatch = 2\neval_every = 2\n"
         "lr = 1e-3\nclip = 0\n[published]\nsource = \"T 1\"\nresults = { accuracy = 36.5 }\n"
         "spread = { accuracy = 0.25 }\n");
    File("tables/small.toml", "[train]\nsteps = 2\n");
    File("tables/tiny.toml", Tiny(""));
  }
  std::string File(const std::string& name, const std::string& text) {
    const std::string path = folder_ / name;
    fs::create_directories(fs::path(path).parent_path());
    WriteFileAtomically(path, text);
    return path;
  }
  static std::string Tiny(const std::string& more) {
    return "title = \"A tiny table\"\nsource = \"T 1\"\nplace = \"page 3\"\nseeds = 2\n"
           "statistics = true\n"
           "[[column]]\nname = \"ListOps\"\nsmall = \"small.toml\"\nchance = 10\n"
           "baselines = [\"majority\", \"root_operator\"]\n"
           "[[row]]\nname = \"Softmax\"\nfile = \"../experiments/base.toml\"\n"
           "group = \"all\"\nvariant = \"s\"\n"
           "[[row]]\nname = \"Latte\"\nfile = \"../experiments/base.toml\"\n"
           "set = [\"model.attention=latte\"]\npublished = { ListOps = 40 }\n"
           "group = \"all\"\nvariant = \"l\"\n" +
           more + "[[row]]\nname = \"Elsewhere\"\npublished = { ListOps = 12.5 }\n";
  }
  // A row whose numbers overflow within a few steps.
  static std::string Diverging() {
    return "[[row]]\nname = \"Wild\"\nfile = \"../experiments/base.toml\"\n"
           "set = [\"train.optimizer=sgd\", \"train.lr=1000\", \"train.schedule=constant\", "
           "\"train.warmup=0\", \"train.steps=40\"]\ngroup = \"all\"\nvariant = \"w\"\n";
  }
  Words Command(const Words& more) {
    return Words{"reproduce",    folder_ / "tables/tiny.toml", "--threads", "1", "--out",
                 folder_ / "out"} +
           more;
  }
  static double Accuracy(const std::string& folder) {
    return ParseJson(ReadFile(folder + "/result.json"), "result")["test"]["accuracy"].get<double>();
  }
  static size_t Count(const std::string& text, const std::string& what) {
    size_t n = 0;
    for (size_t at = text.find(what); at != text.npos; at = text.find(what, at + 1)) ++n;
    return n;
  }
};

TEST_F(ReproduceTest, EveryTableOfThePapersCanBePlanned) {
  const Outcome all = Run({"reproduce", "--list", "--json"});
  ASSERT_EQ(all.code, 0) << all;
  const Json tables = ParseJson(all.out, "stdout");
  std::vector<std::string> names;
  for (const Json& table : tables) {
    names.push_back(table["name"]);
    for (const Words& more : {Words{}, Words{"--small"}}) {
      const Outcome o = Run(Words{"reproduce", names.back(), "--list", "--json"} + more);
      ASSERT_EQ(o.code, 0) << names.back() << "\n" << o;
      const Json cells = ParseJson(o.out, "stdout");
      EXPECT_GE(cells.size(), 4u) << names.back();
      for (const Json& cell : cells) EXPECT_EQ(cell["changes"].empty(), more.empty()) << cell;
    }
  }
  EXPECT_EQ(names, (std::vector<std::string>{"LRA", "Own-Mark", "P000-Fig2", "P000-Parts",
                                             "P000-T1", "P000-T3", "P001-T3", "P001-T5",
                                             "P002-Fig4", "P003-T4", "P004-T2", "Pretraining"}));
  // Spec 7, copied from that page.
  const std::map<std::string, std::map<std::string, double>> printed = {
      {"P000-T1", {{"Luna-16, Text", 65.53}, {"ConvLuna-256, CIFAR", 56.69}}},
      {"P000-T3", {{"OnlyFiltering-1, Matching", 82.38}, {"OnlyScaling-16, ListOps", 37.08}}},
      {"P001-T3", {{"13 layers K=6 P=10, ImageNet", 84.69}, {"K=12 P=6, ImageNet", 83.55}}},
      {"P001-T5", {{"K=8 P=3, Pathfinder", 82.4}, {"K=8 P=2, ListOps", 40.2}}},
      {"P002-Fig4", {{"linformer, CIFAR", 69.9}, {"linear, CIFAR", 52.8}}},
      {"P003-T4", {{"BASE, pairs", 27.2}, {"ABC_MLP 32-8, pairs", 27.1}}},
      {"P004-T2", {{"Latte-D, Image", 48.05}, {"Luna-128, Retrieval", 79.55}}},
      {"LRA", {{"Linear Transformer, Text", 65.90}, {"Transformer, Pathfinder", 71.40}}}};
  for (const auto& table : printed) {
    const Json cells = ParseJson(Run({"reproduce", table.first, "--list", "--json"}).out, "stdout");
    for (const auto& want : table.second) {
      bool found = false;
      for (const Json& cell : cells) {
        if (cell["cell"] != want.first) continue;
        found = true;
        EXPECT_DOUBLE_EQ(cell["published"].get<double>(), want.second) << want.first;
      }
      EXPECT_TRUE(found) << table.first << " has no cell " << want.first;
    }
  }
}

TEST_F(ReproduceTest, RefusesWhatItCannotDoBeforeAnyWork) {
  Expect({"reproduce"}, 2, {"name the table", "--list"});
  Expect(Command({"--retry"}), 2, {"--retry", "give --resume with it"});
  Expect({"reproduce", "P000-T2"}, 2, {"unknown table 'P000-T2'", "P000-T"});
  Expect({"reproduce", "P000-T1", "--rows", "Luna-17"}, 2,
         {"row of P000-T1", "Luna-17", "did you mean 'Luna-1"});
  Expect({"reproduce", "P000-T1", "--columns", "Txt"}, 2, {"did you mean 'Text'"});
  Expect({"reproduce", "P000-T1", "--rows", "Transformer"}, 2, {"only quoted"});
  const std::string out = folder_ / "none";
  Expect({"reproduce", "P000-T1", "--small", "--out", out}, 2,
         {"P000-T1 needs data", "Text: IMDb", "--data imdb=PATH", "FOLDER/aclImdb", "CIFAR-10",
          "without them: --columns ListOps"});
  EXPECT_FALSE(fs::exists(out));
  Expect({"reproduce", "P000-T1", "--data", "imbd=" + folder_.path()}, 2,
         {"data set", "did you mean 'imdb'"});
  Expect({"reproduce", "P000-T1", "--data", "imdb=/nowhere"}, 2, {"/nowhere does not exist"});
  File("tables/tiny.toml", Tiny("[[row]]\nname = \"Bad\"\nfile = \"no.toml\"\n"));
  Expect(Command({}), 2, {"tiny.toml: Bad", "no.toml does not exist"});
  File("tables/tiny.toml", Tiny("[[row]]\nname = \"Bad\"\npublished = { Listop = 3 }\n"));
  Expect(Command({}), 2, {"did you mean 'ListOps'"});
  File("tables/tiny.toml", Tiny("[[row]]\nname = \"One, two\"\n"));
  Expect(Command({}), 2, {"tiny.toml", "'One, two' has a comma", "--rows"});
  File("tables/tiny.toml", Tiny("[[row]]\nnam = \"Bad\"\n"));
  Expect(Command({}), 2, {"tiny.toml", "'nam'", "'name'"});
  // The statistics would compare a row with itself.
  const std::string grouped =
      "[[row]]\nname = \"Again\"\nfile = \"../experiments/base.toml\"\ngroup = \"all\"\n";
  File("tables/tiny.toml", Tiny(grouped));
  Expect(Command({}), 2, {"tiny.toml: Again is of the group all", "needs a variant"});
  File("tables/tiny.toml", Tiny(grouped + "variant = \"l\"\n"));
  Expect(Command({}), 2, {"Latte and Again are both the variant l of the group all"});
  File("tables/tiny.toml", Tiny("[[row]]\nname = \"Bad\"\nfile = \"../experiments/base.toml\"\n"
                                "set = [\"model.heads=3\"]\n"));
  Expect(Command({}), 2, {"Bad, ListOps: ", "heads"});
  EXPECT_FALSE(fs::exists(folder_ / "out"));
}

TEST_F(ReproduceTest, MeansDeviationsAndGapsAreThoseOfTheRuns) {
  const Outcome o = Run(Command({"--small"}));
  ASSERT_EQ(o.code, 0) << o;
  const std::string out = folder_ / "out";
  ExpectContains(o.out, {"about "});
  ExpectContains(o.out, {"[4/4] "});
  // A table with statistics keeps its seeds in the small version.
  ExpectContains(o.out, {"4 runs"});
  const double a = Accuracy(out + "/latte/listops/seed-1"),
               b = Accuracy(out + "/latte/listops/seed-2"), mean = (a + b) / 2,
               deviation = std::sqrt((a - mean) * (a - mean) + (b - mean) * (b - mean));
  const Json results = ParseJson(ReadFile(out + "/results.json"), "results");
  const Json& latte = results["cells"][1];
  EXPECT_EQ(latte["row"], "Latte");
  EXPECT_NEAR(latte["mean"].get<double>(), mean, 1e-9);
  EXPECT_NEAR(latte["deviation"].get<double>(), deviation, 1e-9);
  EXPECT_NEAR(latte["gap"].get<double>(), mean - 40, 1e-9);
  EXPECT_EQ(latte["changes"], Json({"train.steps 4 -> 2"}));
  EXPECT_EQ(results["cells"][0]["published"], 36.5);
  EXPECT_EQ(latte["runs"][1]["seed"], 2);
  const std::string table = ReadFile(out + "/table.md");
  ExpectContains(
      table, {"# A tiny table (small)", "| Elsewhere | (12.50) |", "(36.50 ± 0.25)",
              "| chance | 10.00 |", "baseline: root operator",
              "otherwise than the source's: train.steps 4 -> 2", "not run: quoted", "Friedman"});
  const std::string runs = ReadFile(out + "/runs.csv");
  EXPECT_EQ(Count(runs, ",finished\n"), 4u) << runs;
  EXPECT_TRUE(fs::exists(out + "/statistics.json"));
  const Outcome tested = Run({"statistics", out + "/runs.csv", "--method", "variant", "--cell",
                              "group,column", "--value", "accuracy", "--json"});
  ASSERT_EQ(tested.code, 0) << tested;
  EXPECT_EQ(ParseJson(tested.out, "stdout")["tables"]["methods"][0]["mean"],
            ParseJson(ReadFile(out + "/statistics.json"), "file")["tables"]["methods"][0]["mean"]);
  const std::string page = ReadFile(out + "/report.html");
  ExpectContains(page, {"<svg"});
  EXPECT_EQ(page.find("<script"), page.npos);
  EXPECT_FALSE(fs::exists(out + "/cost"));
}

// Of the runs, which may do otherwise than the source.
TEST_F(ReproduceTest, RunsThatValidateOnTheTestRows) {
  std::string rows;
  for (int i = 0; i < 40; ++i) rows += i % 2 == 0 ? "a\tgood one\n" : "b\tbad one\n";
  File("experiments/text.toml",
       StrCat("[task]\nkind = \"classify\"\ndata = \"", File("rows.tsv", rows),
              "\"\ntokenizer = \"bytes\"\nvalid_from = \"test\"\n[model]\ndim = 8\nlayers = 1\n"
              "heads = 2\nffn_dim = 8\n[train]\nsteps = 1\nbatch = 2\n"));
  File("tables/share.toml", "[task]\nvalid_from = \"share\"\n");
  File("tables/tiny.toml",
       "title = \"T\"\nsource = \"T 2\"\nseeds = 1\n[[column]]\nname = \"Text\"\n"
       "small = \"share.toml\"\n[[row]]\nname = \"Softmax\"\nfile = "
       "\"../experiments/text.toml\"\n");
  const std::string said = "Text: the test rows choose the best model here";
  const auto says = [&](const Words& more) {
    fs::remove_all(folder_ / "out");
    const Outcome o = Run(Command(more));
    EXPECT_EQ(o.code, 0) << o;
    return ReadFile(folder_ / "out/table.md").find(said) != std::string::npos;
  };
  EXPECT_TRUE(says({}));
  EXPECT_FALSE(says({"--small"}));
}

// The worse row stands first; the table is named from its own folder.
TEST_F(ReproduceTest, TheBestRowHasTheLeastBits) {
  std::string text;
  for (int i = 0; i < 4000; ++i) text += StrCat(i, "\n");
  File("tables/text.txt", text);
  File("tables/lm.toml",
       "[task]\nkind = \"lm\"\ntext = \"text.txt\"\nlength = 16\nvocab_size = 270\n[model]\n"
       "attention = \"latte\"\ndim = 8\nlayers = 1\nheads = 2\nffn_dim = 8\n[train]\n"
       "steps = 30\nbatch = 4\nlr = 1e-2\n");
  File("tables/bits.toml",
       "title = \"Bits\"\nsource = \"T 1\"\nmetric = \"bits_per_byte\"\n"
       "[[column]]\nname = \"Text\"\n"
       "[[row]]\nname = \"Left as it was\"\nfile = \"lm.toml\"\nset = [\"train.lr=1e-9\"]\n"
       "[[row]]\nname = \"Trained\"\nfile = \"lm.toml\"\n");
  const fs::path before = fs::current_path();
  fs::current_path(folder_ / "tables");
  const Outcome o = Run({"reproduce", "bits.toml", "--threads", "1", "--out", folder_ / "bits"});
  fs::current_path(before);
  ASSERT_EQ(o.code, 0) << o;
  const Json cells = ParseJson(ReadFile(folder_ / "bits/results.json"), "results")["cells"];
  EXPECT_GT(cells[0]["mean"].get<double>(), cells[1]["mean"].get<double>());
  const std::string page = ReadFile(folder_ / "bits/report.html");
  EXPECT_EQ(Count(page, "<tr class=\"best\"><td>Trained"), 2u);
  EXPECT_EQ(Count(page, "<tr class=\"best\">"), 2u);
}

TEST_F(ReproduceTest, FailedRunsAreResults) {
  File("tables/tiny.toml", Tiny(Diverging()));
  const Outcome o = Run(Command({"--seeds", "1", "--rows", "Wild,Softmax"}));
  ASSERT_EQ(o.code, 0) << o;
  const std::string out = folder_ / "out";
  const Json wild = ParseJson(ReadFile(out + "/wild/listops/seed-1/result.json"), "result");
  EXPECT_EQ(wild["diverged"], true) << wild;
  ExpectContains(o.out, {"Wild, ListOps, seed 1: diverged: "});
  ExpectContains(ReadFile(out + "/table.md"), {"| Wild | 0 of 1, 1 diverged |"});
  ExpectContains(ReadFile(out + "/runs.csv"), {",diverged\n"});
  // It stays one when the reproduction goes on; --retry tries it again.
  const Outcome again = Run(Command({"--seeds", "1", "--rows", "Wild,Softmax", "--resume"}));
  EXPECT_EQ(again.code, 0) << again;
  ExpectContains(again.out, {"Wild, ListOps, seed 1: diverged: "});
  const Outcome alone = Run({"reproduce", folder_ / "tables/tiny.toml", "--threads", "1", "--out",
                             folder_ / "alone", "--seeds", "1", "--rows", "Wild"});
  EXPECT_EQ(alone.code, 1) << alone;
  ExpectContains(alone.err, {"no run has finished"});
  // Its statistics leave out what did not finish, and say so.
  const Outcome two = Run(Command({"--seeds", "2", "--rows", "Wild,Softmax", "--resume"}));
  ASSERT_EQ(two.code, 0) << two;
  ExpectContains(two.out, {"all, ListOps is not tested: not every run of it has finished"});
  EXPECT_EQ(two.out.find("No statistics"), two.out.npos) << two;
  Expect({"statistics", out + "/runs.csv", "--method", "variant", "--cell", "group,column",
          "--value", "accuracy"},
         1, {"runs.csv: no cell has two values of variant whose runs have all finished"});
}

// What is trained from it is that cell, with all that rows, options and --small say.
TEST_F(ReproduceTest, ExperimentsAreThoseOfTheCells) {
  const Outcome o = Run(Command({"--small", "--seeds", "1", "--rows", "Latte", "--estimate",
                                 "--set", "train.batch=3", "--dtype", "float32"}));
  ASSERT_EQ(o.code, 0) << o;
  const std::string file = folder_ / "out/experiments/latte-listops.toml";
  const Outcome printed = Run({"train", file, "--print-config"});
  ASSERT_EQ(printed.code, 0) << printed;
  ExpectContains(printed.out, {"attention = [\"latte\"]", "batch = 3", "steps = 2", "float32"});
  const std::string text = ReadFile(file);
  EXPECT_EQ(text.substr(text.find('\n') + 1), printed.out);
}

TEST_F(ReproduceTest, ExperimentsOfSomethingElseAreNotItsOwn) {
  File("out/experiments/mine.toml", "");
  Expect(Command({"--seeds", "1"}), 2,
         {"files of something else in it (experiments/mine.toml)", "new folder"});
  EXPECT_EQ(Contents(folder_ / "out").size(), 1u);
}

TEST_F(ReproduceTest, ResumesWhereItStopped) {
  const std::string out = folder_ / "out";
  ASSERT_EQ(Run(Command({"--seeds", "1"})).code, 0);
  Expect(Command({"--seeds", "1"}), 2, {"already holds a reproduction", "--resume"});
  const std::string kept = out + "/softmax/listops/seed-1/model.safetensors",
                    gone = out + "/latte/listops/seed-1";
  const auto before = fs::last_write_time(kept);
  const double accuracy = Accuracy(gone);
  fs::remove_all(gone);
  const Outcome o = Run(Command({"--seeds", "2", "--resume"}));
  ASSERT_EQ(o.code, 0) << o;
  EXPECT_EQ(fs::last_write_time(kept), before);
  EXPECT_EQ(Accuracy(gone), accuracy);
  EXPECT_EQ(Count(o.out, ", kept"), 1u) << o;
  EXPECT_TRUE(fs::exists(out + "/latte/listops/seed-2/result.json"));
  Expect(Command({"--resume", "--set", "train.steps=5"}), 2,
         {"softmax/listops was begun with other settings", "train.steps 4 -> 5"});
  Expect(Command({"--resume", "--small"}), 2, {"was begun with small false"});
  Words threads = Command({"--resume"});
  threads[3] = "2";
  Expect(threads, 2, {out + " was begun with threads 1, not 2", "give --threads 1"});
  // Files that have moved are the same settings, a file that was edited is not.
  fs::create_directory(folder_ / "moved");
  for (const char* part : {"/experiments", "/tables"})
    fs::copy(folder_.path() + part, folder_.path() + "/moved" + part, fs::copy_options::recursive);
  const Outcome moved = Run({"reproduce", folder_ / "moved/tables/tiny.toml", "--threads", "1",
                             "--out", out, "--seeds", "2", "--resume"});
  ASSERT_EQ(moved.code, 0) << moved;
  EXPECT_EQ(Count(moved.out, ", kept"), 4u) << moved;
  std::string edited = ReadFile(folder_ / "experiments/base.toml");
  edited.replace(edited.find("lr = 1e-3"), 9, "lr = 2e-3");
  File("experiments/base.toml", edited);
  Expect(Command({"--resume"}), 2, {"other settings: train.lr 0.001 -> 0.002; leave"});
}

TEST_F(ReproduceTest, RunsThatHaveEndedHadTheDataOfThoseThatFollow) {
  std::string rows = "label\ttext\n";
  for (int i = 0; i < 60; ++i)
    rows += StrCat(i % 3 ? "good" : "bad", "\tword ", i * i % 17, " and ", i * 7 % 11, "\n");
  const std::string data = File("rows.tsv", rows);
  File("experiments/base.toml",
       "[task]\nkind = \"classify\"\nlength = 24\n[model]\nattention = \"softmax\"\ndim = 8\n"
       "layers = 1\nheads = 2\nffn_dim = 8\n[train]\nsteps = 2\nbatch = 2\n");
  File("tables/data.toml", "[rows]\nwhat = \"rows\"\nplaces = [\"rows.tsv\"]\n");
  std::string table = Tiny("");
  table.replace(table.find("baselines"),
                table.find('\n', table.find("baselines")) - table.find("baselines"),
                "data = \"rows\"");
  File("tables/tiny.toml", table);
  const Words words = Command({"--seeds", "1", "--data", "rows=" + data});
  const Outcome begun = Run(words + Words{"--rows", "Softmax"});
  ASSERT_EQ(begun.code, 0) << begun;
  WriteFileAtomically(data, rows + "good\tone row more\n");
  Expect(words + Words{"--resume"}, 2,
         {"out/softmax/listops/seed-1 has been trained on other data", "another --out"});
  EXPECT_FALSE(fs::exists(folder_ / "out/latte/listops/seed-1"));
  WriteFileAtomically(data, rows);
  const Outcome rest = Run(words + Words{"--resume"});
  ASSERT_EQ(rest.code, 0) << rest;
  EXPECT_EQ(Count(rest.out, ", kept"), 1u) << rest;
  // They may lie elsewhere when a run goes on.
  fs::rename(data, folder_ / "moved.tsv");
  fs::remove(folder_ / "out/softmax/listops/seed-1/result.json");
  const Outcome moved =
      Run(Command({"--seeds", "1", "--data", "rows=" + (folder_ / "moved.tsv"), "--resume"}));
  ASSERT_EQ(moved.code, 0) << moved;
  EXPECT_EQ(Count(ReadFile(folder_ / "out/runs.csv"), ",finished\n"), 2u) << moved;
}

// A budget of seconds is its own estimate.
TEST_F(ReproduceTest, AnEstimateIsOfTheSettingsAskedFor) {
  for (const double seconds : {60.0, 120.0}) {
    const Outcome o =
        Run(Command({"--rows", "Latte", "--seeds", "1", "--estimate", "--json", "--set",
                     "train.steps=0", "--set", StrCat("train.seconds=", seconds)}));
    ASSERT_EQ(o.code, 0) << o;
    EXPECT_EQ(ParseJson(o.out, "stdout")["seconds"], seconds);
  }
  Expect(Command({"--set", "seed=5"}), 2, {"--set seed=5", "give --seed"});
}

TEST_F(ReproduceTest, FilesOfSomethingElseStay) {
  const std::string out = folder_ / "out";
  for (const char* name : {"cost/notes.txt", "report.html"}) File(StrCat("out/", name), "mine");
  const auto before = Contents(out);
  Expect(Command({"--small"}), 2, {out + " has files of something else in it", "new folder"});
  EXPECT_EQ(Contents(out), before);
  fs::remove_all(out);
  // What was killed before its record, and later additions to its own folder.
  File("out/experiments/softmax-listops.toml", "");
  File("out/cost.tmp-999999-0/log.txt", "");
  ASSERT_EQ(Run(Command({"--small", "--seeds", "1", "--rows", "Softmax"})).code, 0);
  EXPECT_FALSE(fs::exists(out + "/cost.tmp-999999-0"));
  File("out/cost/notes.txt", "mine");
  ASSERT_EQ(Run(Command({"--small", "--seeds", "1", "--resume"})).code, 0);
  EXPECT_EQ(ReadFile(out + "/cost/notes.txt"), "mine");
  for (const auto& entry : fs::directory_iterator(out))
    EXPECT_FALSE(entry.path().filename().string().starts_with("cost.tmp-")) << entry.path();
}

// By a run whose reproduction was killed and that still saves.
TEST_F(ReproduceTest, AFolderInUseIsWaitedFor) {
  const Words words = Command({"--small", "--seeds", "1"});
  ASSERT_EQ(Run(words + Words{"--rows", "Softmax"}).code, 0);
  const std::string run = folder_ / "out/latte/listops/seed-1", prefix = folder_ / "run";
  EnsureDirectory(run);
  std::optional<FileLock> lock;
  lock.emplace(run + "/lock", "it");
  const pid_t child = Start(words + Words{"--resume"}, prefix);
  bool waits = false;
  for (int i = 0; i < 6000 && !waits && ::waitpid(child, nullptr, WNOHANG) == 0; ++i) {
    ::usleep(10'000);
    waits = ReadFile(prefix + ".err").find("waiting for it") != std::string::npos;
  }
  ASSERT_TRUE(waits) << ReadFile(prefix + ".err");
  EXPECT_FALSE(fs::exists(run + "/result.json"));
  lock.reset();
  const Outcome o = Wait(child, prefix);
  ASSERT_EQ(o.code, 0) << o;
  EXPECT_EQ(Count(ReadFile(folder_ / "out/runs.csv"), ",finished\n"), 2u) << o;
}

// A rebuild while it runs.
TEST_F(ReproduceTest, AReplacedProgramGoesOn) {
  const std::string program = std::getenv("CISTERN_BINARY"), copy = folder_ / "cistern",
                    prefix = folder_ / "run";
  fs::copy_file(program, copy);
  ::setenv("CISTERN_BINARY", copy.c_str(), 1);
  const pid_t child = Start(Command({"--small", "--seeds", "1"}), prefix);
  for (int i = 0; i < 6000 && !fs::exists(folder_ / "out/experiments"); ++i) ::usleep(10'000);
  std::string name;  // the one that top and killall know it by
  std::ifstream("/proc/" + std::to_string(child) + "/comm") >> name;
  EXPECT_EQ(name, "cistern");
  fs::remove(copy);
  WriteFileAtomically(copy, "another program");
  ::setenv("CISTERN_BINARY", program.c_str(), 1);
  const Outcome o = Wait(child, prefix);
  ASSERT_EQ(o.code, 0) << o;
  EXPECT_EQ(Count(ReadFile(folder_ / "out/runs.csv"), ",finished\n"), 2u) << o;
}

TEST_F(ReproduceTest, ARunThatCannotBeStartedLeavesTheReportOfTheOthers) {
  const Words words = Command({"--small", "--seeds", "1"});
  ASSERT_EQ(Run(words + Words{"--rows", "Softmax"}).code, 0);
  fs::remove(folder_ / "out/report.html");
  File("out/latte", "in the way");
  Expect(words + Words{"--resume"}, 1, {"cannot create directory", "out/latte"});
  ExpectContains(ReadFile(folder_ / "out/report.html"), {"Softmax"});
  EXPECT_EQ(Count(ReadFile(folder_ / "out/runs.csv"), ",finished\n"), 1u);
}

TEST_F(ReproduceTest, AnInterruptedReproductionGoesOn) {
  const std::string prefix = folder_ / "run", data = folder_ / "my data";
  fs::create_directory(data);
  const Words words = Command({"--seeds", "2", "--set", "train.steps=30", "--seed", "1", "--dtype",
                               "float32", "--data", data});
  const pid_t child = Start(words, prefix);
  const std::string first = folder_ / "out/softmax/listops/seed-1/result.json";
  for (int i = 0; i < 6000 && !fs::exists(first); ++i) ::usleep(10'000);
  ::kill(child, SIGINT);
  const Outcome o = Wait(child, prefix);
  ASSERT_EQ(o.code, 130) << o;
  ExpectContains(
      o.err, {"to continue: cistern reproduce " + (folder_ / "tables/tiny.toml") +
              " --threads 1 --seeds 2 --set train.steps=30 --seed 1 --dtype " + "float32 --data '" +
              data + "' --out " + (folder_ / "out") + " --resume\n"});
  EXPECT_TRUE(fs::exists(folder_ / "out/report.html"));
  EXPECT_FALSE(fs::exists(folder_ / "out/latte/listops/seed-2/result.json"));
  const Outcome rest = Run(words + Words{"--resume"});
  ASSERT_EQ(rest.code, 0) << rest;
  EXPECT_GE(Count(rest.out, ", kept"), 1u);
  EXPECT_EQ(Count(ReadFile(folder_ / "out/runs.csv"), ",finished\n"), 4u);
}

}  // namespace
}  // namespace cistern
