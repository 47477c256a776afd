#pragma once
// For tests of the program from outside: what it prints, what it leaves on disk, and its exit
// codes. Every run is a process of its own in a folder of its own; $CISTERN_BINARY names the
// program.
#include <fcntl.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "cistern/io/atomic_file.h"
#include "cistern/io/json_text.h"
#include "cistern/io/test_folder.h"

namespace cistern {

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

struct Outcome {
  int code = -1;  // exit code, or 128 + signal
  std::string out, err;
};

inline std::ostream& operator<<(std::ostream& to, const Outcome& o) {
  return to << "exit code " << o.code << "\n" << o.out << o.err;
}

inline Words operator+(Words a, const Words& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

inline constexpr unsigned kNobody = 65534;

class CliTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    shared_ = new TestFolder;
    fs::permissions(shared_->path(), fs::perms(0755));
    WriteFileAtomically(*shared_ / "text.txt", Text());
    const Outcome o = Run(Train(*shared_ / "text.txt", *shared_ / "model"));
    ASSERT_EQ(o.code, 0) << o;
  }
  static void TearDownTestSuite() {
    delete shared_;
    shared_ = nullptr;
  }
  void SetUp() override { fs::permissions(folder_.path(), fs::perms(0777)); }

  static std::string Text() {
    std::string text;
    for (int i = 0; i < 400; ++i)
      text +=
          StrCat("line ", i * i % 97, " of the book tells of ", i * 7 % 31, " ships and a sea\n");
    return text;
  }

  // Arguments of a tiny training run.
  static Words Train(const std::string& text, const std::string& out, const Words& more = {}) {
    Words words = {"train", "--text", text, "--out", out, "--threads", "1", "--steps", "3"};
    for (const char* s : {"model.dim=16", "model.heads=2", "model.layers=1", "task.length=16",
                          "task.vocab_size=300", "train.batch=2"}) {
      words = words + Words{"--set", s};
    }
    return words + more;
  }

  // Starts the program with its output in PREFIX.out and PREFIX.err; as an ordinary user where
  // asked, and with that standard input.
  static pid_t Start(const Words& arguments, const std::string& prefix, bool ordinary = false,
                     int input = -1) {
    Words words = Words{"cistern"} + arguments;
    std::vector<char*> argv;
    for (std::string& w : words) argv.push_back(w.data());
    argv.push_back(nullptr);
    const std::string cache = shared_->path() + (ordinary ? "/cache-nobody" : "/cache");
    fs::create_directories(cache);
    if (ordinary) fs::permissions(cache, fs::perms(0777));
    const int out = ::open((prefix + ".out").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    const int err = ::open((prefix + ".err").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    const pid_t child = ::fork();
    if (child == 0) {
      ::setenv("XDG_CACHE_HOME", cache.c_str(), 1);
      if (input >= 0) ::dup2(input, STDIN_FILENO);
      ::dup2(out, STDOUT_FILENO);
      ::dup2(err, STDERR_FILENO);
      if (ordinary && ::geteuid() == 0 &&
          (::setgroups(0, nullptr) != 0 || ::setgid(kNobody) != 0 || ::setuid(kNobody) != 0))
        ::_exit(126);
      ::execv(std::getenv("CISTERN_BINARY"), argv.data());
      ::_exit(127);
    }
    ::close(out);
    ::close(err);
    return child;
  }

  static Outcome Wait(pid_t child, const std::string& prefix) {
    int status = 0;
    ::waitpid(child, &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
            ReadFile(prefix + ".out"), ReadFile(prefix + ".err")};
  }

  static Outcome Run(const Words& arguments, bool ordinary = false) {
    const TestFolder output;
    const std::string prefix = output / "run";
    return Wait(Start(arguments, prefix, ordinary), prefix);
  }

  // With `text` as its standard input.
  static Outcome RunWith(const std::string& text, const Words& arguments) {
    const TestFolder output;
    const std::string prefix = output / "run";
    WriteFileAtomically(prefix + ".in", text);
    const int input = ::open((prefix + ".in").c_str(), O_RDONLY | O_CLOEXEC);
    const pid_t child = Start(arguments, prefix, false, input);
    ::close(input);
    return Wait(child, prefix);
  }

  // Can the ordinary user start the program at all? Build folders below a private home cannot be
  // entered.
  static bool OrdinaryUserWorks() { return Run({"--version"}, true).code == 0; }

  static void Expect(const Words& arguments, int code, const Words& phrases) {
    const Outcome o = Run(arguments);
    EXPECT_EQ(o.code, code) << ::testing::PrintToString(arguments) << "\n" << o;
    for (const std::string& phrase : phrases)
      EXPECT_NE(o.err.find(phrase), std::string::npos) << "no '" << phrase << "' in\n" << o;
    EXPECT_EQ(o.err.find("terminate called"), std::string::npos) << o;
  }

  // A copy of the trained model's run folder, to be broken.
  std::string Copy(const std::string& name) const {
    const std::string to = folder_ / name;
    fs::copy(*shared_ / "model", to, fs::copy_options::recursive);
    return to;
  }

  static std::map<std::string, std::string> Contents(const std::string& folder) {
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::recursive_directory_iterator(folder)) {
      if (entry.is_regular_file()) files[entry.path().string()] = ReadFile(entry.path().string());
    }
    return files;
  }

  static void Halve(const std::string& path) { fs::resize_file(path, fs::file_size(path) / 2); }
  static std::string TrainedText() { return *shared_ / "text.txt"; }
  static std::string Trained() { return *shared_ / "model"; }

  inline static TestFolder* shared_ = nullptr;
  TestFolder folder_;
};

}  // namespace cistern
