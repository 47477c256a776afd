#include "cistern/base/memory.h"

#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <limits>
#include <sstream>

namespace cistern {
namespace {

constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

// A "Name:  123 kB" line of a /proc file, in bytes; 0 when it is not there.
int64_t ProcBytes(const char* path, const std::string& name) {
  std::ifstream file(path);
  std::string word;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    int64_t kilobytes = 0;
    if (words >> word >> kilobytes && word == name + ":") return kilobytes * 1024;
  }
  return 0;
}

// The number that a file holds; `other` when it holds a word ("max") or is not there.
int64_t NumberIn(const std::string& path, int64_t other) {
  std::ifstream file(path);
  int64_t value = 0;
  return file >> value && value >= 0 ? value : other;
}

// A "name 123" line of memory.stat.
int64_t StatBytes(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  std::string word;
  int64_t value = 0;
  while (file >> word >> value) {
    if (word == name) return value;
  }
  return 0;
}

// What a group may still take: its limit without what it uses, where pages of files that the system
// would drop first do not count.
int64_t GroupLeft(const std::string& folder, const char* limit_file, const char* used_file,
                  const char* inactive) {
  const int64_t limit = NumberIn(folder + limit_file, kNone);
  if (limit >= int64_t{1} << 60) return kNone;  // v1 says "none" with a huge number
  const int64_t used =
      NumberIn(folder + used_file, 0) - StatBytes(folder + "/memory.stat", inactive);
  return std::max<int64_t>(0, limit - std::max<int64_t>(0, used));
}

// The group and all above it. In a container /sys/fs/cgroup is the container's own group, whatever
// /proc says, so the mount point is always asked.
int64_t LeastOfGroups(const std::string& mount, std::string group, bool v2) {
  int64_t least = kNone;
  for (;;) {
    const std::string folder = mount + (group == "/" ? "" : group);
    least =
        std::min(least, v2 ? GroupLeft(folder, "/memory.max", "/memory.current", "inactive_file")
                           : GroupLeft(folder, "/memory.limit_in_bytes", "/memory.usage_in_bytes",
                                       "total_inactive_file"));
    if (group.empty() || group == "/") return least;
    group = group.substr(0, group.rfind('/'));
  }
}

}  // namespace

int64_t ResidentBytes() { return ProcBytes("/proc/self/status", "VmRSS"); }
int64_t PeakBytes() { return ProcBytes("/proc/self/status", "VmHWM"); }
int64_t PageFaults() {
  rusage usage{};
  return getrusage(RUSAGE_SELF, &usage) == 0 ? usage.ru_minflt : 0;
}
void ResetPeakMemory() { std::ofstream("/proc/self/clear_refs") << "5"; }

int64_t CgroupAvailableBytes(const std::string& root, const std::string& self) {
  int64_t least = kNone;
  std::istringstream lines(self);  // "0::/group" of v2, "4:memory:/group" of v1
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == line.npos || second == line.npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string group = line.substr(second + 1);
    if (controllers == ",,") {
      least = std::min(least, LeastOfGroups(root + "/sys/fs/cgroup", group, true));
    } else if (controllers.find(",memory,") != controllers.npos) {
      least = std::min(least, LeastOfGroups(root + "/sys/fs/cgroup/memory", group, false));
    }
  }
  return least;
}

int64_t SharedAvailableBytes() {
  const int64_t machine = ProcBytes("/proc/meminfo", "MemAvailable");
  std::ifstream groups("/proc/self/cgroup");
  const std::string self{std::istreambuf_iterator<char>(groups), {}};
  return std::min(machine > 0 ? machine : kNone, CgroupAvailableBytes("", self));
}

int64_t OwnAvailableBytes() {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kNone;
  const int64_t used = ProcBytes("/proc/self/status", "VmSize");
  return std::max<int64_t>(1, int64_t(limit.rlim_cur) - used);
}

int64_t AvailableBytes() {
  const int64_t least = std::min(SharedAvailableBytes(), OwnAvailableBytes());
  return least == kNone ? 0 : least;
}

}  // namespace cistern
