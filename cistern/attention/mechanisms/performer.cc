#include "cistern/attention/mechanisms/performer.h"

#include <ATen/ATen.h>

#include <cmath>

#include "cistern/attention/definition.h"
#include "cistern/attention/feature_attention.h"
#include "cistern/base/random.h"
#include "cistern/ops/favor_bidirectional.h"
#include "cistern/ops/linear_product.h"
#include "cistern/ops/slot_attention.h"
#include "cistern/ops/tensor_rows.h"

namespace cistern {

MechanismInfo performer_mechanism() {
  MechanismInfo i = InfoOf<PerformerMechanism>("performer");
  i.title = "Performer (FAVOR+)";
  i.source = "Choromanski et al. 2021; P004 eq. 30-32; spec 2.6";
  i.summary =
      "Softmax attention with its kernel estimated by positive orthogonal random features: an "
      "unbiased estimate whose error falls as the "
      "root of their number. `kernel=relu` is the deterministic variant that the Long Range "
      "Arena calls Performer.";
  i.definition =
      "as linear, phi(x) = exp(w_i . x' - |x'|^2 / 2) / sqrt(m), x' = x / d^(1/4), rows w_i "
      "orthogonal";
  i.forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
  i.stochastic = true;
  i.positions = AllPositions();
  i.time = "O(T m d)";
  i.state = "m (d + 1) per head";
  i.cases = {Json{{"features", 7}}, Json{{"features", 12}, {"scaling", 1}, {"redraw", 0}},
             Json{{"features", 7}, {"eps", 0.05}}, Json{{"kernel", "relu"}}};
  i.merges = true;
  return i;
}

Fields PerformerMechanism::Describe(Options& options) {
  Fields f;
  f.Add("features", &options.features,
        "random features of each head (m); 0 takes d ln d. kernel=relu has d", {0, 65536});
  f.Add("kernel", &options.kernel,
        "softmax, estimated by random features; or relu, whose features are relu(x) + 0.001",
        {{Kernel::kSoftmax, "softmax"}, {Kernel::kRelu, "relu"}});
  f.Add("scaling", &options.scaling,
        "lengths of the random vectors: 0 as Gaussian ones have, 1 all sqrt(d)", {0, 1});
  f.Add("redraw", &options.redraw,
        "training calls from an empty memory after which the features are drawn anew; 0: never",
        {0});
  f.Add("seed", &options.seed, "of the random features", {0});
  f.Add("eps", &options.eps,
        "added to every feature, 1e-6 in the authors' code: relative to a query's largest e^(w . "
        "x'), and to 1 for keys, whose stabiliser there looks at later keys. Features of softmax "
        "alone; those of relu have their 0.001",
        {0, 1});
  return f;
}

PerformerMechanism::PerformerMechanism(const MechanismInfo& info, const Options& options,
                                       const AttentionDims& dims)
    : Mechanism(info, dims),
      features_(options.features),
      scaling_(options.scaling),
      redraw_(options.redraw),
      seed_(options.seed),
      eps_(options.eps),
      relu_(options.kernel == Kernel::kRelu) {
  RefuseAttentionDropout(info, dims);
  if (relu_ && eps_ > 0)
    FailUsage("[performer] eps=", eps_,
              " belongs to kernel=softmax; the features of relu have 0.001 added in their source");
  const Options unset;
  if (relu_ && (features_ != unset.features || scaling_ != unset.scaling ||
                redraw_ != unset.redraw || seed_ != unset.seed))
    FailUsage(
        "[performer] features, scaling, redraw and seed have no effect with kernel=relu, which "
        "draws nothing; leave them out");
  q_ = AddProjection({"q", Side::kQuery, dims.dim, true});
  k_ = AddProjection({"k", Side::kKey, dims.dim, true});
  v_ = AddProjection({"v", Side::kKey, dims.dim});
  memory_ = AddState("memory");
  z_ = AddState("z");
  const int64_t width = dims.dim / dims.heads;
  if (relu_) {
    features_ = width;
    return;
  }
  if (features_ == 0)
    features_ = std::max<int64_t>(1, int64_t(double(width) * std::log(double(width))));
  if (eps_ == 0)
    decoding_ = {{}, memory_, z_, AddState(kDecodingName), dims.heads, features_, width};
  const auto kind = redraw_ > 0 ? CoreWeight::Kind::kRedrawn : CoreWeight::Kind::kDrawn;
  AddWeight("projection", projection_,
            OrthogonalFeatures(features_, width, scaling_, uint64_t(seed_), uint64_t(dims.layer)),
            kind);
  AddWeight("sequences", sequences_, at::zeros({1}), kind);
}

State PerformerMechanism::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  const ops::SlotState slots =
      ops::EmptySlots(batch, dims().heads, features_, dims().dim / dims().heads, options);
  State state = UndefinedState();
  state[memory_] = slots.memory;
  state[z_] = slots.z;
  return state;
}

double PerformerMechanism::ScaleOf(const at::Tensor& x) const {
  return std::pow(double(x.size(3)), -0.25);
}

// Detached: features drawn anew before the backward must not reach it.
at::Tensor PerformerMechanism::Rows(const at::Tensor& x) const {
  return projection_.detach().to(ops::ComputeTypeOf(x));
}

// log phi(x) but for what is the same for all features and cancels: -log(m) / 2, and without eps
// the square of a query. [B,H,T,d] -> [B,H,T,m]
at::Tensor PerformerMechanism::LogFeatures(const at::Tensor& x, Side side) const {
  if (relu_) return (at::relu(x) + 1e-3).log();
  const double scale = ScaleOf(x);
  const at::Tensor rows = projection_.to(x.scalar_type()) * scale;
  const auto half_square = [&] { return x.square().sum({3}, true) * (0.5 * scale * scale); };
  at::Tensor logits;
  if (side == Side::kQuery) {
    logits = ops::LinearProduct(x, rows);
    if (eps_ == 0) return logits;
    logits = logits - (logits.amax({3}, true) + half_square());
  } else {  // the square is one more channel
    logits =
        ops::LinearProduct(at::cat({x, half_square()}, 3), at::constant_pad_nd(rows, {0, 1}, -1.0));
    if (eps_ == 0) return logits;
  }
  return at::logaddexp(logits, at::full({}, std::log(eps_), rows.options()));
}

// In training features are drawn anew at every `redraw`-th sequence, and only where a sequence
// begins: a memory knows its own features alone.
void PerformerMechanism::BeginSequence(const State& state) {
  if (relu_ || redraw_ == 0 || !is_training() || !state[z_].defined() ||
      !at::isneginf(state[z_]).all().item<bool>())
    return;
  at::NoGradGuard guard;
  const int64_t sequence = int64_t(sequences_.item<double>());
  sequences_.add_(1);
  if (sequence == 0 || sequence % redraw_ != 0) return;
  const uint64_t stream = uint64_t(sequence / redraw_) << 32 | uint64_t(dims().layer);
  const at::Tensor drawn =
      OrthogonalFeatures(features_, projection_.size(1), scaling_, uint64_t(seed_), stream);
  projection_.set_data(drawn.to(projection_.options()));
}

bool PerformerMechanism::FormsFeatures(Form) const { return !relu_ && eps_ == 0; }

bool PerformerMechanism::TakesBFloat16(Form form) const { return FormsFeatures(form); }

at::Tensor PerformerMechanism::DoExtend(const std::vector<at::Tensor>& x, State& state,
                                        const ops::Mask& mask) {
  BeginSequence(state);
  if (FormsFeatures(Form::kCausal))
    return ops::FavorQueriesExtend(x[q_], x[k_], x[v_], Rows(x[q_]), ScaleOf(x[q_]),
                                   decoding_.Of(state), mask);
  const auto wide = [&](const ProjectionId& id) { return x[id].to(ops::ComputeTypeOf(x[id])); };
  return ops::FavorExtend(LogFeatures(wide(q_), Side::kQuery), LogFeatures(wide(k_), Side::kKey),
                          wide(v_), state[memory_], state[z_], mask)
      .to(x[v_].scalar_type());
}

void PerformerMechanism::DoWrite(const std::vector<at::Tensor>& x, State& state,
                                 const ops::Mask& mask) {
  decoding_.End(state);
  BeginSequence(state);
  const ops::SlotState before = {state[memory_], state[z_]},
                       slots = FormsFeatures(Form::kCross)
                                   ? ops::FavorWrite(x[k_], x[v_], Rows(x[k_]), ScaleOf(x[k_]),
                                                     before, mask)
                                   : ops::SlotWrite(LogFeatures(x[k_], Side::kKey), x[v_], before,
                                                    mask);
  state[memory_] = slots.memory;
  state[z_] = slots.z;
}

at::Tensor PerformerMechanism::Read(const std::vector<at::Tensor>& x, const State& written) {
  const State state = Settled(written);
  if (FormsFeatures(Form::kCross))
    return ops::FavorRead(x[q_], Rows(x[q_]), ScaleOf(x[q_]), {state[memory_], state[z_]});
  const auto type = x[q_].scalar_type();
  // Counted from the largest in double, z loses nothing of weight in float. An empty memory reads
  // 0.
  const at::Tensor most = state[z_].detach().amax({2}, true), none = at::isneginf(most),
                   z = (state[z_] - most.masked_fill(none, 0.0)).masked_fill(none, 0.0).to(type);
  return ops::SlotSoftmaxRead(LogFeatures(x[q_], Side::kQuery) + z.unsqueeze(2), state[memory_]);
}

at::Tensor PerformerMechanism::Definition(Form form, const std::vector<at::Tensor>& queries,
                                          const std::vector<at::Tensor>& x) const {
  const double scale = std::pow(double(dims().dim / dims().heads), -0.25);
  auto log_phi = [&](const at::Tensor& y) {  // [B,H,S,d] -> [B,H,S,m]
    if (relu_) return (y.clamp_min(0) + 1e-3).log();
    const at::Tensor w = projection_.to(at::kDouble), scaled = y * scale;
    return (scaled.unsqueeze(3) * w).sum(4) - 0.5 * (scaled * scaled).sum({3}, true);
  };
  if (eps_ > 0) {  // sums of products, as written; nothing here can overflow
    auto phi = [&](const at::Tensor& y, bool of_query) {  // [B,H,S,d] -> [B,H,S,m]
      const at::Tensor w = projection_.to(at::kDouble), scaled = y * scale,
                       products = (scaled.unsqueeze(3) * w).sum(4);
      at::Tensor exponent = products - 0.5 * (scaled * scaled).sum({3}, true);
      if (of_query) exponent = exponent - std::get<0>(products.max(3, true));
      return exponent.exp() + eps_;
    };
    return EachQuery(form, queries, x, x[v_].size(3), [&](const auto& query, const auto& seen) {
      const at::Tensor weights = (phi(query[q_], true) * phi(seen[k_], false)).sum(3);  // [B,H,S]
      return at::matmul((weights / weights.sum(2, true)).unsqueeze(2), seen[v_]);
    });
  }
  return EachQuery(form, queries, x, x[v_].size(3), [&](const auto& query, const auto& seen) {
    const at::Tensor log_kernel = at::logsumexp(log_phi(query[q_]) + log_phi(seen[k_]),
                                                {3});  // log of phi(q) . phi(k_s), [B,H,S]
    return at::matmul(at::softmax(log_kernel, 2).unsqueeze(2), seen[v_]);
  });
}

State PerformerMechanism::Merge(const State& earlier, const State& later) const {
  const State first = Settled(earlier), second = Settled(later);
  const ops::SlotState whole =
      ops::MergeSlots({first[memory_], first[z_]}, {second[memory_], second[z_]});
  State state = UndefinedState();
  state[memory_] = whole.memory;
  state[z_] = whole.z;
  return state;
}

at::Tensor OrthogonalFeatures(int64_t features, int64_t width, int64_t scaling, uint64_t seed,
                              uint64_t stream) {
  Random random(seed, stream);
  auto normal = [&](int64_t rows) {
    const at::Tensor x = at::empty({rows, width}, at::kDouble);
    for (int64_t i = 0; i < x.numel(); ++i) x.mutable_data_ptr<double>()[i] = random.Normal();
    return x;
  };
  std::vector<at::Tensor> blocks;
  for (int64_t row = 0; row < features; row += width) {
    auto [q, r] = at::linalg_qr(normal(width));
    const at::Tensor lengths = scaling == 1
                                   ? at::full({width, 1}, std::sqrt(double(width)), at::kDouble)
                                   : normal(width).norm(2, {1}, true);
    blocks.push_back(
        ((q * r.diagonal().sign()).t() * lengths).narrow(0, 0, std::min(width, features - row)));
  }
  return at::cat(blocks).to(at::kFloat);
}

LeastOperations PerformerMechanism::Operations(Form form, int64_t tokens, int64_t) const {
  return MemoryOperations(form, tokens, double(features_) * double(dims().dim));
}

}  // namespace cistern
