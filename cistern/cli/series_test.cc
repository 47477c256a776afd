// The tasks series and forecast from outside: train, eval, predict, compare, resume, analyze; and
// the shell's completion.
#include <cmath>

#include "cistern/base/format.h"
#include "cistern/base/testing_messages.h"
#include "cistern/cli/testing_cli.h"

namespace cistern {
namespace {

using testing::ExpectContains;

class SeriesCliTest : public CliTest {
 protected:
  // Series of two classes, one slower than the other; number: their period in place of the class.
  static std::string Table(bool number) {
    std::string text = "series,date,label,x,y\n";
    for (int i = 0; i < 40; ++i) {
      const double speed = i % 2 ? 0.3 : 0.9;
      for (int t = 0; t < 12; ++t) {
        text += StrCat("s", i, ",", t, ",",
                       number  ? std::to_string(100 / speed)
                       : i % 2 ? "slow"
                               : "fast",
                       ",", std::sin(speed * t + i), ",", t % 5 == 4 ? "" : "1.5", "\n");
      }
    }
    return text;
  }
  std::string File(const std::string& name, const std::string& text) {
    WriteFileAtomically(folder_ / name, text);
    return folder_ / name;
  }
  static Words Tiny(const Words& command, const std::string& out, const std::string& steps) {
    return command + Words{"--out",     out,
                           "--threads", "1",
                           "--steps",   steps,
                           "--set",     "model.dim=16",
                           "--set",     "model.layers=1",
                           "--set",     "model.heads=2",
                           "--set",     "model.ffn_dim=16",
                           "--set",     "train.lr=5e-3",
                           "--set",     "train.eval_every=300",
                           "--json"};
  }
};

TEST_F(SeriesCliTest, ClassesOfATable) {
  const std::string table = File("t.csv", Table(false)), out = folder_ / "run";
  const Outcome o = Run(Tiny({"train", "--task", "series", "--data", table}, out, "300"));
  ASSERT_EQ(o.code, 0) << o;
  const Json result = ParseJson(o.out, "stdout");
  EXPECT_GT(result["test"]["accuracy"].get<double>(), 70);
  EXPECT_LE(result["test"]["majority"].get<double>(), 90);
  EXPECT_GT(result["input_share"].get<double>(), 0);
  ExpectContains(o.err, {"column date: not read", "80 missing values", "task.missing"});
  EXPECT_TRUE(fs::exists(out + "/metrics.csv"));
  const Outcome eval = Run({"eval", out, table, "--json"});
  ASSERT_EQ(eval.code, 0) << eval;
  // The columns may stand elsewhere, and labels may be missing.
  const Outcome rows =
      Run({"predict", out, File("new.csv", "y,x,series\n1.5,0,a\n1.5,.29,a\n,.56,a\n1,2,b\n")});
  ASSERT_EQ(rows.code, 0) << rows;
  ExpectContains(rows.out, {"line\tlabel\tprobability\tprobabilities.fast\tprobabilities.slow",
                            "\n2\t", "\n5\t"});
  Expect({"predict", out, File("less.csv", "x,series\n1,a\n")}, 1, {"column 'y'"});
  Expect({"eval", out, File("other.csv", "series,label,x,y\na,slower,1,2\n")}, 1,
         {"other.csv:2", "slower", "did you mean 'slow'"});
  const Outcome resumed =
      Run({"train", "--resume", "--out", out, "--steps", "305", "--threads", "1"});
  EXPECT_EQ(resumed.code, 0) << resumed;
  const Outcome slots = Run({"analyze", out, "--rows", "2", "--out", folder_ / "a"});
  EXPECT_EQ(slots.code, 0) << slots;
  Expect({"train", "--task", "series", "--data", File("bad.csv", "label,a\nx,1\ny,b\n"), "--out",
          folder_ / "bad"},
         1, {"bad.csv:3", "column a is 'b'"});
}

TEST_F(SeriesCliTest, NumbersOfATable) {
  const std::string table = File("n.csv", Table(true)), out = folder_ / "run";
  Expect({"train", "--task", "series", "--data", table, "--out", out}, 2,
         {"task.series.regression=true"});
  Expect({"train", "--task", "series", "--data", table, "--out", out, "--set",
          "task.regression=true", "--set", "train.label_smoothing=0.1"},
         2, {"train.label_smoothing is for classes"});
  const Outcome o = Run(Tiny({"train", "--task", "series", "--data", table, "--set",
                              "task.regression=true", "--set", "task.indicator=true"},
                             out, "300"));
  ASSERT_EQ(o.code, 0) << o;
  const Json test = ParseJson(o.out, "stdout")["test"];
  EXPECT_LT(test["rmse"].get<double>(), 0.8 * test["mean_rmse"].get<double>());
  const Outcome rows = Run({"predict", out, table, "--json"});
  ASSERT_EQ(rows.code, 0) << rows;
  const double value =
      ParseJson(rows.out.substr(0, rows.out.find('\n')), "row")["value"].get<double>();
  EXPECT_GT(value, 80);  // 111 or 333
  EXPECT_LT(value, 400);
}

TEST_F(SeriesCliTest, ForecastsBeatTheLastValue) {
  std::string text = "date,x,y\n";
  for (int t = 0; t < 600; ++t)
    text +=
        StrCat("day ", t, ",", 1000 + 50 * std::sin(0.7 * t), ",", t % 11 == 3 ? "NaN" : "7", "\n");
  const std::string table = File("f.csv", text), out = folder_ / "run";
  const Outcome o = Run(Tiny(
      {"train", "--task", "forecast", "--data", table, "--set", "task.length=32"}, out, "150"));
  ASSERT_EQ(o.code, 0) << o;
  const Json test = ParseJson(o.out, "stdout")["test"];
  const Json& x = test["channels"]["x"];
  EXPECT_LT(x["rmse"].get<double>(), 0.5 * x["last_rmse"].get<double>());
  EXPECT_LT(x["last_rmse"].get<double>(), x["mean_rmse"].get<double>());
  EXPECT_NEAR(x["mean_rmse"].get<double>(), 50 / std::sqrt(2.0), 2);
  const Outcome rows = Run({"predict", out, table, "--json"});
  ASSERT_EQ(rows.code, 0) << rows;
  const Json row = ParseJson(rows.out, "row");
  EXPECT_NEAR(row["forecast"]["x"].get<double>(), 1000 + 50 * std::sin(0.7 * 600), 30);
  EXPECT_NEAR(row["forecast"]["y"].get<double>(), 7, 1);
  EXPECT_EQ(row["steps"], 600);
  // Large numbers differ behind the point.
  const Outcome lines = Run({"predict", out, table});
  ExpectContains(lines.out, {Significant(row["forecast"]["x"].get<double>(), 7)});
  const Outcome eval = Run({"eval", out, "--json"});
  ASSERT_EQ(eval.code, 0) << eval;
  const Outcome compared = Run({"compare", table, "--task", "forecast", "--mechanisms",
                                "latte,softmax", "--set", "task.length=16", "--set", "model.dim=8",
                                "--seconds", "1", "--out", folder_ / "compare", "--threads", "1"});
  EXPECT_EQ(compared.code, 0) << compared;
  Expect({"generate", out, "--prompt", "x"}, 2, {});
  const Outcome verified = Run({"verify", "--model", out, "--tokens", "20"});
  EXPECT_EQ(verified.code, 0) << verified;
  ExpectContains(verified.out, {"on 20 tokens of random values", "9 checks, 0 failed"});
  Expect({"verify", "--model", out, "--text", table}, 2, {"forecaster", "omit --text"});
  Expect({"train", "--resume", "--out", out, "--set", "train.label_smoothing=0.1"}, 2, {});
}

TEST_F(SeriesCliTest, CompletionOfBash) {
  const Outcome o = Run({"completion", "bash"});
  ASSERT_EQ(o.code, 0) << o;
  WriteFileAtomically(folder_ / "completion", o.out);
  const auto completed = [&](const std::string& words, int at) {
    const std::string out = folder_ / "words";
    const std::string script =
        StrCat("source ", folder_ / "completion", "; COMP_WORDS=(", words, "); COMP_CWORD=", at,
               "; _cistern; echo ${COMPREPLY[@]} > ", out);
    EXPECT_EQ(std::system(("bash -c '" + script + "'").c_str()), 0);
    return ReadFile(out);
  };
  EXPECT_EQ(completed("cistern tra", 1), "train\n");
  EXPECT_EQ(completed("cistern train --resu", 2), "--resume\n");
  EXPECT_EQ(completed("cistern train --task for", 3), "forecast\n");
  EXPECT_EQ(completed("cistern train --set train.label_s", 3), "train.label_smoothing=\n");
  EXPECT_EQ(completed("cistern compare x --mechanisms lat", 4), "latte\n");
  EXPECT_EQ(completed("cistern data path", 2), "pathfinder\n");
  EXPECT_EQ(completed("cistern data pathfinder out --si", 4), "--size\n");
  EXPECT_EQ(completed("cistern completion ba", 2), "bash\n");
  EXPECT_EQ(completed("cistern predict run da", 3), "\n");  // names of files, by bash itself
  Expect({"completion", "fish"}, 2, {"bash"});
}

}  // namespace
}  // namespace cistern
