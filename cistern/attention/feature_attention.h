#pragma once
// Attention by feature maps: a query weighs a key by phi(q) . phi(k), so that the sum over the keys
// needs only
//   S_t = sum_i phi(k_i) (x) v_i    z_t = sum_i phi(k_i)    o_t = phi(q_t)^T S_t / (phi(q_t) . z_t)
// (Katharopoulos et al. 2020, eq. 4-12; spec 2.3-2.5). S and z are one raw memory
// (ops/sum_memory.h): z is the column of the values that are all one. Linear attention, T2R and RFA
// differ in phi and in what keeps the division safe. Extending is one fused walk
// (ops/linear_attention.h), with gates one of the summing memory.
#include "cistern/attention/mechanism.h"
#include "cistern/kernels/linear_attention.h"
#include "cistern/ops/slot_decoding.h"

namespace cistern {

// What the sum of the values is divided by (kernels/linear_attention.h has the rules). An empty
// memory and padding read zeros under every rule.
struct Denominator {
  using Rule = DivisorRule;
  Rule rule = Rule::kPlus;
  double value = 1e-6;
};

// The empty memory: double, [B,H,f,d+1], without the last column where nothing is divided.
at::Tensor EmptyFeatureSums(int64_t batch, const AttentionDims& dims, int64_t features,
                            const Denominator& denominator, const at::TensorOptions& options);

// Whether it may be put off, so that a mechanism declares `decoding`.
inline bool MayDecode(const Denominator& denominator) {
  return denominator.rule != Denominator::Rule::kNone;
}

// phi_q, phi_k [B,H,T,f], v [B,H,T,d] -> [B,H,T,d]; memory is replaced by the one after. log_gate
// [B,H,T,1]: the memory decays by its exponential before each write, and `decoding` of the handles
// is null. O(T f d).
at::Tensor FeatureExtend(const at::Tensor& phi_q, const at::Tensor& phi_k, const at::Tensor& v,
                         const ops::SlotHandles& memory, const ops::Mask& mask,
                         const Denominator& denominator, const at::Tensor& log_gate = {});
// Of all tokens before any reads: bidirectional and cross attention.
void FeatureWrite(const at::Tensor& phi_k, const at::Tensor& v, at::Tensor& memory,
                  const ops::Mask& mask, const Denominator& denominator,
                  const at::Tensor& log_gate = {});
at::Tensor FeatureRead(const at::Tensor& phi_q, const at::Tensor& memory,
                       const Denominator& denominator);
// The same with phi(x) = elu(x) + 1 + eps of q and k inside.
at::Tensor EluExtend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const ops::SlotHandles& memory, const ops::Mask& mask,
                     const Denominator& denominator, double eps);
void EluWrite(const at::Tensor& k, const at::Tensor& v, at::Tensor& memory, const ops::Mask& mask,
              const Denominator& denominator, double eps);
at::Tensor EluRead(const at::Tensor& q, const at::Tensor& memory, const Denominator& denominator,
                   double eps);

// With random Fourier features of q and k inside.
at::Tensor FourierExtend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const ops::SlotHandles& memory, const ops::FourierFeatureMap& map,
                         const ops::Mask& mask, const Denominator& denominator);
void FourierWrite(const at::Tensor& k, const at::Tensor& v, at::Tensor& memory,
                  const ops::FourierFeatureMap& map, const ops::Mask& mask,
                  const Denominator& denominator);
at::Tensor FourierRead(const at::Tensor& q, const at::Tensor& memory,
                       const ops::FourierFeatureMap& map, const Denominator& denominator);

// x / (||x|| + 1e-3), over the last dimension (RFA and T2R).
at::Tensor Normalised(const at::Tensor& x);

// For definitions: the rows of `weights` [B,H,1,S] over v [B,H,S,d], divided by the rule.
at::Tensor WeightedValues(const at::Tensor& weights, const at::Tensor& v,
                          const Denominator& denominator);

// UsageError where attention dropout is asked for: these mechanisms form no probabilities that it
// could drop.
void RefuseAttentionDropout(const MechanismInfo& info, const AttentionDims& dims);

}  // namespace cistern
