#include "cistern/tensors/parallel_rows.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "cistern/base/parallel_items.h"

namespace cistern {

void ForRows(int64_t rows, const std::function<void(int64_t)>& fn) {
  ParallelForItems(rows, [&](int64_t row) {
    // Of this thread; autocast would be on in the caller's alone.
    const at::NoGradGuard no_grad;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    fn(row);
  });
}

}  // namespace cistern
