#include "cistern/attention/mechanisms/reuse.h"

#include <ATen/ATen.h>

#include <numeric>

#include "cistern/base/error.h"
#include "cistern/ops/exact_attention.h"

namespace cistern {
namespace {

using ReusePlacement = ReuseMechanism::Placement;

const EnumNames<ReusePlacement> kPlacements = {
    {ReusePlacement::kPartial, "partial"},     {ReusePlacement::kFull, "full"},
    {ReusePlacement::kAlternate, "alternate"}, {ReusePlacement::kAllEnd, "all_end"},
    {ReusePlacement::kSkip, "skip"},
};

int64_t CopiedHeads(const ReuseMechanism::Options& o, int64_t heads) {
  if (o.heads > heads && !o.clamp_heads) {
    FailUsage("[reuse] heads=", o.heads, " cannot be copied in layers of ", heads,
              " heads; use heads=", heads, " or fewer, heads=-1 for all, or clamp_heads=true");
  }
  return o.heads < 0 ? heads : std::min(o.heads, heads);
}

// A layer of a model whose attention is left out: no projections, no state.
class SkippedAttention : public Mechanism {
 public:
  using Mechanism::Mechanism;
  State EmptyState(int64_t, const at::TensorOptions&) const override { return {}; }
  at::Tensor DoExtend(const std::vector<at::Tensor>&, State&, const ops::Mask&) override {
    Refuse();
  }
  void DoWrite(const std::vector<at::Tensor>&, State&, const ops::Mask&) override { Refuse(); }
  at::Tensor Read(const std::vector<at::Tensor>&, const State&) override { Refuse(); }
  at::Tensor Definition(Form, const std::vector<at::Tensor>&,
                        const std::vector<at::Tensor>&) const override {
    Refuse();
  }
  void Truncate(State&, int64_t) const override {}

 private:
  [[noreturn]] static void Refuse() { Fail("[reuse] a skipped layer has no attention to run"); }
};

}  // namespace

MechanismInfo reuse_mechanism() {
  MechanismInfo i = InfoOf<ReuseMechanism>("reuse");
  i.title = "Reuse attention";
  i.source = "Bhojanapalli et al. 2021 (P001); spec 2.16";
  i.summary =
      "Exact softmax attention in which some heads take over the scores of the layer before: "
      "fewer scores, parameters and cached keys. "
      "Needs two layers or more.";
  i.definition =
      "y_t = sum_s A_l[t,s] v_s, A_l = [softmax(q k^T / sqrt(d)) of H-K new heads; A_{l-1} of "
      "its first K heads]";
  i.forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
  i.exact = true;
  i.bounded = false;
  i.positions = AllPositions();
  i.positions.push_back(PositionKind::kRelative);
  i.time = "O(T^2 d)";
  i.state = "2 T d per head, T d where it is copied";
  i.truncates = i.leaves_scores = i.copies_scores = true;
  i.copy_plan = &ReusePlan;
  i.cases = {Json{{"heads", 1}},
             Json{{"heads", -1}},
             Json{{"heads", 0}},
             Json{{"heads", 1}, {"keep", "scores"}},
             Json{{"heads", -1}, {"keep", "scores"}},
             Json{{"heads", 1}, {"scale", "unit"}}};
  i.construct = [construct = i.construct](const MechanismInfo& info, const Json& options,
                                          const AttentionDims& dims) -> std::shared_ptr<Mechanism> {
    if (dims.copied == AttentionDims::kSkipped)
      return std::make_shared<SkippedAttention>(info, dims);
    return construct(info, options, dims);
  };
  return i;
}

Fields ReuseMechanism::Describe(Options& options) {
  Fields f;
  f.Add("heads", &options.heads,
        "heads that a copying layer takes over from the layer before (K); -1: all", {-1, 1024});
  f.Add("layers", &options.layers, "layers that copy (P); 0: as many as the placement has room for",
        {0, 1024});
  f.Add("placement", &options.placement,
        "which: from the second on, the last exact (partial); the same with all heads, where the "
        "last may copy too, so that with layers=0 only the first is exact (full); "
        "every second; the last but one and those "
        "before it (all_end); or layers from the second on that have no attention (skip)",
        kPlacements);
  f.Add("keep", &options.keep,
        "what a layer leaves to the next: queries and keys, linear memory; or the probabilities, "
        "saves time",
        {{Keep::kHandles, "handles"}, {Keep::kScores, "scores"}});
  f.Add("memory_mib", &options.memory_mib,
        "keep=scores: the most that the probabilities left by one layer may take, in MiB",
        {1, 1 << 20});
  f.Add("clamp_heads", &options.clamp_heads,
        "takes all heads where a layer has fewer than `heads`");
  DescribeScale(&options.scale, f);
  return f;
}

ReuseMechanism::ReuseMechanism(const MechanismInfo& info, const Options& options,
                               const AttentionDims& dims)
    : ReuseMechanism(
          info, options, dims,
          dims.copied == AttentionDims::kAlone ? CopiedHeads(options, dims.heads) : dims.copied) {}

ReuseMechanism::ReuseMechanism(const MechanismInfo& info, const Options& options,
                               const AttentionDims& dims, int64_t copied)
    : SoftmaxMechanism(info, dims,
                       Setup{.own_heads = dims.heads - copied,
                             .rotary = true,
                             .key_heads = dims.heads - std::max<int64_t>(0, dims.copied),
                             .scale = options.scale}),
      options_(options),
      copied_(copied) {
  if (options.keep == Keep::kHandles && options.memory_mib != Options().memory_mib)
    FailUsage("[reuse] memory_mib=", options.memory_mib,
              " has no effect with keep=handles; leave it out, or take keep=scores");
  if (!alone() || copied == 0) return;
  if (dims.relative) {
    FailUsage("[reuse] relative positions need a model: outside of it nothing says which bias the ",
              copied, " copied heads have");
  }
  const int64_t width = dims.dim / dims.heads;
  copied_q_ = AddProjection({"copied_q", Side::kQuery, copied * width, true, copied});
  copied_k_ = AddProjection({"copied_k", Side::kKey, copied * width, true, copied});
}

SoftmaxMechanism::Own ReuseMechanism::Joined(const std::vector<at::Tensor>& x) const {
  const at::Tensor& v = x[v_];
  const auto joined = [&](ProjectionId fresh, ProjectionId copied) {
    if (copied.declared() && x[copied].defined())
      return fresh.declared() ? at::cat({x[fresh], x[copied]}, 1) : x[copied];
    if (fresh.declared()) return x[fresh];
    return !copied.declared() && v.defined() ? v.narrow(1, 0, 0) : at::Tensor();
  };
  return {joined(q_, copied_q_), joined(k_, copied_k_), v};
}

bool ReuseMechanism::TakesBFloat16(Form) const {
  return !dims().relative && options_.keep == Keep::kHandles && ops::AttendsToBFloat16();
}

void ReuseMechanism::CheckMemory(int64_t heads, const at::Tensor& q, const at::Tensor& k) const {
  const int64_t limit = options_.memory_mib << 20;
  const double bytes = double(q.size(0)) * double(heads) * double(q.size(2)) * double(k.size(2)) *
                       double(q.element_size());
  CISTERN_CHECK(bytes <= double(limit), "[reuse] the probabilities [", q.size(0), ",", heads, ",",
                q.size(2), ",", k.size(2), "] that a layer leaves to the next would take ",
                int64_t(bytes / (1 << 20)) + 1, " MiB, more than memory_mib=", options_.memory_mib,
                "; use keep=handles, whose memory is linear in the length");
}

// Runs the new heads and the copied ones, each group by itself, and puts what the next layer copies
// into `handles`.
SoftmaxMechanism::Compute ReuseMechanism::Sharing(Handles& handles) const {
  return [this, &handles](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const ops::SoftmaxOptions& options, const ops::Mask& mask,
                          const at::Tensor& key_valid) {
    const int64_t heads = dims().heads, fresh = heads - copied_, left = dims().copied_on;
    const bool scores = options_.keep == Keep::kScores;
    Handles all;
    if (fresh > 0) {
      const int64_t formed =
          scores ? std::min(left, fresh) : 0;  // the heads whose probabilities the next layer wants
      const HeadScores own = {q, k, {}, options.bias, options.scale};
      if (formed > 0) all.push_back(HeadsOf(own, 0, formed));
      if (formed < fresh) all.push_back(HeadsOf(own, formed, fresh - formed));
    }
    Handles taken = FirstHeads(handles, copied_);
    if (alone() && copied_ > 0)
      taken = {{q.narrow(1, fresh, copied_), k.narrow(1, fresh, copied_), {}, {}, options.scale}};
    all.insert(all.end(), taken.begin(), taken.end());
    std::vector<int64_t> counts;
    for (const HeadScores& s : all) counts.push_back(s.heads());
    const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t(0));
    CISTERN_CHECK(total == heads, "[reuse] expected the scores of ", copied_,
                  " heads of the layer before, got those of ", total - fresh);
    std::vector<at::Tensor> out, values = v.split_with_sizes(counts, 1);
    int64_t begin = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      HeadScores& s = all[i];
      ops::SoftmaxOptions of = options;
      of.bias = s.bias;
      of.scale = s.scale;
      if (scores && !s.p.defined() && (begin >= fresh || begin < left)) {
        CheckMemory(begin >= fresh ? copied_ : left, s.q, s.k);
        s = {{}, {}, ops::AttentionProbabilities(s.q, s.k, of, mask, key_valid)};
      }
      out.push_back(s.p.defined()
                        ? ops::ApplyProbabilities(s.p, values[i], options.dropout)
                        : ops::SoftmaxAttention(s.q, s.k, values[i], of, mask, key_valid));
      begin += counts[i];
    }
    handles = FirstHeads(all, left);
    return out.size() == 1 ? out[0] : at::cat(out, 1);
  };
}

at::Tensor ReuseMechanism::DoAttend(Form form, const std::vector<at::Tensor>& x, State* state,
                                    const ops::Mask& mask, Handles& handles) {
  if (alone()) return Mechanism::DoAttend(form, x, state, mask, handles);
  const Own own = Joined(x);
  if (form == Form::kBidirectional) return BidirectionalBy(own, mask, Sharing(handles));
  return form == Form::kCausal ? ExtendBy(own, *state, mask, Sharing(handles))
                               : ReadBy(own.q, *state, Sharing(handles));
}

void ReuseMechanism::DoWrite(const std::vector<at::Tensor>& x, State& state,
                             const ops::Mask& mask) {
  const Own own = Joined(x);
  WriteBy(own.k, own.v, state, mask);
}

at::Tensor ReuseMechanism::Read(const std::vector<at::Tensor>& x, const State& state) {
  Handles none;
  return ReadBy(Joined(x).q, state, Sharing(none));
}

at::Tensor ReuseMechanism::DoExtend(const std::vector<at::Tensor>& x, State& state,
                                    const ops::Mask& mask) {
  Handles none;
  return ExtendBy(Joined(x), state, mask, Sharing(none));
}

at::Tensor ReuseMechanism::Definition(Form form, const std::vector<at::Tensor>& queries,
                                      const std::vector<at::Tensor>& x) const {
  CISTERN_CHECK(alone(), "[reuse] the definition is that of the core alone");
  // The new heads first, then the copied ones.
  const auto heads = [](const std::vector<at::Tensor>& y, ProjectionId fresh, ProjectionId taken) {
    std::vector<at::Tensor> parts;
    if (fresh.declared()) parts.push_back(y[fresh]);
    if (taken.declared()) parts.push_back(y[taken]);
    return at::cat(parts, 1);
  };
  return DefinitionBy(form, heads(queries, q_, copied_q_),
                      {heads(x, q_, copied_q_), heads(x, k_, copied_k_), x[v_]});
}

std::vector<int64_t> ReusePlan(const Json& json, int64_t heads, int64_t layers) {
  using Placement = ReuseMechanism::Placement;
  ReuseMechanism::Options o;
  ReuseMechanism::Describe(o).Read(json, "options of reuse");
  const int64_t copied = CopiedHeads(o, heads);
  if (layers < 2)
    FailUsage("[reuse] of one layer there is none to reuse; use two layers or more, or softmax");
  const bool whole =
      o.placement == Placement::kFull || o.placement == Placement::kSkip;  // all heads or none
  if (whole && copied != heads)
    FailUsage("[reuse] placement=", NameOf(o.placement, kPlacements),
              " takes whole layers; for heads=", o.heads, " use partial");
  const bool last_exact = o.placement == Placement::kPartial || o.placement == Placement::kAllEnd;
  const int64_t room =
      o.placement == Placement::kAlternate ? layers / 2 : layers - (last_exact ? 2 : 1);
  if (room == 0) {
    FailUsage("[reuse] placement=", NameOf(o.placement, kPlacements),
              " keeps the first and the last layer exact, so that none of ", layers,
              " copies; use placement=alternate or more layers");
  }
  if (o.layers > room)
    FailUsage("[reuse] placement=", NameOf(o.placement, kPlacements), " has room for ", room,
              " of ", layers, " layers, not for ", o.layers);
  const int64_t count = o.layers > 0 ? o.layers : room;
  std::vector<int64_t> plan(size_t(layers), 0);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t layer = o.placement == Placement::kAlternate ? 1 + 2 * i
                          : o.placement == Placement::kAllEnd  ? layers - 1 - count + i
                                                               : 1 + i;
    plan[size_t(layer)] = o.placement == Placement::kSkip ? AttentionDims::kSkipped : copied;
  }
  return plan;
}

}  // namespace cistern
