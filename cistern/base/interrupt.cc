#include "cistern/base/interrupt.h"

#include <csignal>
#include <cstdint>
#include <ctime>

namespace cistern {
namespace {

// When each signal came first, in milliseconds; 0: not yet.
std::atomic<int64_t> first_at[NSIG];

// One signal may come twice: timeout(1) sends it to its child and then to the group, RunProcess
// passes on what the group has as well.
void Handle(int signal) {
  constexpr int64_t kSameSignal = 1000;
  Interrupted() = true;
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t at = int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000;
  int64_t first = 0;
  if (first_at[signal].compare_exchange_strong(first, at) || at - first <= kSameSignal) return;
  std::signal(signal, SIG_DFL);
  std::raise(signal);  // arrives when this returns
}

}  // namespace

std::atomic<bool>& Interrupted() {
  static std::atomic<bool> flag{false};
  return flag;
}

void InstallInterruptHandler() {
  Interrupted();  // made before a signal can arrive
  for (std::atomic<int64_t>& at : first_at) at = 0;
  struct sigaction action = {};
  action.sa_handler = Handle;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGUSR1, &action, nullptr);  // by RunProcess
  // A terminal that closes; what nohup started goes on as it asked to.
  struct sigaction before = {};
  sigaction(SIGHUP, nullptr, &before);
  if (before.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);
}

}  // namespace cistern
