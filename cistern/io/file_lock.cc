#include "cistern/io/file_lock.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "cistern/base/error.h"
#include "cistern/base/interrupt.h"
#include "cistern/base/terminal.h"

namespace cistern {
namespace {

constexpr char kTemporary[] = ".tmp-";

// The process number in a file, for messages.
std::string OwnerIn(int fd) {
  char text[32] = {};
  const ssize_t n = ::pread(fd, text, sizeof text - 1, 0);
  const std::string digits(text, n > 0 ? size_t(n) : 0);
  return digits.substr(0, digits.find_first_not_of("0123456789"));
}

// A lock that was removed between our opening and locking it locks nothing: the path has another
// file now, or none.
bool StillThere(int fd, const std::string& path) {
  struct stat ours, there;
  return ::fstat(fd, &ours) == 0 && ::stat(path.c_str(), &there) == 0 &&
         ours.st_ino == there.st_ino && ours.st_dev == there.st_dev;
}

// Of "NAME.tmp-<pid>-<n>"; 0 for any other name.
pid_t ProcessOf(const std::string& name) {
  const size_t at = name.rfind(kTemporary);
  if (at == name.npos || at == 0) return 0;
  const std::string rest = name.substr(at + sizeof kTemporary - 1);
  const size_t dash = rest.find('-');
  if (dash == rest.npos || dash == 0 || dash > 9 || dash + 1 == rest.size()) return 0;
  const std::string pid = rest.substr(0, dash), number = rest.substr(dash + 1);
  if ((pid + number).find_first_not_of("0123456789") != rest.npos) return 0;
  return pid_t(std::stoi(pid));
}

bool Dead(pid_t pid) { return ::kill(pid, 0) != 0 && errno == ESRCH; }

// Seconds since a process began; a negative number where the system does not say.
double AgeOf(pid_t pid) {
  std::ifstream file(StrCat("/proc/", pid, "/stat"));
  std::string text;
  std::getline(file, text, '\0');
  std::istringstream fields(text.substr(text.rfind(')') + 1));  // after the name: proc(5), from 3
  for (int field = 3; field < 22; ++field) fields >> text;
  double ticks = 0;
  timespec now{};
  if (!(fields >> ticks) || ::clock_gettime(CLOCK_BOOTTIME, &now) != 0) return -1;
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec) - ticks / double(::sysconf(_SC_CLK_TCK));
}

// Whether a file was there before the process of this number began, so that another one with its
// number wrote it: in a container every run may be process 1.
bool IsOlder(const std::string& path, pid_t pid) {
  struct stat info;
  if (::lstat(path.c_str(), &info) != 0) return false;
  constexpr double kClocks = 2;  // seconds by which they may differ
  const double age = AgeOf(pid);
  return age >= 0 && double(::time(nullptr) - info.st_mtime) > age + kClocks;
}

}  // namespace

FileLock::FileLock(const std::string& path, const std::string& what, Wait wait)
    : path_(path), what_(what) {
  for (bool noted = false;;) {
    fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd_ < 0) Fail("cannot write ", path, ": ", std::strerror(errno));
    // A file system without locks (some network ones): better none than no work.
    if (::flock(fd_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      const std::string owner = OwnerIn(fd_);
      ::close(fd_);
      fd_ = -1;
      const std::string text =
          StrCat(what, " is in use by ", owner.empty() ? "another process" : "process " + owner);
      if (wait == Wait::kNo) Fail(text, " (", path, ")");
      if (!noted) Note(text + "; waiting for it");
      noted = true;
      CISTERN_CHECK(!Interrupted(), text, " (", path, "); interrupted while waiting for it");
      ::usleep(50'000);
      continue;
    }
    if (StillThere(fd_, path)) break;
    ::close(fd_);
  }
  const std::string pid = StrCat(::getpid(), "\n");
  if (::ftruncate(fd_, 0) != 0 || ::pwrite(fd_, pid.data(), pid.size(), 0) != ssize_t(pid.size())) {
    const int error = errno;
    ::unlink(path.c_str());
    ::close(fd_);
    Fail("cannot write ", path, ": ", std::strerror(error));
  }
}

void FileLock::Check() const {
  CISTERN_CHECK(StillThere(fd_, path_), what_,
                " has been removed or replaced while it was in use (", path_, " is gone)");
}

FileLock::~FileLock() {
  if (StillThere(fd_, path_)) ::unlink(path_.c_str());
  ::close(fd_);
}

void RemoveLeftovers(const std::string& folder, const std::string& name) {
  namespace fs = std::filesystem;
  std::error_code error;
  fs::directory_iterator entry(folder, error), end;
  for (; !error && entry != end; entry.increment(error)) {
    const std::string found = entry->path().filename().string();
    if (!name.empty() && !found.starts_with(name + kTemporary)) continue;
    const pid_t pid = ProcessOf(found);
    if (pid == 0 || (!Dead(pid) && !IsOlder(entry->path(), pid))) continue;
    std::error_code ignored;
    fs::remove_all(entry->path(), ignored);
  }
}

std::string TemporaryName(const std::string& path) {
  static std::atomic<int> count{0};
  return StrCat(path, kTemporary, ::getpid(), "-", count++);
}

}  // namespace cistern
