#include "cistern/attention/mechanisms/local_to_global.h"

#include <ATen/ATen.h>

#include "cistern/base/error.h"

namespace cistern {

const MechanismInfo& local_to_global_mechanism() {
  static MechanismInfo info = [] {
    MechanismInfo i;
    i.name = "local_to_global";
    i.title = "Local to global";
    i.source = "P003 App. A.1; spec 2.14";
    i.summary =
        "Every token attends to n global tokens, the first ones or every stride-th, and to no "
        "others. The control that shows what a memory "
        "filled by position alone can do.";
    i.definition = "y_t = sum_i softmax_i(q_t . k_i / sqrt(d)) v_i over the global tokens i <= t";
    i.forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
    i.positions = {"none", "learned", "sinusoidal"};
    i.time = "O(T n d)";
    i.state = "n (2 d + 1) per head";
    i.cases = {Json{{"slots", 4}}, Json{{"slots", 4}, {"stride", 3}},
               Json{{"slots", 4}, {"stride", 3}, {"empty_slots", "take_part"}},
               Json{{"slots", 6}, {"stride", 0}}};
    return i;
  }();
  static const bool bound = (BindMechanism<LocalToGlobalMechanism>(info), true);
  (void)bound;
  return info;
}

Fields LocalToGlobalMechanism::Describe(Options& options) {
  Fields f;
  DescribeMemory(f, options.memory);
  f.Add("stride", &options.stride,
        "every stride-th token is global until the slots are full; 0 spreads them over max_length",
        {0, 1 << 24});
  return f;
}

LocalToGlobalMechanism::LocalToGlobalMechanism(const MechanismInfo& info, const Options& options,
                                               const AttentionDims& dims)
    : AbcMechanism(info, options.memory, Weights::kByPosition, dims),
      stride_(options.stride > 0 ? options.stride : dims.max_length / slots()) {
  if (stride_ < 1) {
    FailUsage("[local_to_global] stride=0 needs max_length of at least slots=", slots(), ", got ",
              dims.max_length, "; set stride to the distance between global tokens instead");
  }
}

at::Tensor LocalToGlobalMechanism::LogWeights(const std::vector<at::Tensor>& x,
                                              const at::Tensor& positions) const {
  const at::Tensor slot =
      at::floor_divide(positions, stride_).masked_fill(positions.remainder(stride_) != 0, -1);
  return OneHotLogWeights(slot, slots(), x[1].options())
      .unsqueeze(1)
      .expand({-1, dims().heads, -1, -1});
}

at::Tensor LocalToGlobalMechanism::DefinedWeights(Form, const std::vector<at::Tensor>& seen) const {
  const int64_t length = seen[1].size(2);
  const at::Tensor phi = at::zeros({slots(), length}, seen[1].options());
  for (int64_t l = 0; l < slots() && l * stride_ < length; ++l) phi[l][l * stride_].fill_(1.0);
  return phi.expand({seen[1].size(0), seen[1].size(1), -1, -1});
}

}  // namespace cistern
