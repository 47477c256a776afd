#include "cistern/base/memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

namespace cistern {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

class CgroupTest : public testing::Test {
 protected:
  void SetUp() override {
    root_ = testing::TempDir() + "cistern_cgroup_" + std::to_string(getpid());
    fs::remove_all(root_);
  }
  void TearDown() override { fs::remove_all(root_); }
  void Put(const std::string& path, const std::string& text) {
    fs::create_directories(fs::path(root_ + "/sys/fs/cgroup/" + path).parent_path());
    std::ofstream(root_ + "/sys/fs/cgroup/" + path) << text;
  }
  std::string root_;
};

TEST_F(CgroupTest, TheSecondVersionAndTheGroupsAbove) {
  EXPECT_EQ(CgroupAvailableBytes(root_, "0::/a/b\n"), kNone);
  Put("a/b/memory.max", "max\n");
  EXPECT_EQ(CgroupAvailableBytes(root_, "0::/a/b\n"), kNone);
  Put("a/memory.max", "1000\n");
  Put("a/memory.current", "700\n");
  EXPECT_EQ(CgroupAvailableBytes(root_, "0::/a/b\n"), 300);
  Put("a/memory.stat", "anon 500\ninactive_file 200\n");
  EXPECT_EQ(CgroupAvailableBytes(root_, "0::/a/b\n"), 500);
  EXPECT_EQ(CgroupAvailableBytes(root_, "0::/other\n"), kNone);
  Put("memory.max", "100\n");  // a container's own group, mounted as the root
  EXPECT_EQ(CgroupAvailableBytes(root_, "0::/other\n"), 100);
  EXPECT_EQ(CgroupAvailableBytes(root_, "0::/\n"), 100);
}

TEST_F(CgroupTest, TheFirstVersion) {
  const std::string self = "11:cpu,cpuacct:/x\n4:memory:/docker/1\n0::/\n";
  Put("memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(CgroupAvailableBytes(root_, self), kNone);
  Put("memory/docker/1/memory.limit_in_bytes", "5000\n");
  Put("memory/docker/1/memory.usage_in_bytes", "4000\n");
  Put("memory/docker/1/memory.stat", "inactive_file 1\ntotal_inactive_file 1500\n");
  EXPECT_EQ(CgroupAvailableBytes(root_, self), 2500);
}

TEST(AvailableBytes, SeesTheLimitOfTheProcess) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the address sanitizer reserves more than any limit";
#endif
  ASSERT_GT(AvailableBytes(), 0);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  rlimit limit = before;
  limit.rlim_cur = rlim_t{1} << 33;
  if (before.rlim_max != RLIM_INFINITY && before.rlim_max < limit.rlim_cur) GTEST_SKIP();
  ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
  const int64_t within = AvailableBytes();
  setrlimit(RLIMIT_AS, &before);
  EXPECT_LT(within, int64_t{1} << 33);
  EXPECT_GT(within, 0);
}

TEST(Memory, OfThisProcess) {
  EXPECT_GT(ResidentBytes(), 1 << 20);
  EXPECT_GE(PeakBytes(), ResidentBytes());
}

}  // namespace
}  // namespace cistern
