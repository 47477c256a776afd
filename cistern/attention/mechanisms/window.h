#pragma once
// Sliding-window attention (P003 sec. 3.3 and eq. 5; spec 2.14): exact softmax attention to the
// last n tokens. As ABC: the memory is a queue, phi_t = e_n and the others move up. Its dilated
// sister (dilated.h) sees every g-th token and shares all of this code: tokens g apart form g
// interleaved sequences, each with a window of n.
#include "cistern/attention/abc_memory.h"
#include "cistern/attention/operations.h"

namespace cistern {

class WindowMechanism : public Mechanism, public CountsOperations {
 public:
  using EmptySlots = AbcMechanism::EmptySlots;
  struct Options {
    int64_t window = 256;  // n, tokens that a token sees, itself among them
    EmptySlots empty_slots = EmptySlots::kMasked;
  };
  static Fields Describe(Options& options);
  WindowMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);

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
  bool TakesBFloat16(Form) const override;
  LeastOperations Operations(Form form, int64_t tokens, int64_t before) const override;

 protected:
  WindowMechanism(const MechanismInfo& info, int64_t window, int64_t dilation,
                  EmptySlots empty_slots, const AttentionDims& dims);
  static void DescribeEmpty(Fields& fields, EmptySlots& empty_slots);
  at::Tensor BidirectionalRows(const std::vector<at::Tensor>& x,
                               const ops::Mask& mask) override;  // |t - s| <= (n - 1) g

 private:
  struct Ring {
    at::Tensor k, v, count;  // as in a state
  };
  struct RingPiece;
  Ring Held(const State& state) const;
  void Keep(const Ring& ring, State& state) const;
  static Ring RingAfter(const RingPiece& all, const Ring& before, const ops::Mask& mask);
  at::Tensor ExtendEmpty(const std::vector<at::Tensor>& x, State& state) const;
  at::Tensor ExtendByOne(const std::vector<at::Tensor>& x, State& state) const;
  at::Tensor Banded(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const at::Tensor& documents, int64_t lead, int64_t after) const;
  double Scale() const;
  double Dropout() const;

  at::Tensor ReadRing(const at::Tensor& q, const Ring& ring, const at::Tensor& slots) const;

  int64_t window_, dilation_;
  bool take_part_;
  ProjectionId q_, k_, v_;
  StateId keys_, values_, count_;
};

}  // namespace cistern
