#pragma once
// Which implementation the ops use: CISTERN_IMPL=kernel|composite|reference, or set by a test.
//   kernel:    the kernels of the tensors' device (the default), on the CPU our SIMD code, in double
//              or float; the composite where there is none
//   composite: plain ATen operations, differentiated by autograd
//   reference: the definition, plain loops in double precision
#include <ATen/core/Tensor.h>

#include <string>

namespace cistern::ops {

enum class Impl { kKernel, kComposite, kReference };

Impl ActiveImpl();
void SetImpl(Impl impl);
std::string ImplName(Impl impl);
Impl ParseImpl(const std::string& name);  // UsageError on an unknown name

// Forces an implementation for a scope.
class ImplScope {
 public:
  explicit ImplScope(Impl impl) : before_(ActiveImpl()) { SetImpl(impl); }
  ~ImplScope() { SetImpl(before_); }
  ImplScope(const ImplScope&) = delete;
  ImplScope& operator=(const ImplScope&) = delete;

 private:
  Impl before_;
};

// True where the CPU kernels (or the reference, which shares their entry) serve this tensor.
bool UsesKernel(const at::Tensor& x);

}  // namespace cistern::ops
