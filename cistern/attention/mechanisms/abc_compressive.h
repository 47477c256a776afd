#pragma once
// ABC with mean pooling by position, the compressive transformer's memory (P003 Table 1 and App. A;
// spec 2.14): slot l holds the mean of tokens l c .. l c + c - 1 of the document. Table 1 of the
// paper has the slot off by one and leaves the 1/c out.
#include "cistern/attention/abc_memory.h"

namespace cistern {

class AbcCompressiveMechanism : public AbcMechanism {
 public:
  struct Options {
    MemoryOptions memory;
    int64_t ratio = 0;              // c, tokens of a slot; 0: max_length / slots, rounded up
    std::string divisor = "count";  // count, ratio
  };
  static Fields Describe(Options& options);
  AbcCompressiveMechanism(const MechanismInfo& info, const Options& options,
                          const AttentionDims& dims);

 protected:
  at::Tensor LogWeights(const std::vector<at::Tensor>& x,
                        const at::Tensor& positions) const override;
  bool HoldsSums() const override { return by_ratio_; }
  double SumDivisor() const override { return double(ratio_); }
  at::Tensor DefinedWeights(Form form, const std::vector<at::Tensor>& seen) const override;

 private:
  int64_t ratio_;
  bool by_ratio_;
};

}  // namespace cistern
