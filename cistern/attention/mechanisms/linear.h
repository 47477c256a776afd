#pragma once
// Linear attention with elu + 1 (Katharopoulos et al. 2020, eq. 7; spec 2.3): phi(x) = x + 1 for x
// > 0, else e^x. The simplest feature map: no parameters, positive, d features a head.
#include "cistern/attention/feature_attention.h"
#include "cistern/attention/operations.h"

namespace cistern {

class LinearMechanism : public Mechanism, public CountsOperations {
 public:
  struct Options {
    // False: no denominator; the sum is divided by sqrt(max_length), as the "linear" model of the
    // Nystromformer's repository for the Long Range Arena does with its inputs, which are padded to
    // that length. Another model, not another way to compute this one.
    bool denominator = true;
    double eps = 1e-6;   // added to the denominator
    double map_eps = 0;  // added to the features of queries and keys
  };
  static Fields Describe(Options& options);
  // UsageError: attention dropout; no denominator without a max_length.
  LinearMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);

  State EmptyState(int64_t batch, const at::TensorOptions& options)
      const override;  // memory [B,H,d,d+1] in double; `decoding` in its place while it
                       // decodes, with a denominator (ops/slot_decoding.h)
  at::Tensor DoExtend(const std::vector<at::Tensor>& x, State& state,
                      const ops::Mask& mask) override;
  void DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  at::Tensor Read(const std::vector<at::Tensor>& x, const State& state) override;
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override;
  State Merge(const State& first, const State& second) const override;
  bool TakesBFloat16(Form) const override { return true; }
  LeastOperations Operations(Form form, int64_t tokens, int64_t before) const override;

 private:
  Denominator denominator_;
  double map_eps_;
  ProjectionId q_, k_, v_;
  StateId memory_;
};

}  // namespace cistern
