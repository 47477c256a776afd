#include "cistern/base/parallel.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#ifdef CISTERN_SERIAL

namespace cistern {
int NumThreads() { return 1; }
void SetNumThreads(int) {}
void SleepSoonWhileWaiting(char**) {}
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
void SetNumThreads(int threads) { omp_set_num_threads(threads); }

void SleepSoonWhileWaiting(char** argv) {
  // docs/notes/training-speed.md: fewer cost speed on a quiet machine, more of it on Intel's
  // processors; more of them cost speed beside a busy process.
#if defined(__x86_64__)
  const char* const turns = __builtin_cpu_is("intel") != 0 ? "5000" : "2000";
#else
  const char* const turns = "2000";
#endif
  if (std::getenv("GOMP_SPINCOUNT") || std::getenv("OMP_WAIT_POLICY")) return;
  setenv("GOMP_SPINCOUNT", turns, 1);
  std::error_code none;
  // By its own path, so that top and killall know it by its name. Where it cannot, this process
  // goes on as it is.
  execv(std::filesystem::read_symlink("/proc/self/exe", none).c_str(), argv);
}

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
