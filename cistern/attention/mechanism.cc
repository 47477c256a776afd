#include "cistern/attention/mechanism.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "cistern/attention/head_groups.h"
#include "cistern/base/error.h"
#include "cistern/ops/finite.h"
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

std::shared_ptr<Mechanism> MechanismInfo::Make(const Json& options,
                                               const AttentionDims& dims) const {
  if (dims.heads < 1 || dims.dim < 1 || dims.dim % dims.heads != 0)
    FailUsage("[", name, "] expected heads >= 1 and a dim that they divide, got dim=", dims.dim,
              " and heads=", dims.heads);
  return construct(*this, options, dims);
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

const MechanismInfo& FindMechanism(const std::string& name,
                                   const std::vector<std::string>& beside) {
  if (IsHeadGroups(name)) return HeadGroupsInfo(name);
  std::vector<std::string> names;
  for (const MechanismInfo* info : Mechanisms()) {
    if (info->name == name) return *info;
    names.push_back(info->name);
  }
  names.insert(names.end(), beside.begin(), beside.end());
  throw UsageError(UnknownName("mechanism", name, names));
}

void RequireForm(const MechanismInfo& info, Form form) {
  if (info.Supports(form)) return;
  for (const std::string& refusal : info.refusals) {
    if (refusal.starts_with(FormName(form) + ":")) FailUsage("[", info.name, "] has no ", refusal);
  }
  FailUsage("[", info.name, "] has no ", FormName(form), " form");
}

void CheckMask(const std::string& where, const ops::Mask& mask, int64_t batch, int64_t length) {
  try {
    mask.Check(where.c_str(), batch, length);
  } catch (const c10::Error& e) {
    Fail(e.what_without_backtrace());
  }
}

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

std::vector<at::Tensor> Widened(std::vector<at::Tensor> x, at::ScalarType half) {
  for (at::Tensor& t : x) {
    if (t.defined() && t.scalar_type() == half) t = t.to(at::kFloat);
  }
  return x;
}

// A cache of tokens goes on in their type.
bool Holds(const State& state, at::ScalarType type) {
  return std::any_of(state.tensors.begin(), state.tensors.end(), [&](const auto& t) {
    return t.value.defined() && t.value.scalar_type() == type;
  });
}

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

void Mechanism::CheckTokens(const std::vector<at::Tensor>& x, std::optional<Side> side,
                            const ops::Mask& mask, const State* state) const {
  const at::Tensor* first = nullptr;
  for (size_t i = 0; i < projections_.size(); ++i) {
    const Projection& p = projections_[i];
    if (!p.OfTokens() || (side && p.side != *side)) continue;
    CISTERN_CHECK(i < x.size(), "[", info_.name, "] expected a tensor for each projection, got ",
                  x.size(), " and none for ", p.name);
    const at::Tensor& t = x[i];
    CISTERN_CHECK(t.defined(), "[", info_.name, "] expected a tensor of ", p.name,
                  ", got an undefined one");
    const int64_t heads = p.heads > 0 ? p.heads : dims_.heads, width = p.width / heads;
    if (!first) first = &t;
    const bool fits = t.dim() == 4 && t.size(0) == first->size(0) && t.size(1) == heads &&
                      t.size(2) == first->size(2) && t.size(3) == width;
    CISTERN_CHECK(fits, "[", info_.name, "] expected ", p.name, " of shape [B,", heads, ",T,",
                  width, "]",
                  first == &t ? "" : StrCat(" with B=", first->size(0), " and T=", first->size(2)),
                  ", got ", t.sizes());
    CISTERN_CHECK(t.scalar_type() == first->scalar_type(), "[", info_.name,
                  "] expected tokens of one dtype, got ", p.name, " in ", t.scalar_type(),
                  " beside ", first->scalar_type());
  }
  if (!first) return;
  const int64_t batch = first->size(0);
  if (mask) CheckMask(StrCat("[", info_.name, "]"), mask, batch, first->size(2));
  if (!state) return;
  for (const NamedTensor& t : state->tensors) {
    CISTERN_CHECK(!t.value.defined() || (t.value.dim() > 0 && t.value.size(0) == batch), "[",
                  info_.name, "] expected a state of as many rows as the tokens have, ", batch,
                  ", got ", t.name, " of shape ", t.value.sizes());
  }
}

template <class Change>
std::vector<at::Tensor> Mechanism::OfTokens(const std::vector<at::Tensor>& x,
                                            std::optional<Side> side, Change&& change) const {
  std::vector<at::Tensor> changed = x;
  for (size_t i = 0; i < std::min(projections_.size(), x.size()); ++i) {
    const Projection& p = projections_[i];
    if (p.OfTokens() && x[i].defined() && (!side || p.side == *side)) changed[i] = change(x[i]);
  }
  return changed;
}

std::vector<at::Tensor> Mechanism::WithoutPadding(const std::vector<at::Tensor>& x,
                                                  const ops::Mask& mask, Form form,
                                                  std::optional<Side> side) const {
  if (!mask.Padded() || SeesPadding()) return x;
  // Scores of two rows of such numbers are far from those of which exact attention knows no
  // exponential (1e9 in float).
  constexpr double kModerate = 1e4;
  const bool left_out = mask.lengths && LeavesPaddingOut(form);
  return OfTokens(x, side, [&](const at::Tensor& t) {
    return left_out && ops::PaddingIsBelow(t, *mask.lengths, kModerate) ? t : ZeroPadding(t, mask);
  });
}

std::vector<at::Tensor> Mechanism::Moved(const std::vector<at::Tensor>& x,
                                         const ops::TokenMap& map) const {
  return OfTokens(x, {}, [&](const at::Tensor& t) { return map.Move(t, 2); });
}

void Mechanism::RequireMaskable() const {
  if (SeesPadding())
    FailUsage("[", info_.name,
              "] sees padding like any token with mask=none (nystrom: padding=zeroes or front), so "
              "that no token can be masked and no row can hold several documents; use mask=tokens "
              "(padding=tokens)");
}

ops::TokenMap Mechanism::RealTokensFirst(const ops::Mask& mask) const {
  RequireMaskable();
  return ToFront(mask, mask.valid->size(1));
}

std::optional<at::ScalarType> Mechanism::HalfType(Form form,
                                                  const std::vector<at::Tensor>& x) const {
  for (const at::Tensor& t : x) {
    if (!t.defined()) continue;
    const at::ScalarType type = t.scalar_type();
    if (type == at::kHalf || (type == at::kBFloat16 && !TakesBFloat16(form))) return type;
  }
  return {};
}

at::Tensor Mechanism::Extend(const std::vector<at::Tensor>& x, State& state,
                             const ops::Mask& mask) {
  CheckTokens(x, {}, mask, &state);
  if (const auto half = HalfType(Form::kCausal, x); half && !Holds(state, *half))
    return Extend(Widened(x, *half), state, mask).to(*half);
  if (mask.valid) {
    const ops::TokenMap front = RealTokensFirst(mask);
    return front.Back(Extend(Moved(x, front), state, front.mask()), 2);
  }
  return mask.lengths ? DoExtend(WithoutPadding(x, mask, Form::kCausal), state, mask)
                      : DoExtend(x, state, mask);
}

void Mechanism::Write(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) {
  CheckTokens(x, Side::kKey, mask, &state);
  if (mask.valid) {
    const ops::TokenMap front = RealTokensFirst(mask);
    const auto keys =
        OfTokens(x, Side::kKey, [&](const at::Tensor& t) { return front.Move(t, 2); });
    return Write(keys, state, front.mask());
  }
  mask.lengths ? DoWrite(WithoutPadding(x, mask, Form::kCross, Side::kKey), state, mask)
               : DoWrite(x, state, mask);
}

at::Tensor Mechanism::Bidirectional(const std::vector<at::Tensor>& x, const ops::Mask& mask) {
  CheckTokens(x, {}, mask, nullptr);
  if (const auto half = HalfType(Form::kBidirectional, x))
    return Bidirectional(Widened(x, *half), mask).to(*half);
  if (mask.valid) {
    const ops::TokenMap front = RealTokensFirst(mask);
    return front.Back(Bidirectional(Moved(x, front), front.mask()), 2);
  }
  if (mask.starts) return EachDocument(x, mask);
  if (!mask.lengths || SeesPadding()) return BidirectionalRows(x, mask);
  return ZeroPadding(BidirectionalRows(WithoutPadding(x, mask, Form::kBidirectional), mask), mask);
}

at::Tensor Mechanism::Attend(Form form, const std::vector<at::Tensor>& x, State* state,
                             const ops::Mask& mask, Handles& handles) {
  const bool reads = form == Form::kCross;
  const std::optional<Side> side = reads ? std::optional(Side::kQuery) : std::nullopt;
  CheckTokens(x, side, mask, form == Form::kBidirectional ? nullptr : state);
  if (!mask.Padded()) return DoAttend(form, x, state, mask, handles);
  if (mask.valid && !reads) {
    const ops::TokenMap front = RealTokensFirst(mask);
    return front.Back(Attend(form, Moved(x, front), state, front.mask(), handles), 2);
  }
  return DoAttend(form, WithoutPadding(x, mask, form, side), state, mask, handles);
}

at::Tensor Mechanism::DoAttend(Form form, const std::vector<at::Tensor>& x, State* state,
                               const ops::Mask& mask, Handles& handles) {
  handles.clear();
  if (form == Form::kCausal) return DoExtend(x, *state, mask);
  if (form == Form::kCross) return Read(x, *state);
  if (mask.starts) return EachDocument(x, mask);
  const at::Tensor y = BidirectionalRows(x, mask);
  return SeesPadding() ? y : ZeroPadding(y, mask);
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

int64_t Mechanism::StateBytes(int64_t batch, int64_t, const at::TensorOptions& options,
                              bool decodes) const {
  const State empty = EmptyState(batch, options.device(at::kMeta));
  const int64_t decoding = decodes && PutsOffWrites() ? decoding_.Bytes(empty, batch, options) : 0;
  return decoding > 0 ? decoding : empty.Bytes();
}

State Mechanism::Compact(const State& state) const { return state; }
State Mechanism::Settled(const State& state) const { return decoding_.Settled(state); }
State Mechanism::StateForm(int64_t batch, const at::TensorOptions& options,
                           const std::function<bool(const std::string&)>& has) const {
  return decoding_.Form(EmptyState(batch, options), has);
}

void Mechanism::CheckState(const State&) const {}

at::Tensor ZeroPadding(const at::Tensor& y, const ops::Mask& mask) {
  const at::Tensor pad = mask.HeadsPadding(y.size(2));
  return pad.defined() ? y.masked_fill(pad, 0.0) : y;
}

// Packed rows: every document becomes a row of its own, and goes back to its place afterwards.
at::Tensor Mechanism::EachDocument(const std::vector<at::Tensor>& x, const ops::Mask& mask) {
  RequireMaskable();
  const ops::TokenMap rows = ops::EachDocument(mask, mask.starts->size(1));
  std::vector<at::Tensor> unpacked;
  for (const at::Tensor& y : x) unpacked.push_back(rows.Move(y, 2));
  return rows.Back(BidirectionalRows(unpacked, rows.mask()), 2);
}

}  // namespace cistern
