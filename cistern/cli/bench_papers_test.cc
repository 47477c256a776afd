// cistern bench papers from outside, and the settings of its whole models beside those of configs/.
#include <fstream>
#include <iterator>

#include "cistern/bench/papers_models.h"
#include "cistern/cli/testing_cli.h"
#include "cistern/io/fields.h"

namespace cistern {
namespace {

class BenchPapersTest : public CliTest {
 protected:
  static void SetUpTestSuite() {
    shared_ = new TestFolder;
    fs::permissions(shared_->path(), fs::perms(0755));
  }
  // All settings of a file of configs/, as the program reads them.
  Json Settings(const std::string& file) const {
    const char* source = std::getenv("CISTERN_SOURCE_DIR");
    const Outcome o =
        Run({"train", StrCat(source ? source : ".", "/configs/", file), "--print-config"});
    EXPECT_EQ(o.code, 0) << o;
    const std::string copy = folder_ / "config.toml";
    WriteFileAtomically(copy, o.out);
    return ReadTomlFile(copy);
  }
};

nlohmann::json Sorted(const Json& json) { return nlohmann::json::parse(json.dump()); }

// Table 6's K = 4 of four heads is Table 5's K = 8.
TEST_F(BenchPapersTest, SettingsAreThoseOfThePublishedExperiments) {
  const std::map<std::string, std::map<std::string, std::string>> files = {
      {"reuse-table6",
       {{"base", "P001/text/base.toml"},
        {"K=4 P=2", "P001/text/k4-p2.toml"},
        {"K=4 P=3", "P001/text/k8-p3.toml"}}},
      {"reuse-table3",
       {{"base", "P001/vit/base.toml"},
        {"K=6 P=10", "P001/vit/k6-p10.toml"},
        {"K=12 P=6", "P001/vit/k12-p6.toml"},
        {"13 layers, K=6 P=10", "P001/vit/13-layers-k6-p10.toml"}}},
      {"abc-table6-model",
       {{"base", "P003/sst2/base.toml"},
        {"Linformer 64", "P003/sst2/linformer-64.toml"},
        {"Linformer 128", "P003/sst2/linformer-128.toml"},
        {"ABC 64", "P003/sst2/abc_mlp-64.toml"},
        {"ABC 128", "P003/sst2/abc_mlp-128.toml"}}},
      {"abc-fig1-model",  // RFA's and T2R's have no file
       {{"softmax", "P003/wmt14/base.toml"}, {"ABC 32/8", "P003/wmt14/abc_mlp-32-8.toml"}}}};
  for (const auto& [figure, arms] : files) {
    const bench::Protocol p = bench::ChosenProtocols({figure}).at(0);
    EXPECT_EQ(p.arms.size(), arms.size() + (figure == "abc-fig1-model" ? 2 : 0));
    for (const bench::Arm& arm : p.arms) {
      if (!arms.contains(arm.name)) continue;
      const std::string& file = arms.at(arm.name);
      const Json settings = Settings(file);
      ModelConfig here = bench::ConfigOf(p, arm, p.lengths[0]),
                  there = ReadModelConfig(settings["model"], file);
      EXPECT_EQ(Sorted(here.Describe().Write()), Sorted(there.Describe().Write())) << file;
      if (p.whole->work != bench::ModelWork::kTraining) continue;
      OptimizerOptions optimizer = p.whole->optimizer;
      Fields fields;
      optimizer.AddTo(fields);
      const Json written = fields.Write();
      for (const auto& [key, value] : written.items())
        EXPECT_EQ(Sorted(value), Sorted(settings["train"][key])) << file << " " << key;
      EXPECT_EQ(p.whole->clip, settings["train"]["clip"].get<double>()) << file;
    }
  }
}

TEST_F(BenchPapersTest, WholeModelsHaveStepsASecond) {
  const std::string file = folder_ / "papers.json", page = folder_ / "papers.html";
  const Outcome o = Run({"bench", "papers", "reuse-table6", "--scale", "0.016", "--scale-batch",
                         "--seconds", "0.001", "--runs", "1", "--json", file, "--report", page});
  EXPECT_EQ(o.code, 0) << o;
  for (const char* phrase : {"steps/s", "parameters", "pass training step", "K=4 P=3",
                             "K=4 P=2 faster than base at 64", "report in"})
    EXPECT_NE(o.out.find(phrase), std::string::npos) << phrase << "\n" << o;
  const Json json = ReadJsonFile(file);
  ASSERT_EQ(json["rows"].size(), 12u);
  for (const Json& row : json["rows"]) {
    ASSERT_TRUE(row.contains("figures")) << row;
    EXPECT_GT(row["figures"].value("steps_per_s", 0.0), 0) << row;
  }
  EXPECT_EQ(json["settings"]["findings"].size(), 16u);
  EXPECT_NE(ReadFile(page).find("steps/s"), std::string::npos);
  EXPECT_NE(o.err.find("know no spread; give --runs 3"), std::string::npos) << o;
}

// As `train` does (base/restart.h).
TEST_F(BenchPapersTest, WholeModelsRunWithTheSettingsOfTrainings) {
  ::unsetenv("GOMP_SPINCOUNT");
  ::unsetenv("OMP_WAIT_POLICY");
  const std::string prefix = folder_ / "run";
  const pid_t child = Start({"bench", "papers", "--seconds", "600", "reuse-table6"}, prefix);
  bool set = false;
  for (int i = 0; i < 60000 && !set; ++i) {
    ::usleep(1000);
    std::ifstream file(StrCat("/proc/", child, "/environ"));
    const std::string environment((std::istreambuf_iterator<char>(file)), {});
    set = environment.find("GOMP_SPINCOUNT=") != std::string::npos;
  }
  EXPECT_TRUE(set);
  ::kill(child, SIGINT);
  EXPECT_EQ(Wait(child, prefix).code, 130);
}

TEST_F(BenchPapersTest, TheListSaysWhatTakesMinutes) {
  const Outcome o = Run({"bench", "papers", "--list"});
  EXPECT_EQ(o.code, 0) << o;
  for (const bench::Protocol& p : bench::Protocols()) {
    EXPECT_NE(o.out.find(p.name), std::string::npos) << p.name << "\n" << o;
    EXPECT_EQ(p.whole.has_value(), p.minutes > 0) << p.name;
  }
  EXPECT_NE(o.out.find(" min on two cores"), std::string::npos) << o;
  for (const char* scale : {"nan", "NaN", "17", "0", "inf"})
    Expect({"bench", "papers", "--list", "--scale", scale}, 2, {"--scale", "0.001", "16"});
  Expect({"bench", "papers", "modles"}, 2, {"did you mean 'models'?"});
  Expect({"bench", "papers", "reuse-table2"}, 2, {"did you mean 'reuse-table"});
}

}  // namespace
}  // namespace cistern
