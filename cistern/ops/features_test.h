#pragma once
// What the tests of ops that map tokens to features share.
#include <functional>
#include <string>
#include <vector>

#include "cistern/ops/testing.h"

namespace cistern::testing {

// all(type): the outputs and gradients of an op whose tensors have that type. The kernel's in both
// precisions are the composite's in double.
inline void ExpectKernelIsComposite(
    const std::function<std::vector<at::Tensor>(at::ScalarType)>& all) {
  const auto with = [&](ops::Impl impl, at::ScalarType type) {
    const ops::ImplScope scope(impl);
    return all(type);
  };
  const auto want = with(ops::Impl::kComposite, at::kDouble),
             fine = with(ops::Impl::kKernel, at::kDouble),
             plain = with(ops::Impl::kKernel, at::kFloat);
  for (size_t i = 0; i < want.size(); ++i) {
    ExpectClose(fine[i], want[i], 1e-12, "double " + std::to_string(i));
    ExpectClose(plain[i], want[i], 1e-5, "float " + std::to_string(i));
  }
}

}  // namespace cistern::testing
