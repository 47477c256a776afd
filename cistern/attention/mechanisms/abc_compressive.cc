#include "cistern/attention/mechanisms/abc_compressive.h"

#include <ATen/ATen.h>

#include "cistern/base/error.h"

namespace cistern {

MechanismInfo abc_compressive_mechanism() {
  MechanismInfo i = InfoOf<AbcCompressiveMechanism>("abc_compressive");
  i.title = "ABC, compressive";
  i.source = "P003 Table 1, App. A; causal ours; spec 2.14";
  i.summary =
      "Each slot is the mean of c neighbouring tokens; a query attends to the n slots by "
      "softmax. c follows from the model's longest length or from the row's own (`length`); "
      "what lies beyond n c tokens joins the last slot.";
  i.definition =
      "as abc_mlp, phi_s = e_i / c, i = floor(s / c), c = ceil(N / n), the last slot over its "
      "true count";
  i.forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
  i.positions = AddedPositions();
  i.slots = true;
  i.time = "O(T n d)";
  i.state = "n (2 d + 1) per head";
  i.cases = {Json{{"slots", 3}, {"ratio", 4}},
             Json{{"slots", 3}, {"ratio", 4}, {"divisor", "ratio"}},
             Json{{"slots", 4}, {"ratio", 8}, {"empty_slots", "take_part"}},
             Json{{"slots", 5}},
             Json{{"slots", 5}, {"length", "row"}},
             Json{{"slots", 4}, {"length", "row"}, {"divisor", "ratio"}}};
  return i;
}

Fields AbcCompressiveMechanism::Describe(Options& options) {
  Fields f;
  DescribeMemory(f, options.memory);
  f.Add("ratio", &options.ratio, "tokens pooled into a slot (c); 0 takes N / slots, rounded up",
        {0, 1 << 24});
  f.Add("length", &options.length,
        "N where ratio is 0: the model's max_length, or the tokens of the row itself as in the "
        "source (row), so that a short row fills its slots too. A row's own length is known to "
        "the bidirectional form, and to the cross form where the source is written at once",
        {{Length::kModel, "max_length"}, {Length::kRow, "row"}});
  f.Add(
      "divisor", &options.divisor,
      "of a slot's sum: the count of tokens so far, or the ratio c also while a slot fills (P003) "
      "and where the last one, which takes all tokens beyond n c, holds more than c: that slot is "
      "then more than a mean",
      {{Divisor::kCount, "count"}, {Divisor::kRatio, "ratio"}});
  return f;
}

AbcCompressiveMechanism::AbcCompressiveMechanism(const MechanismInfo& info, const Options& options,
                                                 const AttentionDims& dims)
    : AbcMechanism(info, options.memory,
                   options.length == Length::kRow ? Weights::kByLength : Weights::kByPosition,
                   dims),
      ratio_(options.ratio > 0                ? options.ratio
             : options.length == Length::kRow ? 0
                                              : (dims.max_length + slots() - 1) / slots()),
      by_ratio_(options.divisor == Divisor::kRatio) {
  if (options.length == Length::kRow && options.ratio > 0) {
    FailUsage("[abc_compressive] ratio=", options.ratio,
              " says how many tokens a slot has, so that length=row has nothing to decide; set one "
              "of them");
  }
  if (ratio_ < 1 && options.length != Length::kRow)
    FailUsage(
        "[abc_compressive] ratio=0 needs the model's max_length; set ratio to the tokens of a slot "
        "instead");
}

at::Tensor AbcCompressiveMechanism::Ratio(const at::Tensor& tokens) const {
  if (ratio_ > 0) return at::full({1}, ratio_, at::kLong);
  return at::floor_divide(tokens + (slots() - 1), slots()).clamp_min(1);
}

at::Tensor AbcCompressiveMechanism::SumDivisor(const at::Tensor& tokens) const {
  if (ratio_ > 0) return at::full({}, double(ratio_), at::kDouble);
  return Ratio(tokens).to(at::kDouble).view({-1, 1, 1, 1});
}

at::Tensor AbcCompressiveMechanism::LogWeights(const std::vector<at::Tensor>& x,
                                               const Piece& piece) const {
  const at::Tensor ratio = ratio_ > 0 ? at::full({}, ratio_, piece.positions.options())
                                      : Ratio(piece.lengths).unsqueeze(1);
  const at::Tensor slot = at::floor_divide(piece.positions, ratio).clamp_max(slots() - 1);
  return OneHotLogWeights(slot, slots(), x[k_].options())
      .unsqueeze(1)
      .expand({-1, dims().heads, -1, -1});
}

at::Tensor AbcCompressiveMechanism::DefinedWeights(Form,
                                                   const std::vector<at::Tensor>& seen) const {
  const int64_t length = seen[k_].size(2), n = slots();
  int64_t c = ratio_;
  if (c == 0) {  // the smallest with n c >= N: N is padded up to a multiple of n
    c = 1;
    while (n * c < length) ++c;
  }
  const at::Tensor phi = at::zeros({n, length}, seen[k_].options());
  std::vector<int64_t> slot_of(static_cast<size_t>(length)), count(static_cast<size_t>(n), 0);
  for (int64_t t = 0; t < length; ++t) {
    const int64_t slot = t / c < n ? t / c : n - 1;
    slot_of[size_t(t)] = slot;
    ++count[size_t(slot)];
  }
  for (int64_t t = 0; t < length; ++t) {
    const int64_t slot = slot_of[size_t(t)];
    phi[slot][t].fill_(1.0 / double(by_ratio_ ? c : count[size_t(slot)]));
  }
  return phi.expand({seen[k_].size(0), seen[k_].size(1), -1, -1});
}

}  // namespace cistern
