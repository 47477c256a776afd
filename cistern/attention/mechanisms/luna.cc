#include "cistern/attention/mechanisms/luna.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "cistern/attention/definition.h"
#include "cistern/base/error.h"
#include "cistern/ops/slot_memory.h"
#include "cistern/ops/softmax_attention.h"

namespace cistern {

const MechanismInfo& luna_mechanism() {
  static MechanismInfo info = [] {
    MechanismInfo i;
    i.name = "luna";
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
    i.positions = {"none", "learned", "sinusoidal"};
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
  }();
  static const bool bound = (BindMechanism<LunaMechanism>(info), true);
  (void)bound;
  return info;
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
        {"none", "query_key", "all"});
  f.Add("packed_output", &options.packed_output,
        "what was packed goes through no linear map as in Luna, its own, or the tokens' output "
        "projection as P000's Luna (shared)",
        {"none", "own", "shared"});
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
}

std::vector<Projection> LunaMechanism::Projections() const {
  const int64_t dim = dims().dim;
  const bool queries = options_.sharing != "none", values = options_.sharing == "all";
  std::vector<Projection> all = {{"q", Side::kQuery, dim}};
  auto add = [&](const std::string& name, Side side, const std::string& map = "") {
    all.push_back({name, side, dim});
    all.back().map = map;
    if (side != Side::kPacked) all.back().heads = options_.packing_heads;
  };
  auto add_packed = [&](const std::string& name, bool shared) {
    shared ? add("packed_" + name, Side::kPacked, name) : add(name, Side::kPacked);
  };
  add(options_.tie_kv ? (queries ? "c" : "pc") : (queries ? "k" : "pk"), Side::kKey);
  if (!options_.tie_kv) add(values ? "v" : "pv", Side::kKey);
  add("pq", Side::kMemory, queries ? "q" : "");
  add_packed(options_.tie_kv ? "c" : "k", queries);
  if (!options_.tie_kv) add_packed("v", values);
  return all;
}

MemoryMechanism::PackedOutput LunaMechanism::packed_output() const {
  if (options_.packed_output == "none") return PackedOutput::kNone;
  return options_.packed_output == "own" ? PackedOutput::kOwn : PackedOutput::kShared;
}

at::Tensor LunaMechanism::LayerHeads(const at::Tensor& packed) const {
  return packed.transpose(1, 2).flatten(2).unflatten(2, {dims().heads, Width()}).transpose(1, 2);
}

at::Tensor LunaMechanism::Readable(const at::Tensor& lengths) const {
  if (!options_.dynamic_projection) return {};
  return ops::Within(lengths, Slots());
}

at::Tensor LunaMechanism::DoPack(const std::vector<at::Tensor>& x, const ops::Mask& mask) {
  ops::SoftmaxOptions options;
  options.dropout = Dropout();
  return ops::SoftmaxAttention(OfMemory(x, 0, Keys(x).size(0)), Keys(x), Values(x), options,
                               mask.WithoutStarts());
}

at::Tensor LunaMechanism::DoUnpack(const std::vector<at::Tensor>& x,
                                   const std::vector<at::Tensor>& packed, const ops::Mask& mask) {
  ops::SoftmaxOptions options;
  options.dropout = Dropout();
  const at::Tensor all = at::full({x[0].size(0)}, x[0].size(2), x[0].options().dtype(at::kLong));
  return ops::SoftmaxAttention(x[0], packed[0], packed.back(), options, {},
                               Readable(mask.lengths ? *mask.lengths : all));
}

State LunaMechanism::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  const ops::SlotState slots =
      ops::EmptySlots(batch, PackingHeads(), Slots(), dims().dim / PackingHeads(), options);
  return {{{"memory", slots.memory},
           {"z", slots.z},
           {"count", at::zeros({batch}, options.dtype(at::kLong).requires_grad(false))}}};
}

void LunaMechanism::DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) {
  const at::Tensor& keys = Keys(x);
  const at::Tensor fit = at::matmul(keys, OfMemory(x, 0, keys.size(0)).transpose(2, 3)) /
                         std::sqrt(double(keys.size(3)));  // [B,H,T,M]
  const ops::SlotState slots = ops::SlotWrite(fit, Values(x), {state["memory"], state["z"]}, mask);
  state["memory"] = slots.memory;
  state["z"] = slots.z;
  state["count"] = mask.lengths ? state["count"] + *mask.lengths : state["count"] + keys.size(2);
}

at::Tensor LunaMechanism::Read(const std::vector<at::Tensor>& x, const State& state) {
  const size_t tokens = options_.tie_kv ? 2 : 3;
  const at::Tensor packed = LayerHeads(state["memory"]).to(x[0].scalar_type());
  const at::Tensor &k = x.size() > tokens ? x[tokens] : packed,
                   &v = x.size() > tokens ? x.back() : packed;
  // Every token is written to every slot: all slots of a row are, or none.
  const at::Tensor written = (state["count"] > 0).unsqueeze(1).expand({-1, Slots()});  // [B,M]
  const at::Tensor readable = Readable(state["count"]);
  ops::SoftmaxOptions options;
  options.dropout = Dropout();
  return ops::SoftmaxAttention(x[0], k, v, options, {},
                               readable.defined() ? written.logical_and(readable) : written);
}

State LunaMechanism::Merge(const State& first, const State& second) const {
  const ops::SlotState whole =
      ops::MergeSlots({first["memory"], first["z"]}, {second["memory"], second["z"]});
  return {{{"memory", whole.memory}, {"z", whole.z}, {"count", first["count"] + second["count"]}}};
}

at::Tensor LunaMechanism::Definition(Form form, const std::vector<at::Tensor>& queries,
                                     const std::vector<at::Tensor>& x) const {
  const double root = std::sqrt(double(Width())),
               packing_root = std::sqrt(double(dims().dim) / double(PackingHeads()));
  return EachQuery(form, queries, x, Width(), [&](const auto& query, const auto& seen) {
    const at::Tensor p = at::softmax(
        at::matmul(MemoryHeads(PackingHeads()), Keys(seen).transpose(2, 3)) / packing_root, 3);
    at::Tensor packed = LayerHeads(at::matmul(p, Values(seen)));
    if (options_.dynamic_projection)
      packed = packed.narrow(2, 0, std::min(Slots(), Keys(seen).size(2)));
    return at::matmul(at::softmax(at::matmul(query[0], packed.transpose(2, 3)) / root, 3), packed);
  });
}

}  // namespace cistern
