#include "cistern/attention/mechanisms/window.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "cistern/attention/token_positions.h"
#include "cistern/ops/banded_attention.h"
#include "cistern/ops/softmax_attention.h"

namespace cistern {

const MechanismInfo& window_mechanism() {
  static MechanismInfo info = [] {
    MechanismInfo i;
    i.name = "window";
    i.title = "Sliding window";
    i.source = "P003 sec. 3.2, eq. 5; bidirectional and cross ours; spec 2.14";
    i.summary =
        "Exact attention to the last n tokens (bidirectional: to both sides; cross: to the last n "
        "of the source). Nothing further back is "
        "seen within a layer.";
    i.definition =
        "y_t = sum_s softmax_s(q_t . k_s / sqrt(d)) v_s over t-n < s <= t; bidirectional |t-s| < "
        "n; cross: the last n of the source";
    i.forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
    i.positions = {"none", "learned", "sinusoidal", "rotary"};
    i.time = "O(T n d)";
    i.state = "2 n d per head";
    i.cases = {Json{{"window", 4}}, Json{{"window", 20}}};
    i.merges = true;
    return i;
  }();
  static const bool bound = (BindMechanism<WindowMechanism>(info), true);
  (void)bound;
  return info;
}

Fields WindowMechanism::Describe(Options& options) {
  return Fields().Add("window", &options.window, "tokens that a token sees, itself among them (n)",
                      {1, 65536});
}

WindowMechanism::WindowMechanism(const MechanismInfo& info, const Options& options,
                                 const AttentionDims& dims)
    : WindowMechanism(info, options.window, 1, dims) {}

WindowMechanism::WindowMechanism(const MechanismInfo& info, int64_t window, int64_t dilation,
                                 const AttentionDims& dims)
    : Mechanism(info, dims), window_(window), dilation_(dilation) {}

std::vector<Projection> WindowMechanism::Projections() const {
  const int64_t dim = dims().dim;
  return {{"q", Side::kQuery, dim, true}, {"k", Side::kKey, dim, true}, {"v", Side::kKey, dim}};
}

State WindowMechanism::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  const at::Tensor ring =
      at::zeros({batch, dims().heads, window_ * dilation_, dims().dim / dims().heads}, options);
  return {
      {{"k", ring}, {"v", ring.clone()}, {"count", at::zeros({batch}, options.dtype(at::kLong))}}};
}

double WindowMechanism::Scale() const { return 1 / std::sqrt(double(dims().dim / dims().heads)); }
double WindowMechanism::Dropout() const { return is_training() ? dims().dropout : 0.0; }

namespace {

// Rows of x [B,H,S,d] picked by index [B,R] -> [B,H,R,d].
at::Tensor PickRows(const at::Tensor& x, const at::Tensor& index) {
  return x.gather(
      2, index.unsqueeze(1).unsqueeze(-1).expand({x.size(0), x.size(1), index.size(1), x.size(3)}));
}

// [B,L]: the ring rows that hold the last L tokens of each row, in order; the first L - count of
// them hold nothing of this document.
at::Tensor RingOrder(const at::Tensor& count, int64_t ring) {
  return (count.unsqueeze(1) + at::arange(ring, count.options())).remainder(ring);
}

// [B,L]: how many tokens before the newest one the token in each ring row was written; at least
// `count` where it is of no use.
at::Tensor RingAge(const at::Tensor& count, int64_t ring) {
  return (count.unsqueeze(1) - 1 - at::arange(ring, count.options())).remainder(ring);
}

// The number all rows hold, or -1 where they differ or cannot be looked at without waiting for a
// device.
int64_t SharedCount(const at::Tensor& count) {
  if (!count.is_cpu() || count.numel() == 0) return -1;
  const at::Tensor rows = count.contiguous();
  const int64_t* c = rows.const_data_ptr<int64_t>();
  return std::all_of(c, c + rows.numel(), [&](int64_t n) { return n == c[0]; }) ? c[0] : -1;
}

// tokens [B,H,T,d], the first of their sequence, as a ring of L rows: row i holds the newest whose
// position is i modulo L.
at::Tensor RingOf(const at::Tensor& tokens, int64_t ring) {
  const int64_t length = tokens.size(2);
  if (length <= ring) return at::constant_pad_nd(tokens, {0, 0, 0, ring - length}, 0);
  return tokens.narrow(2, length - ring, ring).roll(length % ring, 2);
}

// A piece behind the tokens the ring holds: k, v [B,H,L+T,d]; documents [B,L+T], negative where
// there is no token.
struct RingPiece {
  RingPiece(const std::vector<at::Tensor>& x, const State& state, const ops::Mask& mask) {
    const at::Tensor count = state["count"];
    const int64_t ring = state["k"].size(2), length = x[1].size(2);
    const at::Tensor order = RingOrder(count, ring);
    k = at::cat({PickRows(state["k"], order), x[1]}, 2);
    v = at::cat({PickRows(state["v"], order), x[2]}, 2);
    const at::Tensor there =
        at::arange(ring, count.options()).unsqueeze(0) >= ring - count.unsqueeze(1);
    at::Tensor piece =
        mask.starts ? mask.Documents(length) : at::zeros({count.size(0), length}, count.options());
    if (mask.lengths) piece = piece.masked_fill(mask.Padding(length), -1);
    documents = at::cat({there.to(at::kLong) - 1, piece}, 1);
  }
  at::Tensor k, v, documents;
};

// The ring after the piece: row i takes the newest token whose position is i modulo the ring.
void KeepLast(const RingPiece& all, State& state, const ops::Mask& mask) {
  const int64_t ring = state["k"].size(2), length = all.k.size(2) - ring;
  const at::Tensor positions = PiecePositions(state["count"], length, mask),
                   count = PositionsAfter(state["count"], positions, mask);
  const at::Tensor end = mask.lengths ? *mask.lengths + ring : at::full_like(count, ring + length);
  const at::Tensor index = end.unsqueeze(1) - 1 - RingAge(count, ring);
  state["k"] = PickRows(all.k, index);
  state["v"] = PickRows(all.v, index);
  state["count"] = count;
}

}  // namespace

// Every g-th row belongs together: [B,H,S,d] becomes [B g,H,S/g,d], a plain window in each.
at::Tensor WindowMechanism::Banded(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const at::Tensor& documents, int64_t lead, int64_t after) const {
  const int64_t g = dilation_, batch = q.size(0), heads = q.size(1), length = q.size(2),
                width = q.size(3);
  const ops::Band band = {window_ - 1, after, lead / g};
  if (q.numel() == 0) return at::zeros_like(q) + 0 * q.sum();
  if (g == 1) return ops::BandedAttention(q, k, v, band, documents, Scale(), Dropout());
  const int64_t more = (g - length % g) % g;  // rows that make the length a multiple of g
  auto split = [&](const at::Tensor& x) {
    const at::Tensor padded = more == 0 ? x : at::constant_pad_nd(x, {0, 0, 0, more}, 0);
    return padded.reshape({batch, heads, -1, g, width})
        .permute({0, 3, 1, 2, 4})
        .reshape({batch * g, heads, -1, width});
  };
  const at::Tensor rows =
      (more == 0 ? documents : at::constant_pad_nd(documents, {0, more}, -1)).expand({batch, -1});
  const at::Tensor split_rows =
      rows.reshape({batch, -1, g}).transpose(1, 2).reshape({batch * g, -1});
  const at::Tensor out =
      ops::BandedAttention(split(q), split(k), split(v), band, split_rows, Scale(), Dropout());
  return out.view({batch, g, heads, -1, width})
      .permute({0, 2, 3, 1, 4})
      .reshape({batch, heads, length + more, width})
      .narrow(2, 0, length);
}

at::Tensor WindowMechanism::DoExtend(const std::vector<at::Tensor>& x, State& state,
                                     const ops::Mask& mask) {
  if (x[0].size(2) == 1 && !mask && !at::GradMode::is_enabled()) return ExtendByOne(x, state);
  if (!mask && SharedCount(state["count"]) == 0) return ExtendEmpty(x, state);
  const RingPiece all(x, state, mask);
  const at::Tensor out = Banded(x[0], all.k, all.v, all.documents, state["k"].size(2), 0);
  KeepLast(all, state, mask);
  return out;
}

// A whole sequence, as in training: no ring before it, and inside one window nothing but causal
// attention.
at::Tensor WindowMechanism::ExtendEmpty(const std::vector<at::Tensor>& x, State& state) const {
  const int64_t length = x[0].size(2);
  for (const auto& [name, tokens] : {std::pair{"k", x[1]}, std::pair{"v", x[2]}})
    state[name] = RingOf(tokens, state[name].size(2));
  state["count"] = state["count"] + length;
  if (dilation_ == 1 && length <= window_)
    return ops::SoftmaxAttention(x[0], x[1], x[2], {true, 0, Dropout(), Scale()});
  return Banded(x[0], x[1], x[2], at::zeros({1, length}, state["count"].options()), 0, 0);
}

// Decoding: the token takes its place in the ring, then sees the rows of its window.
at::Tensor WindowMechanism::ExtendByOne(const std::vector<at::Tensor>& x, State& state) const {
  const int64_t count = SharedCount(state["count"]), ring = state["k"].size(2);
  if (dilation_ == 1 && count >= 0) {  // the order of the rows is no matter: no mask
    for (const auto& [name, token] : {std::pair{"k", x[1]}, std::pair{"v", x[2]}})
      state[name].select(2, count % ring).copy_(token.select(2, 0));
    state["count"] = state["count"] + 1;
    const int64_t rows = std::min(count + 1, ring);
    return ops::MaskedAttention(x[0], state["k"].narrow(2, 0, rows), state["v"].narrow(2, 0, rows),
                                {}, Scale(), Dropout());
  }
  const at::Tensor row =
      state["count"].remainder(state["k"].size(2)).view({-1, 1, 1, 1}).expand_as(x[1]);
  state["k"].scatter_(2, row, x[1]);
  state["v"].scatter_(2, row, x[2]);
  state["count"] = state["count"] + 1;
  const at::Tensor age = RingAge(state["count"], state["k"].size(2));
  at::Tensor visible = age < state["count"].unsqueeze(1);
  if (dilation_ > 1) visible = visible.logical_and(age.remainder(dilation_) == 0);
  return ops::MaskedAttention(x[0], state["k"], state["v"], visible.unsqueeze(1).unsqueeze(1),
                              Scale(), Dropout());
}

void WindowMechanism::DoWrite(const std::vector<at::Tensor>& x, State& state,
                              const ops::Mask& mask) {
  KeepLast(RingPiece(x, state, mask), state, mask);
}

at::Tensor WindowMechanism::Read(const std::vector<at::Tensor>& x, const State& state) {
  RequireForm(info(), Form::kCross);
  const at::Tensor visible =
      RingAge(state["count"], state["k"].size(2)) < state["count"].unsqueeze(1);
  return ops::MaskedAttention(x[0], state["k"], state["v"], visible.unsqueeze(1).unsqueeze(1),
                              Scale(), Dropout());
}

at::Tensor WindowMechanism::BidirectionalRows(const std::vector<at::Tensor>& x,
                                              const ops::Mask& mask) {
  const auto index = x[0].options().dtype(at::kLong).requires_grad(false);
  at::Tensor documents = at::zeros({x[0].size(0), x[0].size(2)}, index);
  if (mask.lengths) documents = documents.masked_fill(mask.Padding(x[0].size(2)), -1);
  return Banded(x[0], x[1], x[2], documents, 0, window_ - 1);
}

at::Tensor WindowMechanism::Definition(Form form, const std::vector<at::Tensor>& queries,
                                       const std::vector<at::Tensor>& x) const {
  const int64_t length = x[1].size(2), reach = window_ * dilation_;
  const at::Tensor scores = at::matmul(queries[0], x[1].transpose(2, 3)) * Scale();  // [B,H,T,S]
  const at::Tensor out = at::zeros(queries[0].sizes(), queries[0].options());
  for (int64_t t = 0; t < queries[0].size(2); ++t) {
    std::vector<int64_t> seen;
    for (int64_t s = 0; s < length; ++s) {
      const int64_t back = form == Form::kCross    ? length - 1 - s
                           : form == Form::kCausal ? t - s
                                                   : std::abs(t - s);
      if (back >= 0 && back < reach && back % dilation_ == 0) seen.push_back(s);
    }
    if (seen.empty()) continue;
    const at::Tensor keys = at::tensor(seen, at::kLong);
    const at::Tensor p = at::softmax(scores.select(2, t).index_select(2, keys), 2);  // [B,H,keys]
    out.select(2, t).copy_(at::matmul(p.unsqueeze(2), x[2].index_select(2, keys)).squeeze(2));
  }
  return out;
}

// The last tokens of `second` are written behind those of `first`, at the positions they have in
// the whole.
State WindowMechanism::Merge(const State& first, const State& second) const {
  const int64_t ring = second["k"].size(2);
  const at::Tensor fresh = second["count"].clamp_max(ring);
  const at::Tensor order = RingOrder(second["count"] - fresh, ring);
  State whole = first;
  whole["count"] = first["count"] + second["count"] - fresh;
  KeepLast(RingPiece({{}, PickRows(second["k"], order), PickRows(second["v"], order)}, whole, {}),
           whole, {fresh, {}});
  return whole;
}

}  // namespace cistern
