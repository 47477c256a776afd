#pragma once
// Weights in bfloat16, made once for many products: decoding meets each of them at every token.
#include <ATen/core/Tensor.h>

namespace cistern::ops {

// While one lives, this thread keeps what KeptInBFloat16 makes. Scopes may be nested; the outermost
// one ends with everything that was kept, 2 bytes a weight beside its own 4.
class KeptWeightsScope {
 public:
  explicit KeptWeightsScope(bool on);
  ~KeptWeightsScope();
  KeptWeightsScope(const KeptWeightsScope&) = delete;
  KeptWeightsScope& operator=(const KeptWeightsScope&) = delete;

 private:
  bool on_;
};

bool KeepsWeights();

// `weight` [..] of floats in bfloat16, contiguous: made at the first call, and again where it was
// written to since (at::Tensor::_version). Only where KeepsWeights(). It is kept as well: a tensor
// that is made anew for every product would never be met again, and never go.
at::Tensor KeptInBFloat16(const at::Tensor& weight);
// How many this thread keeps.
size_t KeptWeights();

}  // namespace cistern::ops
