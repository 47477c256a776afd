#include "cistern/base/restart.h"

#include <unistd.h>

#include <cstdlib>
#include <string>

namespace cistern {
namespace {

// docs/notes/training-speed.md: fewer cost speed on a quiet machine, more of it on Intel's
// processors; more of them cost speed beside a busy process.
const char* WaitingTurns() {
#if defined(__x86_64__)
  if (__builtin_cpu_is("intel") != 0) return "5000";
#endif
  return "2000";
}

}  // namespace

void RestartForLongRuns(char** argv) {
  bool changed = false;
  const auto set = [&](const char* name, const std::string& value) {
    changed = setenv(name, value.c_str(), 1) == 0 || changed;
  };
  if (!std::getenv("GOMP_SPINCOUNT") && !std::getenv("OMP_WAIT_POLICY"))
    set("GOMP_SPINCOUNT", WaitingTurns());
  const char* const given = std::getenv("GLIBC_TUNABLES");
  const std::string tunables = given ? given : "";
  if (tunables.find("glibc.malloc.hugetlb") == std::string::npos)
    set("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1" + (tunables.empty() ? "" : ":" + tunables));
  if (!changed) return;
  execv("/proc/self/exe", argv);  // not by its path, where another program may lie by now
}

}  // namespace cistern
