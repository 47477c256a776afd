// The program from outside: every command, every kind of error.
#include <sys/mount.h>

#include <chrono>
#include <sstream>
#include <thread>

#include "cistern/base/testing_messages.h"
#include "cistern/cli/testing_cli.h"
#include "cistern/models/model.h"

namespace cistern {
namespace {

using testing::ExpectContains;

// Text

TEST_F(CliTest, TextThatCannotBeUsed) {
  const std::string path = folder_ / "bad.txt", out = folder_ / "run";
  Expect(Train(path, out), 1, {path, "does not exist"});
  WriteFileAtomically(path, "");
  Expect(Train(path, out), 1, {path, "is empty"});
  WriteFileAtomically(path, std::string("GIF89a\0\1\2", 9) + Text());
  Expect(Train(path, out), 1, {path, "looks binary", "offset 6"});
  WriteFileAtomically(path, "five words and no more\n");
  Expect(Train(path, out), 1, {path, "too short"});
  EXPECT_FALSE(fs::exists(out));
  Expect({"train", "--out", out}, 2, {"--text my.txt", "--data", "--task"});
}

TEST_F(CliTest, OddTextIsAcceptedWithANote) {
  const std::string path = folder_ / "odd.txt";
  std::string crlf;
  for (const char c : Text()) crlf += c == '\n' ? std::string("\r\n") : std::string(1, c);
  WriteFileAtomically(path, crlf);
  Expect(Train(path, folder_ / "crlf"), 0, {path, "CRLF line ends"});
  WriteFileAtomically(path, Text() + "caf\xe9 in Latin-1\n" + Text());
  Expect(Train(path, folder_ / "latin1"), 0, {path, "is not UTF-8 from byte offset"});
  const Outcome quiet = Run(Train(path, folder_ / "quiet", {"--quiet"}));
  EXPECT_EQ(quiet.code, 0) << quiet;
  EXPECT_EQ(quiet.err, "");
}

// What is on disk

TEST_F(CliTest, BrokenCheckpointStopsAResumeAndNothingIsOverwritten) {
  for (const char* name : {"model.safetensors", "optimizer.safetensors", "trainer.json"}) {
    const std::string run = Copy(std::string("halved-") + name),
                      path = run + "/checkpoint-3/" + name;
    Halve(path);
    const auto before = Contents(run);
    Expect({"train", "--resume", "--out", run, "--steps", "5"}, 1, {path});
    EXPECT_EQ(Contents(run), before) << name;
  }
  const std::string run = Copy("keyless"), path = run + "/checkpoint-3/trainer.json";
  WriteFileAtomically(path, "{}\n");
  const auto before = Contents(run);
  Expect({"train", "--resume", "--out", run, "--steps", "5"}, 1, {path, "step"});
  EXPECT_EQ(Contents(run), before);
  fs::remove_all(run + "/checkpoint-3");
  Expect({"train", "--resume", "--out", run, "--steps", "5"}, 1, {run, "no complete checkpoint"});
  Expect({"train", "--resume", "--out", folder_ / "nowhere"}, 1,
         {"there is no run in " + (folder_ / "nowhere") + " to resume"});
}

TEST_F(CliTest, BrokenModelFilesAreNamed) {
  const auto expect_both = [&](const std::string& model, int code, const Words& phrases) {
    const auto before = Contents(model);
    Expect({"generate", model, "--max-tokens", "2"}, code, phrases);
    Expect({"eval", model}, code, phrases);
    EXPECT_EQ(Contents(model), before);
  };
  for (const char* name : {"model.safetensors", "tokenizer.json", "config.json"}) {
    const std::string model = Copy(std::string("halved-") + name);
    Halve(model + "/" + name);
    expect_both(model, 1, {model + "/" + name});
    WriteFileAtomically(model + "/" + name, "\xff\xff\xff\xff\xff\xff\xff\x7fgarbage");
    expect_both(model, 1, {model + "/" + name});
    fs::remove(model + "/" + name);
    expect_both(model, 1, {model, "it lacks " + std::string(name)});
  }
  Expect({"generate", folder_ / "nowhere"}, 1, {"there is no folder", "nowhere"});
  Expect({"info", folder_ / "nowhere"}, 1, {"nowhere"});
}

TEST_F(CliTest, ConfigurationsThatDoNotFit) {
  const std::string model = Copy("other"), path = model + "/config.json";
  Json config = ParseJson(ReadFile(path), path);
  config["version"] = 99;
  WriteFileAtomically(path, config.dump());
  Expect({"generate", model}, 2, {"config version 99", "newer cistern"});
  config["version"] = 1;
  config["attention"] = {"late"};
  WriteFileAtomically(path, config.dump());
  Expect({"generate", model}, 2, {path, "did you mean 'latte'?"});
  config["attention"] = {"latte"};
  config["dim"] = 32;
  WriteFileAtomically(path, config.dump());
  Expect({"generate", model}, 1, {"model.safetensors", "shape"});
}

TEST_F(CliTest, AFolderThatHoldsARunIsLeftAlone) {
  const std::string run = Copy("taken");
  const auto before = Contents(run);
  Expect(Train(TrainedText(), run), 2, {run, "already holds a run", "--resume"});
  EXPECT_EQ(Contents(run), before);
}

// Words

TEST_F(CliTest, SizesThatMakeNoSense) {
  const std::string out = folder_ / "run";
  const Words refused = {"model.dim=0",     "model.dim=-16",    "model.dim=1000000000000",
                         "model.layers=0",  "model.heads=-1",   "train.batch=0",
                         "train.batch=-3",  "task.lm.length=1", "task.lm.vocab_size=10",
                         "train.lr=-1",     "train.lr=nan",     "model.dropout=1.5",
                         "train.batch=2.5", "model.dim=wide"};
  for (const std::string& assignment : refused) {
    Expect(Train(TrainedText(), out, {"--set", assignment}), 2,
           {assignment.substr(0, assignment.find('='))});
  }
  Expect(Train(TrainedText(), out, {"--set", "model.heads=3"}), 2,
         {"dim=16 is not divisible by heads=3"});
  Expect(Train(TrainedText(), out, {"--set", "model.dim=65536", "--set", "model.layers=1024"}), 2,
         {"parameters", "model"});
  Expect({"train", "--text", TrainedText(), "--out", out, "--steps", "-5"}, 2, {"--steps"});
  Expect({"train", "--text", TrainedText(), "--out", out, "--seconds", "-5"}, 2, {"--seconds"});
  Expect({"train", "--text", TrainedText(), "--out", out, "--threads", "-1"}, 2, {"--threads"});
  Expect({"generate", Trained(), "--max-tokens", "-1"}, 2, {"max"});
  Expect({"generate", Trained(), "--top-p", "0"}, 2, {"top"});
  Expect({"eval", Trained(), "--rows", "0"}, 2, {"--rows"});
  Expect({"data", "listops", "--out", out, "--counts", "0,1,1"}, 2, {"counts"});
  Expect({"data", "listops", "--out", out, "--counts", "1,-1,1"}, 2, {"counts"});
  Expect({"data", "text", TrainedText(), "--vocab-size", "-1"}, 2, {"vocab"});
  Expect({"compare", TrainedText(), "--out", out, "--seconds", "0"}, 2, {"--seconds"});
  EXPECT_FALSE(fs::exists(out));
}

TEST_F(CliTest, MemoryIsForetold) {
  const std::string out = folder_ / "run";
  Expect(
      Train(
          TrainedText(), out,
          {"--set", "train.batch=1048576", "--set", "task.length=256", "--set", "model.dim=1024"}),
      2, {"a training step would need about", " GB", "batch 1048576 x length 256", "train.batch"});
  Expect(Train(TrainedText(), out,
               {"--set", "model.attention=abc_mlp", "--set",
                "model.attention_options.abc_mlp.slots=65536", "--set", "train.batch=65536"}),
         2, {"a training step would need about"});
  EXPECT_FALSE(fs::exists(out + "/experiment.json"));
}

// The machine

TEST_F(CliTest, AnOrdinaryUserWithoutPermission) {
  if (!OrdinaryUserWorks()) GTEST_SKIP() << "an ordinary user cannot enter the build folder";
  const std::string locked = folder_ / "locked", text = folder_ / "secret.txt";
  fs::create_directory(locked);
  fs::permissions(locked, fs::perms(0555));
  Outcome o = Run(Train(TrainedText(), locked + "/run"), true);
  EXPECT_EQ(o.code, 1) << o;
  EXPECT_NE(o.err.find(locked + "/run"), std::string::npos) << o;
  EXPECT_NE(o.err.find("Permission denied"), std::string::npos) << o;
  WriteFileAtomically(text, Text());
  fs::permissions(text, fs::perms(0));
  o = Run(Train(text, folder_ / "run"), true);
  EXPECT_EQ(o.code, 1) << o;
  EXPECT_NE(o.err.find(text), std::string::npos) << o;
  EXPECT_NE(o.err.find("Permission denied"), std::string::npos) << o;
  fs::permissions(locked, fs::perms(0000));
  o = Run(Train(TrainedText(), locked + "/run"), true);
  EXPECT_EQ(o.code, 1) << o;
  EXPECT_NE(o.err.find(locked), std::string::npos) << o;
  fs::permissions(locked, fs::perms(0755));
}

TEST_F(CliTest, FullDisk) {
  const std::string disk = folder_ / "disk";
  fs::create_directory(disk);
  if (::mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=128k") != 0)
    GTEST_SKIP() << "cannot mount a small disk here";
  const Outcome o = Run(Train(TrainedText(), disk + "/run"));
  size_t left_over = 0;
  for (const auto& [path, bytes] : Contents(disk))
    left_over += path.find(".tmp", folder_.path().size()) != std::string::npos;
  ::umount(disk.c_str());
  EXPECT_EQ(o.code, 1) << o;
  EXPECT_NE(o.err.find("No space left on device"), std::string::npos) << o;
  EXPECT_NE(o.err.find(disk + "/run"), std::string::npos) << o;
  EXPECT_EQ(left_over, 0u);
}

// Training

TEST_F(CliTest, LossThatIsNotFiniteStopsTheRunAndKeepsTheCheckpoint) {
  // Decay of lr * 100 multiplies every matrix by about -1e5 at each step: float overflows within
  // ten.
  const auto train = [&](const std::string& run, const Words& more) {
    Words words = Train(TrainedText(), run);
    words[8] = "60";
    for (const char* s : {"lr=1000", "weight_decay=100", "clip=0", "warmup=1", "schedule=constant",
                          "eval_tokens=64"}) {
      words = words + Words{"--set", StrCat("train.", s)};
    }
    return words + more;
  };
  // Met by a training step, or by an evaluation.
  const std::string step = folder_ / "step", eval = folder_ / "eval",
                    kept = "last good checkpoint is kept: ";
  Expect(train(step, {"--set", "train.eval_every=1000", "--set", "train.checkpoint_every=1"}), 1,
         {"the loss is ", " at step ", "finite", kept + step + "/checkpoint-"});
  Expect(train(eval, {"--set", "train.eval_every=1"}), 1,
         {" at step ", kept + eval + "/checkpoint-"});
  for (const std::string& run : {step, eval}) {
    int checkpoints = 0;
    for (const auto& entry : fs::directory_iterator(run))
      checkpoints += entry.path().filename().string().starts_with("checkpoint-");
    EXPECT_EQ(checkpoints, 1) << run;
  }
  EXPECT_EQ(Run({"generate", eval, "--max-tokens", "2"}).code, 0);  // the best model so far
}

TEST_F(CliTest, InterruptSavesAndResumeGivesTheSameWeights) {
  const int steps = 600;
  const auto train = [&](const std::string& out) {
    Words words = Train(TrainedText(), out);
    words[8] = std::to_string(steps);
    return words + Words{"--set", "train.log_every=1",   "--set", "model.dropout=0.1",
                         "--set", "train.eval_tokens=64"};
  };
  const std::string whole = folder_ / "whole", parts = folder_ / "parts",
                    log = parts + "/metrics.jsonl";
  const Outcome at_once = Run(train(whole));
  ASSERT_EQ(at_once.code, 0) << at_once;

  const std::string prefix = folder_ / "interrupted";
  const pid_t child = Start(train(parts), prefix);
  for (int i = 0; i < 60000 && !(fs::exists(log) && fs::file_size(log) > 1000); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ::kill(child, SIGINT);
  const Outcome stopped = Wait(child, prefix);
  ASSERT_EQ(stopped.code, 130) << stopped;
  EXPECT_NE(stopped.err.find("interrupted after step"), std::string::npos) << stopped;
  EXPECT_NE(stopped.err.find("cistern train --resume --out " + parts), std::string::npos)
      << stopped;
  EXPECT_EQ(Run({"generate", parts, "--max-tokens", "2"}).code, 0);

  const Outcome resumed = Run({"train", "--resume", "--out", parts, "--threads", "1", "--json"});
  ASSERT_EQ(resumed.code, 0) << resumed;
  EXPECT_EQ(ParseJson(resumed.out, "stdout")["steps"], steps);
  const std::string last = StrCat("/checkpoint-", steps, "/");
  for (const char* name : {"model.safetensors", "optimizer.safetensors"}) {
    EXPECT_TRUE(ReadFile(whole + last + name) == ReadFile(parts + last + name)) << name;
  }
}

TEST_F(CliTest, PrintedConfigurationsAreReadBack) {
  const Words changes = {"--set", "model.attention=latte,abc_mlp",
                         "--set", "model.attention_options.abc_mlp.slots=5",
                         "--set", "train.lr=3e-5"};
  const Outcome first =
      Run(Train(TrainedText(), folder_ / "run", changes + Words{"--print-config"}));
  ASSERT_EQ(first.code, 0) << first;
  EXPECT_NE(first.out.find("slots = 5"), std::string::npos) << first;
  const std::string file = folder_ / "printed.toml";
  WriteFileAtomically(file, first.out);
  const Outcome second = Run({"train", file, "--print-config"});
  EXPECT_EQ(second.code, 0) << second;
  EXPECT_EQ(second.out, first.out);
  EXPECT_FALSE(fs::exists(folder_ / "run"));
  const Outcome list = Run({"train", "--list"});
  EXPECT_EQ(list.code, 0);
  EXPECT_NE(list.out.find("train.warmup"), std::string::npos);
}

TEST_F(CliTest, ARunFolderHoldsWhatTheGuideSays) {
  const std::string run = Trained();
  for (const char* name : {"config.json", "model.safetensors", "tokenizer.json", "experiment.json",
                           "metrics.jsonl", "checkpoint-3/trainer.json"}) {
    EXPECT_TRUE(fs::exists(run + "/" + name)) << name;
  }
  const Outcome o = Run(Train(TrainedText(), folder_ / "json", {"--json"}));
  ASSERT_EQ(o.code, 0) << o;
  const Json result = ParseJson(o.out, "stdout");
  EXPECT_EQ(result["steps"], 3);
  EXPECT_GT(result["test"]["bits_per_byte"].get<double>(), 0);
  EXPECT_GT(result["peak_bytes"].get<int64_t>(), 0);
  EXPECT_GT(result["tokens_per_s"].get<double>(),
            0);  // of a run shorter than a line of its log, too
}

// A dtype that nothing names is chosen, named by the record, and kept by a resumed run.
TEST_F(CliTest, TheRecordNamesTheDtype) {
  const std::string run = Copy("dtype");
  const Json record = ParseJson(ReadFile(run + "/experiment.json"), "experiment.json");
  EXPECT_EQ(record["dtype"], "float32");
  EXPECT_NE(record["environment"]["dtype"].dump().find("too small to gain"), std::string::npos)
      << record["environment"];
  Expect({"train", "--resume", "--out", run, "--steps", "4", "--dtype", "auto"}, 0, {});
  const Json resumed = ParseJson(ReadFile(run + "/experiment.json"), "experiment.json");
  EXPECT_EQ(resumed["dtype"], "float32");
  EXPECT_EQ(resumed["environment"]["dtype"], record["environment"]["dtype"]);
  Expect({"train", "--resume", "--out", run, "--dtype", "bfloat16"}, 2, {"dtype"});
  Expect({"eval", run, "--dtype", "auto"}, 2, {"auto"});
  Expect({"eval", run, "--dtype", "bfloat16"}, 2, {"float32 or float64", "cistern generate"});
  Expect({"info", run, "--dtype", "float64"}, 2, {"--dtype"});  // which it would not use
}

// A record without task.lm.split is of a version whose split was the tail.
TEST_F(CliTest, RunsOfEarlierVersionsKeepTheirSplit) {
  const std::string run = Copy("earlier"), path = run + "/experiment.json";
  Json record = ParseJson(ReadFile(path), path);
  EXPECT_EQ(record["task"]["lm"]["split"], "spread");
  record["task"]["lm"].erase("split");
  WriteFileAtomically(path, record.dump());
  const Outcome o = Run({"eval", run, "--json"});
  ASSERT_EQ(o.code, 0) << o;
  EXPECT_EQ(ParseJson(o.out, "stdout")["split"], "the tail of the text");
}

// The other commands

TEST_F(CliTest, Generate) {
  const Words words = {"generate",     Trained(), "--prompt",  "line 1 of",
                       "--max-tokens", "8",       "--threads", "1"};
  const Outcome one = Run(words), again = Run(words),
                json =
                    Run(words + Words{"--json", "--stats", "--stats-at", "0,40", "--logprobs=2"});
  EXPECT_EQ(one.code, 0) << one;
  EXPECT_EQ(one.out, again.out);
  ASSERT_EQ(json.code, 0) << json;
  const Json result = ParseJson(json.out, "stdout");
  EXPECT_EQ(result["tokens"].size(), 8u);
  EXPECT_EQ(result["top"][0].size(), 2u);
  const Json& positions = result["stats"]["positions"];
  ASSERT_EQ(positions.size(), 2u);
  EXPECT_EQ(positions[0]["state_bytes"], positions[1]["state_bytes"]);  // bounded memory
  const Outcome stats = Run(words + Words{"--stats", "--stats-at", "0,40"});
  EXPECT_EQ(stats.out, one.out);  // figures go to standard error
  EXPECT_NE(stats.err.find("state bytes"), std::string::npos) << stats;

  WriteFileAtomically(folder_ / "prompts.jsonl",
                      "{\"prompt\": \"the book\", \"id\": 7}\n{\"prompt\": \"a sea\"}\n"
                      "{\"prompt\": \"a sea\", \"id\": null}\n");
  const Outcome batch =
      Run({"generate", Trained(), "--prompts", folder_ / "prompts.jsonl", "--max-tokens", "4"});
  ASSERT_EQ(batch.code, 0) << batch;
  EXPECT_EQ(ParseJson(batch.out.substr(0, batch.out.find('\n')), "stdout")["id"], 7);
  EXPECT_NE(batch.out.find("\"id\":null"), std::string::npos) << batch;
  Expect({"generate", Trained(), "--prompt-file", folder_ / "none.txt"}, 1, {"none.txt"});
  Expect({"generate", Trained(), "--prompt", "a", "--prompt-file", "b"}, 2, {"give one of"});
}

TEST_F(CliTest, Eval) {
  const Outcome own = Run({"eval", Trained(), "--json"});
  ASSERT_EQ(own.code, 0) << own;
  const Json score = ParseJson(own.out, "stdout");
  EXPECT_EQ(score["length"], 16);
  EXPECT_GT(score["bits_per_byte"].get<double>(), 0);
  const Outcome other = Run({"eval", Trained(), TrainedText(), "--by-position", "--rows", "2",
                             "--max-tokens", "400", "--json"});
  ASSERT_EQ(other.code, 0) << other;
  const Json far = ParseJson(other.out, "stdout");
  EXPECT_EQ(far["trained_length"], 16);
  EXPECT_EQ(far["positions"].back()["end"], 200);  // far beyond the training length
  const Outcome table = Run({"eval", Trained(), TrainedText(), "--by-position", "--max-tokens",
                             "400", "--svg", folder_ / "p.svg"});
  EXPECT_EQ(table.code, 0) << table;
  EXPECT_NE(table.out.find("bits per byte"), std::string::npos) << table;
  EXPECT_NE(ReadFile(folder_ / "p.svg").find("<svg"), std::string::npos);
  EXPECT_NE(table.out.find("the state was carried further"), std::string::npos) << table;
  Expect({"eval", Trained(), folder_ / "none.txt"}, 1, {"none.txt", "does not exist"});
}

TEST_F(CliTest, EvalByPositionEndsWithLearnedPositions) {
  const std::string run = folder_ / "learned";
  ASSERT_EQ(Run(Train(TrainedText(), run,
                      {"--set", "model.positions=learned", "--set", "model.max_length=16"}))
                .code,
            0);
  const Outcome o = Run({"eval", run, TrainedText(), "--by-position"});
  ASSERT_EQ(o.code, 0) << o;
  ExpectContains(o.out,
                 {"trained on 16 tokens at a time\n", "the positions of the model end at 16"});
  const Outcome most = Run({"eval", run, TrainedText(), "--by-position", "--max-tokens", "100000"});
  EXPECT_EQ(most.out, o.out);
  const Words stats = {"generate", run, "--prompt", "a", "-n", "2", "--stats"};
  Expect(stats + Words{"--stats-at", "0"}, 2,
         {"--stats-at 0", "positions of this model end at 16"});
  const Outcome short_one = Run(stats);
  ASSERT_EQ(short_one.code, 0) << short_one;
  EXPECT_EQ(short_one.err.find("million"), std::string::npos) << short_one;
}

TEST_F(CliTest, ListOpsDataTrainAndEval) {
  const std::string data = folder_ / "data", run = folder_ / "run";
  const Outcome made = Run({"data", "listops", "--out", data, "--counts", "24,6,6", "--json"});
  ASSERT_EQ(made.code, 0) << made;
  EXPECT_TRUE(ParseJson(made.out, "stdout").contains("majority"));
  EXPECT_TRUE(ReadFile(data + "/basic_test.tsv").starts_with("Source\tTarget"));
  Words words = {"train",     "--out", run,      "--steps", "2",
                 "--threads", "1",     "--json", "--set",   "task.data=" + data};
  for (const char* s : {"task.kind=listops", "task.length=64", "model.dim=16", "model.heads=2",
                        "model.layers=1", "train.batch=2"}) {
    words = words + Words{"--set", s};
  }
  const Outcome trained = Run(words);
  ASSERT_EQ(trained.code, 0) << trained;
  EXPECT_TRUE(ParseJson(trained.out, "stdout")["test"].contains("root_operator"));
  EXPECT_EQ(Run({"eval", run}).code, 0);
  Expect({"generate", run}, 2, {"encoder_classifier"});
  // Mechanisms that have no causal form are for classifiers, those that have no other are not.
  words[2] = folder_ / "memory";
  const Outcome memory =
      Run(words + Words{"--set", "model.attention=conv_luna", "--set", "model.pooling=memory",
                        "--set", "task.group_by_length=true"});
  EXPECT_EQ(memory.code, 0) << memory;
  EXPECT_EQ(Run({"eval", folder_ / "memory"}).code, 0);
  words[2] = folder_ / "gate";
  Expect(words + Words{"--set", "model.attention=rfa_gate"}, 2,
         {"bidirectional", "use rfa instead"});
  Expect(Train(TrainedText(), folder_ / "luna", {"--set", "model.attention=conv_luna"}), 2,
         {"causal", "use luna_causal or latte instead"});
  WriteFileAtomically(data + "/basic_train.tsv", "Source\tTarget\nnonsense\n");
  Expect({"train", "--out", folder_ / "broken", "--set", "task.kind=listops", "--set",
          "task.data=" + data},
         1, {"basic_train.tsv"});
}

TEST_F(CliTest, CompareWritesAReport) {
  const std::string out = folder_ / "compare";
  Words words = {"compare",       TrainedText(), "--out", out,         "--mechanisms",
                 "softmax,latte", "--seconds",   "1",     "--threads", "1"};
  words = words + Words{"--sample-tokens", "8", "--decode-tokens", "40"};
  for (const char* s :
       {"model.dim=16", "model.heads=2", "model.layers=1", "task.length=16", "task.vocab_size=300"})
    words = words + Words{"--set", s};
  const Outcome o = Run(words);
  ASSERT_EQ(o.code, 0) << o;
  EXPECT_NE(o.out.find("bits per byte"), std::string::npos) << o;
  const Json result = ParseJson(ReadFile(out + "/compare.json"), "compare.json");
  EXPECT_EQ(result["best_bounded"], "latte");
  EXPECT_TRUE(result["mechanisms"].contains("softmax"));
  const std::string recommended = result["recommended"].get<std::string>();
  EXPECT_TRUE(recommended == "latte" || recommended == "softmax") << recommended;
  EXPECT_GE(result["pareto_front"].size(), 1u);
  EXPECT_NE(o.out.find("recommended: " + recommended), std::string::npos) << o;
  const std::string report = ReadFile(out + "/report.html");
  EXPECT_NE(report.find("Recommended: " + recommended), std::string::npos);
  EXPECT_NE(report.find("Quality against state"), std::string::npos);
  EXPECT_NE(report.find("<svg"), std::string::npos);
  EXPECT_EQ(report.find("<script"), std::string::npos);
  EXPECT_EQ(Run({"generate", out + "/softmax", "--max-tokens", "2"}).code, 0);
  // A budget of time: it is kept, ten evaluations lie in it, and the rate has come down at its end.
  std::istringstream lines(ReadFile(out + "/softmax/metrics.jsonl"));
  int64_t evaluations = 0;
  double seconds = 0, highest = 0, last = 0;
  for (std::string line; std::getline(lines, line);) {
    const Json row = ParseJson(line, "metrics.jsonl");
    evaluations += row["event"] == "valid";
    if (row["event"] != "step") continue;
    seconds = row["seconds"];
    last = row["lr"];
    highest = std::max(highest, last);
  }
  EXPECT_GE(seconds, 1);
  EXPECT_GE(evaluations, 1);
  EXPECT_LE(evaluations, 11);
  EXPECT_LT(last, 0.2 * highest);
}

TEST_F(CliTest, Info) {
  const Outcome o = Run({"info", "--json"});
  ASSERT_EQ(o.code, 0) << o;
  const Json info = ParseJson(o.out, "stdout");
  EXPECT_TRUE(info.contains("libtorch"));
  EXPECT_TRUE(info.contains("simd_in_use"));
  EXPECT_GE(info["mechanisms"].size(), 3u);
  const Outcome kinds = Run({"info", "--models"});
  for (const char* phrase : {"decoder_lm", "stacks: encoder, decoder, cross", "share_embeddings"})
    EXPECT_NE(kinds.out.find(phrase), std::string::npos) << phrase << "\n" << kinds;
  const Outcome model = Run({"info", Trained(), "--json"});
  ASSERT_EQ(model.code, 0) << model;
  EXPECT_GT(ParseJson(model.out, "stdout")["parameters"].get<int64_t>(), 0);
  ModelConfig config;
  config.kind = "encoder_decoder", config.vocab_size = 12, config.dim = 16, config.layers = 1;
  SaveModel(*MakeModel(config, 1), folder_ / "both");
  const Outcome both = Run({"info", folder_ / "both"});
  EXPECT_EQ(both.code, 0) << both;
  for (const char* phrase :
       {"as many of its source", "layer 0 (latte)", "layer 0 to the source (softmax)"})
    EXPECT_NE(both.out.find(phrase), std::string::npos) << phrase << "\n" << both;
  const Json bytes =
      ParseJson(Run({"info", folder_ / "both", "--json"}).out, "stdout")["state_bytes"];
  EXPECT_EQ(bytes["1000"].get<int64_t>() - bytes["0"].get<int64_t>(),
            1000 * 2 * 16 * 4);  // keys and values of the source
  EXPECT_EQ(Run({"--version"}).code, 0);
  for (const char* command : {"train", "eval", "generate", "compare", "data", "info"})
    EXPECT_EQ(Run({command, "--help"}).code, 0) << command;
}

// Verification

TEST_F(CliTest, VerifyShowsAMatrixAndChecksAModel) {
  const Outcome matrix = Run({"verify", "--mechanism", "latte", "--property", "definition,truncate",
                              "--implementation", "kernel"});
  EXPECT_EQ(matrix.code, 0) << matrix;
  for (const char* phrase :
       {"definition", "latte", "-a  its state cannot be cut back", "0 failed (seed 1"})
    EXPECT_NE(matrix.out.find(phrase), std::string::npos) << phrase << "\n" << matrix;
  EXPECT_EQ(matrix.out.find('\033'), std::string::npos) << "colours are for terminals";
  const Outcome json =
      Run({"verify", "--mechanism", "latte", "--property", "empty", "--form", "causal", "--json"});
  EXPECT_EQ(json.code, 0) << json;
  EXPECT_EQ(ParseJson(json.out, "out")["failed"], 0) << json;
  const Outcome model =
      Run({"verify", "--model", Trained(), "--text", TrainedText(), "--tokens", "16"});
  EXPECT_EQ(model.code, 0) << model;
  EXPECT_NE(model.out.find("9 checks, 0 failed"), std::string::npos) << model;
  Expect({"verify", "--mechanism", "late"}, 2, {"'late'", "did you mean 'latte'?"});
  Expect({"verify", "--mechanism", "exact_atention"}, 2, {"did you mean 'exact_attention'?"});
  Expect({"verify", "--property", "paddign"}, 2, {"property 'paddign'", "did you mean 'padding'?"});
  Expect({"verify", "--form", "sideways"}, 2, {"form 'sideways'", "bidirectional, causal, cross"});
  Expect({"verify", "--quick", "--full"}, 2, {"not both"});
  const Outcome random = Run({"verify", "--model", Trained(), "--tokens", "16"});
  EXPECT_EQ(random.code, 0) << random;
  ExpectContains(random.out, {"on 16 tokens of random ids", "9 checks, 0 failed"});
  Expect({"verify", "--model", Trained(), "--text", folder_ / "none.txt"}, 1, {"none.txt"});
  WriteFileAtomically(folder_ / "short.txt", "two words");
  Expect({"verify", "--model", Trained(), "--text", folder_ / "short.txt"}, 1,
         {"short.txt is too short", "at least 16"});
}

TEST_F(CliTest, VerifyChecksAClassifier) {
  ModelConfig config;
  config.kind = "encoder_classifier", config.vocab_size = 12, config.classes = 3, config.dim = 16,
  config.layers = 1;
  config.attention = {"nystrom"}, config.max_length = 40;
  SaveModel(*MakeModel(config, 1), folder_ / "classifier");
  const Outcome model = Run({"verify", "--model", folder_ / "classifier"});
  EXPECT_EQ(model.code, 0) << model;
  for (const char* phrase :
       {"on 40 tokens of random ids", "padding", "batch", "4 checks, 0 failed"})
    EXPECT_NE(model.out.find(phrase), std::string::npos) << phrase << "\n" << model;
  Expect({"verify", "--model", folder_ / "classifier", "--text", TrainedText()}, 2,
         {"encoder_classifier", "omit --text"});
  Expect({"verify", "--model", folder_ / "classifier", "--tokens", "41"}, 2, {"max_length of 40"});
  Expect({"verify", "--text", TrainedText()}, 2, {"--text goes with --model"});
}

TEST_F(CliTest, VerifyChecksAnEncoderDecoderOfAFolder) {
  ModelConfig config;
  config.kind = "encoder_decoder", config.vocab_size = 12, config.dim = 16, config.layers = 1;
  config.attention = {"latte"}, config.max_length = 40;
  SaveModel(*MakeModel(config, 1), folder_ / "pair");
  const Outcome model = Run({"verify", "--model", folder_ / "pair"});
  EXPECT_EQ(model.code, 0) << model;
  ExpectContains(model.out, {"on 40 tokens of random ids, for a source of 26", "source", "file",
                             "-     packed           does not apply", "10 checks, 0 failed"});
  Expect({"verify", "--model", folder_ / "pair", "--text", TrainedText()}, 2,
         {"encoder_decoder", "omit --text"});
}

TEST_F(CliTest, VerifyDecodesForLong) {
  const Outcome o = Run({"verify", "--mechanism", "latte,rfa_gate", "--long", "3000", "--json"});
  ASSERT_EQ(o.code, 0) << o;
  const Json json = ParseJson(o.out, "stdout");
  ASSERT_EQ(json["results"].size(), 2u);
  for (const Json& row : json["results"]) {
    EXPECT_FALSE(row["failed"]);
    ASSERT_EQ(row["errors"].size(), 2u);
    EXPECT_LT(row["errors"]["3000"].get<double>(), 1e-5);
    EXPECT_GT(row["errors"]["1000"].get<double>(), 0);
  }
  const Outcome text = Run({"verify", "--mechanism", "linear", "--long", "1000", "--piece", "1"});
  for (const char* phrase : {"ok    linear:  1000 ", "1 mechanisms, 0 failed"})
    EXPECT_NE(text.out.find(phrase), std::string::npos) << phrase << "\n" << text;
  Expect({"verify", "--mechanism", "softmax", "--long", "2000"}, 2, {"[softmax]", "grows"});
  Expect({"verify", "--mechanism", "nystrom", "--long", "2000"}, 2,
         {"[nystrom]", "causal", "use latte"});
  for (const char* few : {"0", "10"}) Expect({"verify", "--long", few}, 2, {"at least 1000"});
  Expect({"verify", "--long", "2000", "--tokens", "500"}, 2, {"--tokens goes with --model"});
  Expect({"verify", "--long", "2000", "--form", "causal"}, 2, {"only --mechanism and --full"});
}

}  // namespace
}  // namespace cistern
