#include "cistern/base/cpu_share.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <thread>

namespace cistern {
namespace {

void Spin(double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::atomic<int> x = 0;
  while (std::chrono::steady_clock::now() < end) ++x;
}

// Two threads that want one core get half of it each, whatever else the machine does.
TEST(CpuShare, TwoThreadsOnOneCoreGetAboutHalf) {
  if (int64_t ran = 0; !(std::ifstream("/proc/self/schedstat") >> ran))
    GTEST_SKIP() << "this kernel has no schedstat";
  cpu_set_t all, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof all, &all), 0);
  CPU_ZERO(&one);
  int core = 0;
  while (!CPU_ISSET(core, &all)) ++core;
  CPU_SET(core, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  std::atomic<bool> stop = false;
  std::thread other([&] {
    while (!stop) Spin(0.01);
  });
  const CpuShare share;
  Spin(0.4);
  const double value = share.Value();
  stop = true;
  other.join();
  sched_setaffinity(0, sizeof all, &all);
  EXPECT_LT(value, kBusyShare);
  EXPECT_GT(value, 0.02);
}

}  // namespace
}  // namespace cistern
