#include "cistern/attention/mechanisms/dilated.h"

namespace cistern {

MechanismInfo dilated_mechanism() {
  MechanismInfo i = InfoOf<DilatedMechanism>("dilated");
  i.title = "Dilated window";
  i.source = "P003 App. A.4; bidirectional ours; spec 2.14";
  i.summary =
      "Exact attention to every second (or g-th) of the last tokens: a window reaches g times as "
      "far at the cost of a plain one. Beside "
      "plain windows or other mechanisms, since on its own it never sees the tokens between.";
  i.definition =
      "y_t = sum_s softmax_s(q_t . k_s / sqrt(d)) v_s over s = t, t-g, ..., t-(n-1)g; "
      "bidirectional to both sides";
  i.forms = {Form::kBidirectional, Form::kCausal};
  i.refusals = {
      "cross: a query of another sequence has no position among the keys to count from; use "
      "window or abc_compressive instead"};
  i.positions = AllPositions();
  i.time = "O(T n d)";
  i.state = "2 n g d per head";
  i.cases = {Json{{"window", 3}}, Json{{"window", 2}, {"dilation", 3}},
             Json{{"window", 4}, {"empty_slots", "take_part"}}};
  i.merges = true;
  return i;
}

Fields DilatedMechanism::Describe(Options& options) {
  Fields f;
  f.Add("window", &options.window, "tokens that a token sees, itself among them (n)", {1, 65536});
  f.Add("dilation", &options.dilation,
        "distance between them (g); the window reaches back (n-1) g tokens", {2, 1024});
  DescribeEmpty(f, options.empty_slots);
  return f;
}

DilatedMechanism::DilatedMechanism(const MechanismInfo& info, const Options& options,
                                   const AttentionDims& dims)
    : WindowMechanism(info, options.window, options.dilation, options.empty_slots, dims) {}

}  // namespace cistern
