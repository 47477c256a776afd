#pragma once
// Local-to-global attention as ABC (P003 App. A.1; spec 2.14): n tokens chosen by their position
// are global, and every query attends to the global tokens alone. Despite its name there is no
// local window.
#include "cistern/attention/abc_memory.h"

namespace cistern {

class LocalToGlobalMechanism : public AbcMechanism {
 public:
  enum class Length { kModel, kRow };
  struct Options {
    MemoryOptions memory;
    int64_t stride =
        1;  // the i-th global token stands at position i * stride; 0: N / slots, at least 1
    Length length = Length::kModel;  // N: max_length, or the row's own
  };
  static Fields Describe(Options& options);
  LocalToGlobalMechanism(const MechanismInfo& info, const Options& options,
                         const AttentionDims& dims);

 protected:
  at::Tensor LogWeights(const std::vector<at::Tensor>& x, const Piece& piece) const override;
  at::Tensor DefinedWeights(Form form, const std::vector<at::Tensor>& seen) const override;

 private:
  int64_t stride_;  // 0: of the row
};

}  // namespace cistern
