// `cistern compare` with several seeds and lengths, from outside.
#include <algorithm>
#include <cmath>
#include <fstream>

#include "cistern/base/format.h"
#include "cistern/base/testing_messages.h"
#include "cistern/cli/testing_cli.h"

namespace cistern {
namespace {

using testing::ExpectContains;

class CompareTest : public CliTest {
 protected:
  Words Command(const Words& more) {
    Words words = {"compare",         TrainedText(), "--out",           folder_ / "out",
                   "--mechanisms",    "latte",       "--seconds",       "0.2",
                   "--threads",       "1",           "--sample-tokens", "0",
                   "--decode-tokens", "4",           "--dtype",         "float32"};
    for (const char* s : {"model.dim=16", "model.heads=2", "model.layers=1", "task.length=16",
                          "task.vocab_size=300"})
      words = words + Words{"--set", s};
    return words + more;
  }
  static double Bits(const std::string& folder) {
    return ParseJson(ReadFile(folder + "/result.json"), "result")["test"]["bits_per_byte"]
        .get<double>();
  }
};

// Three seeds: 4.303 is the 97.5 % point of Student's t with two degrees of freedom.
TEST_F(CompareTest, SeedsGiveAMeanWithAnInterval) {
  const Outcome o = Run(Command({"--seeds", "3"}));
  ASSERT_EQ(o.code, 0) << o;
  double sum = 0, squares = 0;
  for (int seed = 1; seed <= 3; ++seed) sum += Bits(StrCat(folder_ / "out", "/latte/seed-", seed));
  const double mean = sum / 3;
  for (int seed = 1; seed <= 3; ++seed) {
    const double d = Bits(StrCat(folder_ / "out", "/latte/seed-", seed)) - mean;
    squares += d * d;
  }
  EXPECT_GT(squares, 0);
  const Json row =
      ParseJson(ReadFile(folder_ / "out/compare.json"), "compare.json")["mechanisms"]["latte"];
  EXPECT_NEAR(row["mean"].get<double>(), mean, 1e-12);
  EXPECT_NEAR(row["half_width_95"].get<double>(), 4.303 * std::sqrt(squares / 2 / 3), 1e-12);
  EXPECT_EQ(row["seeds"].size(), 3u);
  double tokens = 0, peak = 0;
  for (const Json& seed : row["seeds"]) {
    tokens += seed["tokens_per_s"].get<double>() / 3;
    peak = std::max(peak, seed["peak_bytes"].get<double>());
  }
  EXPECT_NEAR(row["tokens_per_s"].get<double>(), tokens, 1e-9 * tokens);
  EXPECT_EQ(row["peak_bytes"].get<double>(), peak);
  const std::string rounded =
      Thousands(std::llround(row["tokens_per_s"].get<double>())) + " tokens/s";
  // The line of the row, and the recommendation.
  ExpectContains(o.out, {"bits per byte, " + rounded, "trains fastest: " + rounded,
                         "tokens/s is the mean of the seeds", "are those of seed 1."});
  const Json& speed = row["decode_speed"];
  EXPECT_EQ(speed["sequences"], 256);
  EXPECT_EQ(speed["weight_bytes"].get<int64_t>(), 4 * row["parameters"].get<int64_t>());
  const double weights = row["parameters"].get<double>();
  EXPECT_NEAR(
      speed["of_fma_peak"].get<double>(),
      2 * weights * speed["tokens_per_s"].get<double>() / 1e9 / speed["gflops"].get<double>(),
      1e-9);
  EXPECT_NEAR(speed["of_memory_limit"].get<double>(),
              4 * weights / speed["gb_per_s"].get<double>() / 1e6 /
                  row["decode"][0]["ms_per_token"].get<double>(),
              1e-9);
  ExpectContains(ReadFile(folder_ / "out/report.html"),
                 {"of the memory limit", "tokens/s, 256 sequences", ">nats<"});
  ExpectContains(o.out, {" ± ", "The mean of 3 seeds"});
  const Outcome again = Run(Command({"--seeds", "3", "--resume"}));
  ASSERT_EQ(again.code, 0) << again;
  EXPECT_EQ(Bits(folder_ / "out/latte/seed-1") + Bits(folder_ / "out/latte/seed-2") +
                Bits(folder_ / "out/latte/seed-3"),
            sum);
}

// The run of the first seed is the one that is there, wherever it was begun.
TEST_F(CompareTest, SeedsMayBeAdded) {
  const std::string out = folder_ / "out", first = out + "/latte/result.json";
  ASSERT_EQ(Run(Command({})).code, 0);
  const std::string kept = ReadFile(first), log = out + "/latte/metrics.jsonl";
  WriteFileAtomically(log, "{\n" + ReadFile(log));  // a line that cannot be read is passed over
  const auto row = [&](const Words& more) {
    const Outcome o = Run(Command(Words{"--resume"} + more));
    EXPECT_EQ(o.code, 0) << o;
    return ParseJson(ReadFile(out + "/compare.json"), "compare.json")["mechanisms"]["latte"];
  };
  const Json two = row({"--seeds", "2"});
  EXPECT_EQ(ReadFile(first), kept);
  EXPECT_FALSE(fs::exists(out + "/latte/seed-1"));
  ASSERT_EQ(two["seeds"].size(), 2u) << two.dump(1);
  EXPECT_EQ(two["seeds"][0]["test"]["bits_per_byte"].get<double>(), Bits(out + "/latte"));
  EXPECT_EQ(two["seeds"][1]["test"]["bits_per_byte"].get<double>(), Bits(out + "/latte/seed-2"));
  // And the other way round.
  const std::string several = folder_ / "several";
  Words words = Command({"--seeds", "2"});
  words[3] = several;
  ASSERT_EQ(Run(words).code, 0);
  words = Command({"--resume"});
  words[3] = several;
  const Outcome one = Run(words);
  ASSERT_EQ(one.code, 0) << one;
  EXPECT_FALSE(fs::exists(several + "/latte/experiment.json"));
  const Json of_one =
      ParseJson(ReadFile(several + "/compare.json"), "compare.json")["mechanisms"]["latte"];
  EXPECT_EQ(of_one["test"]["bits_per_byte"].get<double>(), Bits(several + "/latte/seed-1"));
}

// The second figure of a text is that of `cistern eval` with blocks of 16 x the length.
TEST_F(CompareTest, BlocksLongerThanTheTrainingRows) {
  const Outcome o = Run(Command({"--seeds", "2"}));
  ASSERT_EQ(o.code, 0) << o;
  ExpectContains(o.out, {"in blocks 16 x longer"});
  const std::string file = folder_ / "out/compare.json";
  const Json row = ParseJson(ReadFile(file), file)["mechanisms"]["latte"];
  double sum = 0;
  for (int seed = 1; seed <= 2; ++seed) {
    const std::string run = StrCat(folder_ / "out", "/latte/seed-", seed);
    const Outcome eval = Run({"eval", run, "--length", "256", "--json"});
    ASSERT_EQ(eval.code, 0) << eval;
    const double bits = ParseJson(eval.out, "eval")["bits_per_byte"].get<double>();
    const Json& longer = row["seeds"][size_t(seed - 1)]["long_blocks"];
    EXPECT_NEAR(longer["bits_per_byte"].get<double>(), bits, 1e-6);
    EXPECT_NE(bits, Bits(run));
    EXPECT_EQ(longer["length"], 256);
    sum += longer["bits_per_byte"].get<double>();
  }
  EXPECT_NEAR(row["long_blocks"]["mean"].get<double>(), sum / 2, 1e-12);
}

// Learned positions end, so there is no such figure; nor one of decoding beyond them, and the text
// is shorter.
TEST_F(CompareTest, NoLongBlocksBeyondLearnedPositions) {
  for (const std::string group : {"model.", "model.decoder."}) {
    Words words = Command(
        {"--set", group + "positions=learned", "--set", group + "max_length=80", "--quiet"});
    words[3] = folder_ / group;
    *(std::find(words.begin(), words.end(), "--sample-tokens") + 1) = "120";
    *(std::find(words.begin(), words.end(), "--decode-tokens") + 1) = "400";
    const Outcome o = Run(words);
    ASSERT_EQ(o.code, 0) << o;
    EXPECT_EQ(o.out.find("x longer"), std::string::npos) << o;
    EXPECT_EQ(o.out.find("not measured"), std::string::npos) << o;
    EXPECT_EQ(o.out.find("state at 0"), std::string::npos) << o;
    ExpectContains(o.out, {"Written by latte", "state at start  ms/token at start",
                           "decoding was measured up to position 0: learned positions end at 80"});
  }
}

// What was trained is reported, and why the rest of it is not.
TEST_F(CompareTest, WhatAMechanismCannotReachIsNotMeasured) {
  Words of_text = Command({"--set", "model.max_length=80"});
  of_text[5] = "latte,linformer";
  *(std::find(of_text.begin(), of_text.end(), "--decode-tokens") + 1) = "400";
  const Outcome text = Run(of_text);
  ASSERT_EQ(text.code, 0) << text;
  const std::string file = folder_ / "out/compare.json";
  Json rows = ParseJson(ReadFile(file), file)["mechanisms"];
  EXPECT_TRUE(rows["latte"].contains("long_blocks"));
  EXPECT_FALSE(rows["linformer"].contains("long_blocks")) << rows["linformer"].dump(1);
  EXPECT_TRUE(rows["linformer"]["test"].contains("bits_per_byte"));
  EXPECT_FALSE(rows["linformer"].contains("decode"));
  ExpectContains(text.out, {"linformer: longer blocks were not measured: [linformer] position",
                            "linformer: decoding was not measured: [linformer] position",
                            "make the model with a larger one"});
  EXPECT_EQ(text.out.find("Not on the Pareto front: linformer"), std::string::npos) << text;

  Words words = {"compare",
                 "--task",
                 "recall",
                 "--out",
                 folder_ / "recall",
                 "--mechanisms",
                 "latte,linformer",
                 "--seconds",
                 "0.2",
                 "--threads",
                 "1",
                 "--dtype",
                 "float32",
                 "--decode-tokens",
                 "100"};
  for (const char* s : {"model.dim=16", "model.heads=2", "model.layers=1", "model.max_length=80",
                        "task.sizes=4,8", "task.distance=4"})
    words = words + Words{"--set", s};
  const Outcome recall = Run(words);
  ASSERT_EQ(recall.code, 0) << recall;
  ExpectContains(recall.out, {"linformer: decoding was not measured"});
  rows = ParseJson(ReadFile(folder_ / "recall/compare.json"), "compare.json")["mechanisms"];
  EXPECT_TRUE(rows["latte"].contains("decode"));
  EXPECT_TRUE(rows["linformer"]["test"].contains("accuracy")) << rows["linformer"].dump(1);
}

TEST_F(CompareTest, EfficiencyLengthsInTheRecommendation) {
  const Outcome o = Run(Command({"--mechanisms", "softmax", "--efficiency", "128"}));
  ASSERT_EQ(o.code, 0) << o;
  const Json result = ParseJson(ReadFile(folder_ / "out/compare.json"), "compare.json");
  // Causal forward, forward+backward, decoding; of latte against softmax, at 64 and 128.
  ASSERT_EQ(result["efficiency"].size(), 3u) << result["efficiency"].dump(1);
  for (const Json& row : result["efficiency"]) {
    EXPECT_EQ(row["mechanism"], "latte");
    EXPECT_EQ(row["time"]["longest"], 128) << row.dump(1);
  }
  ExpectContains(ReadFile(folder_ / "out/report.html"), {"Efficiency length", "less time from"});
  if (result["recommended"] == "latte")
    ExpectContains(o.out, {"latte takes less time than softmax in training"});
  EXPECT_EQ(o.out.find("cistern bench efficiency"), std::string::npos);
  Expect(Command({"--efficiency", "100"}), 2, {"128 or more"});
  Expect(Command({"--mechanisms", "all,latte"}), 2, {"all stands alone"});
  Expect(Command({"--mechanisms", "latte:2"}), 2, {"latte:2 and latte are the same model"});
}

// Its state is that of the position; a model whose state grows is no best bounded one.
TEST_F(CompareTest, DecodingIsMeasuredWhereItSays) {
  Words words = Command({});
  words[5] = "softmax";
  const Outcome o = Run(words);
  ASSERT_EQ(o.code, 0) << o;
  const Json result = ParseJson(ReadFile(folder_ / "out/compare.json"), "compare.json");
  EXPECT_TRUE(result["best_bounded"].is_null()) << result["best_bounded"];
  EXPECT_EQ(result["recommended"], "softmax");
  const Json& decode = result["mechanisms"]["softmax"]["decode"];
  ASSERT_EQ(decode.size(), 4u);
  const int64_t empty = decode[0]["state_bytes"], token = 2 * 16 * 4;  // a key and a value
  for (const auto& [point, position] : {std::pair(0, 0), {1, 1}, {2, 2}, {3, 4}}) {
    EXPECT_EQ(decode[size_t(point)]["position"], position);
    EXPECT_EQ(decode[size_t(point)]["state_bytes"], empty + position * token);
  }
}

TEST_F(CompareTest, LengthsAreASweep) {
  const Outcome o = Run(Command({"--lengths", "8,16"}));
  ASSERT_EQ(o.code, 0) << o;
  const Json result = ParseJson(ReadFile(folder_ / "out/compare.json"), "compare.json");
  for (const int length : {8, 16}) {
    const std::string name = StrCat("latte, ", length, " tokens");
    ASSERT_TRUE(result["mechanisms"].contains(name)) << result.dump(1);
    EXPECT_EQ(result["mechanisms"][name]["length"], length);
    const Json run = ParseJson(
        ReadFile(StrCat(folder_ / "out", "/latte-", length, "/experiment.json")), "experiment");
    EXPECT_EQ(run["task"]["lm"]["length"], length);
  }
  ExpectContains(ReadFile(folder_ / "out/report.html"), {"tokens of a row"});
  Expect(Command({"--lengths", "8,8"}), 2, {"--lengths names 8 twice"});
  Expect({"compare", "--task", "pathfinder", "--lengths", "8", "--out", folder_ / "none"}, 2,
         {"--lengths: the task pathfinder"});
  EXPECT_FALSE(fs::exists(folder_ / "none"));
}

// Rows of other settings, of other data or of a damaged file would stand beside the new ones.
TEST_F(CompareTest, AResumedComparisonIsTheSameOne) {
  const std::string out = folder_ / "out", text = folder_ / "mine.txt";
  WriteFileAtomically(text, Text());
  const auto command = [&](const Words& more) {
    Words words = Command(more);
    words[1] = text;
    return words;
  };
  ASSERT_EQ(Run(command({})).code, 0);
  const auto before = Contents(out + "/latte");
  Expect(command({"--resume", "--seconds", "0.3"}), 2,
         {out + " was begun with train.seconds=0.2, and 0.3"});
  Expect(command({"--resume", "--set", "model.dim=32"}), 2, {"model.dim=16, and 32"});
  Expect(command({"--resume", "--seed", "2"}), 2, {"seed=1, and 2"});
  Words more = command({"--resume"});
  more[9] = "2";
  Expect(more, 2, {out + " was begun with threads=1, and 2"});
  more = command({"--resume"});
  more[15] = "float64";
  Expect(more, 2, {out + " was begun with dtype=\"float32\", and \"float64\""});
  WriteFileAtomically(text, Text() + "another line\n");
  Expect(command({"--resume"}), 2, {out + "/latte has been trained on other data"});
  WriteFileAtomically(text, Text());
  const std::string result = out + "/latte/result.json";
  std::string damaged = ReadFile(result);
  const size_t digit = damaged.find_first_of("12345678", damaged.find("bits_per_byte"));
  ++damaged[digit];
  WriteFileAtomically(result, damaged);
  const Outcome broken = Run(command({"--resume"}));
  EXPECT_EQ(broken.code, 1) << broken;
  ExpectContains(broken.out, {result + ": the contents do not fit their checksum"});
  --damaged[digit];
  WriteFileAtomically(result, damaged);
  const std::string elsewhere = folder_ / "elsewhere.txt";  // the same text
  fs::rename(text, elsewhere);
  Words words = Command({"--resume"});
  words[1] = elsewhere;
  *std::find(words.begin(), words.end(), "latte") = "latte,linear";
  const Outcome o = Run(words);
  ASSERT_EQ(o.code, 0) << o;
  EXPECT_EQ(Contents(out + "/latte"), before);
  ExpectContains(o.out, {"latte", "linear"});
}

// Elsewhere by the command line or by an experiment file: the run goes on, and its longer blocks
// are measured.
TEST_F(CompareTest, TheTextMayMoveBeforeARunGoesOn) {
  const std::string file = folder_ / "mine.toml";
  for (const bool by_file : {false, true}) {
    const auto command = [&](const std::string& text, const Words& more) {
      Words words = Command(more);
      words[1] = text, words[3] = folder_ / (by_file ? "by-file" : "by-word");
      if (!by_file) return words;
      WriteFileAtomically(file, "[task]\nkind = \"lm\"\ntext = \"" + text + "\"\n");
      words[1] = file;
      words.insert(words.begin() + 1, "--experiment");
      return words;
    };
    const std::string first = folder_ / "first.txt", second = folder_ / "second.txt";
    WriteFileAtomically(first, Text());
    const Words begin = command(first, {});
    ASSERT_EQ(Run(begin).code, 0);
    const std::string out = begin[by_file ? 4 : 3];
    fs::remove(out + "/latte/result.json");  // as if it had been interrupted
    fs::rename(first, second);
    const Outcome o = Run(command(second, {"--resume"}));
    EXPECT_EQ(o.code, 0) << o;
    const Json row =
        ParseJson(ReadFile(out + "/compare.json"), "compare.json")["mechanisms"]["latte"];
    EXPECT_TRUE(row.contains("long_blocks")) << row.dump(1) << o;
    EXPECT_FALSE(row.contains("unmeasured")) << row.dump(1);
  }
}

// The loss of predicted numbers is none of likelihood.
TEST_F(CompareTest, TheLossOfNumbersIsNotInNats) {
  std::string rows = "label\ttext\n";
  for (int i = 0; i < 60; ++i) rows += StrCat(i * 7 % 11, "\tword ", i * i % 17, "\n");
  WriteFileAtomically(folder_ / "rows.tsv", rows);
  Words words = Command({"--set", "task.regression=true"});
  words[1] = folder_ / "rows.tsv";
  const Outcome o = Run(words);
  ASSERT_EQ(o.code, 0) << o;
  EXPECT_EQ(ReadFile(folder_ / "out/report.html").find(">nats<"), std::string::npos);
}

// What `train` refuses is that row's failure; what it would refuse of every row ends them all.
TEST_F(CompareTest, ARefusedRunLosesItsRow) {
  const auto command = [&](const Words& more) {
    Words words = Command(more);
    words[5] = "performer,latte", words[9] = "2";
    return words;
  };
  Expect(command({"--set", "train.ema=0.9", "--set", "train.average_last=3"}), 2,
         {"train.average_last and train.ema"});
  EXPECT_FALSE(fs::exists(folder_ / "out"));
  const Outcome o = Run(command({"--set", "train.parallel=rows"}));
  ASSERT_EQ(o.code, 0) << o;
  ExpectContains(o.err, {"train.parallel=rows is not possible: a mechanism of it draws"});
  const std::string why = "the training run was refused: train.parallel=rows is not possible";
  ExpectContains(o.out, {"performer failed: seed 1: " + why});
  ExpectContains(ReadFile(folder_ / "out/report.html"), {why});
  const Json rows = ParseJson(ReadFile(folder_ / "out/compare.json"), "compare.json")["mechanisms"];
  ExpectContains(rows["performer"]["failed"].get<std::string>(), {why, "draws random numbers"});
  EXPECT_TRUE(rows["latte"]["test"].contains("bits_per_byte")) << rows.dump(1);
}

// Once, not once for each mechanism, and nothing is left.
TEST_F(CompareTest, DataThatCannotBeReadEndItBeforeAnyRun) {
  const std::string text = folder_ / "a.txt.gz", out = folder_ / "out";
  std::ofstream(text, std::ios::binary) << "\x1f\x8b\x08 and so on";
  const Outcome o = Run({"compare", text, "--out", out, "--mechanisms", "latte,abc_mlp", "--dtype",
                         "float32", "--seconds", "0.2"});
  EXPECT_EQ(o.code, 1) << o;
  ExpectContains(o.err, {text, "is compressed", "gunzip"});
  EXPECT_EQ(o.err.find("is compressed"), o.err.rfind("is compressed")) << o;
  EXPECT_EQ(o.out, "");
  EXPECT_FALSE(fs::exists(out));
}

TEST_F(CompareTest, TheSeedOfAnExperimentIsTheFirst) {
  const std::string file = folder_ / "seven.toml", out = folder_ / "two words";
  WriteFileAtomically(file, "seed = 7\n");
  const auto command = [&](const Words& more) {
    Words words = Command(more);
    words[3] = out;
    return words;
  };
  Expect(command({"--set", "model.attention=softmax"}), 2, {"model.attention", "--mechanisms"});
  Expect(command({"--set", "train.final_test=false"}), 2, {"train.final_test", "leave it out"});
  Expect(command({"--set", "model.decoder.attention=softmax"}), 2,
         {"no layer", "model.decoder.attention"});
  EXPECT_FALSE(fs::exists(out));
  const Outcome o = Run(command({"--experiment", file, "--seeds", "2"}));
  ASSERT_EQ(o.code, 0) << o;
  for (const int seed : {7, 8}) {
    const std::string path = StrCat(out, "/latte/seed-", seed, "/experiment.json");
    EXPECT_EQ(ParseJson(ReadFile(path), path)["seed"], seed);
  }
  ExpectContains(o.out, {", 0.2 s of training time", "generate '" + out + "/latte/seed-7'"});
  // Another comparison would take the place of this one's report.
  const auto before = Contents(out);
  Words other = command({});
  *std::find(other.begin(), other.end(), "latte") = "linear";
  Expect(other, 2, {out + " already holds runs", "--resume", "another --out"});
  EXPECT_EQ(Contents(out), before);
}

TEST_F(CompareTest, AnInterruptedLadderIsNotReported) {
  const std::string prefix = folder_ / "run";
  const pid_t child = Start(Command({"--efficiency", "1048576"}), prefix);
  // The line of the last row: what is left is the ladder.
  for (int i = 0; i < 6000 && ReadFile(prefix + ".out").find("tokens/s") == std::string::npos; ++i)
    ::usleep(10'000);
  ::kill(child, SIGINT);
  const Outcome o = Wait(child, prefix);
  EXPECT_EQ(o.code, 130) << o;
  ExpectContains(o.err, {"interrupted; to continue: cistern compare " + TrainedText() +
                             " --mechanisms latte --seconds 0.2 --threads 1 ",
                         " --set model.dim=16 --set model.heads=2 ",
                         " --efficiency 1048576 --out " + (folder_ / "out") + " --resume\n"});
  const Json result = ParseJson(ReadFile(folder_ / "out/compare.json"), "compare.json");
  EXPECT_EQ(result["interrupted"], true);
  EXPECT_FALSE(result.contains("efficiency")) << result["efficiency"].dump(1);
  EXPECT_TRUE(result["mechanisms"].contains("latte"));
  EXPECT_TRUE(fs::exists(folder_ / "out/report.html"));
}

TEST_F(CompareTest, OneComparisonInAFolder) {
  const std::string prefix = folder_ / "first";
  const pid_t first = Start(Command({"--seconds", "60"}), prefix);
  for (int i = 0; i < 6000 && !fs::exists(folder_ / "out/latte/experiment.json"); ++i)
    ::usleep(10'000);
  Expect(Command({"--seconds", "60", "--resume"}), 1, {"is in use by process"});
  ::kill(first, SIGINT);
  const Outcome o = Wait(first, prefix);
  EXPECT_EQ(o.code, 130) << o;
  EXPECT_FALSE(fs::exists(folder_ / "out/lock"));
  // One way to continue, and not that of a single run.
  ExpectContains(o.err, {"interrupted after step ", "to continue: cistern compare "});
  EXPECT_EQ(o.err.find("cistern train"), o.err.npos) << o;
}

}  // namespace
}  // namespace cistern
