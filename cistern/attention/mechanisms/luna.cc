#include "cistern/attention/mechanisms/luna.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "cistern/attention/definition.h"
#include "cistern/base/error.h"
#include "cistern/ops/slot_memory.h"
#include "cistern/ops/softmax_attention.h"

namespace cistern {

MechanismInfo luna_mechanism() {
  MechanismInfo i = InfoOf<LunaMechanism>("luna");
  i.title = "Luna";
  i.source = "Ma et al. 2021; P004 eq. 21-23; P000 sec. 2; spec 2.10";
  i.summary =
      "A memory stream beside the tokens: its slots attend to the tokens, and the tokens attend "
      "to what the slots found. The memory goes "
      "on "
      "from block to block.";
  i.definition =
      "y_t = softmax(q_t Y^T / sqrt(d)) Y, Y_m = softmax(p_m K^T / sqrt(d)) V over the tokens";
  i.forms = {Form::kBidirectional, Form::kCross};
  i.refusals = {
      "causal: a slot attends to all tokens at once; use luna_causal instead, the paper's causal "
      "form"};
  i.memory = MemoryUse::kStream;
  i.positions = AddedPositions();
  i.time = "O(T M d)";
  i.state = "M (d + 1) per head";
  i.cases = {Json{{"slots", 3}},
             Json{{"slots", 4},
                  {"tie_kv", false},
                  {"sharing", "all"},
                  {"packed_output", "shared"},
                  {"init", "scaled"}},
             Json{{"slots", 4},
                  {"packing_heads", 1},
                  {"init", "scaled"},
                  {"sinusoid", true},
                  {"norm", true}},
             Json{{"slots", 6},
                  {"tie_kv", false},
                  {"sharing", "query_key"},
                  {"packed_output", "own"},
                  {"init", "identity"}},
             Json{{"slots", 20}, {"dynamic_projection", true}, {"init", "embedding"}},
             Json{{"slots", 2}, {"tie_kv", false}, {"init", "xavier"}}};
  i.merges = true;
  return i;
}

Fields LunaMechanism::Describe(Options& options) {
  Fields f;
  MemoryMechanism::Describe(options, f);
  f.Add("tie_kv", &options.tie_kv,
        "keys are also the values, as in Luna; its Long Range Arena models and P000's Luna have it "
        "off");
  f.Add("sharing", &options.sharing,
        "maps that packing and unpacking have in common: none as in Luna, query_key as P000's "
        "Set-Transformer-like model, all as P000's Luna",
        {{Sharing::kNone, "none"}, {Sharing::kQueryKey, "query_key"}, {Sharing::kAll, "all"}});
  f.Add("packed_output", &options.packed_output,
        "what was packed goes through no linear map as in Luna, its own, or the tokens' output "
        "projection as P000's Luna (shared)",
        {{PackedOutput::kNone, "none"},
         {PackedOutput::kOwn, "own"},
         {PackedOutput::kShared, "shared"}});
  f.Add("dynamic_projection", &options.dynamic_projection,
        "no more slots are read than there are tokens, as Luna's option of this name");
  f.Add("packing_heads", &options.packing_heads,
        "heads by which the memory attends to the tokens, as Luna's projected attention heads; 0: "
        "as many as the layer has",
        {0, 1024});
  return f;
}

LunaMechanism::LunaMechanism(const MechanismInfo& info, const Options& options,
                             const AttentionDims& dims)
    : MemoryMechanism(info, options, dims), options_(options) {
  if (dims.dim % PackingHeads() != 0)
    FailUsage("[luna] packing_heads=", options.packing_heads,
              " does not divide the width dim=", dims.dim, "; 0 takes those of the layer");
  const bool tied = options.tie_kv, queries = options.sharing != Sharing::kNone,
             values = options.sharing == Sharing::kAll;
  auto add = [&](const std::string& name, Side side, const std::string& map = "") {
    Projection p = {name, side, dims.dim};
    p.map = map;
    if (side == Side::kKey || side == Side::kMemory) p.heads = options.packing_heads;
    return AddProjection(p);
  };
  auto add_packed = [&](const std::string& name, bool shared) {
    return shared ? add("packed_" + name, Side::kPacked, name) : add(name, Side::kPacked);
  };
  q_ = add("q", Side::kQuery);
  k_ = add(tied ? (queries ? "c" : "pc") : (queries ? "k" : "pk"), Side::kKey);
  v_ = tied ? k_ : add(values ? "v" : "pv", Side::kKey);
  memory_q_ = add("pq", Side::kMemory, queries ? "q" : "");
  packed_k_ = add_packed(tied ? "c" : "k", queries);
  packed_v_ = tied ? packed_k_ : add_packed("v", values);
  packed_ = AddState("memory");
  z_ = AddState("z");
  count_ = AddState("count");
}

at::Tensor LunaMechanism::LayerHeads(const at::Tensor& packed) const {
  return packed.transpose(1, 2).flatten(2).unflatten(2, {dims().heads, Width()}).transpose(1, 2);
}

at::Tensor LunaMechanism::Readable(const at::Tensor& lengths) const {
  if (!options_.dynamic_projection) return {};
  return ops::Within(lengths, Slots());
}

at::Tensor LunaMechanism::ReadableSlots(const State& state) const {
  return options_.dynamic_projection ? state[count_].clamp_max(Slots()) : at::Tensor();
}

at::Tensor LunaMechanism::DoPack(const std::vector<at::Tensor>& x, const ops::Mask& mask) {
  ops::SoftmaxOptions options;
  options.dropout = Dropout();
  const at::Tensor queries = OfMemory(x, memory_q_, x[k_].size(0)).to(x[k_].scalar_type());
  return ops::SoftmaxAttention(queries, x[k_], x[v_], options, mask.WithoutStarts());
}

at::Tensor LunaMechanism::DoUnpack(const std::vector<at::Tensor>& x,
                                   const std::vector<at::Tensor>& packed, const ops::Mask& mask) {
  ops::SoftmaxOptions options;
  options.dropout = Dropout();
  const at::Tensor& q = x[q_];
  const at::Tensor all = at::full({q.size(0)}, q.size(2), q.options().dtype(at::kLong));
  return ops::SoftmaxAttention(q, packed[packed_k_], packed[packed_v_], options, {},
                               Readable(mask.lengths ? *mask.lengths : all));
}

State LunaMechanism::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  const ops::SlotState slots =
      ops::EmptySlots(batch, PackingHeads(), Slots(), dims().dim / PackingHeads(), options);
  State state = UndefinedState();
  state[packed_] = slots.memory;
  state[z_] = slots.z;
  state[count_] = at::zeros({batch}, options.dtype(at::kLong).requires_grad(false));
  return state;
}

void LunaMechanism::DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) {
  const at::Tensor& keys = x[k_];
  const at::Tensor fit = at::matmul(keys, OfMemory(x, memory_q_, keys.size(0)).transpose(2, 3)) /
                         std::sqrt(double(keys.size(3)));  // [B,H,T,M]
  const ops::SlotState slots = ops::SlotWrite(fit, x[v_], {state[packed_], state[z_]}, mask);
  state[packed_] = slots.memory;
  state[z_] = slots.z;
  state[count_] = mask.lengths ? state[count_] + *mask.lengths : state[count_] + keys.size(2);
}

at::Tensor LunaMechanism::Read(const std::vector<at::Tensor>& x, const State& state) {
  const std::vector<at::Tensor> packed =
      PackedOf(x, LayerHeads(state[packed_]).to(x[q_].scalar_type()));
  // Every token is written to every slot: all slots of a row are, or none.
  const at::Tensor written = (state[count_] > 0).unsqueeze(1).expand({-1, Slots()});  // [B,M]
  const at::Tensor readable = Readable(state[count_]);
  ops::SoftmaxOptions options;
  options.dropout = Dropout();
  return ops::SoftmaxAttention(x[q_], packed[packed_k_], packed[packed_v_], options, {},
                               readable.defined() ? written.logical_and(readable) : written);
}

State LunaMechanism::Merge(const State& first, const State& second) const {
  const ops::SlotState whole =
      ops::MergeSlots({first[packed_], first[z_]}, {second[packed_], second[z_]});
  State state = UndefinedState();
  state[packed_] = whole.memory;
  state[z_] = whole.z;
  state[count_] = first[count_] + second[count_];
  return state;
}

at::Tensor LunaMechanism::Definition(Form form, const std::vector<at::Tensor>& queries,
                                     const std::vector<at::Tensor>& x) const {
  const double root = std::sqrt(double(Width())),
               packing_root = std::sqrt(double(dims().dim) / double(PackingHeads()));
  return EachQuery(form, queries, x, Width(), [&](const auto& query, const auto& seen) {
    const at::Tensor p = at::softmax(
        at::matmul(DefinedMemory(PackingHeads()), seen[k_].transpose(2, 3)) / packing_root, 3);
    at::Tensor packed = at::matmul(p, seen[v_]);  // by the heads of packing, then by the layer's
    packed = packed.permute({0, 2, 1, 3})
                 .reshape({packed.size(0), packed.size(2), dims().heads, Width()})
                 .permute({0, 2, 1, 3});
    if (options_.dynamic_projection)
      packed = packed.narrow(2, 0, std::min(Slots(), seen[k_].size(2)));
    return at::matmul(at::softmax(at::matmul(query[q_], packed.transpose(2, 3)) / root, 3), packed);
  });
}

}  // namespace cistern
