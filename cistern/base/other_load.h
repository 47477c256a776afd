#pragma once
// What the rest of the machine does while this process measures.
#include <cstdint>

namespace cistern {

// Since it was made: processor time of all processes but this one (the system's /proc/stat less
// getrusage).
class OtherLoad {
 public:
  OtherLoad();
  // Cores that others kept busy on average, 0 where the system does not say. Exact to the system's
  // tick of 10 ms: 0 before two ticks have passed.
  double Cores() const;

 private:
  double began_, all_, own_;  // seconds
};

// Above this, others take a part of the caches, the memory and the clock rate that shows.
inline constexpr double kBusyCores = 0.2;

}  // namespace cistern
