#include "cistern/attention/mechanisms/window.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "cistern/attention/token_positions.h"
#include "cistern/ops/banded_attention.h"
#include "cistern/ops/exact_attention.h"
#include "cistern/ops/softmax_attention.h"

namespace cistern {

MechanismInfo window_mechanism() {
  MechanismInfo i = InfoOf<WindowMechanism>("window");
  i.title = "Sliding window";
  i.source = "P003 sec. 3.3, eq. 5; bidirectional and cross ours; spec 2.14";
  i.summary =
      "Exact attention to the last n tokens (bidirectional: to both sides; cross: to the last n "
      "of the source). Nothing further back is "
      "seen within a layer.";
  i.definition =
      "y_t = sum_s softmax_s(q_t . k_s / sqrt(d)) v_s over t-n < s <= t; bidirectional |t-s| < "
      "n; cross: the last n of the source";
  i.forms = {Form::kBidirectional, Form::kCausal, Form::kCross};
  i.padding_refusal = "a token reads its neighbours, and padding has none";
  i.positions = AllPositions();
  i.time = "O(T n d)";
  i.state = "2 n d per head";
  i.cases = {Json{{"window", 4}}, Json{{"window", 20}},
             Json{{"window", 6}, {"empty_slots", "take_part"}}};
  i.merges = true;
  return i;
}

Fields WindowMechanism::Describe(Options& options) {
  Fields f;
  f.Add("window", &options.window, "tokens that a token sees, itself among them (n)", {1, 65536});
  DescribeEmpty(f, options.empty_slots);
  return f;
}

void WindowMechanism::DescribeEmpty(Fields& fields, EmptySlots& empty_slots) {
  fields.Add(
      "empty_slots", &empty_slots,
      "slots of the queue that hold no token, while fewer than n were written: masked, or "
      "take_part in the softmax with logit 0 and value 0 (P003 to the letter; bidirectional: "
      "in the places of the n tokens up to a token, not of those after it)",
      EmptySlotNames());
}

WindowMechanism::WindowMechanism(const MechanismInfo& info, const Options& options,
                                 const AttentionDims& dims)
    : WindowMechanism(info, options.window, 1, options.empty_slots, dims) {}

WindowMechanism::WindowMechanism(const MechanismInfo& info, int64_t window, int64_t dilation,
                                 EmptySlots empty_slots, const AttentionDims& dims)
    : Mechanism(info, dims),
      window_(window),
      dilation_(dilation),
      take_part_(empty_slots == EmptySlots::kTakePart) {
  q_ = AddProjection({"q", Side::kQuery, dims.dim, true});
  k_ = AddProjection({"k", Side::kKey, dims.dim, true});
  v_ = AddProjection({"v", Side::kKey, dims.dim});
  keys_ = AddState("k");
  values_ = AddState("v");
  count_ = AddState("count");
}

State WindowMechanism::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  const at::Tensor ring =
      at::zeros({batch, dims().heads, window_ * dilation_, dims().dim / dims().heads}, options);
  State state = UndefinedState();
  Keep({ring, ring.clone(), at::zeros({batch}, options.dtype(at::kLong))}, state);
  return state;
}

WindowMechanism::Ring WindowMechanism::Held(const State& state) const {
  return {state[keys_], state[values_], state[count_]};
}

void WindowMechanism::Keep(const Ring& ring, State& state) const {
  state[keys_] = ring.k;
  state[values_] = ring.v;
  state[count_] = ring.count;
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

}  // namespace

// A piece behind the tokens the ring holds: k, v [B,H,L+T,d]; documents [B,L+T], negative where
// there is no token.
struct WindowMechanism::RingPiece {
  RingPiece(const at::Tensor& piece_k, const at::Tensor& piece_v, const Ring& before,
            const ops::Mask& mask) {
    const at::Tensor& count = before.count;
    const int64_t ring = before.k.size(2), length = piece_k.size(2);
    const at::Tensor order = RingOrder(count, ring);
    k = at::cat({PickRows(before.k, order), piece_k}, 2);
    v = at::cat({PickRows(before.v, order), piece_v}, 2);
    const at::Tensor there =
        at::arange(ring, count.options()).unsqueeze(0) >= ring - count.unsqueeze(1);
    at::Tensor piece =
        mask.starts ? mask.Documents(length) : at::zeros({count.size(0), length}, count.options());
    if (mask.lengths) piece = piece.masked_fill(mask.Padding(length), -1);
    documents = at::cat({there.to(at::kLong) - 1, piece}, 1);
  }
  at::Tensor k, v, documents;
};

// Row i takes the newest token whose position is i modulo the ring.
WindowMechanism::Ring WindowMechanism::RingAfter(const RingPiece& all, const Ring& before,
                                                 const ops::Mask& mask) {
  const int64_t ring = before.k.size(2), length = all.k.size(2) - ring;
  const at::Tensor positions = PiecePositions(before.count, length, mask),
                   count = PositionsAfter(before.count, positions, mask);
  const at::Tensor end = mask.lengths ? *mask.lengths + ring : at::full_like(count, ring + length);
  const at::Tensor index = end.unsqueeze(1) - 1 - RingAge(count, ring);
  return {PickRows(all.k, index), PickRows(all.v, index), count};
}

at::Tensor WindowMechanism::Banded(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const at::Tensor& documents, int64_t lead, int64_t after) const {
  const ops::Band band = {window_ - 1, after, lead, take_part_ ? window_ : 0, dilation_};
  const auto type = q.scalar_type();  // beside the ring's, where tokens are bfloat16
  return ops::BandedAttention(q, k.to(type), v.to(type), band, documents, Scale(), Dropout());
}

bool WindowMechanism::TakesBFloat16(Form) const { return ops::AttendsToBFloat16(); }

at::Tensor WindowMechanism::DoExtend(const std::vector<at::Tensor>& x, State& state,
                                     const ops::Mask& mask) {
  if (x[q_].size(2) == 1 && !mask && !at::GradMode::is_enabled()) return ExtendByOne(x, state);
  if (!mask && SharedCount(state[count_]) == 0) return ExtendEmpty(x, state);
  const Ring before = Held(state);
  const RingPiece all(x[k_], x[v_], before, mask);
  const at::Tensor out = Banded(x[q_], all.k, all.v, all.documents, before.k.size(2), 0);
  Keep(RingAfter(all, before, mask), state);
  return out;
}

// A whole sequence, as in training: no ring before it, and inside one window nothing but causal
// attention.
at::Tensor WindowMechanism::ExtendEmpty(const std::vector<at::Tensor>& x, State& state) const {
  const int64_t length = x[q_].size(2);
  const Ring before = Held(state);
  const int64_t ring = before.k.size(2);
  const auto held = before.k.scalar_type();
  Keep({RingOf(x[k_], ring).to(held), RingOf(x[v_], ring).to(held), before.count + length}, state);
  if (dilation_ == 1 && length <= window_ && !take_part_)
    return ops::SoftmaxAttention(x[q_], x[k_], x[v_], {true, 0, Dropout(), Scale()});
  return Banded(x[q_], x[k_], x[v_], at::zeros({1, length}, before.count.options()), 0, 0);
}

// Decoding: the token takes its place in the ring, then sees the rows of its window.
at::Tensor WindowMechanism::ExtendByOne(const std::vector<at::Tensor>& x, State& state) const {
  const Ring held = Held(state);
  const int64_t count = SharedCount(held.count), ring = held.k.size(2);
  const at::Tensor after = held.count + 1;
  state[count_] = after;
  if (dilation_ == 1 && count >= 0 && !take_part_) {  // the order of the rows is no matter: no mask
    held.k.select(2, count % ring).copy_(x[k_].select(2, 0));
    held.v.select(2, count % ring).copy_(x[v_].select(2, 0));
    const int64_t rows = std::min(count + 1, ring);
    const auto type = x[q_].scalar_type();
    return ops::MaskedAttention(x[q_], held.k.narrow(2, 0, rows).to(type),
                                held.v.narrow(2, 0, rows).to(type), {}, Scale(), Dropout());
  }
  const at::Tensor row = held.count.remainder(ring).view({-1, 1, 1, 1}).expand_as(x[k_]);
  held.k.scatter_(2, row, x[k_].to(held.k.scalar_type()));
  held.v.scatter_(2, row, x[v_].to(held.v.scalar_type()));
  const at::Tensor age = RingAge(after, ring);
  return ReadRing(x[q_], {held.k, held.v, after}, age.remainder(dilation_) == 0);
}

// slots [B,L]: the rows of the ring that are a query's window, written or not.
at::Tensor WindowMechanism::ReadRing(const at::Tensor& q, const Ring& kept,
                                     const at::Tensor& slots) const {
  const auto type = q.scalar_type();
  const Ring ring = {kept.k.to(type), kept.v.to(type), kept.count};
  const at::Tensor written = RingAge(ring.count, ring.k.size(2)) < ring.count.unsqueeze(1);
  if (!take_part_) {
    const at::Tensor visible = slots.logical_and(written).unsqueeze(1).unsqueeze(1);
    return ops::MaskedAttention(q, ring.k, ring.v, visible, Scale(), Dropout());
  }
  const at::Tensor empty = written.logical_not().unsqueeze(1).unsqueeze(-1);  // of old documents
  return ops::MaskedAttention(q, ring.k.masked_fill(empty, 0.0), ring.v.masked_fill(empty, 0.0),
                              slots.unsqueeze(1).unsqueeze(1), Scale(), Dropout());
}

void WindowMechanism::DoWrite(const std::vector<at::Tensor>& x, State& state,
                              const ops::Mask& mask) {
  const Ring before = Held(state);
  Keep(RingAfter(RingPiece(x[k_], x[v_], before, mask), before, mask), state);
}

at::Tensor WindowMechanism::Read(const std::vector<at::Tensor>& x, const State& state) {
  RequireForm(info(), Form::kCross);
  const Ring held = Held(state);
  return ReadRing(
      x[q_], held,
      at::ones({held.count.size(0), held.k.size(2)}, held.count.options().dtype(at::kBool)));
}

at::Tensor WindowMechanism::BidirectionalRows(const std::vector<at::Tensor>& x,
                                              const ops::Mask& mask) {
  const auto index = x[q_].options().dtype(at::kLong).requires_grad(false);
  at::Tensor documents = at::zeros({x[q_].size(0), x[q_].size(2)}, index);
  if (mask.lengths) documents = documents.masked_fill(mask.Padding(x[q_].size(2)), -1);
  return Banded(x[q_], x[k_], x[v_], documents, 0, window_ - 1);
}

at::Tensor WindowMechanism::Definition(Form form, const std::vector<at::Tensor>& queries,
                                       const std::vector<at::Tensor>& x) const {
  const int64_t length = x[k_].size(2), reach = window_ * dilation_;
  const at::Tensor scores = at::matmul(queries[q_], x[k_].transpose(2, 3)) * Scale();  // [B,H,T,S]
  const at::Tensor out = at::zeros(queries[q_].sizes(), queries[q_].options());
  for (int64_t t = 0; t < queries[q_].size(2); ++t) {
    std::vector<int64_t> seen;
    for (int64_t s = 0; s < length; ++s) {
      const int64_t back = form == Form::kCross    ? length - 1 - s
                           : form == Form::kCausal ? t - s
                                                   : std::abs(t - s);
      if (back >= 0 && back < reach && back % dilation_ == 0) seen.push_back(s);
    }
    if (seen.empty()) continue;
    const at::Tensor keys = at::tensor(seen, at::kLong);
    const at::Tensor e = scores.select(2, t).index_select(2, keys);  // [B,H,keys]
    at::Tensor p = at::softmax(e, 2);
    if (take_part_) {    // the others of all slots have logit 0
      int64_t held = 0;  // of the queue's n slots
      for (const int64_t s : seen) held += form == Form::kBidirectional && s > t ? 0 : 1;
      const at::Tensor zeros = at::zeros({e.size(0), e.size(1), window_ - held}, e.options());
      p = at::softmax(at::cat({e, zeros}, 2), 2).narrow(2, 0, e.size(2));
    }
    out.select(2, t).copy_(at::matmul(p.unsqueeze(2), x[v_].index_select(2, keys)).squeeze(2));
  }
  return out;
}

// The last tokens of `second` are written behind those of `first`, at the positions they have in
// the whole.
State WindowMechanism::Merge(const State& first, const State& second) const {
  const Ring last = Held(second);
  const int64_t ring = last.k.size(2);
  const at::Tensor fresh = last.count.clamp_max(ring);
  const at::Tensor order = RingOrder(last.count - fresh, ring);
  Ring before = Held(first);
  before.count = before.count + last.count - fresh;
  const RingPiece all(PickRows(last.k, order), PickRows(last.v, order), before, {});
  State whole = first;
  Keep(RingAfter(all, before, {fresh, {}}), whole);
  return whole;
}

LeastOperations WindowMechanism::Operations(Form form, int64_t tokens, int64_t before) const {
  if (dilation_ != 1 || form == Form::kCross)
    return {};  // pairs at a distance are not counted here
  return PairOperations(SeenPairs(form, tokens, before, window_), double(dims().dim));
}

}  // namespace cistern
