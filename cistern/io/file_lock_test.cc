#include "cistern/io/file_lock.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>

#include "cistern/io/atomic_file.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

// The exit code of f in a process of its own.
template <class F>
int InChild(F&& f) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(f());
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST(FileLock, OneOwnerAtATime) {
  const TestFolder folder;
  const std::string path = folder / "lock";
  {
    const FileLock lock(path, "the run");
    EXPECT_EQ(ReadFile(path), StrCat(::getpid(), "\n"));
    const std::string owner = StrCat("the run is in use by process ", ::getpid(), " (", path, ")");
    EXPECT_EQ(InChild([&] {
                return ErrorMessage([&] { FileLock other(path, "the run"); }) == owner ? 0 : 1;
              }),
              0);
  }
  EXPECT_EQ(folder.Count(), 0);
  const FileLock again(path, "the run");
}

TEST(FileLock, OfAKilledProcessIsFree) {
  const TestFolder folder;
  const std::string path = folder / "lock";
  EXPECT_EQ(InChild([&] {
              const FileLock lock(path, "the run");
              return ::kill(::getpid(), SIGKILL);
            }),
            128 + SIGKILL);
  EXPECT_TRUE(std::filesystem::exists(path));
  { const FileLock lock(path, "the run"); }
  EXPECT_EQ(folder.Count(), 0);
}

// Four processes add to a number in a file; each removes the lock's file when it is done.
TEST(FileLock, WaitingProcessesTakeTurns) {
  const TestFolder folder;
  WriteFileAtomically(folder / "count", "0");
  std::vector<pid_t> children;
  for (int i = 0; i < 4; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      for (int n = 0; n < 5; ++n) {
        const FileLock lock(folder / "lock", "the count", FileLock::Wait::kYes);
        const int count = std::stoi(ReadFile(folder / "count"));
        WriteFileAtomically(folder / "count", std::to_string(count + 1));
      }
      ::_exit(0);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) ::waitpid(child, nullptr, 0);
  EXPECT_EQ(ReadFile(folder / "count"), "20");
}

TEST(FileLock, AFolderThatVanishesIsSeen) {
  const TestFolder folder;
  EnsureDirectory(folder / "run");
  const FileLock lock(folder / "run/lock", "the run");
  lock.Check();
  std::filesystem::remove_all(folder / "run");
  EnsureDirectory(folder / "run");
  EXPECT_NE(ErrorMessage([&] { lock.Check(); }).find("the run has been removed or replaced"),
            std::string::npos);
}

TEST(FileLock, NeedsAFolder) {
  const TestFolder folder;
  EXPECT_EQ(ErrorMessage([&] { FileLock lock(folder / "none/lock", "x"); }),
            "cannot write " + (folder / "none/lock") + ": No such file or directory");
}

TEST(RemoveLeftovers, OfDeadProcessesAlone) {
  const TestFolder folder;
  const pid_t dead = ::fork();
  if (dead == 0) ::_exit(0);
  ::waitpid(dead, nullptr, 0);
  const std::string own = TemporaryName(folder / "a"),
                    other = StrCat(folder / "a.tmp-", ::getppid(), "-0");
  for (const std::string& name :
       {own, other, folder / "a.tmp-x-1", folder / "a", folder / "a.tmp-1",
        StrCat(folder / "m.safetensors.tmp-", dead, "-3")})
    WriteFileAtomically(name, "x");
  EnsureDirectory(StrCat(folder / "listops.tmp-", dead, "-0", "/inside"));
  RemoveLeftovers(folder.path());
  EXPECT_EQ(folder.Count(), 5);
  // Of an earlier process with a number that is in use again, as in a container.
  for (const std::string& name : {own, other}) {
    std::filesystem::last_write_time(
        name, std::filesystem::file_time_type::clock::now() - std::chrono::hours(10'000));
  }
  RemoveLeftovers(folder.path());
  EXPECT_EQ(folder.Count(), 3);
  EXPECT_NE(TemporaryName("a"), TemporaryName("a"));
}

}  // namespace
}  // namespace cistern
