#pragma once
// Linear map, table of embeddings and layer normalisation as modules with Hugging Face-style
// parameter names (weight, bias).
#include <torch/nn/module.h>

#include "cistern/ops/norm.h"

namespace cistern {

// y = x W^T + b, W [out, in]. Initialised N(0, std), bias 0; std = 0 takes 1/sqrt(3 in), the
// variance of torch's default uniform.
class Linear : public torch::nn::Module {
 public:
  Linear(int64_t in, int64_t out, bool bias, double std = 0);
  at::Tensor Forward(const at::Tensor& x) const;
  at::Tensor weight, bias;
};

// One row for each token id, N(0, std).
class Embedding : public torch::nn::Module {
 public:
  Embedding(int64_t vocab, int64_t dim, double std);
  at::Tensor weight;  // [V,D]
};

enum class NormKind { kLayer, kRms };

// Layer normalisation over the last dimension. kRms (T5; Zhang & Sennrich 2019): x / sqrt(mean(x^2)
// + eps), times the weight; no mean is taken away, and there is no bias.
class LayerNorm : public torch::nn::Module {
 public:
  explicit LayerNorm(int64_t width, double eps = 1e-5, NormKind kind = NormKind::kLayer);
  at::Tensor Forward(const at::Tensor& x) const;
  // x + added (undefined: x itself), and the norm of the sum.
  ops::SumAndNorm Add(const at::Tensor& x, const at::Tensor& added) const;
  // The same for linear maps alone to read: in bfloat16 where they take it (BFloat16Scope).
  ops::SumAndNorm AddForMaps(const at::Tensor& x, const at::Tensor& added) const;
  at::Tensor weight, bias;  // bias: undefined with kRms

 private:
  double eps_;
};

// A module that only holds others, for names such as layers.0.attention.
class Container : public torch::nn::Module {
 public:
  template <class M>
  std::shared_ptr<M> Add(const std::string& name, std::shared_ptr<M> module) {
    return register_module(name, std::move(module));
  }
};

}  // namespace cistern
