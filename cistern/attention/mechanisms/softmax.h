#pragma once
// Exact softmax attention (spec 2.1): the baseline every other mechanism is compared with. Its
// state is the key-value cache, which grows.
#include <functional>

#include "cistern/attention/mechanism.h"
#include "cistern/ops/softmax_attention.h"

namespace cistern {

class SoftmaxMechanism : public Mechanism {
 public:
  struct Options {};
  static Fields Describe(Options& options);
  SoftmaxMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);

  std::vector<Projection> Projections() const override;
  // k [B,key_heads,capacity,d], v [B,H,capacity,d]; valid [B,capacity] bool, undefined while no row
  // was padded; count [B] int64: cache rows in use, on the CPU.
  State EmptyState(int64_t batch, const at::TensorOptions& options) const override;
  at::Tensor DoExtend(const std::vector<at::Tensor>& x, State& state,
                      const ops::Mask& mask) override;
  void DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  at::Tensor Read(const std::vector<at::Tensor>& x, const State& state) override;
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override;
  void Truncate(State& state, int64_t count) const override;
  int64_t StateBytes(int64_t batch, int64_t tokens,
                     const at::TensorOptions& options) const override;
  State Compact(const State& state) const override;
  void CheckState(const State& state) const override;
  // Leaves q and k to the next layer where that copies scores.
  at::Tensor DoAttend(Form form, const std::vector<at::Tensor>& x, State* state,
                      const ops::Mask& mask, Handles& handles) override;

 protected:
  // Queries and keys of `key_heads` heads, values of all.
  SoftmaxMechanism(const MechanismInfo& info, const AttentionDims& dims, int64_t key_heads);
  int64_t key_heads() const { return key_heads_; }

  // What becomes of q, k, v, whichever verb they come from: by default ops::SoftmaxAttention.
  using Compute = std::function<at::Tensor(const at::Tensor& q, const at::Tensor& k,
                                           const at::Tensor& v, const ops::SoftmaxOptions& options,
                                           const ops::Mask& mask, const at::Tensor& key_valid)>;
  at::Tensor ExtendBy(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask,
                      const Compute& compute);
  at::Tensor ReadBy(const at::Tensor& q, const State& state, const Compute& compute);
  at::Tensor BidirectionalBy(const std::vector<at::Tensor>& x, const ops::Mask& mask,
                             const Compute& compute);

 private:
  double Dropout() const { return is_training() ? dims().dropout : 0.0; }

  int64_t key_heads_;
};

}  // namespace cistern
