#include "cistern/analyses/parallel_rows.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <exception>

#include "cistern/analyses/implied_weights.h"
#include "cistern/base/parallel.h"

namespace cistern {

void ForRows(int64_t rows, const std::vector<const CapturedLayer*>& layers,
             const std::function<void(int64_t)>& fn) {
  const bool parallel = std::all_of(layers.begin(), layers.end(), [](const CapturedLayer* l) {
    return ImpliedWeights::IsExplicit(*l);
  });
  std::vector<std::exception_ptr> errors(static_cast<size_t>(rows));
  const auto run = [&](int64_t begin, int64_t end) {
    const at::NoGradGuard no_grad;  // of this thread
    for (int64_t row = begin; row < end; ++row) {
      try {
        fn(row);
      } catch (...) {  // must not leave a thread of the pool
        errors[size_t(row)] = std::current_exception();
        return;
      }
    }
  };
  if (parallel) {
    ParallelFor(rows, 1, [&](int64_t begin, int64_t end) { run(begin, end); });
  } else {
    run(0, rows);
  }
  for (const std::exception_ptr& e : errors) {
    if (e) std::rethrow_exception(e);
  }
}

}  // namespace cistern
