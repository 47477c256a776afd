#include "cistern/ops/impl.h"

#include <cstdlib>

#include "cistern/base/error.h"

namespace cistern::ops {
namespace {

Impl& Active() {
  static Impl impl = [] {
    const char* name = std::getenv("CISTERN_IMPL");
    return name && *name ? ParseImpl(name) : Impl::kKernel;
  }();
  return impl;
}

}  // namespace

Impl ActiveImpl() { return Active(); }
void SetImpl(Impl impl) { Active() = impl; }

std::string ImplName(Impl impl) {
  switch (impl) {
    case Impl::kKernel:
      return "kernel";
    case Impl::kComposite:
      return "composite";
    case Impl::kReference:
      return "reference";
  }
  return "";
}

Impl ParseImpl(const std::string& name) {
  for (const Impl impl : {Impl::kKernel, Impl::kComposite, Impl::kReference}) {
    if (name == ImplName(impl)) return impl;
  }
  throw UsageError(
      UnknownName("implementation (CISTERN_IMPL)", name, {"kernel", "composite", "reference"}));
}

bool UsesKernel(const at::Tensor& x) {
  return ActiveImpl() != Impl::kComposite && x.device().is_cpu() &&
         (x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble);
}

}  // namespace cistern::ops
