#pragma once
// Whether this process got the processor time that it asked for.
#include <cstdint>

namespace cistern {

// Time since it was made that the threads of this process ran, and that they were ready and waited
// for a core which somebody else had (the kernel's schedstat).
class CpuShare {
 public:
  CpuShare();
  // ran / (ran + waited), 0 to 1; 1 where the kernel does not tell. Threads that have ended in the
  // meantime are not counted.
  double Value() const;

 private:
  int64_t ran_, waited_;
};

// Below this share, a speed that was measured says more about the machine's load than about us.
inline constexpr double kBusyShare = 0.8;

}  // namespace cistern
