#include "cistern/attention/mechanisms/abc_compressive.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "cistern/base/error.h"

namespace cistern {

const MechanismInfo& abc_compressive_mechanism() {
  static MechanismInfo info = [] {
    MechanismInfo i;
    i.name = "abc_compressive";
    i.title = "ABC, compressive";
    i.source = "P003 Table 1, App. A; causal ours; spec 2.14";
    i.summary =
        "Each slot is the mean of c neighbouring tokens; a query attends to the n slots by "
        "softmax. c follows from the longest length; "
        "what lies beyond joins the last slot.";
    i.definition =
        "as abc_mlp, phi_s = e_i / c, i = floor(s / c), c = ceil(N / n), the last slot over its "
        "true count";
    i.forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
    i.positions = {"none", "learned", "sinusoidal"};
    i.time = "O(T n d)";
    i.state = "n (2 d + 1) per head";
    i.cases = {Json{{"slots", 3}, {"ratio", 4}},
               Json{{"slots", 3}, {"ratio", 4}, {"divisor", "ratio"}},
               Json{{"slots", 4}, {"ratio", 8}, {"empty_slots", "take_part"}}, Json{{"slots", 5}}};
    return i;
  }();
  static const bool bound = (BindMechanism<AbcCompressiveMechanism>(info), true);
  (void)bound;
  return info;
}

Fields AbcCompressiveMechanism::Describe(Options& options) {
  Fields f;
  DescribeMemory(f, options.memory);
  f.Add("ratio", &options.ratio,
        "tokens pooled into a slot (c); 0 takes max_length / slots, rounded up", {0, 1 << 24});
  f.Add(
      "divisor", &options.divisor,
      "of a slot's sum: the count of tokens so far, or the ratio c also while a slot fills (P003) "
      "and where the last one, which takes all tokens beyond n c, holds more than c",
      {"count", "ratio"});
  return f;
}

AbcCompressiveMechanism::AbcCompressiveMechanism(const MechanismInfo& info, const Options& options,
                                                 const AttentionDims& dims)
    : AbcMechanism(info, options.memory, Weights::kByPosition, dims),
      ratio_(options.ratio > 0 ? options.ratio : (dims.max_length + slots() - 1) / slots()),
      by_ratio_(options.divisor == "ratio") {
  if (ratio_ < 1)
    FailUsage(
        "[abc_compressive] ratio=0 needs the model's max_length; set ratio to the tokens of a slot "
        "instead");
}

at::Tensor AbcCompressiveMechanism::LogWeights(const std::vector<at::Tensor>& x,
                                               const at::Tensor& positions) const {
  const at::Tensor slot = at::floor_divide(positions, ratio_).clamp_max(slots() - 1);
  return OneHotLogWeights(slot, slots(), x[1].options())
      .unsqueeze(1)
      .expand({-1, dims().heads, -1, -1});
}

at::Tensor AbcCompressiveMechanism::DefinedWeights(Form,
                                                   const std::vector<at::Tensor>& seen) const {
  const int64_t length = seen[1].size(2);
  const at::Tensor phi = at::zeros({slots(), length}, seen[1].options());
  for (int64_t l = 0; l < slots(); ++l) {
    const int64_t begin = std::min(l * ratio_, length),
                  end = l + 1 == slots() ? length : std::min(begin + ratio_, length);
    if (begin < end)
      phi[l].narrow(0, begin, end - begin).fill_(1.0 / double(by_ratio_ ? ratio_ : end - begin));
  }
  return phi.expand({seen[1].size(0), seen[1].size(1), -1, -1});
}

}  // namespace cistern
