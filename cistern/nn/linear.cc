#include "cistern/nn/linear.h"

#include <ATen/ATen.h>

#include <cmath>

#include "cistern/ops/linear_product.h"
#include "cistern/tensors/device.h"

namespace cistern {

Linear::Linear(int64_t in, int64_t out, bool with_bias, double std) {
  weight = register_parameter(
      "weight", NormalWeights({out, in}, std > 0 ? std : 1.0 / std::sqrt(3.0 * double(in))));
  if (with_bias) bias = register_parameter("bias", ToActiveDevice(at::zeros({out})));
}

at::Tensor Linear::Forward(const at::Tensor& x) const {
  return ops::LinearProduct(x, weight, bias);
}

Embedding::Embedding(int64_t vocab, int64_t dim, double std) {
  weight = register_parameter("weight", NormalWeights({vocab, dim}, std));
}

LayerNorm::LayerNorm(int64_t width, double eps, NormKind kind) : eps_(eps) {
  weight = register_parameter("weight", ToActiveDevice(at::ones({width})));
  if (kind == NormKind::kLayer)
    bias = register_parameter("bias", ToActiveDevice(at::zeros({width})));
}

at::Tensor LayerNorm::Forward(const at::Tensor& x) const { return Add(x, {}).norm; }

ops::SumAndNorm LayerNorm::Add(const at::Tensor& x, const at::Tensor& added) const {
  return ops::AddNorm(x, added, {weight, bias, eps_});
}

ops::SumAndNorm LayerNorm::AddForMaps(const at::Tensor& x, const at::Tensor& added) const {
  return ops::AddNorm(x, added, {weight, bias, eps_}, MapsTakeBFloat16(x) && !ops::StaysFloat(x));
}

}  // namespace cistern
