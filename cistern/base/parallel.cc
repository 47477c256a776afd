#include "cistern/base/parallel.h"

#include <algorithm>

#include "cistern/base/parallel_region.h"

#ifdef CISTERN_SERIAL

namespace cistern {
int NumThreads() { return 1; }
int ThreadsHere() { return 1; }
void SetNumThreads(int) {}
void ParallelForRaw(int64_t n, int64_t, RangeFn fn, void* context) {
  if (n > 0) fn(context, 0, n);
}
}  // namespace cistern

#else

// libgomp's own entry points, called directly: torch's pool with any compiler and without -fopenmp
// (clang's -fopenmp would bring libomp, a second pool that fights the first).
extern "C" {
void GOMP_parallel(void (*fn)(void*), void* data, unsigned num_threads, unsigned flags);
int omp_get_thread_num(void);
int omp_get_num_threads(void);
int omp_get_max_threads(void);
void omp_set_num_threads(int);
int omp_in_parallel(void);
}

namespace cistern {
namespace {

struct Job {
  int64_t n, parts;
  RangeFn fn;
  void* context;
};

void RunPart(void* p) {
  const Job& job = *static_cast<Job*>(p);
  const int64_t parts = std::min<int64_t>(job.parts, omp_get_num_threads());
  const int64_t part = omp_get_thread_num();
  if (part < parts) job.fn(job.context, job.n * part / parts, job.n * (part + 1) / parts);
}

}  // namespace

int NumThreads() { return omp_get_max_threads(); }
int ThreadsHere() { return omp_in_parallel() ? 1 : NumThreads(); }
void SetNumThreads(int threads) { omp_set_num_threads(threads); }

void ParallelForRaw(int64_t n, int64_t grain, RangeFn fn, void* context) {
  if (n <= 0) return;
  Job job{n, std::min<int64_t>(NumThreads(), (n + grain - 1) / std::max<int64_t>(grain, 1)), fn,
          context};
  if (job.parts <= 1 || omp_in_parallel()) return fn(context, 0, n);
  GOMP_parallel(&RunPart, &job, 0,
                0);  // 0: the whole team; a changing team size makes libgomp restart its threads
}

}  // namespace cistern

#endif
