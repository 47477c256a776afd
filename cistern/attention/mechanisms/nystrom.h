#pragma once
// Nystrom attention (Xiong et al. 2021; P002 sec. 2.5; spec 2.8): softmax attention seen through m
// landmarks, the means of m contiguous segments of the queries and of the keys:
//   Y = F (A^+ (B V)),   F = softmax(Q Kl^T / sqrt(d)) [T,m],  A = softmax(Ql Kl^T / sqrt(d))
//   [m,m],  B = softmax(Ql K^T / sqrt(d)) [m,T]
// in this order, so that nothing of size [T,T] is formed: O(T m d + m^3) time, O(T m) memory at
// most. Scaling queries and keys by d^-1/4 each, as some do, gives the same logits.
//
// By default segments are cut over the valid tokens of each document, as evenly as goes, so that
// neither padding nor a length that m does not divide changes anything; a document shorter than m
// has a landmark for each token; and the iterative inverse begins at A^T / (the largest column sum
// of A), for each row and head. The repositories pad to a multiple of m, with zeros that take part,
// and begin at the largest column sum of the whole batch, so that a row's output depends on its
// padding and on its batch mates: Padding and Start.
#include "cistern/attention/mechanism.h"

namespace cistern {

class NystromMechanism : public Mechanism {
 public:
  enum class Inverse { kIterative, kSvd };
  enum class Start { kHead, kBatch };
  // kZeroes (Nystromformer's repository): padding, and as many positions behind it as make the
  // length a multiple of m, are zeros in the landmarks, plain means of equal segments; keys that
  // are no tokens are masked in B alone. kFront (P002's code): the same, the zeros that make a
  // multiple of m before the tokens. kFrontMasked (lucidrains): equal segments of the same places,
  // but what is no token is masked everywhere: a landmark is the mean of its segment's tokens, and
  // one without a token is left out. (There its row of A is 1/m in each place, which the exact
  // inverse gives no weight, and the mean divides by 1e-8 more.) Padding reads, as with the others.
  enum class Padding { kTokens, kZeroes, kFront, kFrontMasked };
  struct Options {
    int64_t landmarks = 64;  // m
    Inverse inverse = Inverse::kIterative;
    int64_t iterations = 6;
    Start start = Start::kHead;
    Padding padding = Padding::kTokens;
    bool exact = false;  // softmax attention for a row of at most m tokens (Nystromformer: m = N)
    int64_t conv = 0;    // taps of the convolution of the values that is added: 0 none (P002), 33
                         // (lucidrains), 35 (Nystromformer's LRA)
  };
  static Fields Describe(Options& options);
  NystromMechanism(const MechanismInfo& info, const Options& options,
                   const AttentionDims& dims);  // UsageError: even conv; a start of no iteration

  bool TakesBFloat16(Form form) const override;
  at::Tensor Definition(Form form, const std::vector<at::Tensor>& queries,
                        const std::vector<at::Tensor>& x) const override;
  bool SeesPadding() const override { return options_.padding != Padding::kTokens; }
  bool SeesBatch() const override { return options_.start == Start::kBatch; }

 protected:
  at::Tensor BidirectionalRows(const std::vector<at::Tensor>& x, const ops::Mask& mask) override;

 private:
  Options options_;
  ProjectionId q_, k_, v_;
  at::Tensor filter_;  // [H,1,conv,1]: one for each head, shared by its channels
};

// The pseudo-inverse of matrices A [..,m,m] whose rows are distributions or zeros, by Razavi's
// iteration (Xiong et al., eq. 11): of third order, A Z A is within 1e-2 of A after 6 iterations on
// random softmax matrices of 16 x 16 and within 1e-12 after 30. Rows and columns of zeros stay
// zeros. It begins at A^T / (the largest column sum of each matrix), or of all (one_start).
// Differentiable.
at::Tensor IterativePseudoInverse(const at::Tensor& A, int64_t iterations, bool one_start = false);
// By singular values; those below m 2^-23 of the largest count as zero, in every precision.
// Differentiable.
at::Tensor SvdPseudoInverse(const at::Tensor& A);

}  // namespace cistern
