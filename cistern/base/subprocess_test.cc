#include "cistern/base/subprocess.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <thread>

#include "cistern/base/error.h"
#include "cistern/base/interrupt.h"

namespace cistern {
namespace {

TEST(Subprocess, OutputAndExitCode) {
  const ProcessResult r = RunProcess("/bin/sh", {"-c", "echo one; echo two; exit 3"});
  EXPECT_EQ(r.code, 3);
  EXPECT_EQ(r.output, "one\ntwo\n");
  EXPECT_EQ(RunProcess("/bin/sh", {"-c", "kill -9 $$"}).code, 128 + SIGKILL);
  EXPECT_THROW(RunProcess("/no/such/program", {}), Error);
}

TEST(Subprocess, WordsThatAShellTakes) {
  EXPECT_EQ(ShellWord("runs/a_b-1.toml=x,y:2+z"), "runs/a_b-1.toml=x,y:2+z");
  EXPECT_EQ(ShellWord(""), "''");
  for (const char* word : {"two words", "it's", "a\"$HOME\"", "\u00fc;*", "~/x", "\\n", "#"}) {
    const std::string quoted = ShellWord(word);
    EXPECT_NE(quoted, word);
    EXPECT_EQ(RunProcess("/bin/sh", {"-c", "printf %s " + quoted}).output, word) << quoted;
  }
}

// Below nohup, too, where a child ignores SIGHUP.
TEST(Subprocess, AnInterruptReachesTheChild) {
  const auto before = std::signal(SIGHUP, SIG_IGN);
  std::thread later([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    Interrupted() = true;
  });
  const ProcessResult r =
      RunProcess("/bin/sh", {"-c",
                             "trap 'echo told; exit 5' USR1; i=0; while [ $i -lt 100 ]; do sleep "
                             "0.05; i=$((i + 1)); done"});
  later.join();
  Interrupted() = false;
  std::signal(SIGHUP, before);
  EXPECT_EQ(r.code, 5);
  EXPECT_EQ(r.output, "told\n");
}

// The exit status of a process to which a signal comes twice, so many milliseconds apart.
int StatusAfterTwo(int signal, int milliseconds) {
  const pid_t child = fork();
  if (child == 0) {
    InstallInterruptHandler();
    raise(signal);
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    raise(signal);
    _exit(Interrupted() ? 3 : 4);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST(Interrupt, ASignalThatComesTwiceAtOnceIsOne) {
  EXPECT_EQ(StatusAfterTwo(SIGTERM, 0), 3);
  EXPECT_EQ(StatusAfterTwo(SIGUSR1, 0), 3);
  EXPECT_EQ(StatusAfterTwo(SIGTERM, 1010), 128 + SIGTERM);
}

// The child of a process that is killed ends as well.
TEST(Subprocess, NoOrphans) {
  int fds[2];
  ASSERT_EQ(pipe(fds), 0);
  const pid_t middle = fork();
  ASSERT_GE(middle, 0);
  if (middle == 0) {
    dup2(fds[1], STDERR_FILENO);
    RunProcess("/bin/sh", {"-c", "echo $$ >&2; exec sleep 60"});
    _exit(0);
  }
  close(fds[1]);
  char text[32] = {};
  ASSERT_GT(read(fds[0], text, sizeof text - 1), 0);
  close(fds[0]);
  const pid_t child = std::stoi(text);
  ASSERT_EQ(kill(child, 0), 0);
  kill(middle, SIGKILL);
  waitpid(middle, nullptr, 0);
  // Gone, or a zombie that nobody has waited for yet.
  const auto ended = [child] {
    std::ifstream stat("/proc/" + std::to_string(child) + "/stat");
    std::string pid, name, state;
    return !(stat >> pid >> name >> state) || state == "Z";
  };
  for (int i = 0; i < 500 && !ended(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_TRUE(ended());
}

}  // namespace
}  // namespace cistern
