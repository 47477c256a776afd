// `cistern generate` from outside: states that are saved and loaded, and the interactive loop.
#include <algorithm>
#include <chrono>
#include <thread>

#include "cistern/cli/testing_cli.h"
#include "cistern/io/safetensors.h"

namespace cistern {
namespace {

class GenerateCliTest : public CliTest {
 protected:
  static Words Generate(const Words& more) {
    return Words{"generate", Trained(), "--threads", "1"} + more;
  }

  // What a run printed, which must have succeeded.
  static std::string Out(const Words& more) {
    const Outcome o = Run(Generate(more));
    EXPECT_EQ(o.code, 0) << o;
    return o.out;
  }

  static Json Tokens(const Words& more) {
    return ParseJson(Out(more + Words{"--json"}), "stdout")["tokens"];
  }

  static std::vector<std::string> Lines(const std::string& text) {
    std::vector<std::string> lines;
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = std::min(text.find('\n', begin), text.size());
      lines.push_back(text.substr(begin, end - begin));
      begin = end + 1;
    }
    return lines;
  }
};

TEST_F(GenerateCliTest, AStateIsReadOnceAndUsedOften) {
  const std::string state = folder_ / "book.state", further = folder_ / "further.state";
  Json whole = Tokens({"--prompt", "line 1 of the book", "-n", "24"});
  Out({"--prompt", "line 1 of the book", "-n", "0", "--save-state", state});
  const auto before = ReadFile(state);
  EXPECT_EQ(Tokens({"--load-state", state, "-n", "24"}), whole);
  // A stop in the middle, with the text that was written.
  Json first = Tokens({"--load-state", state, "-n", "10", "--save-state", further});
  for (const Json& token : Tokens({"--load-state", further, "-n", "14"})) first.push_back(token);
  EXPECT_EQ(first, whole);
  EXPECT_EQ(ReadFile(state), before);

  // Every prompt of a file continues it, as it does alone (prompt 0 of a file draws as a prompt
  // alone).
  const Json alone = Tokens({"--load-state", state, "--prompt", " tells of", "-n", "12"});
  WriteFileAtomically(
      folder_ / "prompts.jsonl",
      "{\"prompt\": \" tells of\"}\n{\"prompt\": \"\"}\n{\"prompt\": \" tells of\"}\n");
  for (const char* batch : {"1", "3"}) {
    const auto lines = Lines(Out({"--load-state", state, "--prompts", folder_ / "prompts.jsonl",
                                  "-n", "12", "--batch", batch}));
    ASSERT_EQ(lines.size(), 3u);
    EXPECT_EQ(ParseJson(lines[0], "stdout")["tokens"], alone) << batch;
    EXPECT_EQ(ParseJson(lines[1], "stdout")["prompt_tokens"], 0);
  }
  const std::string prompts = ReadFile(folder_ / "prompts.jsonl");
  const Words of_input = {"generate", Trained(), "--prompts", "-", "-n", "12"};
  const Outcome piped = RunWith(prompts, of_input);
  EXPECT_EQ(piped.code, 0) << piped;
  EXPECT_EQ(piped.out, Out({"--prompts", folder_ / "prompts.jsonl", "-n", "12"}));
  const Outcome bad = RunWith(prompts + "{}\n", of_input), none = RunWith("\n", of_input);
  EXPECT_EQ(bad.code, 1) << bad;
  EXPECT_NE(bad.err.find("standard input:4: expected an object"), std::string::npos) << bad;
  EXPECT_EQ(none.code, 1) << none;
  EXPECT_NE(none.err.find("standard input holds no prompt"), std::string::npos) << none;
  const Outcome help = Run({"generate", "--help"});
  for (const char* option : {"--save-state", "--load-state", "--interactive"})
    EXPECT_NE(help.out.find(option), std::string::npos) << option;
}

// Samples of one prompt draw as prompts of a file do, whatever the batch, and the first as one
// text.
TEST_F(GenerateCliTest, SeveralTextsOfAPrompt) {
  const Words prompt = {"--prompt", "line 1 of the book", "-n", "9"};
  WriteFileAtomically(folder_ / "same.jsonl",
                      "{\"prompt\": \"line 1 of the book\"}\n{\"prompt\": \"line 1 of the book\"}\n"
                      "{\"prompt\": \"line 1 of the book\"}\n");
  const auto one_by_one =
      Lines(Out({"--prompts", folder_ / "same.jsonl", "-n", "9", "--batch", "1"}));
  ASSERT_EQ(one_by_one.size(), 3u);
  const Json first = Tokens(prompt);
  for (const char* batch : {"1", "2", "3"}) {
    const auto lines = Lines(Out(prompt + Words{"--count", "3", "--batch", batch}));
    ASSERT_EQ(lines.size(), 3u);
    for (size_t i = 0; i < 3; ++i) {
      const Json got = ParseJson(lines[i], "stdout"), want = ParseJson(one_by_one[i], "stdout");
      EXPECT_EQ(got["sample"], i);
      EXPECT_EQ(got["tokens"], want["tokens"]) << batch;
      EXPECT_EQ(got["prompt_tokens"], want["prompt_tokens"]);
      EXPECT_EQ(i == 0, got["tokens"] == first) << i;
    }
  }

  // Prompts of different lengths, twice each: first those of one text each.
  WriteFileAtomically(
      folder_ / "two.jsonl",
      "{\"prompt\": \"line 1 of the book\", \"id\": \"a\"}\n{\"prompt\": \"li\"}\n");
  const Words file = {"--prompts", folder_ / "two.jsonl", "-n", "9"};
  const auto once = Lines(Out(file)), twice = Lines(Out(file + Words{"--count", "2"}));
  ASSERT_EQ(twice.size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    const Json got = ParseJson(twice[i], "stdout");
    EXPECT_EQ(got["index"], i % 2);
    EXPECT_EQ(got["sample"], i / 2);
    EXPECT_EQ(got.contains("id"), i % 2 == 0);
    EXPECT_EQ(i < 2, got["tokens"] == ParseJson(once[i % 2], "stdout")["tokens"]) << i;
  }

  Expect(Generate(prompt + Words{"--count", "0"}), 2, {"--count must be 1 or above"});
  Expect(Generate(prompt + Words{"--count", "2", "--save-state", folder_ / "x"}), 2,
         {"--save-state saves one"});
  Expect(Generate({"--count", "2", "--interactive"}), 2, {"--interactive continues one"});
}

TEST_F(GenerateCliTest, SizesAreForetold) {
  const Outcome info = Run({"info", Trained()});
  EXPECT_EQ(info.code, 0) << info;
  EXPECT_NE(info.out.find("layer 0 (latte)"), std::string::npos) << info;
  const Json foretold = ParseJson(Run({"info", Trained(), "--json"}).out, "stdout")["state_bytes"];
  EXPECT_EQ(foretold["0"], foretold["1000000"]);
  const Json stats =
      ParseJson(Out({"-n", "3", "--json", "--stats", "--stats-at", "0"}), "stdout")["stats"];
  EXPECT_EQ(stats["state_bytes"], foretold["1000"]);
  EXPECT_EQ(stats["state_bytes_after_million_tokens"], foretold["1000000"]);
}

TEST_F(GenerateCliTest, StatesThatCannotBeUsed) {
  const std::string state = folder_ / "good.state", bad = folder_ / "bad.state";
  Out({"--prompt", "line 1", "-n", "2", "--save-state", state});
  const std::string whole = ReadFile(state);
  const auto load = [&](int code, const Words& phrases) {
    Expect(Generate({"--load-state", bad, "-n", "2"}), code, phrases);
  };
  load(1, {"cannot read", bad, "No such file"});
  WriteFileAtomically(bad, whole.substr(0, whole.size() / 2));
  load(1, {bad, "truncated"});
  WriteFileAtomically(bad, "");
  load(1, {bad, "empty or truncated"});
  std::string changed = whole;
  changed[changed.size() - 3] ^= 1;
  WriteFileAtomically(bad, changed);
  load(1, {bad, "corrupt"});
  const auto of_version = [&](const std::string& version) {  // whole
    const SafetensorsFile file(state);
    auto metadata = file.metadata();
    ASSERT_EQ(metadata["version"], "3");
    metadata["version"] = version;
    metadata["tokenizer"] = "another hash";
    WriteSafetensors(bad, file.entries(), {metadata.begin(), metadata.end()});
  };
  of_version("7");
  load(2, {bad, "version 7", "a newer cistern", "reads version 3"});
  of_version("1");
  load(2, {bad, "version 1", "an older cistern", "make it again", "--save-state FILE"});
  fs::copy_file(Trained() + "/model.safetensors", bad, fs::copy_options::overwrite_existing);
  load(1, {bad, "is not a saved state", "--save-state"});
  fs::remove(bad);
  fs::create_directory(bad);
  load(1, {"cannot read", bad, "Is a directory"});

  // Another model, another precision.
  const Outcome trained = Run(Train(TrainedText(), folder_ / "other", {"--seed", "9"}));
  ASSERT_EQ(trained.code, 0) << trained;
  Expect({"generate", folder_ / "other", "--load-state", state}, 2,
         {state, "another model (hash "});
  Expect(Generate({"--load-state", state, "--dtype", "float64"}), 2,
         {state, "float32", "float64", "--dtype"});
  // bfloat16 rounds the weights; its states are float32's.
  const std::string half = folder_ / "half.state";
  Expect(Generate({"--load-state", state, "--dtype", "bfloat16", "--save-state", half}), 0, {});
  Expect(Generate({"--load-state", half}), 0, {});
  EXPECT_EQ(ReadFile(state), whole);

  // Where it cannot be written: said before the work where that is known, and the old file stays.
  Expect(Generate({"--save-state", folder_ / "no/such/x.state", "-n", "2"}), 1,
         {"cannot write", "no/such/x.state", "No such file"});
  const Outcome early = Run(Generate({"--save-state", folder_.path(), "-n", "2"}));
  EXPECT_EQ(early.code, 1) << early;
  EXPECT_EQ(early.out, "") << "before the work";
  Expect(Generate({"--save-state", "/dev/full", "-n", "2"}), 1,
         {"cannot write /dev/full", "No space left on device"});
  for (const auto& entry : fs::directory_iterator(folder_.path())) {
    EXPECT_EQ(entry.path().filename().string().find(".tmp"), std::string::npos) << entry.path();
  }

  const std::string prompts = folder_ / "prompts.jsonl";
  WriteFileAtomically(prompts, "{\"prompt\": \"a\"}\n");
  Expect(Generate({"--prompts", prompts, "--save-state", state}), 2,
         {"--save-state saves one text"});
  Expect(Generate({"--prompts", prompts, "--interactive"}), 2, {"--interactive", "--prompts"});
  Expect(Generate({"--prompt-file", "-", "--interactive"}), 2, {"--interactive", "--prompt-file"});
}

TEST_F(GenerateCliTest, InteractiveLinesAreAppendedAndAnswered) {
  const std::string state = folder_ / "talk.state";
  const Words options = {"--interactive", "-n", "9", "--json"};
  const Outcome o = RunWith("line 1 of\nthe book\\\n\n:stats\n",
                            Generate(options + Words{"--save-state", state}));
  ASSERT_EQ(o.code, 0) << o;
  const auto lines = Lines(o.out);
  ASSERT_EQ(lines.size(), 3u) << o;
  EXPECT_EQ(o.err.find("> "), std::string::npos) << "a prompt sign is for terminals";
  EXPECT_NE(o.err.find("state"), std::string::npos) << ":stats";

  // The same by hand: the line with its end, then one without, then nothing more.
  const std::string hand = folder_ / "hand.state";
  Json first = Tokens({"--prompt", "line 1 of\n", "-n", "9", "--save-state", hand});
  Json second =
      Tokens({"--load-state", hand, "--prompt", "the book", "-n", "9", "--save-state", hand});
  Json third = Tokens({"--load-state", hand, "-n", "9", "--save-state", hand});
  EXPECT_EQ(ParseJson(lines[0], "stdout")["tokens"], first);
  EXPECT_EQ(ParseJson(lines[1], "stdout")["tokens"], second);
  EXPECT_EQ(ParseJson(lines[2], "stdout")["tokens"], third);
  EXPECT_EQ(ReadFile(state), ReadFile(hand));

  // A prompt is read before the lines, and text goes to standard output as it is written.
  const Outcome spoken =
      RunWith("the book\\", Generate({"-i", "-n", "9", "--prompt", "line 1 of\n"}));
  EXPECT_EQ(spoken.code, 0) << spoken;
  EXPECT_EQ(spoken.out, Out({"--prompt", "line 1 of\nthe book", "-n", "9"}));
  EXPECT_EQ(RunWith("", Generate({"-i"})).code, 0);
  // Two colons begin a line that is no command.
  EXPECT_EQ(RunWith("::quit\n", Generate({"-i", "-n", "9"})).out,
            Out({"--prompt", ":quit\n", "-n", "9"}));
}

TEST_F(GenerateCliTest, InteractiveCommands) {
  const std::string state = folder_ / "a.state";
  const Words options = Generate({"-i", "-n", "9", "--json"});
  const auto tokens = [](const std::string& line) { return ParseJson(line, "stdout")["tokens"]; };
  const Outcome o =
      RunWith("one\n:save " + state + "\ntwo\n:back\ntwo\n:back\n:back\none\n:reset\none\n:load " +
                  state + "\ntwo\n:help\n:quit\nthree\n",
              options);
  ASSERT_EQ(o.code, 0) << o;
  const auto lines = Lines(o.out);
  ASSERT_EQ(lines.size(), 6u) << o;  // one two two one one two
  EXPECT_EQ(tokens(lines[1]), tokens(lines[2])) << ":back undoes a turn";
  EXPECT_EQ(tokens(lines[0]), tokens(lines[3])) << "two turns";
  EXPECT_EQ(tokens(lines[0]), tokens(lines[4])) << ":reset starts a new text";
  EXPECT_EQ(tokens(lines[1]), tokens(lines[5])) << ":load continues the file";
  EXPECT_NE(tokens(lines[0]), tokens(lines[1]));
  EXPECT_NE(o.err.find(":save FILE"), std::string::npos) << ":help";

  // Without a terminal the first error ends the program.
  const auto fails = [&](const std::string& input, int code, const Words& phrases) {
    const Outcome failed = RunWith(input + "\none\n", options);
    EXPECT_EQ(failed.code, code) << input << "\n" << failed;
    EXPECT_EQ(failed.out, "") << input;
    for (const std::string& phrase : phrases)
      EXPECT_NE(failed.err.find(phrase), std::string::npos) << "no '" << phrase << "' in\n"
                                                            << failed;
  };
  fails(":sav x", 2, {"did you mean ':save'?"});
  fails(":save", 2, {":save FILE"});
  fails(":back 3", 2, {":back", "'3'"});
  fails(":back", 1, {"nothing to go back to"});
  fails(":save " + state, 1, {"nothing has been read yet"});
  fails(":load " + (folder_ / "none.state"), 1, {"none.state", "No such file"});
  Expect(Generate({"--load-state", state, "-n", "1"}), 0, {});  // a refused :save left the file
}

TEST_F(GenerateCliTest, CtrlCStopsTheAnswerAndNotTheProgram) {
  const std::string prefix = folder_ / "talk";
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  ::fcntl(ends[1], F_SETFD, FD_CLOEXEC);
  const pid_t child = Start(Generate({"-i", "-n", "100000000"}), prefix, false, ends[0]);
  ::close(ends[0]);
  const auto wait_for_output = [&](uintmax_t size) {
    for (int i = 0; i < 60000 && fs::file_size(prefix + ".out") <= size; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return fs::file_size(prefix + ".out");
  };
  uintmax_t size = 0;
  for (int turn = 0; turn < 3; ++turn) {  // the second and the third Ctrl-C do not end it either
    ASSERT_EQ(::write(ends[1], "go\n", 3), 3);
    wait_for_output(size + 20);
    ASSERT_EQ(::kill(child, SIGINT), 0);
    std::this_thread::sleep_for(
        std::chrono::milliseconds(200));  // the answer's last tokens and its line end
    size = fs::file_size(prefix + ".out");
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT_EQ(fs::file_size(prefix + ".out"), size) << "the answer continues after Ctrl-C";
  }
  ASSERT_EQ(::write(ends[1], ":quit\n", 6), 6);
  const Outcome o = Wait(child, prefix);
  ::close(ends[1]);
  EXPECT_EQ(o.code, 0) << o.err;

  // SIGTERM does end it.
  ASSERT_EQ(::pipe(ends), 0);
  ::fcntl(ends[1], F_SETFD, FD_CLOEXEC);
  const pid_t other = Start(Generate({"-i", "-n", "100000000"}), prefix, false, ends[0]);
  ::close(ends[0]);
  ASSERT_EQ(::write(ends[1], "go\n", 3), 3);
  wait_for_output(20);
  ::kill(other, SIGTERM);
  EXPECT_EQ(Wait(other, prefix).code, 128 + SIGTERM);
  ::close(ends[1]);
}

TEST_F(GenerateCliTest, AnInterruptedTextIsKept) {
  const std::string state = folder_ / "half.state", prefix = folder_ / "half";
  const pid_t child =
      Start(Generate({"--prompt", "line", "-n", "100000000", "--save-state", state}), prefix);
  for (int i = 0;
       i < 60000 && !(fs::exists(prefix + ".out") && fs::file_size(prefix + ".out") > 50); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ::kill(child, SIGINT);
  const Outcome o = Wait(child, prefix);
  EXPECT_EQ(o.code, 130) << o.err;
  EXPECT_EQ(Run(Generate({"--load-state", state, "-n", "5"})).code, 0);
}

}  // namespace
}  // namespace cistern
