#include "cistern/attention/mechanisms/rfa_gate.h"

#include <limits>

namespace cistern {

const MechanismInfo& rfa_gate_mechanism() {
  static MechanismInfo info = [] {
    MechanismInfo i;
    i.name = "rfa_gate";
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
    i.positions = {"none", "learned", "sinusoidal", "rotary"};
    i.time = "O(T m d)";
    i.state = "2 m (d + 1) per head; arccos m (d + 1)";
    i.cases = {Json{{"features", 32}}, Json{{"features", 12}, {"kernel", "arccos"}, {"tau", 0.8}}};
    i.tolerance = 5e-5;  // as rfa
    return i;
  }();
  static const bool bound = (BindMechanism<RfaGateMechanism>(info), true);
  (void)bound;
  return info;
}

Fields RfaGateMechanism::Describe(Options& options) {
  Fields f;
  f.Add("features", &options.features,
        "random projections of each head (m); 0 takes the width of a head", {0, 65536});
  f.Add("kernel", &options.kernel, "sines and cosines, or relu", {"gaussian", "arccos"});
  f.Add("matrices", &options.matrices, "rows drawn alone, or orthogonal in blocks",
        {"iid", "orthogonal"});
  f.Add("tau", &options.tau,
        "width of the Gaussian kernel; the temperature of the softmax is its square", {1e-3, 1e3});
  f.Add("bank", &options.bank, "matrices that training draws from; 0: those of evaluation always",
        {0, 1 << 24});
  f.Add("seed", &options.seed, "of the bank", {0, std::numeric_limits<int64_t>::max()});
  return f;
}

RfaGateMechanism::RfaGateMechanism(const MechanismInfo& info, const Options& options,
                                   const AttentionDims& dims)
    : RfaMechanism(info, options, dims, true) {}

}  // namespace cistern
