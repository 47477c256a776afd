#include "cistern/attention/mechanisms/local_to_global.h"

#include <ATen/ATen.h>

#include "cistern/base/error.h"

namespace cistern {

MechanismInfo local_to_global_mechanism() {
  MechanismInfo i = InfoOf<LocalToGlobalMechanism>("local_to_global");
  i.title = "Local to global";
  i.source = "P003 App. A.1; spec 2.14";
  i.summary =
      "Every token attends to n global tokens, the first ones or every stride-th, and to no "
      "others. The control that shows what a memory "
      "filled by position alone can do.";
  i.definition = "y_t = sum_i softmax_i(q_t . k_i / sqrt(d)) v_i over the global tokens i <= t";
  i.forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
  i.positions = AddedPositions();
  i.time = "O(T n d)";
  i.state = "n (2 d + 1) per head";
  i.cases = {Json{{"slots", 4}}, Json{{"slots", 4}, {"stride", 3}},
             Json{{"slots", 4}, {"stride", 3}, {"empty_slots", "take_part"}},
             Json{{"slots", 6}, {"stride", 0}},
             Json{{"slots", 6}, {"stride", 0}, {"length", "row"}}};
  return i;
}

Fields LocalToGlobalMechanism::Describe(Options& options) {
  Fields f;
  DescribeMemory(f, options.memory);
  f.Add("stride", &options.stride,
        "every stride-th token is global until the slots are full; 0 spreads them over N: every "
        "floor(N / n)-th",
        {0, 1 << 24});
  f.Add("length", &options.length,
        "N where stride is 0: the model's max_length, or the tokens of the row itself (row), which "
        "the bidirectional form knows, and the cross form where the source is written at once",
        {{Length::kModel, "max_length"}, {Length::kRow, "row"}});
  return f;
}

LocalToGlobalMechanism::LocalToGlobalMechanism(const MechanismInfo& info, const Options& options,
                                               const AttentionDims& dims)
    : AbcMechanism(info, options.memory,
                   options.length == Length::kRow ? Weights::kByLength : Weights::kByPosition,
                   dims),
      stride_(options.stride > 0               ? options.stride
              : options.length == Length::kRow ? 0
                                               : dims.max_length / slots()) {
  if (options.length == Length::kRow && options.stride > 0) {
    FailUsage("[local_to_global] stride=", options.stride,
              " says which tokens are global, so that length=row has nothing to decide; set "
              "stride=0 with it");
  }
  if (stride_ < 1 && options.length != Length::kRow) {
    FailUsage("[local_to_global] stride=0 needs max_length of at least slots=", slots(), ", got ",
              dims.max_length, "; set stride to the distance between global tokens instead");
  }
}

at::Tensor LocalToGlobalMechanism::LogWeights(const std::vector<at::Tensor>& x,
                                              const Piece& piece) const {
  const at::Tensor& positions = piece.positions;
  const at::Tensor stride =
      stride_ > 0 ? at::full({}, stride_, positions.options())
                  : at::floor_divide(piece.lengths, slots()).clamp_min(1).unsqueeze(1);
  const at::Tensor slot =
      at::floor_divide(positions, stride).masked_fill(positions.remainder(stride) != 0, -1);
  return OneHotLogWeights(slot, slots(), x[k_].options())
      .unsqueeze(1)
      .expand({-1, dims().heads, -1, -1});
}

at::Tensor LocalToGlobalMechanism::DefinedWeights(Form, const std::vector<at::Tensor>& seen) const {
  const int64_t length = seen[k_].size(2);
  const at::Tensor phi = at::zeros({slots(), length}, seen[k_].options());
  int64_t stride = stride_;
  if (stride == 0) {  // the largest with n strides in the row
    stride = 1;
    while (slots() * (stride + 1) <= length) ++stride;
  }
  for (int64_t l = 0; l < slots() && l * stride < length; ++l) phi[l][l * stride].fill_(1.0);
  return phi.expand({seen[k_].size(0), seen[k_].size(1), -1, -1});
}

}  // namespace cistern
