#pragma once
// Performer (Choromanski et al. 2021; spec 2.6): the softmax kernel estimated by positive
// orthogonal random features,
//   phi(x) = m^-1/2 exp(w_i . x' - |x'|^2 / 2),  x' = x d^-1/4,   out = sum_s (phi(q) . phi(k_s))
//   v_s / sum_s phi(q) . phi(k_s),
// or, with kernel = relu, the generalised kernel phi(x) = relu(x) + 1e-3 of the Long Range Arena.
// The slot memory holds, for each feature, the mean of the values weighted by phi(k), with
// log-weights log phi(k) and their log-sum z. Read weights softmax_l(log phi(q)_l + z_l) then give
// the quotient exactly: no stabiliser (that of the paper looks at later keys), and no epsilon but
// on request: the authors' code has phi(x) = m^-1/2 [exp(w_i . x' - |x'|^2 / 2 - c) + eps], c the
// largest w_i . x' of the query, or of all keys. Here c is that of the query, and 0 for keys, since
// e^(w_i . k' - |k'|^2 / 2) <= e^(|w_i|^2 / 2) cannot overflow as a logarithm, nor look ahead.
#include "cistern/attention/mechanism.h"
#include "cistern/attention/operations.h"

namespace cistern {

class PerformerMechanism : public Mechanism, public CountsOperations {
 public:
  enum class Kernel { kSoftmax, kRelu };
  struct Options {
    int64_t features = 256;  // m; 0: d ln d
    Kernel kernel = Kernel::kSoftmax;
    int64_t scaling = 0;  // 0, 1
    int64_t redraw = 1000;
    int64_t seed = 0;
    double eps = 0;  // added to the features; the authors' 1e-6
  };
  static Fields Describe(Options& options);
  // UsageError: attention dropout, eps with kernel = relu.
  PerformerMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);

  // memory [B,H,m,d], z [B,H,m]; `decoding` in their place while it decodes
  // (ops/slot_decoding.h), with features of softmax and no eps.
  State EmptyState(int64_t batch, const at::TensorOptions& options) const override;
  at::Tensor DoExtend(const std::vector<at::Tensor>& x, State& state,
                      const ops::Mask& mask) override;
  void DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  at::Tensor Read(const std::vector<at::Tensor>& x, const State& state) override;
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override;
  State Merge(const State& first, const State& second) const override;
  LeastOperations Operations(Form form, int64_t tokens, int64_t before) const override;
  bool TakesBFloat16(Form form) const override;
  // Where features are of a product and a square alone, they are made where tokens are read
  // (ops::FavorQueriesExtend, ops::FavorWrite, ops::FavorRead).
  bool FormsFeatures(Form form) const override;

 private:
  double ScaleOf(const at::Tensor& x) const;   // d^-1/4
  at::Tensor Rows(const at::Tensor& x) const;  // the matrix, in the type that x is computed in
  at::Tensor LogFeatures(const at::Tensor& x, Side side) const;
  void BeginSequence(const State& state);

  int64_t features_, scaling_, redraw_, seed_;
  double eps_;
  bool relu_;
  ProjectionId q_, k_, v_;
  StateId memory_, z_;
  at::Tensor projection_;  // buffer [m,d], the same for all heads; kernel = softmax only
  at::Tensor sequences_;   // buffer [1], training calls so far; kernel = softmax only
};

// m x d rows, orthogonal within blocks of d, each distributed as a Gaussian vector (scaling = 0) or
// of norm sqrt(d) (1): the QR of a Gaussian matrix with the signs of R's diagonal multiplied in,
// without which the rows are not uniform on the sphere. Float, a function of (seed, stream) alone.
at::Tensor OrthogonalFeatures(int64_t features, int64_t width, int64_t scaling, uint64_t seed,
                              uint64_t stream);

}  // namespace cistern
