#pragma once
// Ctrl-C: the first one sets a flag that long work looks at, the second one ends the process.
#include <atomic>

namespace cistern {

using InterruptFlag = std::atomic<bool>;

inline bool Interrupted(const InterruptFlag* flag) { return flag && flag->load(std::memory_order_relaxed); }

// SIGINT and SIGTERM set the flag while this lives; the former handlers come back afterwards. One at a time.
class InterruptScope {
 public:
  InterruptScope();
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;
  const InterruptFlag* flag() const;
};

}  // namespace cistern
