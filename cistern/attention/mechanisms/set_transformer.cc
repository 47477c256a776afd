#include "cistern/attention/mechanisms/set_transformer.h"

namespace cistern {

MechanismInfo set_transformer_mechanism() {
  MechanismInfo i = InfoOf<SetTransformerMechanism>("set_transformer");
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
  i.positions = AddedPositions();
  i.time = "O(T M d)";
  i.state = "none";
  i.cases = {Json{{"slots", 3}}};
  return i;
}

Fields SetTransformerMechanism::Describe(Options& options) {
  options.init = MemoryInit::kXavier;
  options.tie_kv = false;
  options.sharing = Sharing::kQueryKey;
  options.packed_output = PackedOutput::kOwn;
  Fields f;
  MemoryMechanism::Describe(options, f);
  return f;
}

SetTransformerMechanism::SetTransformerMechanism(const MechanismInfo& info, const Options& options,
                                                 const AttentionDims& dims)
    : LunaMechanism(info, options, dims) {}

}  // namespace cistern
