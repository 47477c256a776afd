#include "cistern/attention/mechanisms/rfa_gate.h"

namespace cistern {

MechanismInfo rfa_gate_mechanism() {
  MechanismInfo i = InfoOf<RfaGateMechanism>("rfa_gate");
  i.title = "Random feature attention with a gate";
  i.source = "Peng et al. 2021 sec. 3.3; spec 2.5";
  i.summary =
      "Random feature attention whose memory decays by a learned gate of each token, so that "
      "recent tokens weigh more. Its denominator keeps |z| >= 1e-6, not 1e-3 as rfa's: gated "
      "weights sum to one at most.";
  i.definition =
      "S_t = g_t S_{t-1} + (1 - g_t) phi(k_t) v_t^T, z_t likewise, g_t = sigmoid(w_g . x_t + "
      "b_g); y_t as rfa";
  i.forms = {Form::kCausal};
  i.refusals = {
      "bidirectional: its gate forgets what is further back, and a token in the middle has no "
      "back; use rfa instead",
      "cross: its gate favours what was written last, and no source token is nearest to a query; "
      "use rfa instead"};
  i.stochastic = true;
  i.positions = AllPositions();
  i.time = "O(T m d)";
  i.state = "2 m (d + 1) per head; arccos m (d + 1)";
  i.cases = {Json{{"features", 32}}, Json{{"features", 12}, {"kernel", "arccos"}, {"tau", 0.8}}};
  i.tolerance = 5e-5;  // as rfa
  return i;
}

Fields RfaGateMechanism::Describe(Options& options) {
  Fields f;
  f.Add("features", &options.features,
        "random projections of each head (m); 0 takes the width of a head", {0, 65536});
  options.DescribeFeatures(f);
  f.Add("tau", &options.tau,
        "width of the Gaussian kernel; the temperature of the softmax is its square", {1e-3, 1e3});
  options.DescribeBank(f);
  f.Add("gate_bias", &options.gate_bias,
        "the gate's map has its bias b_g, whatever the model's `bias` says; false: as the model's "
        "other maps");
  return f;
}

RfaGateMechanism::RfaGateMechanism(const MechanismInfo& info, const Options& options,
                                   const AttentionDims& dims)
    : RfaMechanism(info, options, dims, true) {}

}  // namespace cistern
