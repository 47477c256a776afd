#include "cistern/attention/mechanism.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "cistern/attention/head_groups.h"
#include "cistern/base/error.h"
#include "cistern/tensors/device.h"

namespace cistern {

#define CISTERN_MECHANISM(name) MechanismInfo name##_mechanism();
#include "cistern/attention/mechanisms/mechanisms.def"
#undef CISTERN_MECHANISM

std::string FormName(Form form) {
  switch (form) {
    case Form::kBidirectional:
      return "bidirectional";
    case Form::kCausal:
      return "causal";
    case Form::kCross:
      return "cross";
  }
  return "";
}

std::string SideName(Side side) {
  switch (side) {
    case Side::kQuery:
      return "query";
    case Side::kKey:
      return "key";
    case Side::kMemory:
      return "memory";
    case Side::kPacked:
      return "packed";
  }
  return "";
}

std::string MemoryUseName(MemoryUse use) {
  switch (use) {
    case MemoryUse::kNone:
      return "none";
    case MemoryUse::kFixed:
      return "fixed";
    case MemoryUse::kStream:
      return "stream";
    case MemoryUse::kReplaced:
      return "replaced";
    case MemoryUse::kLatents:
      return "latents";
  }
  return "";
}

bool MechanismInfo::Supports(Form form) const {
  return std::find(forms.begin(), forms.end(), form) != forms.end();
}

bool MechanismInfo::Fits(PositionKind kind) const {
  return std::find(positions.begin(), positions.end(), kind) != positions.end();
}

std::vector<std::string> MechanismInfo::PositionNames() const {
  std::vector<std::string> names;
  for (const PositionKind kind : positions) names.push_back(NameOf(kind, PositionKinds()));
  return names;
}

const std::vector<const MechanismInfo*>& Mechanisms() {
  static const MechanismInfo infos[] = {
#define CISTERN_MECHANISM(name) name##_mechanism(),
#include "cistern/attention/mechanisms/mechanisms.def"
#undef CISTERN_MECHANISM
  };
  static const std::vector<const MechanismInfo*> all = [] {
    std::vector<const MechanismInfo*> pointers;
    for (const MechanismInfo& info : infos) pointers.push_back(&info);
    return pointers;
  }();
  return all;
}

const MechanismInfo& FindMechanism(const std::string& name) {
  if (IsHeadGroups(name)) return HeadGroupsInfo(name);
  std::vector<std::string> names;
  for (const MechanismInfo* info : Mechanisms()) {
    if (info->name == name) return *info;
    names.push_back(info->name);
  }
  throw UsageError(UnknownName("mechanism", name, names));
}

void RequireForm(const MechanismInfo& info, Form form) {
  if (info.Supports(form)) return;
  for (const std::string& refusal : info.refusals) {
    if (refusal.starts_with(FormName(form) + ":")) FailUsage("[", info.name, "] has no ", refusal);
  }
  FailUsage("[", info.name, "] has no ", FormName(form), " form");
}

namespace {

// Where each document of a packed batch lies: (row, first token, length).
struct Document {
  int64_t row, begin, length;
};

std::vector<Document> Documents(const ops::Mask& mask, int64_t batch, int64_t length) {
  const at::Tensor starts = mask.starts->to(at::kCPU).contiguous();
  const at::Tensor lengths = mask.lengths ? mask.lengths->to(at::kCPU).contiguous() : at::Tensor();
  std::vector<Document> documents;
  for (int64_t b = 0; b < batch; ++b) {
    const bool* start = starts.const_data_ptr<bool>() + b * length;
    const int64_t end =
        lengths.defined() ? std::min(length, lengths.const_data_ptr<int64_t>()[b]) : length;
    for (int64_t t = 0; t < end; ++t) {
      if (t == 0 || start[t]) documents.push_back({b, t, 0});
      documents.back().length = t + 1 - documents.back().begin;
    }
  }
  return documents;
}

}  // namespace

size_t ProjectionId::Undeclared() { Fail("a projection that the mechanism has not declared"); }

ProjectionId Mechanism::AddProjection(const Projection& projection) {
  const auto rank = [](Side side) {
    return side == Side::kMemory ? 1 : side == Side::kPacked ? 2 : 0;
  };
  CISTERN_CHECK(projections_.empty() || rank(projections_.back().side) <= rank(projection.side),
                "[", info().name, "] projection ", projection.name, " of the ",
                SideName(projection.side), " comes after ", projections_.back().name, " of the ",
                SideName(projections_.back().side));
  const auto packed = [](const Projection& p) { return p.side == Side::kPacked; };
  const auto before = std::count_if(projections_.begin(), projections_.end(), packed);
  projections_.push_back(projection);
  return ProjectionId(packed(projection) ? size_t(before) : projections_.size() - 1);
}

StateId Mechanism::AddState(const std::string& name) {
  state_names_.push_back(name);
  return {name, state_names_.size() - 1};
}

State Mechanism::UndefinedState() const {
  State state;
  for (const std::string& name : state_names_) state.tensors.push_back({name, {}});
  return state;
}

void Mechanism::AddWeight(const std::string& name, at::Tensor& member, const at::Tensor& initial,
                          CoreWeight::Kind kind) {
  torch::nn::Module* owner = this;
  const size_t dot = name.find('.');
  if (dot != std::string::npos) {
    const std::string child = name.substr(0, dot);
    const auto children = named_children();
    const auto* known = children.find(child);
    owner =
        known ? known->get() : register_module(child, std::make_shared<torch::nn::Module>()).get();
  }
  const std::string leaf = name.substr(dot + 1);  // all of it where there is no dot
  member = kind == CoreWeight::Kind::kTrained
               ? owner->register_parameter(leaf, ToActiveDevice(initial))
               : owner->register_buffer(leaf, ToActiveDevice(initial));
  weights_.push_back({name, &member, kind});
}

std::string Mechanism::TieRefusal() const {
  for (const CoreWeight& w : weights_) {
    if (w.kind == CoreWeight::Kind::kRedrawn)
      return "draws features anew while it is trained, which must not happen between them; set its "
             "redraw=0";
  }
  return "";
}

void Mechanism::AddWeightsOf(const std::string& name, const Mechanism& held) {
  for (const CoreWeight& w : held.weights())
    weights_.push_back({name + "." + w.name, w.value, w.kind});
}

at::Tensor Mechanism::BidirectionalRows(const std::vector<at::Tensor>& x, const ops::Mask& mask) {
  State state = EmptyState(x[0].size(0), x[0].options());
  DoWrite(x, state, mask);
  return Read(x, state);
}

State Mechanism::EmptyState(int64_t, const at::TensorOptions&) const { return {}; }

namespace {

[[noreturn]] void RefuseVerb(const MechanismInfo& info) {
  throw Error(
      StrCat("[", info.name,
             "] has no state to write, read or extend; it takes whole sequences (Bidirectional)"));
}

}  // namespace

at::Tensor Mechanism::DoExtend(const std::vector<at::Tensor>&, State&, const ops::Mask&) {
  RefuseVerb(info());
}

void Mechanism::DoWrite(const std::vector<at::Tensor>&, State&, const ops::Mask&) {
  RefuseVerb(info());
}

at::Tensor Mechanism::Read(const std::vector<at::Tensor>&, const State&) { RefuseVerb(info()); }

std::vector<at::Tensor> Mechanism::WithoutPadding(const std::vector<at::Tensor>& x,
                                                  const ops::Mask& mask,
                                                  std::optional<Side> side) const {
  if (!mask.lengths || SeesPadding()) return x;
  std::vector<at::Tensor> real = x;
  for (size_t i = 0; i < std::min(projections_.size(), x.size()); ++i) {
    const Projection& p = projections_[i];
    if (p.OfTokens() && x[i].defined() && (!side || p.side == *side))
      real[i] = ZeroPadding(x[i], mask);
  }
  return real;
}

at::Tensor Mechanism::Extend(const std::vector<at::Tensor>& x, State& state,
                             const ops::Mask& mask) {
  return mask.lengths ? DoExtend(WithoutPadding(x, mask), state, mask) : DoExtend(x, state, mask);
}

void Mechanism::Write(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) {
  mask.lengths ? DoWrite(WithoutPadding(x, mask, Side::kKey), state, mask)
               : DoWrite(x, state, mask);
}

at::Tensor Mechanism::Bidirectional(const std::vector<at::Tensor>& x, const ops::Mask& mask) {
  if (mask.starts) return EachDocument(x, mask);
  return mask.lengths ? ZeroPadding(BidirectionalRows(WithoutPadding(x, mask), mask), mask)
                      : BidirectionalRows(x, mask);
}

at::Tensor Mechanism::Attend(Form form, const std::vector<at::Tensor>& x, State* state,
                             const ops::Mask& mask, Handles& handles) {
  if (!mask.lengths) return DoAttend(form, x, state, mask, handles);
  const bool reads = form == Form::kCross;
  return DoAttend(form, WithoutPadding(x, mask, reads ? std::optional(Side::kQuery) : std::nullopt),
                  state, mask, handles);
}

at::Tensor Mechanism::DoAttend(Form form, const std::vector<at::Tensor>& x, State* state,
                               const ops::Mask& mask, Handles& handles) {
  handles.clear();
  if (form == Form::kCausal) return DoExtend(x, *state, mask);
  if (form == Form::kCross) return Read(x, *state);
  return mask.starts ? EachDocument(x, mask) : ZeroPadding(BidirectionalRows(x, mask), mask);
}

State Mechanism::Merge(const State&, const State&) const {
  throw Error(StrCat("[", info().name,
                     "] states do not merge; extend one state by the second piece instead"));
}

void Mechanism::Truncate(State&, int64_t) const {
  throw Error(StrCat("[", info().name,
                     "] the state does not hold single tokens and cannot be cut back; keep a Clone "
                     "of it instead"));
}

int64_t Mechanism::StateBytes(int64_t batch, int64_t, const at::TensorOptions& options) const {
  return EmptyState(batch, options.device(at::kMeta)).Bytes();
}

State Mechanism::Compact(const State& state) const { return state; }

void Mechanism::CheckState(const State&) const {}

at::Tensor ZeroPadding(const at::Tensor& y, const ops::Mask& mask) {
  if (!mask.lengths) return y;
  const at::Tensor pad =
      at::arange(y.size(2), mask.lengths->options()).unsqueeze(0) >= mask.lengths->unsqueeze(1);
  return y.masked_fill(pad.unsqueeze(1).unsqueeze(-1), 0.0);
}

// Packed rows: every document becomes a row of its own, and goes back to its place afterwards.
at::Tensor Mechanism::EachDocument(const std::vector<at::Tensor>& x, const ops::Mask& mask) {
  const int64_t batch = x[0].size(0), length = x[0].size(2);
  const std::vector<Document> documents = Documents(mask, batch, length);
  int64_t longest = 0;
  for (const Document& d : documents) longest = std::max(longest, d.length);
  const int64_t count = int64_t(documents.size());
  const at::Tensor index = at::full({count, longest}, batch * length,
                                    at::kLong);  // the last row of the padded table is zeros
  const at::Tensor back = at::full({batch * length}, count * longest, at::kLong);
  const at::Tensor lengths = at::empty({count}, at::kLong);
  for (int64_t i = 0; i < count; ++i) {
    const Document& d = documents[i];
    lengths.mutable_data_ptr<int64_t>()[i] = d.length;
    for (int64_t t = 0; t < d.length; ++t) {
      index.mutable_data_ptr<int64_t>()[i * longest + t] = d.row * length + d.begin + t;
      back.mutable_data_ptr<int64_t>()[d.row * length + d.begin + t] = i * longest + t;
    }
  }
  // Rows of a [.., H, w] table picked by index; an index past the end picks zeros.
  auto pick = [](const at::Tensor& y, const at::Tensor& rows, int64_t b, int64_t t) {
    const at::Tensor flat = y.transpose(1, 2).reshape({-1, y.size(1), y.size(3)});
    const at::Tensor table = at::cat({flat, at::zeros({1, y.size(1), y.size(3)}, y.options())});
    return table.index_select(0, rows.reshape({-1}).to(y.device()))
        .reshape({b, t, y.size(1), y.size(3)})
        .transpose(1, 2);
  };
  std::vector<at::Tensor> unpacked;
  for (const at::Tensor& y : x)
    unpacked.push_back(y.defined() ? pick(y, index, count, longest) : y);
  ops::Mask rows;
  rows.lengths = lengths.to(x[0].device());
  return pick(BidirectionalRows(unpacked, rows), back, batch, length);
}

}  // namespace cistern
