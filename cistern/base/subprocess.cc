#include "cistern/base/subprocess.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string_view>

#include "cistern/base/error.h"
#include "cistern/base/interrupt.h"

namespace cistern {

namespace {

// The running program, also where its file has been replaced or removed since it was started.
constexpr char kSelf[] = "/proc/self/exe";

}  // namespace

std::string ThisProgram() {
  constexpr std::string_view kDeleted = " (deleted)";  // the kernel's word for a file that is gone
  std::string path = std::filesystem::read_symlink(kSelf).string();
  std::error_code ignored;
  if (path.ends_with(kDeleted) && !std::filesystem::exists(path, ignored))
    path.resize(path.size() - kDeleted.size());
  return path;
}

std::string ShellWord(const std::string& word) {
  constexpr std::string_view kPlain = "_-./=,:+@%";
  bool plain = !word.empty();
  for (const char c : word)
    plain = plain && (std::isalnum(static_cast<unsigned char>(c)) || kPlain.find(c) != kPlain.npos);
  if (plain) return word;
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

ProcessResult RunProcess(const std::string& program, const std::vector<std::string>& arguments,
                         const std::string& errors) {
  constexpr int kNotStarted = 127;
  // Not by its path, where another program may lie by the time of the call.
  const std::string file = program == ThisProgram() ? kSelf : program;
  std::vector<std::string> words = {program};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  argv.reserve(words.size() + 1);
  for (std::string& w : words) argv.push_back(w.data());
  argv.push_back(nullptr);
  int log = -1;
  if (!errors.empty()) {
    log = open(errors.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    CISTERN_CHECK(log >= 0, "cannot write ", errors, ": ", std::strerror(errno));
  }
  int fds[2];
  CISTERN_CHECK(pipe(fds) == 0, "cannot make a pipe");
  const pid_t parent = getpid(), child = fork();
  CISTERN_CHECK(child >= 0, "cannot start a process");
  if (child == 0) {
    // SIGTERM when the thread that started it ends; it may have ended before this was asked for.
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(128 + SIGTERM);
    dup2(fds[1], STDOUT_FILENO);
    if (log >= 0) dup2(log, STDERR_FILENO);
    close(fds[0]);
    close(fds[1]);
    execv(file.c_str(), argv.data());
    _exit(kNotStarted);
  }
  close(fds[1]);
  if (log >= 0) close(log);
  ProcessResult result;
  char buffer[4096];
  bool told = false;
  for (;;) {
    // A signal to this process alone reaches the child, too: by SIGUSR1, since SIGHUP is ignored
    // below nohup, and a second SIGINT long after Ctrl-C would end the child before it has saved.
    if (Interrupted() && !told) {
      kill(child, SIGUSR1);
      told = true;
    }
    pollfd ready = {fds[0], POLLIN, 0};
    constexpr int kMilliseconds = 200;
    if (poll(&ready, 1, kMilliseconds) <= 0) continue;
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
