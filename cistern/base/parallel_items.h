#pragma once
// Items in parallel whose work may fail.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <vector>

#include "cistern/base/parallel.h"

namespace cistern {

// fn(i) for each of n items, each in one thread, and inside of it every parallel region runs in
// place. Threads take the next item when they are done with one, so that one whose core is busy
// with something else takes fewer. A thread that finds none left sleeps until all are done, so that
// the system may move one that shares its core with another program to the core that is free. An
// exception does not leave its thread: that of the first item that failed is thrown here, once all
// threads are done; after a failure no item begins.
template <class F>
void ParallelForItems(int64_t n, F&& fn) {
  if (n <= 0) return;
  std::vector<std::exception_ptr> errors(static_cast<size_t>(n));
  std::atomic<int64_t> next = 0;
  std::atomic<bool> failed = false;
  std::atomic<int64_t> left = n;
  ParallelFor(std::min<int64_t>(n, NumThreads()), 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next++) < n;) {
      try {
        if (!failed) fn(i);
      } catch (...) {
        errors[static_cast<size_t>(i)] = std::current_exception();
        failed = true;
      }
      if (--left == 0) left.notify_all();
    }
    for (int64_t others; (others = left) > 0;) left.wait(others);
  });
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace cistern
