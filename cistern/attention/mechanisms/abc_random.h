#pragma once
// ABC with random writes (P003's RD, App. A.2; spec 2.14): each token goes to one slot drawn
// uniformly, keys and values to the same one, and slots hold plain sums (or, with `mean`, means).
// A draw is a function of (key, layer, self or cross attention, head, position in the document).
// The key is `seed` in evaluation; in training every row of a sequence begun empty draws its own
// from torch's generator, which the trainer seeds by (seed, step), and the state keeps it. So
// pieces of a sequence draw what the whole draws, whatever else is drawn between them.
#include "cistern/attention/abc_memory.h"

namespace cistern {

class AbcRandomMechanism : public AbcMechanism {
 public:
  struct Options {
    MemoryOptions memory;
    bool mean = false;
    int64_t seed = 0;
  };
  static Fields Describe(Options& options);
  AbcRandomMechanism(const MechanismInfo& info, const Options& options, const AttentionDims& dims);

  // As AbcMechanism's, and draw [B] int64: the key of a row's draws, -1 in evaluation.
  State EmptyState(int64_t batch, const at::TensorOptions& options) const override;

 protected:
  at::Tensor LogWeights(const std::vector<at::Tensor>& x, const Piece& piece) const override;
  bool HoldsSums() const override { return !mean_; }
  at::Tensor DefinedWeights(Form form, const std::vector<at::Tensor>& seen) const override;

 private:
  bool mean_;
  int64_t seed_;
  StateId draw_;
};

}  // namespace cistern
