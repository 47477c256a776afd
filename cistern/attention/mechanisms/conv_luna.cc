#include "cistern/attention/mechanisms/conv_luna.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

#include "cistern/attention/definition.h"
#include "cistern/base/error.h"
#include "cistern/ops/short_conv.h"
#include "cistern/ops/softmax_attention.h"
#include "cistern/ops/tensor_rows.h"

namespace cistern {
namespace {

constexpr double kMinusInf = -std::numeric_limits<double>::infinity();

template <class M>
MechanismInfo ConvLunaInfo(const std::string& name, const std::string& title,
                           const std::string& summary) {
  MechanismInfo i = InfoOf<M>(name);
  i.title = title;
  i.source = "P000 sec. 3; spec 2.11";
  i.summary = summary;
  i.definition =
      "y_t = softmax(q_t Y^T / sqrt(d)) Y, Y_m = softmax(p_m F(K)^T / e^tau) F(V) over the "
      "filtered tokens, F a convolution or a maximum "
      "of K "
      "tokens";
  i.forms = {Form::kBidirectional};
  i.refusals = {"causal: its memory has seen the whole input; use luna_causal or latte instead",
                "cross: its filter runs along the tokens that are written, and no source defines "
                "it; use luna instead"};
  i.verbs = false;
  i.memory = MemoryUse::kStream;
  i.positions = AddedPositions();
  i.time = "O(T M d (1 + 1/S) + T K d)";
  i.state = "none";
  return i;
}

}  // namespace

MechanismInfo conv_luna_mechanism() {
  MechanismInfo i =
      ConvLunaInfo<ConvLunaMechanism>("conv_luna", "ConvLuna",
                                      "Luna with a learned filter along the tokens and a learned "
                                      "temperature where the memory attends to them, which keeps "
                                      "its slots apart.");
  i.cases = {Json{{"slots", 3}, {"kernel", 4}},
             Json{{"slots", 2},
                  {"kernel", 5},
                  {"temperature", "sqrt"},
                  {"values", "separate"},
                  {"init", "embedding"}},
             Json{{"slots", 3}, {"kernel", 4}, {"filter", "maxpool"}, {"unpack_scale", "unit"}},
             Json{{"slots", 3},
                  {"kernel", 3},
                  {"stride", 2},
                  {"temperature", "unit"},
                  {"values", "shared"}},
             Json{{"slots", 2}, {"kernel", 3}, {"stride", 4}, {"filter", "maxpool"}},
             Json{{"slots", 3}, {"mask", "none"}}};
  return i;
}

MechanismInfo only_scaling_mechanism() {
  MechanismInfo i =
      ConvLunaInfo<OnlyScalingMechanism>("only_scaling", "ConvLuna's ablation OnlyScaling",
                                         "ConvLuna without its filter: the temperature alone.");
  i.cases = {Json{{"slots", 3}}};
  return i;
}

MechanismInfo only_filtering_mechanism() {
  MechanismInfo i = ConvLunaInfo<OnlyFilteringMechanism>(
      "only_filtering", "ConvLuna's ablation OnlyFiltering",
      "ConvLuna with the divisor fixed at sqrt(d): the filter alone.");
  i.cases = {Json{{"slots", 3}, {"kernel", 4}},
             Json{{"slots", 3}, {"kernel", 4}, {"filter", "maxpool"}}};
  return i;
}

Fields ConvLunaMechanism::DescribeAll(Options& options, bool filter, bool temperature) {
  Fields f;
  MemoryMechanism::Describe(options, f);
  if (filter) {
    f.Add("filter", &options.filter,
          "along the tokens: a convolution with weights for each head, or the largest of each "
          "channel",
          {{FilterKind::kConv, "conv"}, {FilterKind::kMaxpool, "maxpool"}});
    f.Add("kernel", &options.kernel,
          "tokens the filter covers (K); 1: no filter. P000 has 4, and 32 for ListOps", {1, 4096});
    f.Add("stride", &options.stride, "tokens from one filtered key to the next (S)", {1, 4096});
  }
  f.Add("mask", &options.mask,
        "tokens: padding is left out, and a row of n tokens gives ceil(n/S) filtered keys, however "
        "long its batch; none, P000's published runs: padding is packed, and reads, like any "
        "token, so its number changes results (task.pad_to=length fixes it), and a length of T "
        "gives floor((T-K)/S) + 1 keys (T with a convolution of stride 1)",
        {{Masking::kTokens, "tokens"}, {Masking::kNone, "none"}});
  if (temperature) {
    f.Add("temperature", &options.temperature,
          "packing's logits are divided by a learned e^tau, at first 1, or by a fixed 1 or sqrt(d)",
          {{Temperature::kLearn, "learn"},
           {Temperature::kUnit, "unit"},
           {Temperature::kSqrt, "sqrt"}});
  }
  f.Add("unpack_scale", &options.unpack_scale,
        "unpacking's logits are divided by sqrt(d) as in P000, or by nothing as in its code (unit)",
        {{UnpackScale::kPaper, "paper"}, {UnpackScale::kUnit, "unit"}});
  f.Add("values", &options.values,
        "the stream itself as in P000, or a map of it that packing and unpacking share, or one for "
        "each",
        {{Values::kIdentity, "identity"},
         {Values::kShared, "shared"},
         {Values::kSeparate, "separate"}});
  return f;
}

Fields ConvLunaMechanism::Describe(Options& options) { return DescribeAll(options, true, true); }
Fields OnlyScalingMechanism::Describe(Options& options) {
  options.kernel = 1;
  return DescribeAll(options, false, true);
}
Fields OnlyFilteringMechanism::Describe(Options& options) {
  options.temperature = Temperature::kSqrt;
  return DescribeAll(options, true, false);
}

ConvLunaMechanism::ConvLunaMechanism(const MechanismInfo& info, const Options& options,
                                     const AttentionDims& dims)
    : MemoryMechanism(info, options, dims), options_(options) {
  const bool identity = options.values == Values::kIdentity;
  const auto add = [&](const std::string& name, Side side, const std::string& map = "") {
    Projection p = {name, side, dims.dim};
    p.map = map;
    p.identity = identity && (name == "v" || name == "packed_v");
    return AddProjection(p);
  };
  q_ = add("q", Side::kQuery);
  k_ = add("k", Side::kKey);
  v_ = add("v", Side::kKey);
  memory_q_ = add("memory_q", Side::kMemory, "q");
  packed_k_ = add("packed_k", Side::kPacked, "k");
  packed_v_ = add("packed_v", Side::kPacked, options.values == Values::kShared ? "v" : "");
  if (options_.kernel > 1 && options_.filter == FilterKind::kConv) {
    const double bound = 1 / std::sqrt(double(options_.kernel));
    AddWeight("filter.weight", filter_,
              at::empty({dims.heads, options_.kernel}).uniform_(-bound, bound),
              CoreWeight::Kind::kTrained);
  }
  if (options_.temperature == Temperature::kLearn)
    AddWeight("tau", tau_, at::zeros({}), CoreWeight::Kind::kTrained);
}
OnlyScalingMechanism::OnlyScalingMechanism(const MechanismInfo& info, const Options& options,
                                           const AttentionDims& dims)
    : ConvLunaMechanism(info, options, dims) {}
OnlyFilteringMechanism::OnlyFilteringMechanism(const MechanismInfo& info, const Options& options,
                                               const AttentionDims& dims)
    : ConvLunaMechanism(info, options, dims) {}

int64_t ConvLunaMechanism::FilteredLength(int64_t length) const {
  if (options_.mask != Masking::kNone || Centred())
    return (length + options_.stride - 1) / options_.stride;
  return length < options_.kernel ? 0 : (length - options_.kernel) / options_.stride + 1;
}

ops::Mask ConvLunaMechanism::Filtered(const ops::Mask& mask) const {
  ops::Mask filtered;
  if (mask.lengths)
    filtered.lengths = (*mask.lengths + (options_.stride - 1)).div(options_.stride, "floor");
  return filtered;
}

at::Tensor ConvLunaMechanism::Filter(const at::Tensor& x, const ops::Mask& mask) const {
  const int64_t taps = options_.kernel, stride = options_.stride, length = x.size(2),
                keys = FilteredLength(length);
  const bool conv = filter_.defined();
  if (taps == 1 && stride == 1) return x;
  at::Tensor y = x.transpose(1, 2).flatten(2);  // [B,T,H d]
  if (conv) {
    const int64_t ahead = Centred() ? taps / 2 : taps - 1;
    const at::Tensor weight =
        filter_.to(ops::ComputeTypeOf(y)).unsqueeze(1).expand({-1, Width(), -1}).flatten(0, 1);
    const at::Tensor none = at::zeros({y.size(0), taps - 1, y.size(2)},
                                      y.options().dtype(weight.dtype()).requires_grad(false));
    y = std::get<0>(ops::ShortConv(y, weight, none, mask, ahead));
    if (stride > 1 || keys < length) y = y.slice(1, 0, (keys - 1) * stride + 1, stride);
  } else {
    const double beyond = taps == 1 ? 0.0 : kMinusInf;
    if (mask.lengths) y = y.masked_fill(mask.Padding(length).unsqueeze(-1), beyond);
    if (taps > 1) {
      y = at::constant_pad_nd(y, {0, 0, 0, (keys - 1) * stride + taps - length}, beyond);
      y = at::max_pool2d(y.transpose(1, 2).unsqueeze(-1), {taps, 1},
                         {stride, 1});  // of [B, H d, T, 1], channels last in memory
      y = y.squeeze(-1).transpose(1, 2);
      if (mask.lengths) y = y.masked_fill(Filtered(mask).Padding(y.size(1)).unsqueeze(-1), 0.0);
    } else {
      y = y.slice(1, 0, std::nullopt, stride);
    }
  }
  return y.unflatten(2, {dims().heads, Width()}).transpose(1, 2);
}

at::Tensor ConvLunaMechanism::DoPack(const std::vector<at::Tensor>& x, const ops::Mask& mask) {
  const int64_t batch = x[k_].size(0), length = x[k_].size(2);
  CISTERN_CHECK(options_.mask == Masking::kTokens || FilteredLength(length) >= 1 || length == 0,
                "[", info().name, "] a filter of ", options_.kernel,
                " tokens with mask=none has no window in ", length, " tokens; use mask=tokens");
  const ops::Mask seen = options_.mask == Masking::kTokens ? mask.WithoutStarts() : ops::Mask();
  at::Tensor queries = OfMemory(x, memory_q_, batch);
  ops::SoftmaxOptions options;
  options.dropout = Dropout();
  options.scale = options_.temperature == Temperature::kSqrt ? 1 / std::sqrt(double(Width())) : 1;
  if (tau_.defined()) queries = queries * (-tau_).exp();
  queries = queries.to(x[k_].scalar_type());
  if (length == 0) return at::zeros_like(queries) + 0 * queries;
  return ops::SoftmaxAttention(queries, Filter(x[k_], seen), Filter(x[v_], seen), options,
                               Filtered(seen));
}

at::Tensor ConvLunaMechanism::DoUnpack(const std::vector<at::Tensor>& x,
                                       const std::vector<at::Tensor>& packed, const ops::Mask&) {
  ops::SoftmaxOptions options;
  options.dropout = Dropout();
  options.scale = options_.unpack_scale == UnpackScale::kUnit ? 1 : 0;
  return ops::SoftmaxAttention(x[q_], packed[packed_k_], packed[packed_v_], options);
}

at::Tensor ConvLunaMechanism::Definition(Form form, const std::vector<at::Tensor>& queries,
                                         const std::vector<at::Tensor>& x) const {
  const double root = std::sqrt(double(Width()));
  const double divisor = tau_.defined() ? std::exp(tau_.item<double>())
                         : options_.temperature == Temperature::kSqrt ? root
                                                                      : 1;
  return EachQuery(form, queries, x, Width(), [&](const auto& query, const auto& seen) {
    auto filtered = [&](const at::Tensor& y) {
      const int64_t length = y.size(2), before = Centred() ? (options_.kernel - 1) / 2 : 0;
      std::vector<at::Tensor> windows;
      // A window begins at every stride-th token; mask=none has only those that end in the row.
      const bool inside = options_.mask == Masking::kNone && !Centred();
      for (int64_t j = 0; j * options_.stride < length; ++j) {
        if (inside && j * options_.stride + options_.kernel > length) break;
        at::Tensor sum, most;
        for (int64_t i = 0; i < options_.kernel; ++i) {
          const int64_t t = j * options_.stride + i - before;
          if (t < 0 || t >= length) continue;
          const at::Tensor token = y.narrow(2, t, 1);
          const at::Tensor term =
              filter_.defined() ? filter_.to(at::kDouble).select(1, i).view({1, -1, 1, 1}) * token
                                : token;
          sum = sum.defined() ? sum + term : term;
          most = most.defined() ? at::maximum(most, token) : token;
        }
        windows.push_back(options_.filter == FilterKind::kMaxpool ? most : sum);
      }
      return at::cat(windows, 2);
    };
    const at::Tensor logits =
        at::matmul(DefinedMemory(), filtered(seen[k_]).transpose(2, 3)) / divisor;
    const at::Tensor packed = at::matmul(at::softmax(logits, 3), filtered(seen[v_]));
    return at::matmul(at::softmax(at::matmul(query[q_], packed.transpose(2, 3)) /
                                      (options_.unpack_scale == UnpackScale::kUnit ? 1 : root),
                                  3),
                      packed);
  });
}

}  // namespace cistern
