#include "cistern/attention/mechanisms/perceiver.h"

#include <ATen/ATen.h>

#include <cmath>

#include "cistern/base/error.h"

namespace cistern {

MechanismInfo perceiver_mechanism() {
  MechanismInfo i = InfoOf<PerceiverMechanism>("perceiver");
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
  i.refusals = {"causal: its latents see all tokens; use latte instead, whose latents are causal"};
  i.memory = MemoryUse::kLatents;
  i.bounded = false;
  i.positions = AddedPositions();
  i.time = "O(T L d)";
  i.state = "2 T d per head";
  i.cases = {Json{{"latents", 4}}, Json{{"latents", 3}, {"queries", "latents"}}};
  return i;
}

namespace {

// The heads of this layer may be others than the model's: lucidrains has one of width 64.
AttentionDims OwnHeads(const MechanismInfo& info, const PerceiverMechanism::Options& options,
                       AttentionDims dims) {
  const int64_t model = dims.Model();
  if (options.heads > 0) dims.heads = options.heads;
  if (options.head_dim > 0) dims.dim = dims.heads * options.head_dim;
  if (dims.dim % dims.heads != 0)
    FailUsage("[", info.name, "] heads=", dims.heads, " does not divide the width ", dims.dim,
              "; give head_dim");
  if (options.queries == PerceiverMechanism::Queries::kLatents && dims.dim != model)
    FailUsage("[", info.name, "] queries=latents are as wide as the model, ", model,
              ", and the heads together are ", dims.dim, "; use queries=mapped");
  dims.model = model == dims.dim ? 0 : model;
  return dims;
}

}  // namespace

Fields PerceiverMechanism::Describe(Options& options) {
  Fields f;
  f.Add("latents", &options.latents, "latents that the stream has after the layer (L)", {1, 65536});
  f.Add("init", &options.init,
        "initial latents: N(0,1) as lucidrains, or N(0, 0.02^2) cut at two deviations as the paper",
        {{Init::kNormal, "normal"}, {Init::kTruncated, "truncated"}});
  f.Add("heads", &options.heads,
        "heads by which the latents attend to the tokens, 1 in lucidrains; 0: the model's",
        {0, 1024});
  f.Add("head_dim", &options.head_dim,
        "width of each of these heads, 64 in lucidrains; 0: the layer's width, shared out",
        {0, 65536});
  f.Add("queries", &options.queries,
        "made of the latents by a linear map, or the latents themselves (P004 eq. 29)",
        {{Queries::kMapped, "mapped"}, {Queries::kLatents, "latents"}});
  DescribeFourier(f, options.fourier);
  return f;
}

PerceiverMechanism::PerceiverMechanism(const MechanismInfo& info, const Options& options,
                                       const AttentionDims& dims)
    : SoftmaxMechanism(info, OwnHeads(info, options, dims),
                       Setup{.own_heads = options.heads > 0 ? options.heads : dims.heads,
                             .rotary = false,
                             .map_queries = options.queries == Queries::kMapped}),
      fourier_(options.fourier.bands > 0) {
  if (!fourier_ && options.fourier.max_freq != FourierOptions().max_freq)
    FailUsage("[perceiver] fourier_max_freq=", options.fourier.max_freq,
              " has no effect without frequencies; give fourier_bands");
  if (dims.first) return;
  at::Tensor initial = at::empty({1, options.latents, dims.Model()});
  if (options.init == Init::kNormal) {
    initial.normal_();
  } else {
    const double inside = std::erf(std::sqrt(2.0));  // of a normal variable, within two deviations
    initial.uniform_(-inside, inside).erfinv_().mul_(std::sqrt(2.0) * 0.02);
  }
  AddWeight("latents", latents_, initial, CoreWeight::Kind::kTrained);
}

std::string PerceiverMechanism::FormRefusal(Form form) const {
  if (!fourier_ || form != Form::kCross) return "";
  return "cross form with fourier_bands: they stand beside the tokens of an encoder's first layer, "
         "and a source comes without positions; use fourier_bands=0";
}

}  // namespace cistern
