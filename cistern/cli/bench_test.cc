// cistern bench from outside: what is printed and written, refusals, exit codes. No speeds.
#include "cistern/attention/mechanism.h"
#include "cistern/cli/testing_cli.h"
#include "cistern/models/model.h"

namespace cistern {
namespace {

class BenchTest : public CliTest {
 protected:
  static void SetUpTestSuite() {
    shared_ = new TestFolder;
    fs::permissions(shared_->path(), fs::perms(0755));
  }
  // Arguments of the smallest run.
  static Words Ops(const Words& more) {
    return Words{"bench", "ops",      "--threads", "1",         "--lengths", "20",     "--heads",
                 "2",     "--widths", "8",         "--seconds", "0.001",     "--runs", "1"} +
           more;
  }
  static Json Parsed(const Outcome& o) {
    EXPECT_EQ(o.code, 0) << o;
    return ParseJson(o.out, "output");
  }
};

// Values are checked before they are timed. Without those that amplify what rounding tokens does.
TEST_F(BenchTest, OpsTakesMechanismsInBFloat16) {
  std::string names;
  for (const MechanismInfo* info : Mechanisms()) {
    const std::string& name = info->name;
    if (name == "rfa" || name == "rfa_gate" || name == "performer" || name == "nystrom") continue;
    names += (names.empty() ? "" : ",") + name;
  }
  const Outcome o =
      Run(Ops({"--mechanisms", names, "--forms", "causal,bidirectional", "--dtypes", "bfloat16"}));
  EXPECT_EQ(o.code, 0) << o;
  EXPECT_EQ(o.out.find("failed"), std::string::npos) << o;
  EXPECT_NE(o.out.find("shared_workspace"), std::string::npos) << o;
  Expect(Ops({"--mechanisms", "all", "--forms", "causl"}), 2, {"did you mean 'causal'?"});
}

TEST_F(BenchTest, OpsMeasuresASweepAndWritesIt) {
  const std::string file = folder_ / "a.json";
  const Outcome o = Run(Ops({"--mechanisms", "latte,nystrom,softmax", "--forms", "causal,decode",
                             "--set", "latte.latents=8,16", "--json", file}));
  EXPECT_EQ(o.code, 0) << o;
  for (const char* phrase :
       {"GFLOP/s (float32", "GB/s", "tokens/s", "heads 2", "latte", "\"latents\":16",
        "not supported: [nystrom] has no causal", "forward+backward"})
    EXPECT_NE(o.out.find(phrase), std::string::npos) << phrase << "\n" << o;
  const Json json = ReadJsonFile(file);
  EXPECT_EQ(json["kind"], "ops");
  // 4 sets of options; causal in two passes, decode in one.
  ASSERT_EQ(json["rows"].size(), 12u);
  int64_t measured = 0;
  for (const Json& row : json["rows"]) {
    EXPECT_EQ(row["what"]["length"], 20);
    if (row.contains("skipped")) {
      EXPECT_EQ(row["what"]["mechanism"], "nystrom");
      continue;
    }
    ++measured;
    EXPECT_GT(row["ms"]["median"].get<double>(), 0);
    EXPECT_GT(row["figures"]["tokens_per_s"].get<double>(), 0);
  }
  EXPECT_EQ(measured, 9);
  // A record equals itself; a slower copy does not.
  const Outcome same = Run({"bench", "diff", file, file});
  EXPECT_EQ(same.code, 0) << same;
  EXPECT_NE(same.out.find("9 same, 3 not measured"), std::string::npos) << same;
  Json slower = json;
  for (Json& row : slower["rows"]) {
    if (row.contains("skipped")) continue;
    Json& ms = row["ms"];  // slower by more than its own spread, however busy the machine was
    const double spread = ms["high"].get<double>() - ms["low"].get<double>();
    ms["low"] = ms["median"] = ms["high"] = 3 * ms["median"].get<double>() + 4 * spread;
  }
  const std::string other = folder_ / "b.json";
  WriteFileAtomically(other, slower.dump());
  const Outcome worse = Run({"bench", "diff", file, other, "--json", "--fail-slower"});
  EXPECT_EQ(worse.code, 1) << worse;
  EXPECT_EQ(ParseJson(worse.out, "diff")["rows"].size(), 12u);
  EXPECT_EQ(ParseJson(worse.out, "diff")["slower"], 9);
  EXPECT_NE(worse.err.find("note: " + other + " is not as it was written"), std::string::npos)
      << worse;
  // Nothing in common is no success.
  Json others = json;
  for (Json& row : others["rows"]) row["what"]["length"] = 21;
  WriteFileAtomically(other, others.dump());
  EXPECT_EQ(Run({"bench", "diff", file, other}).code, 0);
  Expect({"bench", "diff", file, other, "--fail-slower"}, 1,
         {"--fail-slower", "no row was measured in both"});
  slower["machine"]["processor"] = "Another";
  WriteFileAtomically(other, slower.dump());
  Expect({"bench", "diff", file, other}, 2, {"Another", "--any-machine"});
  EXPECT_EQ(Run({"bench", "diff", file, other, "--any-machine"}).code, 0);
}

TEST_F(BenchTest, JsonOnStandardOutputIsAllThereIs) {
  const Json json =
      Parsed(Run(Ops({"--mechanisms", "linear", "--passes", "forward", "--json", "-"})));
  ASSERT_EQ(json["rows"].size(), 1u);
  EXPECT_EQ(json["rows"][0]["what"]["threads"], 1);
  EXPECT_EQ(json["peaks"].size(), json["rows"][0]["figures"].contains("gflops") ? 2u : 1u);
}

TEST_F(BenchTest, WhatCannotBeMeasuredIsRefusedWithTheReason) {
  Expect(Ops({"--mechanisms", "nystrom", "--passes", "forward"}), 2, {"[nystrom] has no causal"});
  Expect(Ops({"--mechanisms", "late"}), 2, {"did you mean 'latte'?"});
  Expect(Ops({"--mechanisms", "latte", "--forms", "causl"}), 2, {"did you mean 'causal'?"});
  Expect(Ops({"--mechanisms", "latte", "--set", "latte.latent=8"}), 2, {"did you mean 'latents'?"});
  Expect(Ops({"--mechanisms", "latte", "--dtypes", "float23"}), 2, {"did you mean 'float32'?"});
  Expect(Ops({"--mechanisms", "latte", "--isas", "avx9"}), 2, {"SIMD target"});
  Expect(Ops({"--mechanisms", "latte,latte"}), 2, {"twice"});
  Expect(Ops({"--mechanisms", "latte", "--batches", "0"}), 2, {"--batches"});
  Expect({"bench"}, 2, {"subcommand"});
  Expect({"bench", "diff", folder_ / "none", folder_ / "none", "--threshold", "nan"}, 2,
         {"--threshold", "from 0 to 10", "nan"});
  Expect({"bench", "diff", folder_ / "none", folder_ / "none"}, 1, {"none"});
  const std::string file = folder_ / "no-record.json";
  WriteFileAtomically(file, "{}\n");
  Expect({"bench", "diff", file, file}, 1, {file, "no file of cistern bench"});
}

// An exit code of 0 says that there are figures.
TEST_F(BenchTest, NothingToMeasureIsRefused) {
  Expect(Ops({"--mechanisms", "nystrom"}), 2,
         {"nothing of this can be measured", "[nystrom] has no causal"});
  Expect(Ops({"--mechanisms", "latte,linear", "--forms", "decode", "--passes", "forward+backward"}),
         2, {"decoding has no backward pass"});
  const auto efficiency = [](const Words& more) {
    return Words{"bench",     "efficiency", "--threads", "1", "--heads", "2",  "--widths", "8",
                 "--seconds", "0.001",      "--runs",    "1", "--from",  "16", "--to",     "32"} +
           more;
  };
  Expect(efficiency({"--mechanisms", "softmax"}), 2, {"softmax is what the others", "--against"});
  Expect(efficiency({"--mechanisms", "latte", "--forms", "decode", "--passes", "forward+backward"}),
         2, {"decoding has no backward pass"});
  Expect(efficiency({"--mechanisms", "nystrom"}), 2, {"[nystrom] has no causal"});
  Expect(efficiency({"--mechanisms", "latte,latte"}), 2, {"twice"});
  Expect({"bench", "model", "--no-train", "--no-decode"}, 2, {"--no-train or --no-decode"});
}

TEST_F(BenchTest, EfficiencyPrintsBrackets) {
  const Outcome o = Run({"bench",     "efficiency", "--mechanisms", "latte,nystrom",
                         "--threads", "1",          "--heads",      "2",
                         "--widths",  "8",          "--seconds",    "0.001",
                         "--runs",    "1",          "--from",       "1024",
                         "--to",      "2048",       "--forms",      "decode"});
  EXPECT_EQ(o.code, 0) << o;
  // "or less" of the memory, whatever the times are.
  for (const char* phrase : {"less time from", "1,024 or less", "not supported: [nystrom]"})
    EXPECT_NE(o.out.find(phrase), std::string::npos) << phrase << "\n" << o;
  Expect({"bench", "efficiency", "--lengths", "16"}, 2, {"--from and --to"});
  Expect({"bench", "efficiency", "--from", "32", "--to", "16"}, 2, {"--from 32"});
}

TEST_F(BenchTest, ModelMeasuresTrainingAndDecoding) {
  const Words small = {
      "bench",     "model", "--set",       "model.dim=16", "--set",       "model.heads=2",
      "--batch",   "2",     "--length",    "16",           "--positions", "0,20",
      "--decoded", "2",     "--seconds",   "0.001",        "--runs",      "1",
      "--threads", "1",     "--sequences", "3,5"};
  const Json json = Parsed(Run(small + Words{"--profile", "--json", "-"}));
  ASSERT_EQ(json["rows"].size(), 5u);
  EXPECT_EQ(json["rows"][0]["what"]["phase"], "train");
  EXPECT_GT(json["rows"][0]["figures"]["tokens_per_s"].get<double>(), 0);
  EXPECT_EQ(json["rows"][2]["what"]["position"], 20);
  // Latte's state is of one size.
  EXPECT_EQ(json["rows"][1]["figures"]["state_bytes"], json["rows"][2]["figures"]["state_bytes"]);
  // Several sequences have states of their own; the shares follow from the time and the peaks.
  const Json &one = json["rows"][1], &five = json["rows"][4];
  EXPECT_EQ(five["what"]["sequences"], 5);
  EXPECT_EQ(five["figures"]["state_bytes"].get<int64_t>(),
            5 * one["figures"]["state_bytes"].get<int64_t>());
  double gb = 0, gflops = 0;
  for (const Json& peak : json["peaks"]) {
    gb += peak.value("gb_per_s", 0.0), gflops += peak.value("gflops", 0.0);
  }
  // The embeddings are the output layer too: all parameters are read and multiplied by.
  const double weights = json["rows"][0]["figures"]["parameters"].get<double>(),
               ms = five["ms"]["median"].get<double>();
  EXPECT_NEAR(five["figures"]["of_memory"].get<double>(), 4 * weights / gb / 1e6 / ms, 1e-9);
  EXPECT_NEAR(five["figures"]["of_peak"].get<double>(), 2 * weights * 5 / gflops / 1e6 / ms, 1e-9);
  const Json& profile = json["settings"]["profile"];
  double sum = profile["outside_ms"].get<double>();
  bool latte = false;
  for (const Json& o : profile["operations"]) {
    sum += o["ms"].get<double>();
    latte = latte || o["name"] == "cistern::latte";
  }
  EXPECT_TRUE(latte) << profile;
  EXPECT_NEAR(sum, profile["ms"].get<double>(), 1e-6 * sum);
  Expect(small + Words{"--no-train", "--profile"}, 2, {"--profile"});
  Expect(small + Words{"--target-length", "8"}, 2, {"--target-length", "encoder_decoder"});
  Expect({"bench", "model", "--positions", "0,1"}, 2, {"tokens apart"});
  Expect({"bench", "model", "--set", "model.dmi=3"}, 2, {"did you mean 'model.dim'?"});
  for (const auto& [setting, instead] :
       std::map<std::string, std::string>{{"train.batch=2", "give --batch"},
                                          {"task.length=64", "give --length"},
                                          {"seed=2", "give --seed"},
                                          {"dtype=bfloat16", "give --dtype"},
                                          {"task.vocab_size=300", "give --set model.vocab_size"},
                                          {"train.lr=1", "leave it out"}})
    Expect(small + Words{"--set", setting}, 2,
           {"--set " + setting.substr(0, setting.find('=')) + " has no effect", instead});
  const Outcome shown = Run(small + Words{"--profile", "--no-decode", "--set", "train.clip=0",
                                          "--set", "train.optimizer=sgd"});
  EXPECT_EQ(shown.code, 0) << shown;
  EXPECT_NE(shown.out.find("the median of 5 training steps"), std::string::npos) << shown;
}

// Models of real values; a source and a target of two lengths.
TEST_F(BenchTest, ModelMakesUpValuesAndTargets) {
  const Words small = {"bench",  "model", "--batch", "2", "--seconds", "0.001",
                       "--runs", "1",     "--json",  "-", "--threads", "1"};
  const auto of = [&](const Words& settings) {
    Words words = small;
    for (const std::string& setting : settings + Words{"model.dim=16", "model.heads=2"})
      words = words + Words{"--set", setting};
    return words;
  };
  // The token before them has a position of its own.
  const Words classifier = of({"task.kind=classify", "model.encoder_classifier.input=values",
                               "model.encoder_classifier.channels=3", "model.positions=learned",
                               "model.max_length=16", "model.pooling=cls"});
  const Json values = Parsed(Run(classifier + Words{"--length", "16"}));
  EXPECT_EQ(values["rows"].size(), 1u);
  EXPECT_GT(values["rows"][0]["figures"]["steps_per_s"].get<double>(), 0);
  Expect(classifier + Words{"--length", "17"}, 2, {"--length 17", "16 tokens"});
  const Json series = Parsed(
      Run(of({"task.kind=forecast", "model.forecaster.inputs=3", "model.forecaster.outputs=2"}) +
          Words{"--length", "16"}));
  EXPECT_EQ(series["rows"][0]["what"]["length"], 16);

  ModelConfig config;
  config.kind = "encoder_decoder", config.dim = 16, config.heads = 2, config.vocab_size = 30;
  SaveModel(*MakeModel(config, 1), folder_ / "translator");
  const Json both =
      Parsed(Run(small + Words{folder_ / "translator", "--length", "16", "--target-length", "5"}));
  const Json& row = both["rows"][0];
  EXPECT_EQ(row["what"]["length"], 16);
  EXPECT_EQ(row["what"]["target_length"], 5);
  EXPECT_NEAR(row["figures"]["tokens_per_s"].get<double>(),
              2 * (16 + 5) * row["figures"]["steps_per_s"].get<double>(), 1e-6);
}

// What a step frees is there for the next one: a later step asks for few pages anew. (Without the
// thresholds that main.cc sets for malloc: 7,800.)
TEST_F(BenchTest, LaterStepsFaultNoPages) {
  const Json json = Parsed(
      Run({"bench", "model", "--set", "model.layers=2", "--batch", "8", "--length", "256",
           "--no-decode", "--seconds", "0.001", "--runs", "1", "--threads", "1", "--json", "-"}));
  EXPECT_LE(json["rows"][0]["figures"]["faults_per_step"].get<int64_t>(), 1000) << json;
}

TEST_F(BenchTest, HelpTeaches) {
  for (const Words& words :
       {Words{"bench", "--help"}, Words{"bench", "ops", "--help"}, Words{"bench", "diff", "--help"},
        Words{"bench", "model", "--help"}, Words{"bench", "efficiency", "--help"}}) {
    const Outcome o = Run(words);
    EXPECT_EQ(o.code, 0) << o;
    EXPECT_NE(o.out.find("Examples:"), std::string::npos) << o;
  }
  const std::string efficiency = Run({"bench", "efficiency", "--help"}).out;
  EXPECT_EQ(efficiency.find("--lengths"), std::string::npos) << efficiency;
  EXPECT_NE(efficiency.find("LENGTH); causal and decode"), std::string::npos) << efficiency;
}

}  // namespace
}  // namespace cistern
