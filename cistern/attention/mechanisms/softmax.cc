#include "cistern/attention/mechanisms/softmax.h"

#include <ATen/ATen.h>

#include "cistern/attention/definition.h"
#include "cistern/base/error.h"

namespace cistern {

const MechanismInfo& softmax_mechanism() {
  static MechanismInfo info = [] {
    MechanismInfo i;
    i.name = "softmax";
    i.title = "Exact softmax attention";
    i.source = "Vaswani et al. 2017; spec 2.1";
    i.summary =
        "Every token attends to every token before it. Exact, quadratic in time; its state, the "
        "key-value cache, grows with the text.";
    i.definition = "y_t = sum_s softmax_s(q_t . k_s / sqrt(d)) v_s";
    i.forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
    i.exact = true;
    i.bounded = false;
    i.positions = {"none", "learned", "sinusoidal", "rotary"};
    i.time = "O(T^2 d)";
    i.state = "2 T d per head";
    i.truncates = i.leaves_scores = true;
    return i;
  }();
  static const bool bound = (BindMechanism<SoftmaxMechanism>(info), true);
  (void)bound;
  return info;
}

Fields SoftmaxMechanism::Describe(Options&) { return {}; }

SoftmaxMechanism::SoftmaxMechanism(const MechanismInfo& info, const Options&,
                                   const AttentionDims& dims)
    : SoftmaxMechanism(info, dims, dims.heads) {}

SoftmaxMechanism::SoftmaxMechanism(const MechanismInfo& info, const AttentionDims& dims,
                                   int64_t key_heads)
    : Mechanism(info, dims), key_heads_(key_heads) {}

std::vector<Projection> SoftmaxMechanism::Projections() const {
  const int64_t dim = dims().dim;
  return {{"q", Side::kQuery, dim, true}, {"k", Side::kKey, dim, true}, {"v", Side::kKey, dim}};
}

State SoftmaxMechanism::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  const int64_t heads = dims().heads, width = dims().dim / heads;
  const auto none = [&](int64_t count) { return at::empty({batch, count, 0, width}, options); };
  return {{{"k", none(key_heads_)},
           {"v", none(heads)},
           {"valid", at::Tensor()},
           {"count", at::zeros({batch}, at::kLong)}}};
}

namespace {

// Rows of the cache in use: the same for the whole batch, kept once a batch row so that Reorder
// fits every tensor of a state.
int64_t Count(const State& state) {
  return state["count"].numel() > 0 ? state["count"].const_data_ptr<int64_t>()[0] : 0;
}

// The `rows` in use with x appended after them. In place, into spare capacity that doubles, unless
// a gradient is recorded.
at::Tensor Append(at::Tensor& cache, int64_t rows, const at::Tensor& x, int64_t time) {
  if (rows == 0 && cache.size(time) == 0) return cache = x;
  if (at::GradMode::is_enabled() && (x.requires_grad() || cache.requires_grad()))
    return cache = at::cat({cache.narrow(time, 0, rows), x}, time);
  const int64_t needed = rows + x.size(time);
  if (cache.size(time) < needed) {
    std::vector<int64_t> shape = cache.sizes().vec();
    shape[time] = std::max<int64_t>({2 * rows, needed, 64});
    const at::Tensor larger = at::empty(shape, cache.options());
    larger.narrow(time, 0, rows).copy_(cache.narrow(time, 0, rows));
    cache = larger;
  }
  cache.narrow(time, rows, x.size(time)).copy_(x);
  return cache.narrow(time, 0, needed);
}

// After a packed piece: only keys of each row's last document stay visible.
void KeepLastDocument(State& state, const ops::Mask& mask, int64_t before) {
  const int64_t length = mask.starts->size(1);
  const at::Tensor document = mask.Documents(length), last = document.narrow(1, length - 1, 1);
  const at::Tensor keys =
      at::cat({at::zeros({document.size(0), before}, document.options()), document}, 1);
  const at::Tensor visible = keys == last;
  state["valid"] = state["valid"].defined() ? state["valid"].logical_and(visible) : visible;
}

}  // namespace

void SoftmaxMechanism::DoWrite(const std::vector<at::Tensor>& x, State& state,
                               const ops::Mask& mask) {
  const int64_t before = Count(state), fresh = x[1].size(2);
  Append(state["k"], before, x[1], 2);
  Append(state["v"], before, x[2], 2);
  if (mask.lengths || state["valid"].defined()) {
    const at::Tensor valid = mask.lengths
                                 ? mask.Real(fresh)
                                 : at::ones({x[1].size(0), fresh}, x[1].options().dtype(at::kBool));
    if (!state["valid"].defined())
      state["valid"] = at::ones({x[1].size(0), before}, valid.options());
    state["valid"] = at::cat({state["valid"].narrow(1, 0, before), valid}, 1);
  }
  state["count"] = at::full_like(state["count"], before + fresh);
}

at::Tensor SoftmaxMechanism::ReadBy(const at::Tensor& q, const State& state,
                                    const Compute& compute) {
  const int64_t rows = Count(state);
  ops::SoftmaxOptions options;
  options.dropout = Dropout();
  const at::Tensor valid = state.Has("valid") ? state["valid"] : at::Tensor();
  return compute(q, state["k"].narrow(2, 0, rows), state["v"].narrow(2, 0, rows), options, {},
                 valid);
}

at::Tensor SoftmaxMechanism::ExtendBy(const std::vector<at::Tensor>& x, State& state,
                                      const ops::Mask& mask, const Compute& compute) {
  const int64_t before = Count(state);
  SoftmaxMechanism::DoWrite(x, state, mask);
  const int64_t rows = Count(state);
  ops::SoftmaxOptions options;
  options.causal = true;
  options.query_offset = before;
  options.dropout = Dropout();
  at::Tensor out;
  if (before == 0) {
    out = compute(x[0], x[1], x[2], options, mask, {});
  } else {
    const at::Tensor valid = state.Has("valid") ? state["valid"] : at::Tensor();
    out = compute(x[0], state["k"].narrow(2, 0, rows), state["v"].narrow(2, 0, rows), options,
                  {{}, mask.starts}, valid);
  }
  if (mask.starts && rows > before) KeepLastDocument(state, mask, before);
  return ZeroPadding(out, mask);
}

at::Tensor SoftmaxMechanism::BidirectionalBy(const std::vector<at::Tensor>& x,
                                             const ops::Mask& mask, const Compute& compute) {
  ops::SoftmaxOptions options;
  options.dropout = Dropout();
  return ZeroPadding(compute(x[0], x[1], x[2], options, mask, {}), mask);
}

at::Tensor SoftmaxMechanism::Read(const std::vector<at::Tensor>& x, const State& state) {
  return ReadBy(x[0], state, ops::SoftmaxAttention);
}

at::Tensor SoftmaxMechanism::DoExtend(const std::vector<at::Tensor>& x, State& state,
                                      const ops::Mask& mask) {
  return ExtendBy(x, state, mask, ops::SoftmaxAttention);
}

at::Tensor SoftmaxMechanism::DoAttend(Form form, const std::vector<at::Tensor>& x, State* state,
                                      const ops::Mask& mask, Handles& handles) {
  const at::Tensor out = Mechanism::DoAttend(form, x, state, mask, handles);
  if (dims().copied_on > 0)
    handles = {{x[0], state ? (*state)["k"].narrow(2, 0, Count(*state)) : x[1], {}}};
  return out;
}

at::Tensor SoftmaxMechanism::Definition(Form form, const std::vector<at::Tensor>& queries,
                                        const std::vector<at::Tensor>& x) const {
  const double scale = 1 / std::sqrt(double(dims().dim / dims().heads));
  return EachQuery(form, queries, x, x[2].size(3), [&](const auto& query, const auto& seen) {
    return at::matmul(at::softmax(at::matmul(query[0], seen[1].transpose(2, 3)) * scale, 3),
                      seen[2]);
  });
}

void SoftmaxMechanism::Truncate(State& state, int64_t count) const {
  const int64_t rows = Count(state);
  CISTERN_CHECK(count >= 0 && count <= rows, "[softmax] cannot cut a state of ", rows,
                " tokens back to ", count);
  for (const char* name : {"k", "v"}) state[name] = state[name].narrow(2, 0, count);
  if (state.Has("valid")) state["valid"] = state["valid"].narrow(1, 0, count);
  state["count"] = at::full_like(state["count"], count);
}

int64_t SoftmaxMechanism::StateBytes(int64_t batch, int64_t tokens,
                                     const at::TensorOptions& options) const {
  const int64_t width = dims().dim / dims().heads;
  return batch *
         ((key_heads_ + dims().heads) * tokens * width * int64_t(options.dtype().itemsize()) +
          int64_t(sizeof(int64_t)));
}

State SoftmaxMechanism::Compact(const State& state) const {
  State compact = state;
  for (const char* name : {"k", "v"}) compact[name] = state[name].narrow(2, 0, Count(state));
  return compact;
}

void SoftmaxMechanism::CheckState(const State& state) const {
  const int64_t batch = state["count"].size(0), rows = Count(state);
  CISTERN_CHECK((state["count"] == rows).all().item<bool>() && state["k"].size(2) == rows &&
                    state["v"].size(2) == rows,
                "[softmax] the cache says that it holds ", rows, " tokens, but k has ",
                state["k"].size(2), " and v ", state["v"].size(2));
  CISTERN_CHECK(state["k"].size(1) == key_heads_, "[softmax] expected k of ", key_heads_,
                " heads, got ", state["k"].size(1));
  if (!state.Has("valid")) return;
  const at::Tensor& valid = state["valid"];
  CISTERN_CHECK(valid.scalar_type() == at::kBool && valid.sizes() == at::IntArrayRef({batch, rows}),
                "[softmax] expected valid of shape [", batch, ", ", rows, "] and type Bool, got ",
                valid.sizes(), " and ", at::toString(valid.scalar_type()));
}

}  // namespace cistern
