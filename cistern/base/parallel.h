#pragma once
// Threads: one pool for the whole process, libgomp's, which is also torch's.
#include <cstdint>

namespace cistern {

using RangeFn = void (*)(void* context, int64_t begin, int64_t end);

// Splits [0, n) into contiguous parts of at least `grain` and runs fn(begin, end) on each. Inside
// another parallel region it runs in place. Which part runs where never changes a result: parts
// write to disjoint places.
void ParallelForRaw(int64_t n, int64_t grain, RangeFn fn, void* context);

template <class F>
void ParallelFor(int64_t n, int64_t grain, F&& f) {
  ParallelForRaw(
      n, grain,
      [](void* context, int64_t begin, int64_t end) { (*static_cast<F*>(context))(begin, end); },
      &f);
}

int NumThreads();
void SetNumThreads(int threads);

}  // namespace cistern
