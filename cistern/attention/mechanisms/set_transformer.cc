#include "cistern/attention/mechanisms/set_transformer.h"

namespace cistern {

const MechanismInfo& set_transformer_mechanism() {
  static MechanismInfo info = [] {
    MechanismInfo i;
    i.name = "set_transformer";
    i.title = "Set-Transformer-like attention";
    i.source = "P000 sec. 2; Lee et al. 2019; spec 2.10";
    i.summary =
        "Luna whose blocks all begin with the same learned memory: what one packed is not handed "
        "on.";
    i.definition =
        "y_t = softmax(q_t Y^T / sqrt(d)) Y, Y_m = softmax(p_m K^T / sqrt(d)) V over the tokens, "
        "the same P in every block";
    i.forms = {Form::kBidirectional};
    i.refusals = {
        "causal: its slots attend to all tokens at once; use luna_causal instead",
        "cross: no source defines it; use luna instead, whose cross attention computes the same"};
    i.verbs = false;
    i.memory = MemoryUse::kFixed;
    i.positions = {"none", "learned", "sinusoidal"};
    i.time = "O(T M d)";
    i.state = "none";
    i.cases = {Json{{"slots", 3}}};
    return i;
  }();
  static const bool bound = (BindMechanism<SetTransformerMechanism>(info), true);
  (void)bound;
  return info;
}

Fields SetTransformerMechanism::Describe(Options& options) {
  options.init = "xavier";
  options.tie_kv = false;
  options.sharing = "query_key";
  options.packed_output = "own";
  Fields f;
  MemoryMechanism::Describe(options, f);
  return f;
}

SetTransformerMechanism::SetTransformerMechanism(const MechanismInfo& info, const Options& options,
                                                 const AttentionDims& dims)
    : LunaMechanism(info, options, dims) {}

}  // namespace cistern
