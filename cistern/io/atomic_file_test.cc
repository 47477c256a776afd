#include "cistern/io/atomic_file.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <filesystem>

#include "cistern/base/hash.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

namespace fs = std::filesystem;

TEST(AtomicFile, WritesAndReplaces) {
  TestFolder folder;
  const std::string path = folder / "a.txt";
  WriteFileAtomically(path, "one");
  EXPECT_EQ(ReadFile(path), "one");
  std::string big(3 << 20, 'x');
  big[12345] = '\0';
  AtomicFile file(path);
  file.Write(big);
  file.Write("tail");
  EXPECT_EQ(ReadFile(path), "one");
  file.Commit();
  EXPECT_EQ(ReadFile(path), big + "tail");
  EXPECT_EQ(folder.Count(), 1);
}

TEST(AtomicFile, OverwritesABeginning) {
  TestFolder folder;
  AtomicFile file(folder / "a");
  file.Write("head, and more");
  file.Overwrite(0, "HEAD", 4);
  file.Write("!");
  file.Commit();
  EXPECT_EQ(ReadFile(folder / "a"), "HEAD, and more!");
  EXPECT_EQ(HashFile(folder / "a"), XxHash64("HEAD, and more!"));
  EXPECT_THROW(HashFile(folder / "b"), Error);
}

TEST(AtomicFile, UncommittedLeavesNothing) {
  TestFolder folder;
  WriteFileAtomically(folder / "a", "old");
  {
    AtomicFile file(folder / "a");
    file.Write("new");
    EXPECT_EQ(folder.Count(), 2);
  }
  EXPECT_EQ(ReadFile(folder / "a"), "old");
  EXPECT_EQ(folder.Count(), 1);
}

TEST(AtomicFile, RefusedWritesKeepTheOldFile) {
  TestFolder folder;
  const std::string path = folder / "a";
  WriteFileAtomically(path, "old");
  ::signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small = {1000, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const std::string message =
      ErrorMessage([&] { WriteFileAtomically(path, std::string(5000, 'x')); });
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_EQ(message, "cannot write " + path + ": File too large");
  EXPECT_EQ(ReadFile(path), "old");
  EXPECT_EQ(folder.Count(), 1);
}

TEST(AtomicFile, ErrorsNameThePathAndTheReason) {
  TestFolder folder;
  EXPECT_EQ(ErrorMessage([&] { WriteFileAtomically("/dev/full", "x"); }),
            "cannot write /dev/full: No space left on device");
  EXPECT_EQ(ErrorMessage([&] { WriteFileAtomically(folder / "no/a", "x"); }),
            "cannot write " + (folder / "no/a") + ": No such file or directory");
  EXPECT_EQ(ErrorMessage([&] { WriteFileAtomically(folder.path(), "x"); }),
            "cannot write " + folder.path() + ": Is a directory");
  EXPECT_EQ(ErrorMessage([&] { ReadFile(folder / "b"); }),
            "cannot read " + (folder / "b") + ": No such file or directory");
  EXPECT_EQ(ErrorMessage([&] { ReadFile(folder.path()); }),
            "cannot read " + folder.path() + ": Is a directory");
}

TEST(AtomicFile, LinksAndDevices) {
  TestFolder folder;
  WriteFileAtomically(folder / "real", "1");
  fs::create_symlink("real", folder / "link");
  WriteFileAtomically(folder / "link", "2");
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_EQ(ReadFile(folder / "real"), "2");
  WriteFileAtomically("/dev/null", "gone");
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  EXPECT_EQ(ReadFile("/dev/null"), "");
  EXPECT_FALSE(ReadFile("/proc/self/status").empty());  // a file that states no size
}

TEST(AtomicFile, KeepsPermissions) {
  TestFolder folder;
  WriteFileAtomically(folder / "a", "1");
  fs::permissions(folder / "a", fs::perms::owner_all);
  WriteFileAtomically(folder / "a", "2");
  EXPECT_EQ(fs::status(folder / "a").permissions(), fs::perms::owner_all);
}

TEST(EnsureDirectory, CreatesParents) {
  TestFolder folder;
  EnsureDirectory(folder / "a/b/c");
  EnsureDirectory(folder / "a/b/c");
  EXPECT_TRUE(fs::is_directory(folder / "a/b/c"));
  WriteFileAtomically(folder / "f", "");
  EXPECT_NE(ErrorMessage([&] { EnsureDirectory(folder / "f/g"); }).find("cannot create directory"),
            std::string::npos);
  EXPECT_NE(ErrorMessage([&] { EnsureDirectory(folder / "f"); }).find("Not a directory"),
            std::string::npos);
}

TEST(ScratchFolder, SaysWhichFolderIsMissing) {
  const TestFolder folder;
  const char* const before = std::getenv("TMPDIR");
  const std::string kept = before ? before : "";
  ::setenv("TMPDIR", (folder / "none").c_str(), 1);
  const std::string message = ErrorMessage([] { ScratchFolder(); });
  before ? ::setenv("TMPDIR", kept.c_str(), 1) : ::unsetenv("TMPDIR");
  EXPECT_NE(message.find("TMPDIR=" + (folder / "none")), std::string::npos) << message;
}

}  // namespace
}  // namespace cistern
