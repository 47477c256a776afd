#pragma once
// What a check changes of the machine, for a scope.
#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include <string>

#include "cistern/base/parallel.h"
#include "cistern/kernels/isa.h"
#include "cistern/kernels/workspace.h"

namespace cistern::verify {

class ThreadScope {
 public:
  ThreadScope() : before_(NumThreads()), torch_before_(at::get_num_threads()) {}
  ~ThreadScope() { Use(before_, torch_before_); }
  void Use(int threads, int torch_threads) const {
    at::set_num_threads(torch_threads);
    SetNumThreads(threads);
  }

 private:
  int before_, torch_before_;
};

class IsaScope {
 public:
  IsaScope() : before_(ActiveIsa()) {}
  ~IsaScope() { ForceIsa(before_); }

 private:
  std::string before_;
};

// Everything that torch or a kernel hands out without setting it holds NaN.
class PoisonScope {
 public:
  PoisonScope()
      : deterministic_(at::globalContext().deterministicAlgorithms()),
        warn_only_(at::globalContext().deterministicAlgorithmsWarnOnly()),
        fill_(at::globalContext().deterministicFillUninitializedMemory()) {
    at::globalContext().setDeterministicAlgorithms(true, true);
    at::globalContext().setDeterministicFillUninitializedMemory(true);
    Workspace::PoisonAll(true);
  }
  ~PoisonScope() {
    Workspace::PoisonAll(false);
    at::globalContext().setDeterministicFillUninitializedMemory(fill_);
    at::globalContext().setDeterministicAlgorithms(deterministic_, warn_only_);
  }

 private:
  bool deterministic_, warn_only_, fill_;
};

}  // namespace cistern::verify
