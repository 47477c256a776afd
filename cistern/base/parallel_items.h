#pragma once
// Items in parallel whose work may fail.
#include <cstdint>
#include <exception>
#include <vector>

#include "cistern/base/parallel.h"

namespace cistern {

// fn(i) for each of n items, each in one thread, and inside of it every parallel region runs in
// place. An exception does not leave its thread: that of the first item that fails is thrown here,
// once all threads are done; a thread whose item fails begins no other.
template <class F>
void ParallelForItems(int64_t n, F&& fn) {
  if (n <= 0) return;
  std::vector<std::exception_ptr> errors(static_cast<size_t>(n));
  ParallelFor(n, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      try {
        fn(i);
      } catch (...) {
        errors[static_cast<size_t>(i)] = std::current_exception();
        return;
      }
    }
  });
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace cistern
