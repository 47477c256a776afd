#include "cistern/base/cpu_share.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

namespace cistern {
namespace {

// Nanoseconds of all threads of this process.
void ReadSchedstat(int64_t* ran, int64_t* waited) {
  *ran = *waited = 0;
  std::error_code error;
  std::filesystem::directory_iterator it("/proc/self/task", error), end;
  for (; !error && it != end; it.increment(error)) {
    std::ifstream file(it->path() / "schedstat");
    int64_t r = 0, w = 0;
    if (file >> r >> w) *ran += r, *waited += w;
  }
}

}  // namespace

CpuShare::CpuShare() { ReadSchedstat(&ran_, &waited_); }

double CpuShare::Value() const {
  int64_t ran = 0, waited = 0;
  ReadSchedstat(&ran, &waited);
  const double r = double(std::max<int64_t>(0, ran - ran_)),
               w = double(std::max<int64_t>(0, waited - waited_));
  return r + w > 0 ? r / (r + w) : 1.0;
}

}  // namespace cistern
