// What the options of cistern train say together, from outside.
#include "cistern/base/testing_messages.h"
#include "cistern/cli/testing_cli.h"

namespace cistern {
namespace {

using testing::ExpectContains;

class TrainArgumentsTest : public CliTest {};

// --text is --task lm --data, and a task whose data are generated has its settings as well.
TEST_F(TrainArgumentsTest, SettingsThatSuitTheTask) {
  const std::string text = *shared_ / "text.txt";
  const Outcome by_text = Run({"train", "--text", text, "--print-config"}),
                by_data = Run({"train", "--data", text, "--print-config"}),
                by_task = Run({"train", "--task", "lm", "--data", text, "--print-config"});
  ASSERT_EQ(by_text.code, 0) << by_text;
  ExpectContains(by_text.out, {"optimizer = \"muon\"", "positions = \"auto\""});
  EXPECT_EQ(by_text.out, by_data.out);
  EXPECT_EQ(by_text.out, by_task.out);
  const Outcome pathfinder = Run({"train", "--task", "pathfinder", "--print-config"});
  ExpectContains(pathfinder.out, {"kind = \"pathfinder\"", "positions = \"learned\""});
  const Outcome set = Run({"train", "--text", text, "--set", "model.positions=learned", "--set",
                           "train.optimizer=adamw", "--print-config"});
  ExpectContains(set.out, {"optimizer = \"adamw\"", "positions = \"learned\""});
}

// The positional argument is an experiment file; data have options of their own.
TEST_F(TrainArgumentsTest, DataAreNoExperimentFile) {
  const std::string rows = folder_ / "my.csv", corpus = folder_ / "corpus",
                    config = folder_ / "config";
  WriteFileAtomically(rows, "text,label\nhello,a\n");
  WriteFileAtomically(corpus, "hello, world\n");
  const std::string how = "an experiment file is TOML; data are given by --data";
  Expect({"train", rows, "--print-config"}, 2, {rows + " looks like data", how});
  Expect({"train", *shared_ / "text.txt", "--print-config"}, 2, {"looks like data", how, "--text"});
  Expect({"train", corpus, "--print-config"}, 2, {corpus + ":1:", "not valid TOML", how});
  Expect({"train", folder_.path(), "--print-config"}, 2, {folder_.path(), how});
  // Whatever it is called.
  WriteFileAtomically(config, "seed = 7\n");
  const Outcome o = Run({"train", config, "--print-config"});
  ASSERT_EQ(o.code, 0) << o;
  ExpectContains(o.out, {"seed = 7"});
}

TEST_F(TrainArgumentsTest, StepsOrSeconds) {
  const Words train = {"train", "--data", *shared_ / "text.txt", "--print-config"};
  const char* both = "steps or seconds, not both";
  Expect(train + Words{"--steps", "3", "--seconds", "2"}, 2, {both});
  Expect(train + Words{"--set", "train.steps=3", "--seconds", "2"}, 2, {both});
  Expect(train + Words{"--steps", "3", "--set", "train.seconds=2"}, 2, {both});
  // The settings of the task name a time, for those who name nothing.
  for (const Words& steps : {Words{"--steps", "3"}, Words{"--set", "train.steps=3"}}) {
    const Outcome o = Run(Words{"train", "--task", "pathfinder", "--print-config"} + steps);
    ASSERT_EQ(o.code, 0) << o;
    ExpectContains(o.out, {"\nsteps = 3\n", "\nseconds = 0"});
  }
  Expect({"compare", *shared_ / "text.txt", "--set", "train.steps=5", "--out", folder_ / "c"}, 2,
         {"train.steps=5", "give --seconds"});
  Expect({"compare", *shared_ / "text.txt", "--set", "train.steps = 5", "--out", folder_ / "c"}, 2,
         {"train.steps = 5", "give --seconds"});
}

TEST_F(TrainArgumentsTest, BlanksAroundAnEqualsSign) {
  const Outcome o = Run({"train", "--print-config", "--set", "task.kind = lm", "--set",
                         " from = " + Trained(), "--set", "task.length = 24 "});
  ASSERT_EQ(o.code, 0) << o;
  ExpectContains(o.out, {"kind = \"lm\"", "\ndim = 16\n", "length = 24"});
  const Outcome mlm =
      Run({"train", "--data", TrainedText(), "--print-config", "--set", "task.kind = mlm"});
  ASSERT_EQ(mlm.code, 0) << mlm;
  ExpectContains(mlm.out, {"kind = \"mlm\""});
}

TEST_F(TrainArgumentsTest, WeightsBringTheirTokens) {
  const Words from = {"train",         "--text",           *shared_ / "text.txt",
                      "--from",        *shared_ / "model", "--out",
                      folder_ / "run", "--steps",          "1"};
  Expect(from + Words{"--set", "task.tokenizer=bytes"}, 2,
         {"task.tokenizer=bytes", "leave it out"});
  Expect(from + Words{"--set", "task.lm.vocab_size=290"}, 2, {"task.lm.vocab_size=290"});
  Expect({"train", "--text", *shared_ / "text.txt", "--set", "from=" + *shared_ / "model", "--set",
          "task.tokenizer=bytes", "--out", folder_ / "run"},
         2, {"task.tokenizer=bytes", "leave it out"});
}

TEST_F(TrainArgumentsTest, RowsWithoutALabel) {
  std::string rows = "text\tlabel\n";
  for (int i = 0; i < 40; ++i) rows += i % 2 ? "a good day\tyes\n" : "a bad night\tno\n";
  WriteFileAtomically(folder_ / "rows.tsv", rows + "neither\t\n");
  Words train = {"train",   "--data", folder_ / "rows.tsv", "--out", folder_ / "run",
                 "--steps", "2",      "--threads",          "1"};
  for (const char* s : {"model.dim=8", "model.heads=1", "model.layers=1", "train.batch=4"})
    train = train + Words{"--set", s};
  Expect(train, 1, {"rows.tsv:42: the label is empty"});
  const Outcome o = Run(train + Words{"--skip-bad-rows"});
  ASSERT_EQ(o.code, 0) << o;
  ExpectContains(o.err, {"1 rows could not be read"});
  WriteFileAtomically(folder_ / "test.tsv", "text\tlabel\na good day\t\na good day\tyes\n");
  const Outcome eval =
      Run({"eval", folder_ / "run", folder_ / "test.tsv", "--skip-bad-rows", "--json"});
  ASSERT_EQ(eval.code, 0) << eval;
  EXPECT_EQ(ParseJson(eval.out, "stdout")["skipped_rows"], 1);
  WriteFileAtomically(folder_ / "none.tsv", "text\tlabel\n");
  Expect({"eval", folder_ / "run", folder_ / "none.tsv"}, 1, {"none.tsv: no row to measure"});
}

}  // namespace
}  // namespace cistern
