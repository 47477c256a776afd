#include <csignal>

#include "cistern/train/trainer.h"

namespace cistern {

std::atomic<bool>& Interrupted() {
  static std::atomic<bool> flag{false};
  return flag;
}

void InstallInterruptHandler() {
  Interrupted();  // made before a signal can arrive
  struct sigaction action = {};
  action.sa_handler = [](int) { Interrupted() = true; };
  action.sa_flags =
      int(SA_RESETHAND);  // the second Ctrl-C has the default effect: it ends the process
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

}  // namespace cistern
