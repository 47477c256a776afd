#pragma once
// Under autocast the linear maps of a layer run in bfloat16; what its core computes runs in full
// precision, the core's own products too.
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace cistern {

template <class F>
auto InFullPrecision(F&& core) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return core();
}

}  // namespace cistern
