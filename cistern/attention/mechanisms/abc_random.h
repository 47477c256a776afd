#pragma once
// ABC with random writes (P003's RD, App. A.2; spec 2.14): each token goes to one slot drawn
// uniformly, keys and values to the same one, and slots hold plain sums (or, with `mean`, means).
// In training slots are drawn anew at every call, from torch's generator; in evaluation the draw is
// fixed by (seed, layer, self or cross attention, head, position in the document).
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

 protected:
  at::Tensor LogWeights(const std::vector<at::Tensor>& x,
                        const at::Tensor& positions) const override;
  bool HoldsSums() const override { return !mean_; }
  at::Tensor DefinedWeights(Form form, const std::vector<at::Tensor>& seen) const override;

 private:
  int64_t Draw(int64_t head, int64_t position) const;  // the slot, in evaluation

  bool mean_;
  int64_t seed_;
};

}  // namespace cistern
