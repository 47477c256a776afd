// Training by several processes, started with torchrun's variables.
#include <algorithm>

#include "cistern/cli/testing_cli.h"
#include "cistern/train/testing_processes.h"

namespace cistern {
namespace {

class ProcessesTest : public CliTest {
 protected:
  // Starts a process for each list of arguments; they wait for each other.
  std::vector<pid_t> StartAll(const std::vector<Words>& arguments) {
    const std::string port = std::to_string(testing::FreePort());
    std::vector<pid_t> children;
    for (size_t rank = 0; rank < arguments.size(); ++rank) {
      const Variables variables({{"RANK", std::to_string(rank)},
                                 {"WORLD_SIZE", std::to_string(arguments.size())},
                                 {"MASTER_ADDR", "127.0.0.1"},
                                 {"MASTER_PORT", port},
                                 {"GLOO_SOCKET_IFNAME", "lo"},  // whatever the machine's name is
                                 {"TMPDIR", folder_.path()}});  // one that is killed leaves its own
      children.push_back(Start(arguments[rank], Output(rank)));
    }
    return children;
  }
  std::vector<Outcome> WaitAll(const std::vector<pid_t>& children) {
    std::vector<Outcome> outcomes;
    for (size_t rank = 0; rank < children.size(); ++rank)
      outcomes.push_back(Wait(children[rank], Output(rank)));
    return outcomes;
  }
  std::vector<Outcome> RunAll(const std::vector<Words>& arguments) {
    return WaitAll(StartAll(arguments));
  }
  Words Steps(const std::string& steps, const std::string& run, const Words& more) const {
    Words words = Train(TrainedText(), folder_ / run, more);
    *(std::find(words.begin(), words.end(), "--steps") + 1) = steps;
    return words;
  }
  std::string Output(size_t rank) const { return folder_ / StrCat("output", rank); }

  // Of the environment that children inherit, while it lives.
  class Variables {
   public:
    explicit Variables(const std::map<std::string, std::string>& values) : values_(values) {
      for (const auto& [name, value] : values_) ::setenv(name.c_str(), value.c_str(), 1);
    }
    ~Variables() {
      for (const auto& [name, value] : values_) ::unsetenv(name.c_str());
    }
    Variables(const Variables&) = delete;
    Variables& operator=(const Variables&) = delete;

   private:
    std::map<std::string, std::string> values_;
  };
};

double Bits(const Json& line) { return line.at("bits_per_byte").get<double>(); }

TEST_F(ProcessesTest, AreOneRun) {
  const Words more = {"--json", "--set", "train.batch=4", "--set", "train.eval_every=5"};
  const Outcome alone = Run(Steps("20", "alone", more));
  ASSERT_EQ(alone.code, 0) << alone;
  const Words words = Steps("20", "run", more);
  const auto outcomes = RunAll({words, words});
  for (const Outcome& o : outcomes) ASSERT_EQ(o.code, 0) << o;
  EXPECT_EQ(outcomes[1].out + outcomes[1].err, "");
  const Json one = ParseJson(alone.out, "alone"), both = ParseJson(outcomes[0].out, "both");
  EXPECT_EQ(both["processes"], 2);
  EXPECT_NEAR(Bits(both["valid"]), Bits(one["valid"]), 1e-4);
  EXPECT_NEAR(Bits(both["test"]), Bits(one["test"]), 1e-4);
  // What the run leaves is what one process leaves: it can be used, and goes on as one process.
  for (const auto& entry : fs::directory_iterator(folder_ / "alone")) {
    const std::string name = entry.path().filename().string();
    const bool is_there = fs::exists(folder_ / ("run/" + name));
    EXPECT_TRUE(is_there || name.starts_with("events")) << name;
  }
  EXPECT_EQ(Run({"eval", folder_ / "run"}).code, 0);
}

TEST_F(ProcessesTest, GoOnAfterASignalAsIfThereHadBeenNone) {
  const Words more = {"--set", "train.batch=4", "--set", "train.eval_every=100"};
  const Words whole = Steps("300", "whole", more), cut = Steps("300", "cut", more);
  for (const Outcome& o : RunAll({whole, whole})) ASSERT_EQ(o.code, 0) << o;
  const auto children = StartAll({cut, cut});
  const std::string log = folder_ / "cut/metrics.jsonl";
  for (int i = 0; i < 3000 && (!fs::exists(log) || fs::file_size(log) < 1000); ++i) ::usleep(10000);
  ::kill(children[1], SIGINT);  // one is enough
  const auto outcomes = WaitAll(children);
  EXPECT_EQ(outcomes[0].code, 130) << outcomes[0];
  EXPECT_EQ(outcomes[1].code, 130) << outcomes[1];
  EXPECT_NE(outcomes[0].err.find("interrupted after step"), std::string::npos) << outcomes[0];
  EXPECT_NE(outcomes[0].err.find(" --threads 1\n"), std::string::npos) << outcomes[0];
  // The second one does not need the folder.
  const Words resume = {"train", "--resume", "--threads", "1", "--out"};
  const auto resumed =
      RunAll({resume + Words{folder_ / "cut"}, resume + Words{folder_ / "nowhere"}});
  for (const Outcome& o : resumed) ASSERT_EQ(o.code, 0) << o;
  EXPECT_FALSE(fs::exists(folder_ / "nowhere"));
  EXPECT_EQ(ReadFile(folder_ / "cut/model.safetensors"),
            ReadFile(folder_ / "whole/model.safetensors"));
}

TEST_F(ProcessesTest, OtherDataOrSettingsAreRefused) {
  WriteFileAtomically(folder_ / "other.txt", Text() + "and one line more\n");
  const Words more = {"--set", "train.batch=4"};
  auto outcomes = RunAll({Train(TrainedText(), folder_ / "a", more),
                          Train(folder_ / "other.txt", folder_ / "a", more)});
  for (const Outcome& o : outcomes) {
    EXPECT_NE(o.code, 0) << o;
    EXPECT_NE(o.code, 126) << o;
  }
  EXPECT_NE(outcomes[0].err.find("process 1 trains another run than process 0"), std::string::npos)
      << outcomes[0];
  outcomes = RunAll({Train(TrainedText(), folder_ / "b", more),
                     Train(TrainedText(), folder_ / "b", more + Words{"--set", "train.lr=0.1"})});
  for (const Outcome& o : outcomes) EXPECT_EQ(o.code, 2) << o;
  EXPECT_NE(outcomes[1].err.find("differ in train/lr"), std::string::npos) << outcomes[1];
  // What decides how rows are shared out, and what would leave one waiting for another.
  Words threads = Train(TrainedText(), folder_ / "c", more);
  *(std::find(threads.begin(), threads.end(), "--threads") + 1) = "2";
  outcomes = RunAll({Train(TrainedText(), folder_ / "c", more), threads});
  for (const Outcome& o : outcomes) EXPECT_EQ(o.code, 2) << o;
  EXPECT_NE(outcomes[1].err.find("differ in threads"), std::string::npos) << outcomes[1];
  outcomes = RunAll({Train(TrainedText(), folder_ / "d", more),
                     {"train", "--resume", "--out", folder_ / "d", "--threads", "1"}});
  for (const Outcome& o : outcomes) EXPECT_EQ(o.code, 2) << o;
  EXPECT_NE(outcomes[0].err.find("have --resume"), std::string::npos) << outcomes[0];
  // The first one's choice is taken where none was asked for.
  outcomes = RunAll({Train(TrainedText(), folder_ / "e", more + Words{"--dtype", "float32"}),
                     Train(TrainedText(), folder_ / "e", more)});
  for (const Outcome& o : outcomes) EXPECT_EQ(o.code, 0) << o;
}

TEST_F(ProcessesTest, OneThatIsKilledEndsTheOthers) {
  const Words words = Steps("1000000", "run", {"--set", "train.batch=4"});
  const auto children = StartAll({words, words});
  const std::string log = folder_ / "run/metrics.jsonl";
  for (int i = 0; i < 3000 && (!fs::exists(log) || fs::file_size(log) == 0); ++i) ::usleep(10000);
  ::kill(children[1], SIGKILL);
  const auto outcomes = WaitAll(children);
  EXPECT_EQ(outcomes[1].code, 128 + SIGKILL);
  EXPECT_EQ(outcomes[0].code, 1) << outcomes[0];
  EXPECT_NE(outcomes[0].err.find("have lost one"), std::string::npos) << outcomes[0];
}

TEST_F(ProcessesTest, OtherCommandsAreRefused) {
  const Variables variables({{"WORLD_SIZE", "2"}, {"RANK", "0"}});
  Expect({"eval", Trained()}, 2, {"WORLD_SIZE=2", "only cistern train"});
  Expect(Train(TrainedText(), folder_ / "run"), 2, {"MASTER_PORT is not set"});
  EXPECT_FALSE(fs::exists(folder_ / "run"));
}

}  // namespace
}  // namespace cistern
