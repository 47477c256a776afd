#include "cistern/base/other_load.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <string>

namespace cistern {
namespace {

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds that all cores together were busy since the system started; steal is another machine's.
double BusySeconds() {
  std::ifstream file("/proc/stat");
  std::string word;
  double user = 0, nice = 0, system = 0, idle = 0, wait = 0, irq = 0, soft = 0, steal = 0;
  if (!(file >> word >> user >> nice >> system >> idle >> wait >> irq >> soft >> steal)) return 0;
  return (user + nice + system + irq + soft + steal) / double(sysconf(_SC_CLK_TCK));
}

double OwnSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) { return double(t.tv_sec) + 1e-6 * double(t.tv_usec); };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

}  // namespace

OtherLoad::OtherLoad() : began_(Now()), all_(BusySeconds()), own_(OwnSeconds()) {}

double OtherLoad::Cores() const {
  const double passed = Now() - began_;
  if (passed < 0.02) return 0;
  return std::max(0.0, (BusySeconds() - all_ - (OwnSeconds() - own_)) / passed);
}

}  // namespace cistern
