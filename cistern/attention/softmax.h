#pragma once
// Exact softmax attention (spec 2.1): the baseline every other mechanism is compared with. Its state is the key-value cache, which grows.
#include "cistern/attention/mechanism.h"

namespace cistern {

class SoftmaxMechanism : public Mechanism {
 public:
  struct Options {};
  static Fields Describe(Options& options);
  SoftmaxMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);

  std::vector<Projection> Projections() const override;
  // k, v [B,H,capacity,d]; valid [B,capacity] bool, undefined while no row was padded; count [B] int64: cache rows in use, on the CPU.
  State EmptyState(int64_t batch, const at::TensorOptions& options) const override;
  at::Tensor Extend(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  void Write(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  at::Tensor Read(const std::vector<at::Tensor>& x, const State& state) override;
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries, const std::vector<at::Tensor>& x) const override;
  void Truncate(State& state, int64_t count) const override;
  int64_t StateBytes(int64_t batch, int64_t tokens, const at::TensorOptions& options) const override;
  State Compact(const State& state) const override;
  void CheckState(const State& state) const override;
};

}  // namespace cistern
