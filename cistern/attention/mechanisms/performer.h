#pragma once
// Performer (Choromanski et al. 2021; spec 2.6): the softmax kernel estimated by positive
// orthogonal random features,
//   phi(x) = m^-1/2 exp(w_i . x' - |x'|^2 / 2),  x' = x d^-1/4,   out = sum_s (phi(q) . phi(k_s))
//   v_s / sum_s phi(q) . phi(k_s),
// or, with kernel = relu, the generalised kernel phi(x) = relu(x) + 1e-3 of the Long Range Arena.
// The slot memory holds, for each feature, the mean of the values weighted by phi(k), with
// log-weights log phi(k) and their log-sum z. Read weights softmax_l(log phi(q)_l + z_l) then give
// the quotient exactly: no stabiliser (that of the paper looks at later keys), no epsilon.
#include "cistern/attention/mechanism.h"

namespace cistern {

class PerformerMechanism : public Mechanism {
 public:
  struct Options {
    int64_t features = 256;          // m; 0: d ln d
    std::string kernel = "softmax";  // softmax, relu
    int64_t scaling = 0;             // 0, 1
    int64_t redraw = 1000;
    int64_t seed = 0;
  };
  static Fields Describe(Options& options);
  PerformerMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);

  std::vector<Projection> Projections() const override;
  State EmptyState(int64_t batch,
                   const at::TensorOptions& options) const override;  // memory [B,H,m,d], z [B,H,m]
  at::Tensor DoExtend(const std::vector<at::Tensor>& x, State& state,
                      const ops::Mask& mask) override;
  void DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  at::Tensor Read(const std::vector<at::Tensor>& x, const State& state) override;
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override;
  State Merge(const State& first, const State& second) const override;

 private:
  at::Tensor LogFeatures(const at::Tensor& x, Side side) const;
  void BeginSequence(const State& state);

  int64_t features_, scaling_, redraw_, seed_;
  bool relu_;
  at::Tensor projection_;  // buffer [m,d], the same for all heads; kernel = softmax only
  at::Tensor sequences_;   // buffer [1], training calls so far; kernel = softmax only
};

// m x d rows, orthogonal within blocks of d, each distributed as a Gaussian vector (scaling = 0) or
// of norm sqrt(d) (1): the QR of a Gaussian matrix with the signs of R's diagonal multiplied in,
// without which the rows are not uniform on the sphere. Float, a function of (seed, stream) alone.
at::Tensor OrthogonalFeatures(int64_t features, int64_t width, int64_t scaling, uint64_t seed,
                              uint64_t stream);

}  // namespace cistern
