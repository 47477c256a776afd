#pragma once
// ABC with mean pooling by position, the compressive transformer's memory (P003 Table 1 and App. A;
// spec 2.14): slot l holds the mean of tokens l c .. l c + c - 1 of the document. Table 1 of the
// paper has the slot off by one and leaves the 1/c out.
#include "cistern/attention/abc_memory.h"

namespace cistern {

class AbcCompressiveMechanism : public AbcMechanism {
 public:
  enum class Divisor { kCount, kRatio };
  enum class Length { kModel, kRow };
  struct Options {
    MemoryOptions memory;
    int64_t ratio = 0;               // c, tokens of a slot; 0: N / slots, rounded up
    Length length = Length::kModel;  // N: max_length, or the row's own
    Divisor divisor = Divisor::kCount;
  };
  static Fields Describe(Options& options);
  AbcCompressiveMechanism(const MechanismInfo& info, const Options& options,
                          const AttentionDims& dims);

 protected:
  at::Tensor LogWeights(const std::vector<at::Tensor>& x, const Piece& piece) const override;
  bool HoldsSums() const override { return by_ratio_; }
  at::Tensor SumDivisor(const at::Tensor& tokens) const override;
  at::Tensor DefinedWeights(Form form, const std::vector<at::Tensor>& seen) const override;

 private:
  at::Tensor Ratio(const at::Tensor& tokens) const;  // [B], or [1] where all rows have the same

  int64_t ratio_;  // 0: of the row
  bool by_ratio_;
};

}  // namespace cistern
