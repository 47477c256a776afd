#include "cistern/base/subprocess.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "cistern/base/error.h"

namespace cistern {

std::string ThisProgram() { return std::filesystem::read_symlink("/proc/self/exe").string(); }

ProcessResult RunProcess(const std::string& program, const std::vector<std::string>& arguments) {
  constexpr int kNotStarted = 127;
  std::vector<std::string> words = {program};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  argv.reserve(words.size() + 1);
  for (std::string& w : words) argv.push_back(w.data());
  argv.push_back(nullptr);
  int fds[2];
  CISTERN_CHECK(pipe(fds) == 0, "cannot make a pipe");
  const pid_t parent = getpid(), child = fork();
  CISTERN_CHECK(child >= 0, "cannot start a process");
  if (child == 0) {
    // SIGTERM when the thread that started it ends; it may have ended before this was asked for.
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(128 + SIGTERM);
    dup2(fds[1], STDOUT_FILENO);
    close(fds[0]);
    close(fds[1]);
    execv(program.c_str(), argv.data());
    _exit(kNotStarted);
  }
  close(fds[1]);
  ProcessResult result;
  char buffer[4096];
  for (;;) {
    const ssize_t n = read(fds[0], buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    result.output.append(buffer, size_t(n));
  }
  close(fds[0]);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  CISTERN_CHECK(result.code != kNotStarted || !result.output.empty(), "cannot start ", program);
  return result;
}

}  // namespace cistern
