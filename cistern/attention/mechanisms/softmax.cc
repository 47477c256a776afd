#include "cistern/attention/mechanisms/softmax.h"

#include <ATen/ATen.h>
#include <typeinfo>

#include "cistern/attention/definition.h"
#include "cistern/attention/relative_positions.h"
#include "cistern/base/error.h"
#include "cistern/ops/exact_attention.h"

namespace cistern {

MechanismInfo softmax_mechanism() {
  MechanismInfo i = InfoOf<SoftmaxMechanism>("softmax");
  i.title = "Exact softmax attention";
  i.source = "Vaswani et al. 2017; spec 2.1";
  i.summary =
      "Every token attends to every token before it. Exact, quadratic in time; its state, the "
      "key-value cache, grows with the text.";
  i.definition = "y_t = sum_s softmax_s(q_t . k_s / sqrt(d)) v_s";
  i.forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
  i.exact = true;
  i.bounded = false;
  i.positions = AllPositions();
  i.positions.push_back(PositionKind::kRelative);
  i.time = "O(T^2 d)";
  i.state = "2 T d per head";
  i.cases = {Json::object(), Json{{"scale", "unit"}}};
  i.truncates = i.leaves_scores = true;
  return i;
}

Fields SoftmaxMechanism::Describe(Options& options) {
  Fields f;
  DescribeScale(&options.scale, f);
  return f;
}

void SoftmaxMechanism::DescribeScale(Scale* scale, Fields& fields) {
  fields.Add("scale", scale, "the scores are divided by sqrt(d), or by nothing as in T5 (unit)",
             {{Scale::kSqrt, "sqrt"}, {Scale::kUnit, "unit"}});
}

SoftmaxMechanism::SoftmaxMechanism(const MechanismInfo& info, const Options& options,
                                   const AttentionDims& dims)
    : SoftmaxMechanism(info, dims,
                       Setup{.own_heads = dims.heads, .rotary = true, .scale = options.scale}) {}

SoftmaxMechanism::SoftmaxMechanism(const MechanismInfo& info, const AttentionDims& dims,
                                   const Setup& setup)
    : Mechanism(info, dims),
      key_heads_(setup.key_heads < 0 ? setup.own_heads : setup.key_heads),
      scale_(setup.scale) {
  const int64_t heads = setup.own_heads == dims.heads ? 0 : setup.own_heads,
                width = setup.own_heads * (dims.dim / dims.heads);
  if (setup.own_heads > 0) {
    Projection q = {"q", Side::kQuery, width, setup.rotary, heads};
    q.identity = !setup.map_queries;
    q_ = AddProjection(q);
    k_ = AddProjection({"k", Side::kKey, width, setup.rotary, heads});
  }
  v_ = AddProjection({"v", Side::kKey, dims.dim});
  keys_ = AddState("k");
  values_ = AddState("v");
  valid_ = AddState("valid");
  count_ = AddState("count");
  if (!dims.relative) return;
  if (dims.first) {
    relative_ = static_cast<const SoftmaxMechanism&>(*dims.first).relative_;
  } else {
    AddWeight("relative_bias.weight", relative_,
              at::randn({kRelativeBuckets, dims.heads}) * dims.relative_std,
              CoreWeight::Kind::kTrained);
  }
}

at::Tensor SoftmaxMechanism::Bias(const at::Tensor& q, int64_t before, int64_t keys,
                                  const at::Tensor& valid, bool causal) const {
  if (!relative_.defined() || !q.defined() || q.size(1) == 0) return {};
  // Keys that are not seen have no position: those of padding, of documents before the last.
  const at::Tensor position =
      valid.defined()
          ? valid.to(at::kLong).cumsum(1)
          : at::arange(keys, q.options().dtype(at::kLong).requires_grad(false)).unsqueeze(0);
  return RelativeBias(relative_.narrow(1, 0, q.size(1)).to(q.scalar_type()),
                      position.narrow(1, before, q.size(2)), position, causal);
}

State SoftmaxMechanism::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  const int64_t heads = dims().heads, width = dims().dim / heads;
  const auto none = [&](int64_t count) { return at::empty({batch, count, 0, width}, options); };
  State state = UndefinedState();
  state[keys_] = none(key_heads_);
  state[values_] = none(heads);
  state[count_] = at::zeros({batch}, at::kLong);
  return state;
}

namespace {

// The `rows` in use with x appended after them. In place, into spare capacity that doubles, unless
// gradients are recorded: those of earlier pieces may need the cache as it was, whether this one
// has any or not. The caller's x stays its own. A cache keeps its type but where training has it
// for one pass.
at::Tensor Append(at::Tensor& cache, int64_t rows, const at::Tensor& x, int64_t time) {
  if (rows == 0 && cache.size(time) == 0)
    return cache = at::GradMode::is_enabled() ? x : x.to(cache.scalar_type(), false, /*copy=*/true);
  if (at::GradMode::is_enabled())
    return cache = at::cat({cache.narrow(time, 0, rows), x.to(cache.scalar_type())}, time);
  const int64_t needed = rows + x.size(time);
  if (cache.size(time) < needed) {
    std::vector<int64_t> shape = cache.sizes().vec();
    shape[time] = cache.size(0) > 0 ? std::max<int64_t>({2 * rows, needed, 64}) : needed;
    const at::Tensor larger = at::empty(shape, cache.options());
    larger.narrow(time, 0, rows).copy_(cache.narrow(time, 0, rows));
    cache = larger;
  }
  cache.narrow(time, rows, x.size(time)).copy_(x);
  return cache.narrow(time, 0, needed);
}

// After a packed piece: only keys of each row's last document stay visible. valid: [B,rows] before
// it, or undefined.
at::Tensor KeepLastDocument(const at::Tensor& valid, const ops::Mask& mask, int64_t before) {
  const int64_t length = mask.starts->size(1);
  const at::Tensor document = mask.Documents(length), last = document.narrow(1, length - 1, 1);
  const at::Tensor keys =
      at::cat({at::zeros({document.size(0), before}, document.options()), document}, 1);
  const at::Tensor visible = keys == last;
  return valid.defined() ? valid.logical_and(visible) : visible;
}

}  // namespace

// Rows of the cache in use: the same for the whole batch, kept once a batch row so that Reorder
// fits every tensor of a state. The cache of a batch of none has no spare room.
int64_t SoftmaxMechanism::Count(const State& state) const {
  const at::Tensor& count = state[count_];
  return count.numel() > 0 ? count.const_data_ptr<int64_t>()[0] : state[keys_].size(2);
}

void SoftmaxMechanism::WriteBy(const at::Tensor& k, const at::Tensor& v, State& state,
                               const ops::Mask& mask) const {
  const int64_t before = Count(state), fresh = k.size(2);
  Append(state[keys_], before, k, 2);
  Append(state[values_], before, v, 2);
  if (mask.lengths || state[valid_].defined()) {
    const at::Tensor valid = mask.lengths
                                 ? mask.Real(fresh)
                                 : at::ones({k.size(0), fresh}, k.options().dtype(at::kBool));
    if (!state[valid_].defined()) state[valid_] = at::ones({k.size(0), before}, valid.options());
    state[valid_] = at::cat({state[valid_].narrow(1, 0, before), valid}, 1);
  }
  state[count_] = at::full_like(state[count_], before + fresh);
}

void SoftmaxMechanism::DoWrite(const std::vector<at::Tensor>& x, State& state,
                               const ops::Mask& mask) {
  WriteBy(x[k_], x[v_], state, mask);
}

at::Tensor SoftmaxMechanism::ReadBy(const at::Tensor& q, const State& state,
                                    const Compute& compute) {
  const int64_t rows = Count(state);
  ops::SoftmaxOptions options;
  options.dropout = Dropout();
  options.scale = ScaleOption();
  return compute(q, state[keys_].narrow(2, 0, rows), state[values_].narrow(2, 0, rows), options, {},
                 state[valid_]);
}

at::Tensor SoftmaxMechanism::ExtendBy(const Own& x, State& state, const ops::Mask& mask,
                                      const Compute& compute) {
  const int64_t before = Count(state);
  WriteBy(x.k, x.v, state, mask);
  const int64_t rows = Count(state);
  ops::SoftmaxOptions options;
  options.causal = true;
  options.query_offset = before;
  options.dropout = Dropout();
  options.scale = ScaleOption();
  options.bias = Bias(x.q, before, rows, state[valid_], true);
  at::Tensor out;
  if (before == 0) {
    out = compute(x.q, x.k, x.v, options, mask, {});
  } else {
    // A state that was begun in another type goes on.
    const auto type = x.v.scalar_type();
    out = compute(x.q, state[keys_].narrow(2, 0, rows).to(type),
                  state[values_].narrow(2, 0, rows).to(type), options, {{}, mask.starts},
                  state[valid_]);
  }
  if (mask.starts && rows > before) state[valid_] = KeepLastDocument(state[valid_], mask, before);
  return ZeroPadding(out, mask);
}

at::Tensor SoftmaxMechanism::BidirectionalBy(const Own& x, const ops::Mask& mask,
                                             const Compute& compute) {
  ops::SoftmaxOptions options;
  options.dropout = Dropout();
  options.scale = ScaleOption();
  options.bias = Bias(x.q, 0, x.v.size(2), {}, false);
  return ZeroPadding(compute(x.q, x.k, x.v, options, mask, {}), mask);
}

// A state says nothing of where the queries stand among its keys.
at::Tensor SoftmaxMechanism::BidirectionalRows(const std::vector<at::Tensor>& x,
                                               const ops::Mask& mask) {
  if (!relative_.defined()) return Mechanism::BidirectionalRows(x, mask);
  return BidirectionalBy({x[q_], x[k_], x[v_]}, mask, ops::SoftmaxAttention);
}

at::Tensor SoftmaxMechanism::Read(const std::vector<at::Tensor>& x, const State& state) {
  return ReadBy(x[q_], state, ops::SoftmaxAttention);
}

at::Tensor SoftmaxMechanism::DoExtend(const std::vector<at::Tensor>& x, State& state,
                                      const ops::Mask& mask) {
  return ExtendBy({x[q_], x[k_], x[v_]}, state, mask, ops::SoftmaxAttention);
}

at::Tensor SoftmaxMechanism::DoAttend(Form form, const std::vector<at::Tensor>& x, State* state,
                                      const ops::Mask& mask, Handles& handles) {
  at::Tensor out, bias;
  if (form == Form::kCausal && relative_.defined()) {
    out = ExtendBy({x[q_], x[k_], x[v_]}, *state, mask,
                   [&](const auto& q, const auto& k, const auto& v, const auto& options,
                       const auto& seen, const auto& key_valid) {
                     bias = options.bias;
                     return ops::SoftmaxAttention(q, k, v, options, seen, key_valid);
                   });
  } else {
    out = Mechanism::DoAttend(form, x, state, mask, handles);
    if (form == Form::kBidirectional) bias = Bias(x[q_], 0, x[v_].size(2), {}, false);
  }
  handles.clear();
  if (dims().copied_on > 0)
    handles = {{x[q_],
                state ? (*state)[keys_].narrow(2, 0, Count(*state)) : x[k_],
                {},
                bias,
                ScaleOption()}};
  return out;
}

at::Tensor SoftmaxMechanism::Definition(Form form, const std::vector<at::Tensor>& queries,
                                        const std::vector<at::Tensor>& x) const {
  return DefinitionBy(form, queries[q_], {{}, x[k_], x[v_]});
}

at::Tensor SoftmaxMechanism::DefinitionBy(Form form, const at::Tensor& q, const Own& x) const {
  CISTERN_CHECK(!relative_.defined(),
                "[softmax] the definition is that of the scores without relative positions");
  const double scale =
      scale_ == Scale::kUnit ? 1 : 1 / std::sqrt(double(dims().dim / dims().heads));
  return EachQuery(form, {q}, {x.k, x.v}, x.v.size(3), [&](const auto& query, const auto& seen) {
    const at::Tensor &k = seen[0], &v = seen[1];
    return at::matmul(at::softmax(at::matmul(query[0], k.transpose(2, 3)) * scale, 3), v);
  });
}

void SoftmaxMechanism::Truncate(State& state, int64_t count) const {
  const int64_t rows = Count(state);
  CISTERN_CHECK(count >= 0 && count <= rows, "[softmax] cannot cut a state of ", rows,
                " tokens back to ", count);
  for (const StateId& id : {keys_, values_}) state[id] = state[id].narrow(2, 0, count);
  if (state[valid_].defined()) state[valid_] = state[valid_].narrow(1, 0, count);
  state[count_] = at::full_like(state[count_], count);
}

int64_t SoftmaxMechanism::StateBytes(int64_t batch, int64_t tokens,
                                     const at::TensorOptions& options, bool) const {
  const int64_t width = dims().dim / dims().heads;
  return batch *
         ((key_heads_ + dims().heads) * tokens * width * int64_t(options.dtype().itemsize()) +
          int64_t(sizeof(int64_t)));
}

State SoftmaxMechanism::Compact(const State& state) const {
  State compact = state;
  for (const StateId& id : {keys_, values_}) compact[id] = state[id].narrow(2, 0, Count(state));
  return compact;
}

void SoftmaxMechanism::CheckState(const State& state) const {
  const int64_t batch = state[count_].size(0), rows = Count(state);
  CISTERN_CHECK((state[count_] == rows).all().item<bool>() && state[keys_].size(2) == rows &&
                    state[values_].size(2) == rows,
                "[softmax] the cache says that it holds ", rows, " tokens, but k has ",
                state[keys_].size(2), " and v ", state[values_].size(2));
  CISTERN_CHECK(state[keys_].size(1) == key_heads_, "[softmax] expected k of ", key_heads_,
                " heads, got ", state[keys_].size(1));
  const at::Tensor& valid = state[valid_];
  if (!valid.defined()) return;
  CISTERN_CHECK(valid.scalar_type() == at::kBool && valid.sizes() == at::IntArrayRef({batch, rows}),
                "[softmax] expected valid of shape [", batch, ", ", rows, "] and type Bool, got ",
                valid.sizes(), " and ", at::toString(valid.scalar_type()));
}

bool SoftmaxMechanism::TakesBFloat16(Form) const {
  return !relative_.defined() && dims().copied_on == 0 && ops::AttendsToBFloat16();
}

LeastOperations SoftmaxMechanism::Operations(Form form, int64_t tokens, int64_t before) const {
  // Those derived from it do something else: they copy scores, or read by latents.
  if (typeid(*this) != typeid(SoftmaxMechanism)) return {};
  return PairOperations(SeenPairs(form, tokens, before), double(dims().dim));
}

}  // namespace cistern
