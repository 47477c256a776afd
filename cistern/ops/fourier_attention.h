#pragma once
// Linear attention (linear_attention.h) whose features are random Fourier features, formed where
// tokens are read.
#include "cistern/ops/fourier_features.h"
#include "cistern/ops/linear_attention.h"

namespace cistern::ops {

// LinearAttention of FourierFeatures(q) and FourierFeatures(k): q, k [B,H,T,d_k], v [B,H,T,d],
// memory double [B,H,2m,d+1], or [B,H,2m,d] with DivisorRule::kNone. No [B,H,T,m] lies in memory;
// the features are formed three times where gradients are wanted. rule.map is not read.
// Differentiable in every tensor; with a gradient of the matrices, which are drawn and not learned,
// it is composed of those two.
SumResult FourierAttention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           const at::Tensor& memory, const FourierFeatureMap& map,
                           const LinearRule& rule, const Mask& mask = {});
// The same for a memory that goes on, as LinearExtend.
at::Tensor FourierExtend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         at::Tensor& memory, const FourierFeatureMap& map, const LinearRule& rule,
                         const Mask& mask = {});

// All tokens at once: LinearWrite of FourierFeatures(k), LinearRead of FourierFeatures(q); formed
// once more where gradients are wanted.
at::Tensor FourierWrite(const at::Tensor& k, const at::Tensor& v, const at::Tensor& memory,
                        const FourierFeatureMap& map, const LinearRule& rule,
                        const Mask& mask = {});
at::Tensor FourierRead(const at::Tensor& q, const at::Tensor& memory, const FourierFeatureMap& map,
                       const LinearRule& rule);

}  // namespace cistern::ops
