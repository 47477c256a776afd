#include "cistern/ops/in_place.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace cistern::ops {

bool IsPlain(const at::Tensor& x) {
  constexpr auto kCpu = c10::BackendComponent::CPUBit;
  static const c10::DispatchKeySet plain = c10::DispatchKeySet(c10::DispatchKey::CPU) |
                                           c10::getAutogradRelatedKeySetFromBackend(kCpu) |
                                           c10::getAutocastRelatedKeySetFromBackend(kCpu);
  return plain.isSupersetOf(x.key_set());
}

bool OwnedAlone(const at::Tensor& x) {
  return x.defined() && x.use_count() == 1 && IsPlain(x) && x.has_storage() &&
         x.storage().use_count() == 1 && x.storage().unsafeGetStorageImpl()->resizable() &&
         x.is_contiguous() && !x.requires_grad();
}

bool NobodyWatchesOps() {
  // Autocast leaves the ops of this library alone.
  static const c10::DispatchKeySet usual =
      c10::default_included_set | c10::DispatchKeySet(c10::autocast_dispatch_keyset);
  return usual.isSupersetOf(c10::impl::tls_local_dispatch_key_set().included_);
}

}  // namespace cistern::ops
