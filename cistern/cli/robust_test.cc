// The program among hostile files, full pipes and killed processes.
#include <sys/resource.h>
#include <sys/stat.h>

#include <chrono>
#include <fstream>
#include <iterator>

#include "cistern/base/subprocess.h"
#include "cistern/cli/testing_cli.h"
#include "cistern/io/jsonl.h"
#include "cistern/train/checkpoint.h"

namespace cistern {
namespace {

// The exit code and the messages of the program with its output going to what takes nothing: a full
// disk, or a pipe that nobody reads.
Outcome IntoNothing(const Words& arguments, const std::string& prefix, bool pipe = false) {
  Words words = Words{"cistern"} + arguments;
  std::vector<char*> argv;
  for (std::string& w : words) argv.push_back(w.data());
  argv.push_back(nullptr);
  int ends[2];
  CISTERN_CHECK(::pipe2(ends, O_CLOEXEC) == 0, "no pipe");
  const int out = pipe ? ends[1] : ::open("/dev/full", O_WRONLY | O_CLOEXEC),
            err = ::open((prefix + ".err").c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  const pid_t child = ::fork();
  if (child == 0) {
    ::setenv("XDG_CACHE_HOME", (prefix + "-cache").c_str(), 1);
    ::signal(SIGPIPE, SIG_DFL);
    ::close(ends[0]);
    ::dup2(out, STDOUT_FILENO);
    ::dup2(err, STDERR_FILENO);
    ::execv(std::getenv("CISTERN_BINARY"), argv.data());
    ::_exit(127);
  }
  for (const int fd : ends) ::close(fd);
  if (!pipe) ::close(out);
  ::close(err);
  int status = 0;
  ::waitpid(child, &status, 0);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), "",
          ReadFile(prefix + ".err")};
}

using RobustTest = CliTest;

TEST_F(RobustTest, OutputThatDoesNotArriveIsAFailure) {
  const std::string model = Trained(), text = TrainedText();
  const std::vector<Words> commands = {
      {"--help"},
      {"--version"},
      {"train", "--help"},
      {"train", "--list"},
      {"train", "--print-config"},
      Train(text, folder_ / "run"),
      Train(text, folder_ / "run-json", {"--json"}),
      {"eval", model},
      {"eval", model, "--json"},
      {"eval", model, text, "--by-position", "--rows", "2", "--max-tokens", "200"},
      {"eval", model, text, "--by-position", "--rows", "2", "--max-tokens", "200", "--json"},
      {"generate", model, "--max-tokens", "2"},
      {"generate", model, "--max-tokens", "2", "--json"},
      {"data", "text", text},
      {"data", "text", text, "--json"},
      {"data", "listops", "--out", folder_ / "listops", "--counts", "2,1,1"},
      {"data", "listops", "--out", folder_ / "lines", "--counts", "2,1,1", "--json"},
      {"info"},
      {"info", "--json"},
      {"info", "--docs"},
      {"info", model},
      {"info", model, "--json"},
      {"verify", "--mechanism", "latte", "--form", "causal", "--property", "empty"},
      {"verify", "--mechanism", "latte", "--form", "causal", "--property", "empty", "--json"},
      {"verify", "--mechanism", "latte", "--long", "1000"},
      {"analyze", model, text, "--of", "maps", "--rows", "1", "--out", folder_ / "seen"},
      {"analyze", "--list"},
      {"bench", "ops", "--mechanisms", "latte", "--lengths", "16", "--seconds", "0.01"},
      {"compare", text, "--mechanisms", "latte", "--seconds", "0.1", "--out", folder_ / "compared"},
      {"reproduce", "--list"},
      {"reproduce", "P000-T1", "--small", "--list"},
      {"statistics", "--help"},
  };
  for (const Words& words : commands) {
    const Outcome o = IntoNothing(words, folder_ / "full");
    EXPECT_EQ(o.code, 1) << ::testing::PrintToString(words) << "\n" << o;
    EXPECT_NE(o.err.find("cannot write to standard output"), std::string::npos)
        << ::testing::PrintToString(words) << "\n"
        << o;
  }
  const Outcome o = IntoNothing({"eval", model}, folder_ / "pipe", true);
  EXPECT_EQ(o.code, 1) << o;
  EXPECT_NE(o.err.find("cannot write to standard output: Broken pipe"), std::string::npos) << o;
  EXPECT_EQ(IntoNothing({"generate", model, "--max-tokens", "2"}, folder_ / "pipe", true).code,
            128 + SIGPIPE);
}

TEST_F(RobustTest, DamagedModelsAreRefused) {
  const std::string model = Copy("model"), path = model + "/model.safetensors";
  const std::string good = ReadFile(path);
  for (const double share : {0.3, 0.5, 0.7, 0.999}) {
    std::string damaged = good;
    damaged[size_t(share * double(good.size()))] ^= 1;
    WriteFileAtomically(path, damaged);
    Expect({"generate", model, "--max-tokens", "2"}, 1, {path, "do not fit their checksum"});
    Expect({"eval", model}, 1, {path, "do not fit their checksum"});
    Expect({"info", model}, 1, {path, "do not fit their checksum"});
  }
}

TEST_F(RobustTest, AChangedConfigurationOrTokenizerIsSaid) {
  const std::string model = Copy("model"), path = model + "/config.json";
  const Outcome good = Run({"generate", model, "--max-tokens", "4"});
  EXPECT_EQ(good.err.find("note:"), std::string::npos) << good;
  const std::string text = ReadFile(path);
  Json config = ParseJson(text, path);
  WriteFileAtomically(path, config.dump());  // the same, written otherwise
  EXPECT_EQ(Run({"generate", model, "--max-tokens", "4"}).err.find("note:"), std::string::npos);
  config["norm_eps"] = 0.5;
  WriteFileAtomically(path, config.dump());
  Expect({"generate", model, "--max-tokens", "4"}, 0,
         {"note: " + path + " is not the one that " + model + "/model.safetensors was saved with"});
  WriteFileAtomically(path, text);
  WriteFileAtomically(model + "/tokenizer.json",
                      ReadFile(model + "/tokenizer.json").replace(2, 0, "\"more\": 1,"));
  Expect({"generate", model, "--max-tokens", "4"}, 0,
         {"note: " + model + "/tokenizer.json is not the one"});
}

TEST_F(RobustTest, ADeepTokenizerIsRefused) {
  const std::string model = Copy("model"), path = model + "/tokenizer.json";
  for (const std::string& open : {std::string("["), std::string("{\"a\":")}) {
    std::string deep = "{\"model\":";
    for (int i = 0; i < 100'000; ++i) deep += open;
    WriteFileAtomically(path, deep);
    Expect({"generate", model, "--max-tokens", "2"}, 1, {path, "nested deeper than 64 levels"});
  }
}

TEST_F(RobustTest, NamesFromFilesDoNotSteerTheTerminal) {
  const std::string model = Copy("model"), path = model + "/config.json";
  Json config = ParseJson(ReadFile(path), path);
  config["\x1b]0;title\a"] = 1;
  WriteFileAtomically(path, config.dump());
  const Outcome o = Run({"generate", model, "--max-tokens", "2"});
  EXPECT_EQ(o.code, 2) << o;
  EXPECT_NE(o.err.find("\\x1b]0;title\\x07"), std::string::npos) << o;
  EXPECT_EQ(o.err.find('\x1b'), std::string::npos);
}

TEST_F(RobustTest, PathsThatAreNotUtf8AreRefusedInOurWords) {
  const std::string path = folder_ / "caf\xe9.txt";
  WriteFileAtomically(path, Text());
  Expect(Train(path, folder_ / "run"), 2, {"task.lm.text", "expected UTF-8"});
  const Outcome out = Run(Train(TrainedText(), folder_ / "r\xe9", {"--json"}));
  EXPECT_EQ(out.code, 0) << out;
  EXPECT_TRUE(ParseJson(out.out, "stdout").contains("test"));
}

// Resuming

// All that a run leaves and that does not depend on the clock.
std::map<std::string, std::string> EndOf(const std::string& run, int64_t steps) {
  std::map<std::string, std::string> end;
  const std::string last = StrCat("checkpoint-", steps, "/");
  for (const std::string& name : {std::string("model.safetensors"), std::string("tokenizer.json"),
                                  last + "model.safetensors", last + "optimizer.safetensors"})
    end[name] = ReadFile(run + "/" + name);
  for (Json line : ParseJsonl(ReadFile(run + "/metrics.jsonl"), "metrics.jsonl")) {
    line.erase("seconds");
    line.erase("tokens_per_s");
    line.erase("input_share");
    end["log"] += JsonLine(line) + "\n";
  }
  return end;
}

TEST_F(RobustTest, AResumedRunIsTheSameRun) {
  const std::string text = folder_ / "mine.txt", run = folder_ / "run";
  WriteFileAtomically(text, Text());
  ASSERT_EQ(Run(Train(text, run)).code, 0);
  const auto before = Contents(run);
  const auto refused = [&](const Words& more, const Words& phrases) {
    Expect(Words{"train", "--resume", "--out", run, "--threads", "1"} + more, 2, phrases);
    EXPECT_EQ(Contents(run), before) << ::testing::PrintToString(more);
  };
  const auto set = [](const std::string& assignment) {
    return Words{"--steps", "6", "--set", assignment};
  };
  refused(set("model.heads=4"), {"model.heads=2", "another run"});
  refused(set("model.attention=softmax"), {"model.attention"});
  refused(set("model.norm=post"), {"model.norm"});
  refused(set("model.activation=relu"), {"model.activation"});
  refused(set("model.positions=sinusoidal"), {"model.positions"});
  refused(set("task.vocab_size=310"), {"vocab_size"});
  refused(set("train.batch=3"), {"train.batch"});
  refused({"--steps", "6", "--seed", "2"}, {"seed=1"});
  refused({"--steps", "6", "--dtype", "float64"}, {"dtype"});
  refused({"--steps", "2"}, {"at step 3 already"});
  refused({"--seconds", "0.001"}, {"has been trained for", "already"});
  // Another text, under the same name or another.
  const std::string other = folder_ / "other.txt";
  WriteFileAtomically(other, Text() + "one line more\n");
  refused({"--steps", "6", "--text", other}, {"other data", "xxh64"});
  const auto time = fs::last_write_time(text);
  std::string changed = Text();
  changed[100] = '#';
  WriteFileAtomically(text, changed);
  fs::last_write_time(text, time);
  refused({"--steps", "6"}, {"other data", "xxh64", "give another --out"});
  // What would be its test now may have been trained on.
  for (const Words& measure : {Words{"eval", run}, Words{"eval", run, "--by-position"},
                               Words{"analyze", run, "--out", folder_ / "analysis"}})
    Expect(measure + Words{"--threads", "1"}, 2, {"trained on other data", "XXH64"});
  EXPECT_EQ(Run({"eval", run, text, "--threads", "1"}).code, 0) << "a file is measured as it is";
  // The same text elsewhere, and a length: taken, and said.
  WriteFileAtomically(other, Text());
  const Outcome o = Run({"train", "--resume", "--out", run, "--threads", "1", "--text", other,
                         "--steps", "5", "--json"});
  ASSERT_EQ(o.code, 0) << o;
  EXPECT_EQ(ParseJson(o.out, "stdout")["steps"], 5);
  EXPECT_NE(o.err.find("resumed with train.steps=5 (it was 3)"), std::string::npos) << o;
  EXPECT_NE(o.err.find("resumed with task.lm.text="), std::string::npos) << o;
}

// Where `bias` gave abc_mlp's control one, too, and no option said so.
TEST_F(RobustTest, ARunOfAnEarlierVersionKeepsItsBiases) {
  const std::string old = folder_ / "old", whole = folder_ / "whole";
  const Words bias = {"--set", "model.attention=abc_mlp",
                      "--set", "model.bias=true",
                      "--set", "model.attention_options.abc_mlp.control_bias=model"};
  Words undisturbed = Train(TrainedText(), whole, bias);
  undisturbed[8] = "6";  // steps
  ASSERT_EQ(Run(undisturbed).code, 0);
  ASSERT_EQ(Run(Train(TrainedText(), old, bias + Words{"--set", "train.schedule_steps=6"})).code,
            0);
  const std::string checkpoint = *NewestCheckpoint(old);
  RunState state = ReadRunState(checkpoint);
  ASSERT_EQ(state.experiment["model"]["attention_options"]["abc_mlp"]["control_bias"], "model");
  state.experiment["model"]["attention_options"]["abc_mlp"].erase("control_bias");
  WriteFileAtomically(checkpoint + "/trainer.json", RunStateText(state));
  const Outcome o = Run({"train", "--resume", "--out", old, "--threads", "1", "--steps", "6"});
  ASSERT_EQ(o.code, 0) << o;
  const Json config = ReadJsonFile(old + "/config.json");
  EXPECT_EQ(config["attention_options"]["abc_mlp"]["control_bias"], "model");
  EXPECT_TRUE(ReadFile(*NewestCheckpoint(old) + "/model.safetensors") ==
              ReadFile(*NewestCheckpoint(whole) + "/model.safetensors"))
      << "not what a run that was never stopped ends with";
}

// As some starters of jobs leave a process: no message lies in a file of the run.
TEST_F(RobustTest, ClosedDescriptorsAreNotGivenToFiles) {
  const std::string run = folder_ / "run";
  std::string rows = "label\ttext\n", command = ShellWord(std::getenv("CISTERN_BINARY"));
  for (int i = 0; i < 60; ++i) rows += StrCat(i % 2, "\ttext ", i, "\n");
  WriteFileAtomically(folder_ / "a.tsv", rows);
  Words words = {"train",   "--data", folder_ / "a.tsv", "--out", run,
                 "--steps", "10",     "--threads",       "1"};
  for (const char* s : {"model.dim=8", "model.heads=2", "model.layers=1", "train.average_last=90"})
    words = words + Words{"--set", s};
  for (const std::string& word : words) command += " " + ShellWord(word);
  EXPECT_EQ(RunProcess("/bin/sh", {"-c", command + " <&- >&- 2>&-"}).code, 1);  // no output
  int files = 0;
  for (const auto& entry : fs::directory_iterator(run)) {
    if (!entry.is_regular_file()) continue;
    ++files;
    EXPECT_EQ(ReadFile(entry.path()).find("note: "), std::string::npos) << entry.path();
  }
  EXPECT_GE(files, 4);
}

TEST_F(RobustTest, LengthsAskedForAreHonoured) {
  const std::string run = folder_ / "run";
  Words words = Train(TrainedText(), run, {"--set", "train.log_every=1"});
  words[8] = "30000";
  const std::string prefix = folder_ / "long";
  const pid_t child = Start(words, prefix);
  for (int i = 0; i < 60000 && !(fs::exists(run + "/metrics.jsonl") &&
                                 fs::file_size(run + "/metrics.jsonl") > 1000);
       ++i)
    ::usleep(1000);
  ::kill(child, SIGHUP);  // as a terminal that closes
  ASSERT_EQ(Wait(child, prefix).code, 130);
  const Outcome shorter =
      Run({"train", "--resume", "--out", run, "--threads", "1", "--steps", "700", "--json"});
  ASSERT_EQ(shorter.code, 0) << shorter;
  EXPECT_EQ(ParseJson(shorter.out, "stdout")["steps"], 700);
  const auto size = fs::file_size(run + "/metrics.jsonl");
  const pid_t longer = Start({"train", "--resume", "--out", run, "--threads", "1", "--seconds",
                              "1000", "--set", "train.log_every=1"},
                             prefix);
  for (int i = 0; i < 60000 && fs::file_size(run + "/metrics.jsonl") < size + 100; ++i)
    ::usleep(1000);
  ::kill(longer, SIGTERM);
  const Outcome o = Wait(longer, prefix);
  EXPECT_EQ(o.code, 130) << o;
  EXPECT_NE(o.err.find("resumed with train.seconds=1000.0 (it was 0.0)"), std::string::npos) << o;
  EXPECT_FALSE(fs::exists(run + "/checkpoint-700"));
}

TEST_F(RobustTest, ARunThatHadEndedSaysSo) {
  const std::string run = Copy("run");
  const Words resume = {"train", "--resume", "--out", run, "--threads", "1"};
  const Outcome o = Run(resume);
  ASSERT_EQ(o.code, 0) << o;
  EXPECT_NE(o.err.find("note: this run had ended at step 3"), std::string::npos) << o;
  EXPECT_EQ(o.out.find(" 0 tokens/s"), std::string::npos) << o;
  const Outcome json = Run(resume + Words{"--json"});
  ASSERT_EQ(json.code, 0) << json;
  EXPECT_GT(ParseJson(json.out, "stdout")["tokens_per_s"].get<double>(), 0);
  const Outcome longer = Run(resume + Words{"--steps", "5"});
  EXPECT_EQ(longer.err.find("had ended"), std::string::npos) << longer;
}

TEST_F(RobustTest, AChangedLogOrRecordIsSaid) {
  const std::string run = Copy("run"), log = run + "/metrics.jsonl",
                    record = run + "/experiment.json";
  const std::string good = ReadFile(log);
  std::string bad = good;
  ++bad[bad.find_first_of("12345678", bad.find("\"loss\":"))];
  WriteFileAtomically(log, bad);
  const Words resume = {"train", "--resume", "--out", run, "--threads", "1"};
  Expect(resume, 0, {"note: " + log + " is not as the run wrote it"});
  bad[1] = '\'';  // a line that cannot be read
  WriteFileAtomically(log, bad);
  Expect(resume, 0, {"note: " + log + " is not as the run wrote it"});
  const std::string slots = folder_ / "slots", their_log = slots + "/metrics.jsonl";
  const Outcome trained = Run(Train(TrainedText(), slots, {"--set", "model.attention=abc_mlp"}));
  ASSERT_EQ(trained.code, 0) << trained;
  const std::string lines = ReadFile(their_log);
  for (const char* line : {"[1]", "{\"event\":1}", "{\"event\":\"valid\",\"step\":\"x\"}"}) {
    WriteFileAtomically(their_log, lines + line + "\n");
    const Outcome o = Run({"analyze", slots, TrainedText(), "--of", "memory", "--rows", "1",
                           "--threads", "1", "--out", folder_ / "seen"});
    EXPECT_TRUE(o.code == 0 || o.err.find(their_log) != std::string::npos) << line << "\n" << o;
    EXPECT_EQ(o.err.find("inside a library"), std::string::npos) << o;
  }
  std::string text = ReadFile(record);
  text.replace(text.find("\"length\": 16"), 12, "\"length\": 18");
  WriteFileAtomically(record, text);
  Expect({"eval", run, "--threads", "1"}, 0, {"note: " + record + " is not as it was written"});
}

// Killed at its beginning, in the middle and at its end, by each of the signals; what it leaves is
// what the undisturbed run leaves.
TEST_F(RobustTest, KilledRunsEndAsUndisturbedOnes) {
  const auto train = [&](const std::string& out) {
    Words words = Train(TrainedText(), out);
    words[8] = "120";
    return words + Words{"--quiet",
                         "--set",
                         "train.log_every=7",
                         "--set",
                         "model.dropout=0.1",
                         "--set",
                         "train.checkpoint_seconds=0.05"};
  };
  const std::string whole = folder_ / "whole";
  const auto begin = std::chrono::steady_clock::now();
  ASSERT_EQ(Run(train(whole)).code, 0);
  const double undisturbed =  // microseconds, on this machine as busy as it is
      std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
  const auto expected = EndOf(whole, 120);
  int number = 0, hits = 0;
  for (const int sign : {SIGKILL, SIGTERM, SIGHUP, SIGINT}) {
    const std::string run = StrCat(folder_ / "run-", number++), prefix = run + "-out";
    Words words = train(run);
    int code = -1;
    for (int kills = 0; kills < 5 && code != 0; ++kills) {
      const pid_t child = Start(words, prefix);
      ::usleep(unsigned(undisturbed * (0.25 + 0.12 * kills + 0.05 * number)));
      ::kill(child, sign);
      const Outcome o = Wait(child, prefix);
      code = o.code;
      ASSERT_TRUE(code == 0 || code == 130 || code == 128 + sign) << o;
      hits += code != 0;
      if (fs::exists(run + "/experiment.json"))
        words = {"train", "--resume", "--out", run, "--threads", "1", "--quiet"};
    }
    if (code != 0) {
      const Outcome o = Run(words);
      ASSERT_EQ(o.code, 0) << o;
    }
    EXPECT_EQ(EndOf(run, 120), expected) << "signal " << sign;
    EXPECT_FALSE(fs::exists(run + "/lock"));
    for (const auto& [path, bytes] : Contents(run))
      EXPECT_EQ(path.find(".tmp-", run.size()), std::string::npos) << path;
  }
  EXPECT_GE(hits, 1) << "nothing was killed: the waits do not fit this machine";
}

TEST_F(RobustTest, OneRunInAFolder) {
  const std::string run = folder_ / "run", prefix = folder_ / "first";
  Words words = Train(TrainedText(), run);
  words[8] = "100000";
  const pid_t child = Start(words, prefix);
  for (int i = 0; i < 60000 && !fs::exists(run + "/checkpoint-0"); ++i) ::usleep(1000);
  Expect({"train", "--resume", "--out", run, "--threads", "1"}, 1,
         {run, "is in use by process " + std::to_string(child)});
  ::kill(child, SIGINT);
  EXPECT_EQ(Wait(child, prefix).code, 130);
  EXPECT_FALSE(fs::exists(run + "/lock"));
}

// The environment that the program had when the C library and libgomp were loaded, which is when
// they read it.
std::string EnvironmentOf(pid_t child) {
  std::ifstream file(StrCat("/proc/", child, "/environ"));
  return std::string((std::istreambuf_iterator<char>(file)), {});
}

TEST_F(RobustTest, MeasuringAndPredictingBeginWithTheSettingsOfTrainings) {
  const std::string run = folder_ / "run", pipe = folder_ / "waits.txt";
  ASSERT_EQ(Run(Train(TrainedText(), run)).code, 0);
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);  // whoever reads it waits
  ::unsetenv("GOMP_SPINCOUNT");
  ::unsetenv("OMP_WAIT_POLICY");
  for (const char* command : {"eval", "predict"}) {
    const std::string prefix = StrCat(run, "-", command);
    const pid_t child = Start({command, run, pipe}, prefix);
    bool set = false;
    for (int i = 0; i < 20000 && !set; ++i) {
      ::usleep(1000);
      set = EnvironmentOf(child).find("GOMP_SPINCOUNT=") != std::string::npos;
    }
    EXPECT_TRUE(set) << command;
    ::kill(child, SIGKILL);
    Wait(child, prefix);
  }
}

TEST_F(RobustTest, ATrainingBeginsWithItsSettingsUnlessToldOtherwise) {
  const char* const policy = std::getenv("OMP_WAIT_POLICY");
  const std::string before = policy ? policy : "";
  ::unsetenv("GOMP_SPINCOUNT");
  int number = 0;
  for (const bool told : {false, true}) {
    const std::string run = StrCat(folder_ / "run-", number++), prefix = run + "-out";
    Words words = Train(TrainedText(), run);
    words[8] = "100000";
    ::unsetenv("OMP_WAIT_POLICY");
    ::setenv("GLIBC_TUNABLES", told ? "glibc.malloc.hugetlb=0" : "glibc.malloc.perturb=0", 1);
    if (told) ::setenv("OMP_WAIT_POLICY", "passive", 1);
    const pid_t child = Start(words, prefix);
    for (int i = 0; i < 60000 && !fs::exists(run + "/checkpoint-0"); ++i) ::usleep(1000);
    const std::string environment = EnvironmentOf(child);
    std::string name;  // as top and killall know it
    std::getline(std::ifstream(StrCat("/proc/", child, "/comm")), name);
    EXPECT_EQ(name, "cistern");
    ::kill(child, SIGINT);
    EXPECT_EQ(Wait(child, prefix).code, 130);
    EXPECT_NE(environment.find("PATH="), std::string::npos);
    EXPECT_EQ(environment.find("GOMP_SPINCOUNT=") == std::string::npos, told);
    // The C library may have cut its settings apart.
    EXPECT_NE(environment.find(told ? "GLIBC_TUNABLES=glibc.malloc.hugetlb=0"
                                    : "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"),
              std::string::npos);
    EXPECT_EQ(environment.find("glibc.malloc.perturb=0") == std::string::npos, told);
  }
  ::unsetenv("GLIBC_TUNABLES");
  ::unsetenv("OMP_WAIT_POLICY");
  if (policy) ::setenv("OMP_WAIT_POLICY", before.c_str(), 1);
}

TEST_F(RobustTest, AFolderThatVanishesIsAFailure) {
  const std::string run = folder_ / "run", prefix = folder_ / "out";
  Words words = Train(TrainedText(), run);
  words[8] = "2000";
  const pid_t child = Start(words, prefix);
  for (int i = 0; i < 60000 && !fs::exists(run + "/checkpoint-0"); ++i) ::usleep(1000);
  fs::rename(run, folder_ / "elsewhere");
  const Outcome o = Wait(child, prefix);
  EXPECT_EQ(o.code, 1) << o;
  EXPECT_NE(o.err.find(run), std::string::npos) << o;
  EXPECT_FALSE(fs::exists(run + "/model.safetensors"));
}

// A run that failed before there was anything to keep leaves a folder that can be begun again.
TEST_F(RobustTest, AFolderWithoutACheckpointMayBeBegunAgain) {
  const std::string run = folder_ / "run";
  EnsureDirectory(run);
  WriteFileAtomically(run + "/experiment.json", ReadFile(Trained() + "/experiment.json"));
  WriteFileAtomically(run + "/metrics.jsonl", "{\"event\":\"step\",\"step\":1}\n");
  WriteFileAtomically(StrCat(run, "/model.safetensors.tmp-", 999999, "-0"), "half");
  const Outcome o = Run(Train(TrainedText(), run));
  ASSERT_EQ(o.code, 0) << o;
  EXPECT_EQ(EndOf(run, 3), EndOf(Trained(), 3));
  EXPECT_FALSE(fs::exists(StrCat(run, "/model.safetensors.tmp-", 999999, "-0")));
  // And the same by --resume.
  const std::string again = folder_ / "again";
  EnsureDirectory(again);
  WriteFileAtomically(again + "/experiment.json", ReadFile(Trained() + "/experiment.json"));
  const Outcome resumed = Run({"train", "--resume", "--out", again, "--threads", "1"});
  ASSERT_EQ(resumed.code, 0) << resumed;
  EXPECT_NE(resumed.err.find("starts again"), std::string::npos) << resumed;
  EXPECT_EQ(EndOf(again, 3), EndOf(Trained(), 3));
}

// As the trainer of another program leaves it; one of the names is enough.
TEST_F(RobustTest, AFolderOfAnotherProgramIsLeftAlone) {
  const Words names = {"checkpoint-500/model.safetensors", "events.out.tfevents.1", "metrics.csv",
                       "config.json", "tokenizer.json"};
  const auto refused = [](const std::string& out, const Words& files) {
    for (const std::string& name : files) {
      EnsureDirectory(fs::path(out + "/" + name).parent_path().string());
      WriteFileAtomically(out + "/" + name, "theirs");
    }
    const auto before = Contents(out);
    Expect(Train(TrainedText(), out), 2,
           {out + " has files of something else in it", "name a new folder"});
    EXPECT_EQ(Contents(out), before);
  };
  refused(folder_ / "all", names + Words{"checkpoint-500/trainer_state.json"});
  for (size_t i = 0; i < names.size(); ++i) refused(folder_ / StrCat("one-", i), {names[i]});
}

TEST_F(RobustTest, OptionsThatMakeNoSense) {
  const std::string out = folder_ / "run";
  for (const char* seconds : {"nan", "0", "-1", "1e-9", "inf", "1e10"}) {
    Expect({"train", "--text", TrainedText(), "--out", out, "--seconds", seconds}, 2,
           {"--seconds"});
    Expect({"compare", TrainedText(), "--out", out, "--mechanisms", "latte", "--seconds", seconds},
           2, {"--seconds"});
  }
  Expect({"train", "--text", TrainedText(), "--out", out, "--steps", "0"}, 2, {"--steps"});
  Expect({"compare", TrainedText(), "--out", out, "--mechanisms", "latte,latte"}, 2,
         {"names latte twice"});
  // What another kind of model has: by its name today, by an old one, and with options.
  for (const char* said : {"model.cross.attention=latte", "model.cross.heads=2"}) {
    Expect(Train(TrainedText(), out, {"--set", said}), 2,
           {"decoder_lm has no cross attention", "encoder_decoder"});
  }
  Expect(Train(TrainedText(), out, {"--set", "model.cross_attention=latte"}), 2,
         {"model.cross_attention", "model.cross.attention"});
  Expect(Train(TrainedText(), out, {"--set", "model.kind=encoder_classifier"}), 2,
         {"model.kind=encoder_classifier does not fit the task lm"});
  Expect(Train(TrainedText(), out, {"--set", "train.min_lr=1"}), 2, {"train.min_lr=1 is above"});
  Expect({"train", "--text", TrainedText(), "--out", out, "--set", "train.seconds=1e-9"}, 2,
         {"train.seconds"});
  EXPECT_FALSE(fs::exists(out));
}

// The limit of the process, as ulimit -v sets it: refused before the work, or in our words.
TEST_F(RobustTest, MemoryThatIsNotThereIsSaidInOurWords) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &before), 0);
  rlimit limit = before;
  limit.rlim_cur = rlim_t{3} << 30;
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
  const Outcome o = Run(Train(TrainedText(), folder_ / "run",
                              {"--set", "task.length=256", "--set", "model.dim=8192"}));
  ::setrlimit(RLIMIT_AS, &before);
  EXPECT_EQ(o.code, 2) << o;
  EXPECT_NE(o.err.find("a training step would need about"), std::string::npos) << o;
}

TEST_F(RobustTest, ThreadsThatMayNotBeStartedAreSaidInOurWords) {
  if (::geteuid() != 0 || !OrdinaryUserWorks()) GTEST_SKIP() << "needs root";
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NPROC, &before), 0);
  const rlimit limit = {32, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NPROC, &limit), 0);
  Words words = Train(TrainedText(), folder_ / "run");
  words[6] = "64";  // threads
  const Outcome o = Run(words, true);
  ::setrlimit(RLIMIT_NPROC, &before);
  EXPECT_EQ(o.code, 1) << o;
  EXPECT_NE(o.err.find("no more threads may be started"), std::string::npos) << o;
}

TEST_F(RobustTest, DamagedRunFilesAreHealedOrRefused) {
  // What a run was begun with is in its checkpoint; the file beside it is for people.
  const std::string run = Copy("run"), path = run + "/experiment.json";
  std::string changed = ReadFile(path);
  changed[changed.find("\"seed\": 1") + 8] = '7';
  WriteFileAtomically(path, changed);
  const Outcome o = Run({"train", "--resume", "--out", run, "--steps", "4", "--threads", "1"});
  ASSERT_EQ(o.code, 0) << o;
  EXPECT_EQ(ParseJson(ReadFile(path), path)["seed"], 1);
  // A best model that is not this run's.
  const std::string other = Copy("other");
  std::string best = ReadFile(other + "/model.safetensors");
  best[best.size() - 3] ^= 1;
  WriteFileAtomically(other + "/model.safetensors", best);
  Expect({"train", "--resume", "--out", other, "--steps", "4", "--threads", "1"}, 1,
         {other + "/model.safetensors", "checksum"});
}

}  // namespace
}  // namespace cistern
