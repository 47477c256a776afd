#include "cistern/base/other_load.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

namespace cistern {
namespace {

void Work(double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < end) {
  }
}

// Another process that works is seen; how much of a core it gets is the system's choice.
TEST(OtherLoad, SeesAnotherProcess) {
  const pid_t child = ::fork();
  if (child == 0) {
    Work(30);
    ::_exit(0);
  }
  const OtherLoad load;
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  const double cores = load.Cores();
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_GT(cores, 0.1);
  EXPECT_LT(cores, 4096);
}

TEST(OtherLoad, SaysNothingOfTooShortATime) { EXPECT_EQ(OtherLoad().Cores(), 0); }

}  // namespace
}  // namespace cistern
