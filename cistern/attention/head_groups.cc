#include "cistern/attention/head_groups.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <mutex>

#include "cistern/base/error.h"

namespace cistern {
namespace {

struct Share {
  const MechanismInfo* info;
  std::string name;
  int64_t heads;
};

std::vector<Share> Shares(const std::string& list) {
  std::vector<Share> shares;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find('+', begin), list.size());
    const std::string item = list.substr(begin, end - begin);
    const size_t colon = item.find(':');
    int64_t heads = 0;
    const char* const last = item.data() + item.size();
    if (colon == std::string::npos ||
        std::from_chars(item.data() + colon + 1, last, heads).ptr != last || heads < 1) {
      FailUsage(
          "attention '", list,
          "': expected MECHANISM:HEADS between the plus signs, such as softmax:2+latte:2, got '",
          item, "'");
    }
    const MechanismInfo& info = FindMechanism(item.substr(0, colon));
    if (!info.verbs)
      FailUsage("attention '", list, "': ", info.name,
                " has no state and cannot share a layer; give it a layer of its own");
    if (info.copies_scores) {
      FailUsage(
          "attention '", list, "': ", info.name,
          " takes over heads of whole layers and cannot share one; give it a layer of its own");
    }
    if (info.memory != MemoryUse::kNone)
      FailUsage("attention '", list, "': ", info.name,
                " has a memory of the model's width and cannot share a layer; give it a layer of "
                "its own");
    shares.push_back({&info, info.name, heads});
    begin = end + 1;
  }
  for (size_t i = 0; i < shares.size(); ++i) {
    const auto same = [&](const Share& s) { return s.info == shares[i].info; };
    if (std::count_if(shares.begin(), shares.end(), same) > 1) shares[i].name += std::to_string(i);
  }
  return shares;
}

std::shared_ptr<Mechanism> Make(const MechanismInfo& info, const std::vector<Share>& shares,
                                const Json& options, const AttentionDims& dims) {
  int64_t heads = 0;
  for (const Share& s : shares) heads += s.heads;
  if (heads != dims.heads)
    FailUsage("attention '", info.name, "' shares out ", heads, " heads, the layer has ",
              dims.heads, "; change model.attention or model.heads");
  std::vector<HeadGroups::Group> groups;
  for (size_t i = 0; i < shares.size(); ++i) {
    AttentionDims part = dims;
    part.heads = shares[i].heads;
    part.dim = dims.dim / dims.heads * shares[i].heads;
    if (dims.first)
      part.first = static_cast<const HeadGroups&>(*dims.first).groups()[i].mechanism.get();
    const std::string& name = shares[i].info->name;
    groups.push_back(
        {shares[i].name,
         shares[i].info->Make(options.contains(name) ? options.at(name) : Json::object(), part)});
  }
  return std::make_shared<HeadGroups>(info, dims, std::move(groups));
}

MechanismInfo Describe(const std::string& list) {
  const std::vector<Share> shares = Shares(list);
  MechanismInfo i;
  i.name = list;
  i.title = i.source = "head groups";
  i.summary = "Several mechanisms in one layer, each on heads of its own.";
  i.definition = "each group of heads as its mechanism";
  for (const Form form : {Form::kBidirectional, Form::kCausal, Form::kCross}) {
    const auto lacks = [&](const Share& s) { return !s.info->Supports(form); };
    const auto found = std::find_if(shares.begin(), shares.end(), lacks);
    if (found == shares.end()) {
      i.forms.push_back(form);
    } else {
      i.refusals.push_back(StrCat(FormName(form), ": ", found->info->name, " has none"));
    }
  }
  for (const PositionKind kind : AllPositions()) {
    const auto fits = [&](const Share& s) { return s.info->Fits(kind); };
    // Rotary positions turn only the projections that allow it: one such mechanism is enough.
    if (kind == PositionKind::kRotary ? std::any_of(shares.begin(), shares.end(), fits)
                                      : std::all_of(shares.begin(), shares.end(), fits))
      i.positions.push_back(kind);
  }
  i.exact = i.bounded = i.merges = i.truncates = i.causal_is_prefix = true;
  for (const Share& s : shares) {
    i.exact = i.exact && s.info->exact;
    i.bounded = i.bounded && s.info->bounded;
    i.stochastic = i.stochastic || s.info->stochastic;
    i.fixed_length = i.fixed_length || s.info->fixed_length;
    i.merges = i.merges && s.info->merges;
    i.truncates = i.truncates && s.info->truncates;
    i.causal_is_prefix = i.causal_is_prefix && s.info->causal_is_prefix;
    if (i.padding_refusal.empty()) i.padding_refusal = s.info->padding_refusal;
    i.tolerance = std::max(i.tolerance, s.info->tolerance);
    i.time += (i.time.empty() ? "" : " + ") + s.info->time;
    i.state += (i.state.empty() ? "" : " + ") + s.info->state;
  }
  return i;
}

}  // namespace

bool IsHeadGroups(const std::string& name) { return name.find_first_of(":+") != std::string::npos; }

bool InHeadGroups(const std::string& list, const std::string& mechanism) {
  return IsHeadGroups(list) && ("+" + list).find("+" + mechanism + ":") != std::string::npos;
}

std::vector<const MechanismInfo*> MechanismsOf(const std::string& name) {
  if (!IsHeadGroups(name)) return {&FindMechanism(name)};
  std::vector<const MechanismInfo*> all;
  for (const Share& s : Shares(name)) all.push_back(s.info);
  return all;
}

const MechanismInfo& HeadGroupsInfo(const std::string& name) {
  static std::mutex mutex;
  static std::map<std::string, MechanismInfo> known;
  const std::lock_guard lock(mutex);
  const auto found = known.find(name);
  if (found != known.end()) return found->second;
  MechanismInfo& info = known[name] = Describe(name);
  info.options = [] { return Fields(); };
  info.construct = [shares = Shares(name)](const MechanismInfo& self, const Json& options,
                                           const AttentionDims& dims) {
    return Make(self, shares, options, dims);
  };
  return info;
}

HeadGroups::HeadGroups(const MechanismInfo& info, const AttentionDims& dims,
                       std::vector<Group> groups)
    : Mechanism(info, dims), groups_(std::move(groups)) {
  for (const Group& g : groups_) {
    for (const Form form : {Form::kBidirectional, Form::kCausal, Form::kCross}) {
      if (g.mechanism->OutputDropout(form) > 0)
        FailUsage("attention '", info.name, "': ", g.name,
                  " drops what the whole layer gives and cannot share one; leave its dropout as it "
                  "is by default");
    }
    register_module(g.name, g.mechanism);
    AddWeightsOf(g.name, *g.mechanism);
    for (Projection p : g.mechanism->Projections()) {
      p.name = g.name + "_" + p.name;
      if (p.heads == 0) p.heads = g.mechanism->dims().heads;
      AddProjection(p);
    }
    first_states_.push_back(StateNames().size());
    for (const std::string& name : g.mechanism->StateNames()) AddState(g.name + "_" + name);
  }
}

State HeadGroups::EmptyState(int64_t batch, const at::TensorOptions& options) const {
  State whole = UndefinedState();
  for (size_t g = 0; g < groups_.size(); ++g)
    PutBack(whole, g, groups_[g].mechanism->EmptyState(batch, options));
  return whole;
}

State HeadGroups::Part(const State& state, size_t group) const {
  State part;
  const std::vector<std::string>& names = groups_[group].mechanism->StateNames();
  for (size_t i = 0; i < names.size(); ++i)
    part.tensors.push_back({names[i], state.tensors.at(first_states_[group] + i).value});
  return part;
}

void HeadGroups::PutBack(State& whole, size_t group, const State& part) const {
  for (size_t i = 0; i < part.tensors.size(); ++i)
    whole.tensors.at(first_states_[group] + i).value = part.tensors[i].value;
}

template <class F>
void HeadGroups::Each(const std::vector<at::Tensor>& x, const State* state, F&& f) const {
  size_t next = 0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    const size_t count = groups_[g].mechanism->Projections().size();
    std::vector<at::Tensor> own;
    if (!x.empty()) own.assign(x.begin() + int64_t(next), x.begin() + int64_t(next + count));
    next += count;
    State part = state ? Part(*state, g) : State();
    f(g, *groups_[g].mechanism, own, part);
  }
}

namespace {

// What the groups give, [B,H,T,d] each, as the heads of one layer; stored token by token, so that
// the output map reads it in place.
at::Tensor JoinHeads(const std::vector<at::Tensor>& groups) {
  std::vector<at::Tensor> by_token;
  for (const at::Tensor& heads : groups) by_token.push_back(heads.transpose(1, 2));
  return at::cat(by_token, 2).transpose(1, 2);
}

}  // namespace

at::Tensor HeadGroups::DoExtend(const std::vector<at::Tensor>& x, State& state,
                                const ops::Mask& mask) {
  std::vector<at::Tensor> out;
  Each(x, &state, [&](size_t g, Mechanism& mechanism, const auto& own, State& part) {
    // Meanwhile the tensors are the group's alone, so that it may write in place.
    PutBack(state, g, mechanism.UndefinedState());
    try {
      out.push_back(mechanism.Extend(own, part, mask));
    } catch (...) {
      PutBack(state, g, part);
      throw;
    }
    PutBack(state, g, part);
  });
  return JoinHeads(out);
}

namespace {

// Tokens that the groups together take in bfloat16, for a group that does not.
std::vector<at::Tensor> AsTaken(const Mechanism& mechanism, std::vector<at::Tensor> x) {
  if (mechanism.TakesBFloat16(Form::kBidirectional)) return x;
  for (at::Tensor& t : x) {
    if (t.defined() && t.scalar_type() == at::kBFloat16) t = t.to(at::kFloat);
  }
  return x;
}

}  // namespace

void HeadGroups::DoWrite(const std::vector<at::Tensor>& x, State& state, const ops::Mask& mask) {
  Each(x, &state, [&](size_t g, Mechanism& mechanism, const auto& own, State& part) {
    mechanism.Write(AsTaken(mechanism, own), part, mask);
    PutBack(state, g, part);
  });
}

at::Tensor HeadGroups::Read(const std::vector<at::Tensor>& x, const State& state) {
  const auto query = std::find_if(x.begin(), x.end(), [](const auto& t) { return t.defined(); });
  std::vector<at::Tensor> out;
  Each(x, &state, [&](size_t, Mechanism& mechanism, const auto& own, State& part) {
    out.push_back(mechanism.Read(AsTaken(mechanism, own), part).to(query->scalar_type()));
  });
  return JoinHeads(out);
}

at::Tensor HeadGroups::BidirectionalRows(const std::vector<at::Tensor>& x, const ops::Mask& mask) {
  std::vector<at::Tensor> out;
  Each(x, nullptr, [&](size_t, Mechanism& mechanism, const auto& own, State&) {
    out.push_back(mechanism.Bidirectional(own, mask));
  });
  return JoinHeads(out);
}

at::Tensor HeadGroups::Definition(Form form, const std::vector<at::Tensor>& queries,
                                  const std::vector<at::Tensor>& x) const {
  std::vector<at::Tensor> out;
  size_t next = 0;
  for (const Group& g : groups_) {
    const size_t end = next + g.mechanism->Projections().size();
    const auto own = [&](const std::vector<at::Tensor>& all) {
      return std::vector<at::Tensor>(all.begin() + int64_t(next), all.begin() + int64_t(end));
    };
    out.push_back(g.mechanism->Definition(form, own(queries), own(x)));
    next = end;
  }
  return at::cat(out, 1);
}

State HeadGroups::Merge(const State& first, const State& second) const {
  if (!info().merges) return Mechanism::Merge(first, second);  // throws
  State whole = first;
  for (size_t g = 0; g < groups_.size(); ++g)
    PutBack(whole, g, groups_[g].mechanism->Merge(Part(first, g), Part(second, g)));
  return whole;
}

void HeadGroups::Truncate(State& state, int64_t count) const {
  if (!info().truncates)
    return Mechanism::Truncate(state, count);  // throws, before any group is cut
  Each({}, &state, [&](size_t g, Mechanism& mechanism, const auto&, State& part) {
    mechanism.Truncate(part, count);
    PutBack(state, g, part);
  });
}

// Those that do not make floats of it.
bool HeadGroups::TakesBFloat16(Form form) const {
  return std::any_of(groups_.begin(), groups_.end(),
                     [&](const Group& g) { return g.mechanism->TakesBFloat16(form); });
}

int64_t HeadGroups::StateBytes(int64_t batch, int64_t tokens, const at::TensorOptions& options,
                               bool decodes) const {
  int64_t bytes = 0;
  for (const Group& g : groups_) bytes += g.mechanism->StateBytes(batch, tokens, options, decodes);
  return bytes;
}

State HeadGroups::Compact(const State& state) const {
  State whole = state;
  for (size_t g = 0; g < groups_.size(); ++g)
    PutBack(whole, g, groups_[g].mechanism->Compact(Part(state, g)));
  return whole;
}

State HeadGroups::Settled(const State& state) const {
  State whole = state;
  for (size_t g = 0; g < groups_.size(); ++g)
    PutBack(whole, g, groups_[g].mechanism->Settled(Part(state, g)));
  return whole;
}

State HeadGroups::StateForm(int64_t batch, const at::TensorOptions& options,
                            const std::function<bool(const std::string&)>& has) const {
  State whole = UndefinedState();
  for (size_t g = 0; g < groups_.size(); ++g) {
    const auto has_own = [&](const std::string& name) { return has(groups_[g].name + "_" + name); };
    PutBack(whole, g, groups_[g].mechanism->StateForm(batch, options, has_own));
  }
  return whole;
}

std::string HeadGroups::FormRefusal(Form form) const {
  for (const Group& g : groups_) {
    const std::string refusal = g.mechanism->FormRefusal(form);
    if (!refusal.empty()) return StrCat(refusal, " (", g.name, ")");
  }
  return "";
}

bool HeadGroups::SeesPadding() const {
  return std::any_of(groups_.begin(), groups_.end(),
                     [](const Group& g) { return g.mechanism->SeesPadding(); });
}
bool HeadGroups::SeesBatch() const {
  return std::any_of(groups_.begin(), groups_.end(),
                     [](const Group& g) { return g.mechanism->SeesBatch(); });
}
bool HeadGroups::WritesAtOnce() const {
  return std::any_of(groups_.begin(), groups_.end(),
                     [](const Group& g) { return g.mechanism->WritesAtOnce(); });
}

void HeadGroups::CheckState(const State& state) const {
  for (size_t g = 0; g < groups_.size(); ++g) groups_[g].mechanism->CheckState(Part(state, g));
}

}  // namespace cistern
