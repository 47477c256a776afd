// cistern data from outside: where it writes, and what a signal leaves.
#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "cistern/base/subprocess.h"
#include "cistern/cli/testing_cli.h"

namespace cistern {
namespace {

class DataTest : public CliTest {
 protected:
  static void SetUpTestSuite() {
    shared_ = new TestFolder;
    fs::permissions(shared_->path(), fs::perms(0755));
  }

  // Whether the program has begun to watch for SIGTERM, by the mask of signals that it handles.
  static bool Watches(pid_t child) {
    std::ifstream status(StrCat("/proc/", child, "/status"));
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("SigCgt:"))
        return (std::strtoull(line.substr(7).c_str(), nullptr, 16) >> (SIGTERM - 1) & 1) != 0;
    }
    return false;
  }
  template <class F>
  static void WaitUntil(F&& f) {
    for (int i = 0; i < 60000 && !f(); ++i) ::usleep(1000);
  }
  // Starts the program, sends the signal once it watches and `begun` says so, and expects the
  // program to end by it.
  template <class F>
  void ExpectEnded(const Words& words, int signal, F&& begun) {
    const std::string prefix = folder_ / "run";
    const pid_t child = Start(words, prefix);
    WaitUntil([&] { return Watches(child) && begun(); });
    EXPECT_EQ(::kill(child, signal), 0);
    const Outcome o = Wait(child, prefix);
    EXPECT_EQ(o.code, 130) << ::testing::PrintToString(words) << "\n" << o;
    EXPECT_NE(o.err.find("cistern: interrupted"), std::string::npos) << o;
    EXPECT_EQ(o.out, "");
  }
};

TEST_F(DataTest, SignalsEndAPathfinder) {
  const std::string out = folder_ / "new/pf", packed = folder_ / "packed/a.pathfinder";
  const Words images = {"--images", "4000000", "--threads", "1"};
  for (const int signal : {SIGINT, SIGTERM}) {
    ExpectEnded(Words{"data", "pathfinder", out} + images, signal,
                [&] { return fs::exists(out + "/imgs/0"); });
    EXPECT_FALSE(fs::exists(folder_ / "new"));
  }
  fs::create_directories(folder_ / "packed");
  ExpectEnded(Words{"data", "pathfinder", packed} + images, SIGTERM,
              [&] { return !fs::is_empty(folder_ / "packed"); });
  EXPECT_TRUE(fs::is_empty(folder_ / "packed"));
}

TEST_F(DataTest, APackedFileIsNotWrittenOver) {
  const std::string packed = folder_ / "a.pathfinder";
  WriteFileAtomically(packed, "earlier");
  Expect({"data", "pathfinder", packed, "--images", "1"}, 2, {packed + " is there already"});
  EXPECT_EQ(ReadFile(packed), "earlier");
}

TEST_F(DataTest, BytesHaveNoVocabularyToLearn) {
  Expect({"data", "text", "a.txt", "--tokenizer", "bytes", "--vocab-size", "300"}, 2,
         {"--vocab-size has no effect with --tokenizer bytes"});
}

TEST_F(DataTest, SignalsEndListOpsAndText) {
  const std::string listops = folder_ / "listops", text = folder_ / "text.txt";
  const auto at_once = [] { return true; };
  ASSERT_EQ(Run({"data", "listops", "--out", listops, "--counts", "20,5,5"}).code, 0);
  const auto earlier = Contents(listops);
  EXPECT_EQ(earlier.size(), 3u);
  const Words many = {"--counts", "900000,2000,2000", "--threads", "1"};
  Expect({"data", "listops", "--out", listops, "--counts", "20,5,5"}, 2,
         {"holds basic_train.tsv already"});
  EXPECT_EQ(Contents(listops), earlier);
  for (const int signal : {SIGTERM, SIGINT}) {
    ExpectEnded(Words{"data", "listops", "--out", folder_ / "none"} + many, signal, at_once);
    EXPECT_FALSE(fs::exists(folder_ / "none"));
  }
  std::string long_text;
  for (int i = 0; i < 600; ++i) long_text += Text();
  WriteFileAtomically(text, long_text);
  for (const char* tokenizer : {"bpe", "words", "bytes"}) {
    ExpectEnded({"data", "text", text, "--tokenizer", tokenizer, "--out", folder_ / "tokenizer"},
                SIGINT, at_once);
    EXPECT_FALSE(fs::exists(folder_ / "tokenizer"));
  }
}

TEST_F(DataTest, AKilledPathfinderIsNoSetAndIsMadeAgain) {
  const std::string out = folder_ / "pf", prefix = folder_ / "run";
  const pid_t child =
      Start({"data", "pathfinder", out, "--images", "4000000", "--threads", "1"}, prefix);
  // A second one has to wait for another time.
  WaitUntil([&] { return fs::exists(out + "/imgs/0/sample_0.png"); });
  Expect({"data", "pathfinder", out, "--images", "2"}, 1, {"in use by process"});
  // Beyond the images of the first file of metadata.
  WaitUntil([&] { return fs::exists(out + "/imgs/1/sample_0.png"); });
  ::kill(child, SIGKILL);
  Wait(child, prefix);
  EXPECT_FALSE(fs::exists(out + "/metadata"));
  Words train = {"train",           "--task",  "pathfinder", "--data",    out, "--out",
                 folder_ / "model", "--steps", "1",          "--threads", "1"};
  Expect(train, 1, {"metadata"});
  const Words again = {"data", "pathfinder", out, "--images", "30", "--threads", "1"};
  const Outcome made = Run(again);
  EXPECT_EQ(made.code, 0) << made;
  const std::string lines = ReadFile(out + "/metadata/0.npy");
  EXPECT_EQ(std::count(lines.begin(), lines.end(), '\n'), 30);
  Expect(again, 2, {"holds metadata of images already"});
}

TEST_F(DataTest, TextIsPreparedAsTrainingReadsIt) {
  const std::string text = folder_ / "text.txt", cache = shared_->path() + "/cache/cistern";
  WriteFileAtomically(text, Text() + "the end\n");
  const Outcome o = Run({"data", "text", text});
  ASSERT_EQ(o.code, 0) << o;
  const auto made = Contents(cache);
  EXPECT_FALSE(made.empty());
  Words train = {"train",           "--text",  text, "--dtype",   "float32", "--out",
                 folder_ / "model", "--steps", "1",  "--threads", "1"};
  for (const char* s : {"model.dim=16", "model.heads=2", "model.layers=1", "task.length=16"})
    train = train + Words{"--set", s};
  const Outcome trained = Run(train);
  ASSERT_EQ(trained.code, 0) << trained;
  EXPECT_EQ(Contents(cache), made);
}

TEST_F(DataTest, TheCommandToTrainCanBeCopied) {
  const std::string out = folder_ / "my pf";
  const Outcome o = Run({"data", "pathfinder", out, "--images", "1"});
  ASSERT_EQ(o.code, 0) << o;
  EXPECT_NE(o.out.find("cistern train --data " + ShellWord(out) + "\n"), std::string::npos) << o;
}

TEST_F(DataTest, TextMakesTheFolderOfItsTokenizer) {
  const std::string text = folder_ / "text.txt", out = folder_ / "a/b";
  WriteFileAtomically(text, Text());
  const Words words = {"data", "text", text, "--vocab-size", "300", "--out"};
  const Outcome o = Run(words + Words{out});
  EXPECT_EQ(o.code, 0) << o;
  EXPECT_TRUE(fs::exists(out + "/tokenizer.json"));
  // What cannot be a folder is said before the text is read.
  Expect({"data", "text", folder_ / "no-text", "--out", text}, 1, {text, "irectory"});
  Expect({"data", "text", folder_ / "no-text", "--out", folder_ / "c"}, 1, {"no-text"});
  EXPECT_FALSE(fs::exists(folder_ / "c"));
}

}  // namespace
}  // namespace cistern
