#pragma once
// What the suite looks at: one mechanism with one set of options, and the ways to run it.
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cistern/attention/mechanism.h"

namespace cistern::verify {

using Tensors = std::vector<at::Tensor>;

// Projected tensors are [B,H,T,width/H] each (H of the projection), in declared order: doubles that
// float holds exactly, so that every precision computes the same problem.
class Subject {
 public:
  // Parameters are made in float from the seed; evaluation mode. `heads` 0: two, or those of head
  // groups. `width`: of the output, per head.
  Subject(const MechanismInfo& info, const Json& options, uint64_t seed, int64_t heads = 0,
          int64_t max_length = 256, int64_t width = 5);

  // A new instance with the same parameters; `heads` 1: with one head, and parameters of its own.
  Subject Again(int64_t heads = 0) const {
    return {info_, options_, seed_, heads > 0 ? heads : dims_.heads, dims_.max_length, width()};
  }

  const MechanismInfo& info() const { return info_; }
  const Json& options() const { return options_; }
  std::string Name() const;  // "latte {"latents":6}"
  int64_t heads() const { return dims_.heads; }
  int64_t width() const { return dims_.dim / dims_.heads; }  // of the output, per head
  // With its parameters as numbers of this type: the same values.
  Mechanism& In(at::ScalarType dtype);

  // Forms that can be run: causal and cross need the verbs, and some options leave one out.
  bool Has(Form form) const;
  const Mechanism& mechanism() const { return *mechanism_; }
  const AttentionDims& dims() const { return dims_; }
  // Why a row of a batch need not be what it is alone and without padding; empty: it has to be.
  std::string RowsDepend() const;
  Tensors Inputs(int64_t batch, int64_t length, double scale = 1) const;
  at::Tensor Weights(int64_t batch,
                     int64_t length) const;  // [B,H,T,d], to make one number of an output
  // The last ones are remembered: every implementation is compared with the same.
  at::Tensor Definition(Form form, const Tensors& queries, const Tensors& x);
  // How far an output may be from the definition, relative RMS: what the mechanism declares in
  // float, plus 2^-22 of logits up to 4; 1e-12 in double, and as much more as the mechanism
  // declares above the usual 1e-6.
  double Tolerance(at::ScalarType dtype) const;
  // The same plus 16 times what rounding the inputs and the parameters to this type once would
  // change: for problems that are ill conditioned.
  double Tolerance(at::ScalarType dtype, Form form, const Tensors& queries, const Tensors& x);
  // The same, where `define` says what the outputs are: it gives `want` for the inputs, and is
  // asked once more with these rounded.
  double Tolerance(at::ScalarType dtype, const Tensors& inputs, const at::Tensor& want,
                   const std::function<at::Tensor(const Tensors&)>& define);

 private:
  struct Known {
    Form form;
    Tensors inputs;  // queries, then x
    at::Tensor out;
  };

  const MechanismInfo& info_;
  Json options_;
  uint64_t seed_;
  AttentionDims dims_;
  std::shared_ptr<Mechanism> mechanism_;
  at::ScalarType dtype_ = at::kDouble;
  std::deque<Known> known_;
};

// Normal numbers that float holds exactly, as doubles.
at::Tensor Normal(at::IntArrayRef sizes, double scale = 1);

Tensors Narrow(const Tensors& x, int64_t begin, int64_t count);  // tokens
Tensors Rows(const Tensors& x, int64_t begin, int64_t count = 1);
Tensors Cast(const Tensors& x, at::ScalarType dtype);
Tensors Leaves(const Tensors& x);
Tensors Joined(const Tensors& a, const Tensors& b);  // b's tokens after a's
// The same numbers in [B,T,H,w] memory between NaNs, as one product of all projections leaves them.
Tensors HeadsLast(const Tensors& x);

at::Tensor LengthsOf(const std::vector<int64_t>& lengths);
// [B,T] bool, true at the given (row, token).
at::Tensor StartsAt(int64_t batch, int64_t length,
                    const std::vector<std::pair<int64_t, int64_t>>& at);

// The whole at once. Cross writes x and reads with the queries; elsewhere these are x.
at::Tensor Whole(Mechanism& m, Form form, const Tensors& queries, const Tensors& x,
                 const ops::Mask& mask = {});
// Extends piece by piece from the empty state; cuts begin with 0 and end with the length. The last
// state is left in `state`.
at::Tensor Pieces(Mechanism& m, const Tensors& x, const std::vector<int64_t>& cuts,
                  const ops::Mask& mask = {}, State* state = nullptr);
std::vector<int64_t> EachToken(int64_t length);

// A row's documents; those of a packed batch are each alone.
struct Document {
  int64_t row, begin, count;
};
std::vector<Document> DocumentsOf(const ops::Mask& mask, int64_t batch, int64_t length);
// The definition of a padded or packed batch, document by document; padding gives zeros.
at::Tensor DefinitionOf(Subject& subject, Form form, const Tensors& x, const ops::Mask& mask);

// Gradients in the order of x, zeros where there is none.
Tensors Gradients(const at::Tensor& loss, const Tensors& x);

}  // namespace cistern::verify
