#include "cistern/attention/mechanisms/perceiver.h"

#include <ATen/ATen.h>

#include <cmath>

namespace cistern {

const MechanismInfo& perceiver_mechanism() {
  static MechanismInfo info = [] {
    MechanismInfo i;
    i.name = "perceiver";
    i.title = "Perceiver";
    i.source = "Jaegle et al. 2021; P004 eq. 29; spec 2.9";
    i.summary =
        "Learned latents attend to the tokens; the layers after it, of any mechanism, run on the "
        "latents alone, whose number does not grow "
        "with "
        "the text.";
    i.definition =
        "z_l = sum_s softmax_s(q_l . k_s / sqrt(d)) v_s, q from the latents, k and v from the "
        "tokens";
    i.forms = {Form::kBidirectional, Form::kCross};
    i.refusals = {
        "causal: its latents see all tokens; use latte instead, whose latents are causal"};
    i.memory = MemoryUse::kLatents;
    i.bounded = false;
    i.positions = {"none", "learned", "sinusoidal"};
    i.time = "O(T L d)";
    i.state = "2 T d per head";
    i.cases = {Json{{"latents", 4}}};
    return i;
  }();
  static const bool bound = (BindMechanism<PerceiverMechanism>(info), true);
  (void)bound;
  return info;
}

Fields PerceiverMechanism::Describe(Options& options) {
  Fields f;
  f.Add("latents", &options.latents, "latents that the stream has after the layer (L)", {1, 65536});
  f.Add("init", &options.init,
        "initial latents: N(0,1) as lucidrains, or N(0, 0.02^2) cut at two deviations as the paper",
        {"normal", "truncated"});
  return f;
}

PerceiverMechanism::PerceiverMechanism(const MechanismInfo& info, const Options& options,
                                       const AttentionDims& dims)
    : SoftmaxMechanism(info, {}, dims) {
  if (dims.first) return;
  at::Tensor initial = at::empty({1, options.latents, dims.dim});
  if (options.init == "normal") {
    initial.normal_();
  } else {
    const double inside = std::erf(std::sqrt(2.0));  // of a normal variable, within two deviations
    initial.uniform_(-inside, inside).erfinv_().mul_(std::sqrt(2.0) * 0.02);
  }
  AddWeight("latents", latents_, initial, CoreWeight::Kind::kTrained);
}

std::vector<Projection> PerceiverMechanism::Projections() const {
  const int64_t dim = dims().dim;
  return {{"q", Side::kQuery, dim}, {"k", Side::kKey, dim}, {"v", Side::kKey, dim}};
}

}  // namespace cistern
