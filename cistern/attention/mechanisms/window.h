#pragma once
// Sliding-window attention (P003 sec. 3.2 and eq. 5; spec 2.14): exact softmax attention to the
// last n tokens. As ABC: the memory is a queue, phi_t = e_n and the others move up. Its dilated
// sister (dilated.h) sees every g-th token and shares all of this code: tokens g apart form g
// interleaved sequences, each with a window of n.
#include "cistern/attention/mechanism.h"

namespace cistern {

class WindowMechanism : public Mechanism {
 public:
  struct Options {
    int64_t window = 256;  // n, tokens that a token sees, itself among them
  };
  static Fields Describe(Options& options);
  WindowMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);

  std::vector<Projection> Projections() const override;
  // k, v [B,H,n g,d], a ring: the token at position p of its document lies in row p mod n g; count
  // [B] int64, tokens of the document so far.
  State EmptyState(int64_t batch, const at::TensorOptions& options) const override;
  at::Tensor DoExtend(const std::vector<at::Tensor>& x, State& state,
                      const ops::Mask& mask) override;
  void DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) override;
  at::Tensor Read(const std::vector<at::Tensor>& x,
                  const State& state) override;  // every query sees the last n tokens written
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override;
  State Merge(const State& first, const State& second) const override;

 protected:
  WindowMechanism(const MechanismInfo& info, int64_t window, int64_t dilation,
                  const AttentionDims& dims);
  at::Tensor BidirectionalRows(const std::vector<at::Tensor>& x,
                               const ops::Mask& mask) override;  // |t - s| <= (n - 1) g

 private:
  at::Tensor ExtendEmpty(const std::vector<at::Tensor>& x, State& state) const;
  at::Tensor ExtendByOne(const std::vector<at::Tensor>& x, State& state) const;
  at::Tensor Banded(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const at::Tensor& documents, int64_t lead, int64_t after) const;
  double Scale() const;
  double Dropout() const;

  int64_t window_, dilation_;
};

}  // namespace cistern
