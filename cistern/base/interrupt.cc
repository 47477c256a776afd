#include "cistern/base/interrupt.h"

#include <csignal>

namespace cistern {

std::atomic<bool>& Interrupted() {
  static std::atomic<bool> flag{false};
  return flag;
}

void InstallInterruptHandler() {
  Interrupted();  // made before a signal can arrive
  struct sigaction action = {};
  action.sa_handler = [](int) { Interrupted() = true; };
  action.sa_flags = int(SA_RESETHAND);  // the second has the default effect
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGUSR1, &action, nullptr);  // by RunProcess
  // A terminal that closes; what nohup started goes on as it asked to.
  struct sigaction before = {};
  sigaction(SIGHUP, nullptr, &before);
  if (before.sa_handler != SIG_IGN) sigaction(SIGHUP, &action, nullptr);
}

}  // namespace cistern
