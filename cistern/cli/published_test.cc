// Experiment files that extend others, and what a source says of them, from outside.
#include <algorithm>
#include <sstream>

#include "cistern/base/testing_messages.h"
#include "cistern/cli/testing_cli.h"

namespace cistern {
namespace {

using testing::ExpectContains;

class PublishedTest : public CliTest {
 protected:
  std::string File(const std::string& name, const std::string& text) {
    const std::string path = folder_ / name;
    fs::create_directories(fs::path(path).parent_path());
    WriteFileAtomically(path, text);
    return path;
  }
  // A classifier of one layer of width 8: counted by hand below.
  std::string Base() {
    return File("base.toml",
                "seed = 3\n[task]\nkind = \"listops\"\nlength = 100\n[model]\n"
                "attention = \"softmax\"\ndim = 8\nlayers = 1\nheads = 2\nffn_dim = 16\n"
                "vocab_size = 17\nclasses = 10\n[train]\nsteps = 5\nlr = 1e-3\n");
  }
};

// Token embedding; q, k, v, out; feed-forward; three norms; head of 16 with its biases.
constexpr int64_t kParameters =
    17 * 8 + 4 * 8 * 8 + 2 * 8 * 16 + 3 * 2 * 8 + (8 * 16 + 16) + (16 * 10 + 10);

TEST_F(PublishedTest, AFileIsReadOnTopOfTheOneItExtends) {
  Base();
  File("rows/middle.toml",
       "extends = \"../base.toml\"\n[model]\nlayers = 2\n"
       "attention_options = { latte = { latents = 4 } }\n[train]\nlr = 2e-3\n");
  const std::string last =
      File("rows/last.toml",
           "extends = \"middle.toml\"\nseed = 9\n[model]\nattention = [\"latte\", \"softmax\"]\n"
           "attention_options = { abc_mlp = { slots = 5 } }\n");
  const std::string whole = File(
      "whole.toml",
      "seed = 9\n[task]\nkind = \"listops\"\nlength = 100\n[model]\n"
      "attention = [\"latte\", \"softmax\"]\n"
      "attention_options = { latte = { latents = 4 }, abc_mlp = { slots = 5 } }\ndim = 8\n"
      "layers = 2\nheads = 2\nffn_dim = 16\nvocab_size = 17\nclasses = 10\n[train]\nsteps = 5\n"
      "lr = 2e-3\n");
  const Outcome a = Run({"train", last, "--print-config"}),
                b = Run({"train", whole, "--print-config"});
  ASSERT_EQ(a.code, 0) << a;
  EXPECT_EQ(a.out, b.out);
  EXPECT_NE(a.out.find("slots = 5"), std::string::npos) << a;
}

// Two files that know nothing of each other: the later one's keys stand, then the file's own.
TEST_F(PublishedTest, AFileMayExtendSeveral) {
  Base();
  File("protocol.toml", "[model]\nnorm = \"post\"\nlayers = 3\n[train]\nlr = 3e-3\nclip = 0\n");
  const std::string list = File("list.toml",
                                "extends = [\"base.toml\", \"protocol.toml\"]\n"
                                "[train]\nlr = 4e-3\n");
  const std::string whole =
      File("whole.toml",
           "seed = 3\n[task]\nkind = \"listops\"\nlength = 100\n[model]\nattention = \"softmax\"\n"
           "dim = 8\nlayers = 3\nheads = 2\nffn_dim = 16\nvocab_size = 17\nclasses = 10\n"
           "norm = \"post\"\n[train]\nsteps = 5\nlr = 4e-3\nclip = 0\n");
  const Outcome a = Run({"train", list, "--print-config"}),
                b = Run({"train", whole, "--print-config"});
  ASSERT_EQ(a.code, 0) << a;
  EXPECT_EQ(a.out, b.out);
  const Outcome bad =
      Run({"train", File("bad.toml", "extends = [\"base.toml\", 3]\n"), "--print-config"});
  EXPECT_EQ(bad.code, 2) << bad;
  ExpectContains(bad.err, {"bad.toml", "or a list of them, got 3"});
}

// What a protocol says of each task, in its table, gives way to a key of [task] in a later file.
TEST_F(PublishedTest, AProtocolSaysWhatHoldsForEachTask) {
  File("protocol.toml",
       "[task.listops]\nlength = 700\ntest_examples = 9\n[task.classify]\nlength = 50\n");
  const auto printed = [&](const std::string& name, const std::string& task) {
    const Outcome o =
        Run({"train", File(name, "extends = \"protocol.toml\"\n" + task), "--print-config"});
    EXPECT_EQ(o.code, 0) << o;
    return o.out;
  };
  ExpectContains(printed("a.toml", "[task]\nkind = \"listops\"\n"),
                 {"length = 700", "test_examples = 9"});
  ExpectContains(printed("b.toml", "[task]\nkind = \"listops\"\nlength = 600\n"),
                 {"length = 600", "test_examples = 9"});
  ExpectContains(printed("c.toml", "[task]\nkind = \"listops\"\n[task.listops]\nlength = 500\n"),
                 {"length = 500", "test_examples = 9"});
  ExpectContains(printed("d.toml", "[task]\nkind = \"classify\"\n"), {"length = 50"});
}

// A pair of texts has the head that the protocol says, in place of that of one text.
TEST_F(PublishedTest, AProtocolSaysTheHeadOfPairs) {
  const std::string root = std::getenv("CISTERN_SOURCE_DIR") + std::string("/configs/protocols/");
  const std::string pair =
      "[task]\nkind = \"retrieval\"\n[model]\ndim = 8\nheads = 2\nlayers = 1\nffn_dim = 16\n"
      "vocab_size = 257\nclasses = 2\nattention = \"luna\"\n";
  const auto size = [&](const std::string& protocol, const std::string& more = "") {
    const std::string file =
        File("pair.toml", StrCat("extends = \"", root, protocol, ".toml\"\n", pair, more));
    const Outcome o = Run({"info", file, "--json"});
    EXPECT_EQ(o.code, 0) << protocol << "\n" << o;
    const Json parts = ParseJson(o.out, "stdout")["parts"];
    int64_t head = 0;
    for (const auto& [part, count] : parts.items()) {
      if (part.starts_with("classifier")) head += count.get<int64_t>();
    }
    return head;
  };
  EXPECT_EQ(size("latte"), 33 * 8 + 9 * 2);
  EXPECT_EQ(size("convluna"), 17 * 16 + 17 * 8 + 9 * 2);
  EXPECT_EQ(size("luna"), 32 * 2);
  EXPECT_EQ(size("nystrom"), 33 * 16 + 17 * 2);
  EXPECT_EQ(size("lra"), 17 * 16 + 17 * 8 + 9 * 2);
  EXPECT_EQ(size("latte", "[model.two_tower]\nmatch = \"luna\"\n"), 32 * 2);  // its own key
  // What is asked for here still has to fit, and groups of other kinds are read.
  const std::string file = File("own.toml", StrCat("extends = \"", root, "latte.toml\"\n", pair));
  Expect({"train", file, "--set", "model.head=gelu"}, 2,
         {"head=gelu", "two_tower.match", "head=relu where a file that is extended says it"});
  Expect({"train", file, "--set", "model.encoder_classifier.channels=3"}, 2,
         {"encoder_classifier", "two_tower"});
  Expect({"info", File("typo.toml", "[task]\nkind = \"listops\"\n[model.two_tower]\nmach = 1\n")},
         2, {"typo.toml: model.two_tower", "mach", "match"});
}

// Before the images are generated.
TEST_F(PublishedTest, AModelThatCannotBeIsRefusedBeforeItsData) {
  const std::string file =
      File("path.toml",
           "[task]\nkind = \"pathfinder\"\ninput = \"values\"\nexamples = 200000\n"
           "[model.init]\nembedding = \"width_normal\"\n");
  Expect({"train", file, "--out", folder_ / "run", "--threads", "1"}, 2,
         {"init.embedding=width_normal fits no weight",
          "set it to default where a file that is extended says it"});
}

TEST_F(PublishedTest, ChainsThatCannotBeRead) {
  const std::string circle = File("a.toml", "extends = \"b.toml\"\n");
  File("b.toml", "extends = \"a.toml\"\n");
  const std::string nowhere = File("c.toml", "extends = \"d.toml\"\n"),
                    number = File("e.toml", "extends = 3\n");
  File("l30.toml", "seed = 1\n");  // read 2^30 times, and a chain of 300
  for (int i = 0; i < 30; ++i) {
    const std::string next = StrCat("\"l", i + 1, ".toml\"");
    File(StrCat("l", i, ".toml"), StrCat("extends = [", next, ", ", next, "]\n"));
  }
  for (int i = 0; i < 300; ++i)
    File(StrCat("n", i, ".toml"), StrCat("extends = \"n", i + 1, ".toml\"\n"));
  File("n300.toml", "seed = 1\n");
  const std::pair<std::string, std::vector<std::string>> cases[] = {
      {circle, {"a.toml", "extends itself"}},
      {nowhere, {"c.toml", "d.toml, which does not exist"}},
      {folder_ / "l0.toml", {"l0.toml: extends more than 256 files, through other files"}},
      {folder_ / "n0.toml", {"n0.toml: extends more than 256 files, through other files"}},
      {number, {"e.toml", "extends must be the path of a file, or a list of them, got 3"}}};
  for (const auto& [file, parts] : cases) {
    const Outcome o = Run({"train", file, "--print-config"});
    EXPECT_EQ(o.code, 2) << o;
    ExpectContains(o.err, parts);
  }
}

TEST_F(PublishedTest, TheSizeOfAModelStandsBesideTheOnePrinted) {
  Base();
  const auto row = [&](const std::string& parameters) {
    return File("row.toml",
                "extends = \"base.toml\"\n[published]\nsource = \"Nobody Table 1\"\n"
                "row = \"small\"\nresults = { accuracy = 41.5 }\n"
                "spread = { accuracy = 0.3 }\nparameters = \"" +
                    parameters + "\"\n");
  };
  Outcome o = Run({"info", row(std::to_string(kParameters)), "--json"});
  ASSERT_EQ(o.code, 0) << o;
  Json json = ParseJson(o.out, "stdout");
  EXPECT_EQ(json["parameters"], kParameters);
  EXPECT_EQ(json["as_published"], true);
  int64_t parts = 0;
  for (const auto& [name, count] : json["parts"].items()) parts += count.get<int64_t>();
  EXPECT_EQ(parts, kParameters);
  // 1,010: what rounds to it with the digits printed, and what does not.
  ASSERT_EQ(kParameters, 1010);
  for (const char* same : {"1.0K", "1.01K", "1K"})
    EXPECT_EQ(ParseJson(Run({"info", row(same), "--json"}).out, same)["as_published"], true);
  for (const char* other : {"1009", "1.02K", "1.1K", "1M", "2K"})
    EXPECT_EQ(ParseJson(Run({"info", row(other), "--json"}).out, other)["as_published"], false);
  o = Run({"info", row("1.1K")});
  ExpectContains(o.out, {"1010 (Nobody Table 1 says 1.1K: another size)", "embed_tokens",
                         "Nobody Table 1, small: accuracy 41.5 +- 0.3"});
}

// Without the images the task takes them to be of 32 x 32 pixels.
TEST_F(PublishedTest, RowsOfLargerImagesAreThoseOfTheModel) {
  const Outcome o = Run({"info", File("vit.toml",
                                      "[task]\nkind = \"image\"\ncolour = \"rgb\"\ninput = "
                                      "\"values\"\npatch = 16\n[model]\ndim = 8\nlayers = 1\n"
                                      "heads = 2\nffn_dim = 8\npositions = \"learned\"\n"
                                      "max_length = 576\nclasses = 10\n[model.encoder_classifier]\n"
                                      "input = \"values\"\nchannels = 768\n")});
  ASSERT_EQ(o.code, 0) << o;
  ExpectContains(o.out, {"rows of 576 tokens"});
}

TEST_F(PublishedTest, ASizeMayBePrintedRelativeToAnother) {
  Base();
  const auto row = [&](const char* printed) {
    return Run({"info", "--json",
                File("rows/row.toml",
                     StrCat("extends = \"../base.toml\"\n[model]\nlayers = 3\n[published]\n"
                            "source = \"Nobody Table 2\"\nrelative_to = \"../base.toml\"\n"
                            "parameters = \"",
                            printed, "\"\n"))});
  };
  // A layer has 4 x 8 x 8 + 2 x 8 x 16 + 2 x 2 x 8 = 544 parameters: 2098 / 1010 = 2.077.
  for (const char* same : {"2", "2.1", "2.08", "2.077"})
    EXPECT_EQ(ParseJson(row(same).out, same)["as_published"], true);
  for (const char* other : {"2.0", "2.07", "2.078", "2.1K"})
    EXPECT_EQ(ParseJson(row(other).out, other)["as_published"], false);
  EXPECT_NEAR(ParseJson(row("2").out, "out")["relative"].get<double>(), 2098.0 / 1010.0, 1e-12);
}

TEST_F(PublishedTest, FiguresThatFitNothing) {
  Base();
  const std::pair<std::string, std::vector<std::string>> cases[] = {
      {"results = { acuracy = 41 }", {"metric of the task listops", "accuracy"}},
      {"results = { accuracy = \"41\" }", {"published.results.accuracy must be a number"}},
      {"parameters = \"many\"", {"published.parameters='many'"}},
      {"parametres = \"1K\"", {"published.parametres", "published.parameters"}}};
  for (const auto& [line, parts] : cases) {
    const Outcome o =
        Run({"info", File("row.toml", "extends = \"base.toml\"\n[published]\n" + line + "\n")});
    EXPECT_EQ(o.code, 2) << o;
    ExpectContains(o.err, parts);
  }
  const Outcome o = Run({"info", File("lm.toml", "[task]\nkind = \"lm\"\n")});
  EXPECT_EQ(o.code, 2) << o;
  ExpectContains(o.err, {"depends on the data", "model.vocab_size"});
}

TEST_F(PublishedTest, TrainingPrintsTheSourcesFigureBesideItsOwn) {
  const std::string file =
      File("row.toml",
           "[task]\nkind = \"listops\"\ntrain_examples = 8\nvalid_examples = 4\n"
           "test_examples = 4\nlength = 600\n[model]\ndim = 8\nlayers = 1\nheads = 2\n"
           "[train]\nsteps = 1\nbatch = 2\n[published]\nsource = \"P004 Table 2\"\n"
           "results = { accuracy = 40.18 }\n");
  const Outcome o = Run({"train", file, "--out", folder_ / "run", "--threads", "1"});
  ASSERT_EQ(o.code, 0) << o;
  ExpectContains(o.out, {"test:", "P004 Table 2: accuracy 40.18"});
  EXPECT_EQ(ReadJsonFile(folder_ / "run/experiment.json")["published"]["source"], "P004 Table 2");
}

// What an experiment file names is the task, whatever the data looks like.
TEST_F(PublishedTest, TheFileNamesTheTaskOfItsData) {
  const std::string masked = File("mlm.toml", "[task]\nkind = \"mlm\"\n");
  const auto kind = [](const Outcome& o) {
    const size_t at = o.out.find("[task]\nkind = ");
    return at == std::string::npos ? StrCat(o.code, o.err) : o.out.substr(at + 14, 6);
  };
  const Words print = {"--data", *shared_ / "text.txt", "--print-config"};
  EXPECT_EQ(kind(Run(Words{"train", masked} + print)), "\"mlm\"\n");
  EXPECT_EQ(kind(Run(Words{"train", masked, "--task", "lm"} + print)), "\"lm\"\nc");
  EXPECT_EQ(kind(Run(Words{"train", masked, "--set", "task.kind=lm"} + print)), "\"lm\"\nc");
  EXPECT_EQ(kind(Run(Words{"train"} + print)), "\"lm\"\nc");
  const Outcome bad = Run(Words{"train", File("bad.toml", "[task]\nkind = \"mml\"\n")} + print);
  EXPECT_EQ(bad.code, 2) << bad;
  ExpectContains(bad.err, {"bad.toml: ", "mml"});
}

// The commands in the comments of configs/, with --print-config and without --from, whose folders
// other runs make.
TEST_F(PublishedTest, TheCommandsInTheFilesRun) {
  const char* source = std::getenv("CISTERN_SOURCE_DIR");
  ASSERT_TRUE(source);
  int tried = 0;
  for (const auto& entry : fs::recursive_directory_iterator(fs::path(source) / "configs")) {
    if (entry.path().extension() != ".toml") continue;
    std::istringstream lines(ReadFile(entry.path()));
    std::vector<std::string> commands;
    bool open = false;
    for (std::string line; std::getline(lines, line);) {
      const bool begins = line.starts_with("#   cistern train ");
      open = begins || (open && line.starts_with("#     --"));
      if (begins) commands.push_back(line.substr(12));
      if (open && !begins) commands.back() += line.substr(5);
    }
    for (const std::string& command : commands) {
      std::istringstream text(command);
      Words words;
      for (std::string word; text >> word;) words.push_back(word);
      if (const auto from = std::find(words.begin(), words.end(), "--from"); from != words.end())
        words.erase(from, from + 2);
      words.at(1) = (fs::path(source) / words.at(1)).string();
      const Outcome o = Run(words + Words{"--print-config"});
      EXPECT_EQ(o.code, 0) << entry.path() << ": " << command << "\n" << o;
      ++tried;
    }
  }
  EXPECT_GE(tried, 15);
}

}  // namespace
}  // namespace cistern
