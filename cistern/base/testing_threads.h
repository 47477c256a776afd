#pragma once
// So many threads in a scope of a test.
#include "cistern/base/parallel.h"

namespace cistern::testing {

class Threads {
 public:
  explicit Threads(int threads) : before_(NumThreads()) { SetNumThreads(threads); }
  ~Threads() { SetNumThreads(before_); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  int before_;
};

}  // namespace cistern::testing
