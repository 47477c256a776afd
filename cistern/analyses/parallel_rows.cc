#include "cistern/analyses/parallel_rows.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <exception>
#include <vector>

#include "cistern/base/parallel.h"

namespace cistern {

void ForRows(int64_t rows, const std::function<void(int64_t)>& fn) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(rows));
  ParallelFor(rows, 1, [&](int64_t begin, int64_t end) {
    // Of this thread; autocast would be on in the caller's alone.
    const at::NoGradGuard no_grad;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    for (int64_t row = begin; row < end; ++row) {
      try {
        fn(row);
      } catch (...) {  // must not leave a thread of the pool
        errors[size_t(row)] = std::current_exception();
        return;
      }
    }
  });
  for (const std::exception_ptr& e : errors) {
    if (e) std::rethrow_exception(e);
  }
}

}  // namespace cistern
