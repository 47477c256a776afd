// Words of the command line that are mistyped, beyond their range, or would change nothing.
#include <ATen/Parallel.h>

#include "cistern/base/error.h"
#include "cistern/cli/testing_cli.h"

namespace cistern {
namespace {

class OptionsTest : public CliTest {};

TEST_F(OptionsTest, UnknownNamesGetTheNearestOne) {
  const auto with = [&](const std::string& assignment) {
    return Train(TrainedText(), folder_ / "run", {"--set", assignment});
  };
  Expect(with("model.attention=late"), 2, {"did you mean 'latte'?"});
  Expect(with("model.dmi=16"), 2, {"did you mean 'model.dim'?"});
  Expect(with("task.kind=listop"), 2, {"did you mean 'listops'?"});
  Expect(with("model.attention_options.latte.latent=8"), 2, {"did you mean 'latents'?"});
  Expect(Train(TrainedText(), folder_ / "run", {"--dtype", "float23"}), 2,
         {"did you mean 'float32'?"});
  Expect(Train(TrainedText(), folder_ / "run", {"--device", "moon"}), 2,
         {"no device 'moon'", "available: cpu"});
  Expect(Train(TrainedText(), folder_ / "run", {"--stpes", "3"}), 2, {"did you mean '--steps'?"});
  Expect({"trian"}, 2, {"did you mean 'train'?"});
  Expect({"compare", TrainedText(), "--mechanisms", "latte,abc_mpl"}, 2,
         {"did you mean 'abc_mlp'?"});
  Expect({}, 2, {"subcommand", "compare", "generate", "'cistern COMMAND --help'"});
  const std::string file = folder_ / "experiment.toml";
  WriteFileAtomically(file, "[train]\nbacth = 8\n");
  Expect({"train", file}, 2, {file, "train.bacth", "did you mean 'train.batch'?"});
  WriteFileAtomically(file, "[train\n");
  Expect({"train", file}, 2, {file});
  EXPECT_FALSE(fs::exists(folder_ / "run"));
}

TEST_F(OptionsTest, WholeNumbersBeyondTheirRangeAreRefused) {
  const std::string beyond = "9223372036854775808";  // 2^63
  Expect({"generate", Trained(), "-n", beyond}, 2, {"--max-tokens", beyond, "64 bits"});
  Expect({"generate", Trained(), "--top-k=-9223372036854775809"}, 2, {"--top-k", "64 bits"});
  Expect({"generate", Trained(), "--seed", "18446744073709551616"}, 2, {"--seed", "64 bits"});
  Expect({"generate", Trained(), "--seed", "-1"}, 2, {"--seed -1 is below 0"});
  Expect({"verify", "--long", beyond}, 2, {"--long", "64 bits"});
  Expect({"verify", "--lengths", "3," + beyond}, 2, {"--lengths", "64 bits"});
  EXPECT_EQ(
      Run({"generate", Trained(), "--prompt", beyond, "-n", "1", "--seed", "18446744073709551615"})
          .code,
      0);
}

TEST_F(OptionsTest, WhatWouldChangeNothingIsRefused) {
  const Words eval = {"eval", Trained()};
  for (const char* option : {"--length", "--batch", "--context"})
    Expect(eval + Words{"--by-position", option, "8"}, 2, {"--by-position", option, "leave out"});
  for (const char* option : {"--rows", "--buckets"})
    Expect(eval + Words{option, "2"}, 2, {option, "--by-position", "give both"});
  Expect(eval + Words{TrainedText(), "--split", "valid"}, 2, {"--split", TrainedText()});
  Expect({"generate", Trained(), "--stats-at", "0,40"}, 2, {"--stats-at", "give both"});
  Expect({"verify", "--piece", "8"}, 2, {"--piece", "--long"});
  Expect({"train", "--list", "--json"}, 2, {"--list", "leave out --json"});
  Expect({"analyze", "--list", "--json"}, 2, {"--list", "leave out --json"});
  Expect({"info", "--docs", "--json"}, 2, {"--docs", "leave out --json"});
}

// The blanks of KEY = VALUE are cut, those of a quoted path are not.
TEST_F(OptionsTest, APathKeepsItsBlanks) {
  const std::string text = folder_ / "text.txt ", out = folder_ / "run";
  WriteFileAtomically(text, Text());
  const Words small = {"--set", "model.dim = 8",          "--set", "model.heads= 2", "--steps", "1",
                       "--set", "task.tokenizer = bytes", "--set", "task.length =16"};
  for (const Words& data : {Words{"--text", text}, Words{"--set", "task.text=\"" + text + "\""}}) {
    const Outcome o = Run(Words{"train", "--threads", "1", "--out", out} + data + small);
    ASSERT_EQ(o.code, 0) << o;
    const Json task = ReadJsonFile(out + "/experiment.json")["task"]["lm"];
    EXPECT_EQ(task["text"], text);
    EXPECT_EQ(task["tokenizer"], "bytes");
    fs::remove_all(out);
  }
}

TEST_F(OptionsTest, ALengthIsOfBlocksOfText) {
  const std::string run = folder_ / "run";
  Words words = {"train", "--out", run, "--steps", "1", "--threads", "1"};
  for (const char* s :
       {"task.kind=listops", "task.length=40", "task.train_examples=8", "task.valid_examples=4",
        "task.test_examples=4", "model.dim=8", "model.heads=2", "model.layers=1", "train.batch=2"})
    words = words + Words{"--set", s};
  const Outcome o = Run(words);
  ASSERT_EQ(o.code, 0) << o;
  Expect({"eval", run, "--length", "8"}, 2, {"--length", "listops", "leave it out"});
}

// Before the measurement, which would be lost.
TEST_F(OptionsTest, AFileThatCannotBeWrittenIsNoticedFirst) {
  const auto refused = [&](const Words& words, const std::string& path) {
    const Outcome o = Run(words + Words{path});
    EXPECT_EQ(o.code, 1) << o;
    EXPECT_NE(o.err.find(path), std::string::npos) << o;
    EXPECT_EQ(o.out, "") << o;
  };
  refused({"bench", "ops", "--mechanisms", "latte", "--lengths", "20", "--json"},
          folder_ / "none/ops.json");
  refused({"bench", "papers", "reuse-table6", "--report"}, folder_ / "none/papers.html");
  refused({"eval", Trained(), "--by-position", "--max-tokens", "100", "--svg"},
          folder_ / "none/positions.svg");
}

// The one command whose threads are not all cores unless told.
TEST_F(OptionsTest, ThreadsOfVerify) {
  const auto threads = [&](const Words& more) {
    const Outcome o = Run(
        Words{"verify", "--mechanism", "latte", "--property", "empty", "--form", "causal"} + more);
    EXPECT_EQ(o.code, 0) << o;
    const size_t end = o.out.rfind(" threads)");
    return end == std::string::npos ? o.out : o.out.substr(0, end);
  };
  EXPECT_TRUE(threads({}).ends_with(", 1"));
  EXPECT_TRUE(threads({"--threads", "2"}).ends_with(", 2"));
  EXPECT_TRUE(threads({"--threads", "0"}).ends_with(StrCat(", ", at::get_num_threads())));
}

}  // namespace
}  // namespace cistern
