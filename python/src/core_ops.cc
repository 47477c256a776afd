// The cores of all mechanisms as one operator, cistern::attend, for eager PyTorch, torch.compile
// and torch.export.
//
// Eager calls run the C++ mechanism as it is: autograd sees the primitives inside (slot_read,
// sum_match, ...). Under fake tensors and tracing the operator is opaque: a node with a shape
// function and a backward node, attend_backward, that runs the forward again. So sizes may be
// symbolic, and a graph holds no trace of what a mechanism does with its lengths.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include "cistern/base/error.h"
#include "cistern/ops/primitive.h"
#include "cistern/ops/slot_decoding.h"
#include "python/src/core_scope.h"

namespace cistern::python {
namespace {

using ops::OptionalTensor;
using torch::autograd::variable_list;
using Result = std::tuple<at::Tensor, std::vector<at::Tensor>>;

// The last three are of mechanisms with a memory stream (attention/memory_mechanism.h).
enum class Verb { kBidirectional, kExtend, kCross, kWrite, kRead, kPack, kUpdate, kUnpack };

Verb ParseVerb(std::string_view name) {
  static constexpr std::pair<std::string_view, Verb> kVerbs[] = {
      {"bidirectional", Verb::kBidirectional},
      {"extend", Verb::kExtend},
      {"cross", Verb::kCross},
      {"write", Verb::kWrite},
      {"read", Verb::kRead},
      {"pack", Verb::kPack},
      {"update", Verb::kUpdate},
      {"unpack", Verb::kUnpack}};
  for (const auto& [known, verb] : kVerbs) {
    if (name == known) return verb;
  }
  FailUsage("unknown verb '", std::string(name),
            "'; expected bidirectional, extend, cross, write, read, pack, update or unpack");
}

bool OfMemory(Verb verb) {
  return verb == Verb::kPack || verb == Verb::kUpdate || verb == Verb::kUnpack;
}
Form FormOf(Verb verb) {
  if (verb == Verb::kBidirectional || OfMemory(verb)) return Form::kBidirectional;
  return verb == Verb::kExtend ? Form::kCausal : Form::kCross;
}
bool TakesState(Verb verb) {
  return verb == Verb::kExtend || verb == Verb::kWrite || verb == Verb::kRead;
}
bool GivesState(Verb verb, bool keep_state) {
  return verb == Verb::kWrite || (verb == Verb::kExtend && keep_state);
}

// The verb, after the checks of it and its form. UsageError.
Verb VerbOf(const CoreScope& core, std::string_view name) {
  const Verb verb = ParseVerb(name);
  RequireForm(core->info(), FormOf(verb));
  if (OfMemory(verb) && !core.memory()) {
    FailUsage("[", core->info().name, "] has no memory to ", std::string(name),
              ": that is for mechanisms with a memory stream such as luna");
  }
  return verb;
}

// Whether a verb takes the tensors of a side. Those of the memory or of what was packed come after
// those of the tokens, all or none of them: the learned memory and the packed heads take their
// places (unpack: all).
bool Takes(Verb verb, Side side) {
  const bool writes = verb == Verb::kWrite || verb == Verb::kPack || verb == Verb::kUpdate,
             reads = verb == Verb::kRead || verb == Verb::kUnpack;
  if (side == Side::kMemory) return writes || verb == Verb::kExtend;
  if (side == Side::kPacked) return reads;
  return side == Side::kQuery ? !writes : !reads;
}

struct Inputs {
  std::vector<at::Tensor> x;  // of the tokens in declared order, undefined where the verb takes
                              // none; then of the memory, if given
  std::vector<at::Tensor> packed;  // of what was packed, if given; update: the packed heads
};

// Error where a shape is not what the mechanism declares.
Inputs Arrange(const CoreScope& core, Verb verb, at::TensorList given) {
  const std::string& name = core->info().name;
  size_t wanted = verb == Verb::kUpdate ? 1 : 0, extra = 0;
  for (const Projection& p : core.projections())
    (p.OfTokens() || verb == Verb::kUnpack ? wanted : extra) += Takes(verb, p.side) ? 1 : 0;
  const bool more = extra > 0 && given.size() == wanted + extra;
  CISTERN_CHECK(more || given.size() == wanted, "[", name, "] expected ", wanted,
                extra > 0 ? StrCat(" or ", wanted + extra) : "", " tensors, got ", given.size());
  const at::Tensor& like = given[0];
  const auto check = [&](const at::Tensor& t, const std::string& what, int64_t heads, Side side,
                         const c10::SymInt& rows, int64_t width) -> const at::Tensor& {
    const bool shared = side == Side::kMemory;  // one memory may be that of all rows
    const char letter = side == Side::kMemory || side == Side::kPacked ? 'M' : 'T';
    CISTERN_CHECK(t.dim() == 4 &&
                      ((shared && t.sym_size(0) == 1) || t.sym_size(0) == like.sym_size(0)) &&
                      t.sym_size(1) == heads && (rows == -1 || t.sym_size(2) == rows) &&
                      t.sym_size(3) == width,
                  "[", name, "] expected ", what, " of shape [B,", heads, ",", letter, ",", width,
                  "] with B=", like.sym_size(0), shared ? " or 1" : "",
                  rows == -1 ? "" : StrCat(" and ", letter, "=", rows), ", got ", t.sym_sizes());
    CISTERN_CHECK(t.scalar_type() == like.scalar_type() &&
                      (t.scalar_type() == at::kFloat || t.scalar_type() == at::kDouble),
                  "[", name, "] expected ", what, " in float32 or float64 as the others, got ",
                  at::toString(t.scalar_type()));
    return t;
  };
  Inputs in;
  size_t next = 0;
  c10::SymInt rows[2] = {-1, -1};  // of the query side, of the key side
  for (const Projection& p : core.projections()) {
    const int64_t width = p.width / p.heads;
    if (!p.OfTokens()) {
      if (!Takes(verb, p.side) || !(more || verb == Verb::kUnpack)) continue;
      const at::Tensor& t = check(given[next++], p.name, p.heads, p.side, core.slots(), width);
      (p.side == Side::kMemory ? in.x : in.packed).push_back(t);
    } else if (Takes(verb, p.side)) {
      c10::SymInt& length = rows[verb == Verb::kCross && p.side == Side::kQuery ? 0 : 1];
      in.x.push_back(check(given[next++], p.name, p.heads, p.side, length, width));
      length = in.x.back().sym_size(2);
    } else {
      in.x.emplace_back();
    }
  }
  const AttentionDims& dims = core->dims();
  if (verb == Verb::kUpdate)
    in.packed = {check(given.back(), "packed", dims.heads, Side::kPacked, core.slots(),
                       dims.dim / dims.heads)};
  return in;
}

// The first tensor of a side, or of the other where that side has none.
const at::Tensor& FirstOf(const CoreScope& core, Side side, const std::vector<at::Tensor>& x) {
  const at::Tensor* found = nullptr;
  for (size_t i = 0; i < x.size() && core.projections()[i].OfTokens(); ++i) {
    if (x[i].defined() && (!found || core.projections()[i].side == side)) found = &x[i];
    if (found && core.projections()[i].side == side) break;
  }
  return *found;
}

// The tensors of a state as an operator takes and gives them: one that is undefined is an empty
// bool of as many rows.
State FromList(const CoreScope& core, at::TensorList tensors) {
  const auto& form = core.form().tensors;
  CISTERN_CHECK(tensors.size() == form.size(), "[", core->info().name, "] expected a state of ",
                form.size(), " tensors, got ", tensors.size());
  State state = core->UndefinedState();
  for (size_t i = 0; i < form.size(); ++i) {
    const bool absent =
        !form[i].value.defined() && tensors[i].dim() == 2 && tensors[i].size(1) == 0;
    if (!absent) state[form[i].name] = tensors[i];
  }
  return state;
}

std::vector<at::Tensor> ToList(const State& state, int64_t batch, const at::Tensor& like) {
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& t : Visible(state).tensors) {
    tensors.push_back(t.value.defined() ? t.value
                                        : at::empty({batch, 0}, like.options().dtype(at::kBool)));
  }
  return tensors;
}

// [B,H,T,d] stored as [B,T,H,d]: what most mechanisms give, and what merging the heads wants.
at::Tensor HeadsInside(const at::Tensor& x) {
  return x.transpose(1, 2).contiguous().transpose(1, 2);
}

// [B,M,D] -> [B,H,M,d], the heads of the layer, which packing need not have.
at::Tensor SplitHeads(const CoreScope& core, const at::Tensor& x) {
  const AttentionDims& dims = core->dims();
  return x.unflatten(2, {dims.heads, dims.dim / dims.heads}).transpose(1, 2);
}

// What a state's tensors must be: those of an empty state but for the batch, and for sizes of 0
// there, which grow. The form was made in float, which stands for the type of the inputs.
void CheckState(const CoreScope& core, const State& state, const at::Tensor& like) {
  for (const NamedTensor& t : core.form().tensors) {
    const at::Tensor &form = t.value, &value = state[t.name];
    if (!form.defined()) continue;
    bool fits = value.dim() == form.dim() && value.size(0) == like.size(0);
    for (int64_t d = 1; fits && d < form.dim(); ++d)
      fits = form.size(d) == 0 || value.size(d) == form.size(d);
    CISTERN_CHECK(fits, "[", core->info().name, "] expected the state's ", t.name, " of shape ",
                  form.sizes(), " with ", like.size(0),
                  " for the first size (a 0 may be any size), got ", value.sizes());
    const auto type = form.scalar_type() == at::kFloat ? like.scalar_type() : form.scalar_type();
    CISTERN_CHECK(value.scalar_type() == type, "[", core->info().name, "] expected the state's ",
                  t.name, " of type ", at::toString(type), ", got ",
                  at::toString(value.scalar_type()),
                  ": a state goes on with inputs of the type that began it");
  }
  if (!core->info().bounded) core->CheckState(state);
}

// The caller's state is a value, and a mechanism may write in place where no gradient is recorded:
// copies of all tensors but those of a cache, which grow. These have no spare room, so that their
// mechanism copies them itself. Groups of heads may have both kinds.
void KeepFromWrites(const CoreScope& core, State& state) {
  for (const NamedTensor& t : core.form().tensors) {
    at::Tensor& value = state[t.name];
    const bool grows = !core->info().bounded && t.value.defined() && t.value.numel() == 0;
    if (value.defined() && !grows) value = value.clone();
  }
}

// The state that is given out is a value too: copies of what it shares with the call's tensors, and
// of what is a part of a larger tensor, which would be kept and saved whole.
variable_list Unshared(variable_list state, std::initializer_list<at::TensorList> given) {
  for (at::Tensor& value : state) {
    bool own = value.storage().nbytes() == value.nbytes();
    for (const at::TensorList list : given)
      for (const at::Tensor& t : list) own = own && !value.is_alias_of(t);
    if (!own) value = value.clone();
  }
  return state;
}

void CheckMask(const CoreScope& core, Verb verb, const at::Tensor& like, const ops::Mask& mask) {
  const std::string& name = core->info().name;
  const bool masked = mask.lengths || mask.starts;
  CISTERN_CHECK(!masked || verb != Verb::kRead, "[", name,
                "] reading takes no lengths and no starts: the state knows what was written");
  CISTERN_CHECK(!mask.starts || verb == Verb::kExtend || verb == Verb::kBidirectional, "[", name,
                "] several documents in a row (starts) are for self attention; cross attention "
                "takes one source a row, a memory one document");
  CISTERN_CHECK(
      !mask.lengths || (mask.lengths->dim() == 1 && mask.lengths->size(0) == like.size(0) &&
                        mask.lengths->scalar_type() == at::kLong),
      "[", name, "] expected lengths of shape [", like.size(0), "] and dtype int64, got ",
      mask.lengths->sizes(), " ", at::toString(mask.lengths->scalar_type()));
  if (mask.lengths && mask.lengths->numel() > 0) {
    const int64_t least = mask.lengths->min().item<int64_t>(),
                  most = mask.lengths->max().item<int64_t>();
    CISTERN_CHECK(least >= 0 && most <= like.size(2), "[", name, "] expected lengths within 0..",
                  like.size(2), ", got ", least, " to ", most);
  }
  CISTERN_CHECK(!mask.starts || (mask.starts->dim() == 2 && mask.starts->size(0) == like.size(0) &&
                                 mask.starts->size(1) == like.size(2) &&
                                 mask.starts->scalar_type() == at::kBool),
                "[", name, "] expected starts of shape [", like.size(0), ", ", like.size(2),
                "] and dtype bool, got ", mask.starts->sizes(), " ",
                at::toString(mask.starts->scalar_type()));
}

Result Run(at::TensorList given, at::TensorList weights, at::TensorList state_in,
           const OptionalTensor& lengths, const OptionalTensor& starts, std::string_view spec,
           std::string_view verb_name, bool training, bool keep_state) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const CoreScope core(std::string(spec), weights, training, FormOf(ParseVerb(verb_name)));
  const Verb verb = VerbOf(core, verb_name);
  const auto [tokens, packed] = Arrange(core, verb, given);
  std::vector<at::Tensor> x = tokens;
  if (verb == Verb::kRead) x.insert(x.end(), packed.begin(), packed.end());
  const ops::Mask mask = {lengths, starts};
  CheckMask(core, verb, FirstOf(core, Side::kKey, x), mask);
  CISTERN_CHECK(state_in.empty() || TakesState(verb), "[", core->info().name,
                "] a whole sequence takes no state");
  const int64_t batch = given[0].size(0);
  State state;
  if (!state_in.empty()) {
    state = FromList(core, state_in);
    CheckState(core, state, given[0]);
    if (verb != Verb::kRead && !at::GradMode::is_enabled()) KeepFromWrites(core, state);
  } else if (TakesState(verb) || verb == Verb::kCross) {
    state = core->EmptyState(batch, given[0].options());
  }
  const ops::WriteAtOnceScope at_once;  // each call gives its state in the tensors of EmptyState
  at::Tensor out;
  switch (verb) {
    case Verb::kBidirectional:
      out = core->Bidirectional(x, mask);
      break;
    case Verb::kExtend:
      out = core->Extend(x, state, mask);
      break;
    case Verb::kCross:
      core->Write(x, state, mask);
      out = core->Read(x, state);
      break;
    case Verb::kWrite:
      core->Write(x, state, mask);
      out = at::empty({0}, given[0].options());
      break;
    case Verb::kRead:
      out = core->Read(x, state);
      break;
    case Verb::kPack:
      out = SplitHeads(core, core.memory()->Pack(x, mask).transpose(1, 2).flatten(2));
      break;
    case Verb::kUpdate:
      out = SplitHeads(core, core.memory()->Update(x, packed[0].transpose(1, 2).flatten(2), mask));
      break;
    case Verb::kUnpack:
      out = core.memory()->Unpack(x, packed, mask);
      if (!core->SeesPadding()) out = ZeroPadding(out, mask);
      break;
  }
  if (out.dim() == 4) out = HeadsInside(out);
  if (!GivesState(verb, keep_state)) return {out, {}};
  return {out, Unshared(ToList(core->Compact(state), batch, given[0]), {given, weights, state_in})};
}

// Draws as `seed` says, and leaves the generator as it was.
class SeedScope {
 public:
  SeedScope(const OptionalTensor& seed, c10::Device device) {
    if (!seed) return;
    generators_.push_back(at::globalContext().defaultGenerator(at::kCPU));
    if (!device.is_cpu()) generators_.push_back(at::globalContext().defaultGenerator(device));
    for (at::Generator& g : generators_) {
      const std::lock_guard lock(g.mutex());
      before_.push_back(g.get_state());
      g.set_current_seed(uint64_t(seed->item<int64_t>()));
    }
  }
  ~SeedScope() {
    for (size_t i = 0; i < generators_.size(); ++i) {
      const std::lock_guard lock(generators_[i].mutex());
      generators_[i].set_state(before_[i]);
    }
  }
  SeedScope(const SeedScope&) = delete;
  SeedScope& operator=(const SeedScope&) = delete;

 private:
  std::vector<at::Generator> generators_;
  std::vector<at::Tensor> before_;
};

// The operator below autograd, on every device.
Result Attend(at::TensorList x, at::TensorList weights, at::TensorList state,
              const OptionalTensor& lengths, const OptionalTensor& starts, std::string_view spec,
              std::string_view verb, bool training, bool keep_state, const OptionalTensor& seed) {
  CISTERN_CHECK(!x.empty(), "[attend] expected at least one tensor");
  const SeedScope seeded(seed, x[0].device());
  auto [out, after] = Run(x, weights, state, lengths, starts, spec, verb, training, keep_state);
  for (const at::Tensor& t : x) {
    if (out.is_alias_of(t)) out = out.clone();  // update, where the memory stays what was packed
  }
  for (at::Tensor& t : after) t = t.contiguous();
  return {out, after};
}

Result AttendMeta(at::TensorList given, at::TensorList, at::TensorList state_in,
                  const OptionalTensor&, const OptionalTensor&, std::string_view spec,
                  std::string_view verb_name, bool training, bool keep_state,
                  const OptionalTensor&) {
  CISTERN_CHECK(!given.empty(), "[attend] expected at least one tensor");
  const CoreScope core{std::string(spec)};
  const Verb verb = VerbOf(core, verb_name);
  const std::string& name = core->info().name;
  const std::vector<at::Tensor> x = Arrange(core, verb, given).x;
  CISTERN_CHECK(core->info().bounded || (state_in.empty() && !GivesState(verb, keep_state)), "[",
                name,
                "] the state grows with every call, so a graph cannot hold it: compile the whole "
                "sequence, or call extend outside the graph");
  for (const CoreWeight& w : core->weights()) {
    CISTERN_CHECK(
        !training || w.kind != CoreWeight::Kind::kRedrawn, "[", name, "] redraws ", w.name,
        " in training, which a graph cannot hold: give redraw=0, or train without torch.compile");
  }
  const c10::SymInt batch = given[0].sym_size(0);
  const AttentionDims& dims = core->dims();
  const auto options = given[0].options();
  const bool packs = verb == Verb::kPack || verb == Verb::kUpdate;
  const c10::SymInt rows =
      packs ? c10::SymInt(core.slots()) : FirstOf(core, Side::kQuery, x).sym_size(2);
  const at::Tensor out =
      verb == Verb::kWrite
          ? at::empty({0}, options)
          : at::empty_symint({batch, rows, dims.heads, dims.dim / dims.heads}, options)
                .transpose(1, 2);
  std::vector<at::Tensor> after;
  if (GivesState(verb, keep_state)) {
    for (const NamedTensor& t : core.form().tensors) {
      std::vector<c10::SymInt> shape = t.value.sym_sizes().vec();
      shape[0] = batch;
      const bool of_x = t.value.scalar_type() ==
                        at::kFloat;  // the form was made in float; double and integers stay
      after.push_back(
          at::empty_symint(shape, of_x ? options : options.dtype(t.value.scalar_type())));
    }
  }
  return {out, after};
}

bool Floats(const at::Tensor& x) { return x.is_floating_point(); }

// Gradients of x, weights and state, in this order; empty for integers. `grads`: of the output and
// of the state's floating-point tensors.
std::vector<at::Tensor> AttendBackward(at::TensorList grads, at::TensorList x,
                                       at::TensorList weights, at::TensorList state,
                                       const OptionalTensor& lengths, const OptionalTensor& starts,
                                       std::string_view spec, std::string_view verb, bool training,
                                       bool keep_state, const OptionalTensor& seed) {
  // The operator may run below autograd; the forward inside needs it.
  auto keys = c10::impl::tls_local_dispatch_key_set();
  keys.excluded_ = keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  const c10::impl::ForceDispatchKeyGuard with_autograd(keys);
  const at::AutoGradMode enable(true);
  const SeedScope seeded(seed, x[0].device());
  variable_list leaves[3];
  const at::TensorList inputs[3] = {x, weights, state};
  variable_list wanted;
  for (int i = 0; i < 3; ++i) {
    for (const at::Tensor& t : inputs[i]) {
      leaves[i].push_back(t.detach());
      if (Floats(t)) wanted.push_back(leaves[i].back().requires_grad_());
    }
  }
  auto [out, after] =
      Run(leaves[0], leaves[1], leaves[2], lengths, starts, spec, verb, training, keep_state);
  variable_list outputs, weighed;
  size_t next = 0;
  auto add = [&](const at::Tensor& value) {
    if (!Floats(value)) return;
    const at::Tensor& grad = grads[next++];
    if (!value.requires_grad()) return;
    outputs.push_back(value);
    weighed.push_back(grad);
  };
  add(out);
  for (const at::Tensor& t : after) add(t);
  const variable_list found = outputs.empty()
                                  ? variable_list(wanted.size())
                                  : torch::autograd::grad(outputs, wanted, weighed, std::nullopt,
                                                          false, /*allow_unused=*/true);
  std::vector<at::Tensor> result;
  next = 0;
  for (const variable_list& list : leaves) {
    for (const at::Tensor& t : list) {
      if (!Floats(t)) {
        result.push_back(at::empty({0}, t.options()));
        continue;
      }
      const at::Tensor& g = found[next++];
      result.push_back(g.defined() ? g.detach().contiguous() : at::zeros(t.sizes(), t.options()));
    }
  }
  return result;
}

std::vector<at::Tensor> AttendBackwardMeta(at::TensorList, at::TensorList x, at::TensorList weights,
                                           at::TensorList state, const OptionalTensor&,
                                           const OptionalTensor&, std::string_view,
                                           std::string_view, bool, bool, const OptionalTensor&) {
  std::vector<at::Tensor> result;
  for (const at::TensorList list : {x, weights, state}) {
    for (const at::Tensor& t : list) {
      result.push_back(Floats(t) ? at::empty_symint(t.sym_sizes(), t.options())
                                 : at::empty({0}, t.options()));
    }
  }
  return result;
}

using AttendSchema = decltype(Attend);
using BackwardSchema = decltype(AttendBackward);
const c10::TypedOperatorHandle<AttendSchema>& AttendOp() {
  static const auto op = ops::OpHandle<AttendSchema>("cistern::attend");
  return op;
}
const c10::TypedOperatorHandle<BackwardSchema>& BackwardOp() {
  static const auto op = ops::OpHandle<BackwardSchema>("cistern::attend_backward");
  return op;
}

struct AttendFunction : torch::autograd::Function<AttendFunction> {
  // inputs: x, weights and state, one after the other.
  static variable_list forward(torch::autograd::AutogradContext* ctx, at::TensorList inputs,
                               int64_t count_x, int64_t count_weights,
                               const OptionalTensor& lengths, const OptionalTensor& starts,
                               const std::string& spec, const std::string& verb, bool training,
                               bool keep_state, const OptionalTensor& seed) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, after] = AttendOp().call(inputs.slice(0, size_t(count_x)),
                                        inputs.slice(size_t(count_x), size_t(count_weights)),
                                        inputs.slice(size_t(count_x + count_weights)), lengths,
                                        starts, spec, verb, training, keep_state, seed);
    variable_list saved = inputs.vec();
    for (const OptionalTensor& t : {lengths, starts, seed})
      saved.push_back(t.value_or(at::Tensor()));
    ctx->save_for_backward(saved);
    ctx->saved_data["count_x"] = count_x;
    ctx->saved_data["count_weights"] = count_weights;
    ctx->saved_data["spec"] = spec;
    ctx->saved_data["verb"] = verb;
    ctx->saved_data["training"] = training;
    ctx->saved_data["keep_state"] = keep_state;
    variable_list outputs = {out}, fixed;
    for (const at::Tensor& t : after) {
      outputs.push_back(t);
      if (!Floats(t)) fixed.push_back(t);
    }
    ctx->mark_non_differentiable(fixed);
    return outputs;
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx, variable_list grads) {
    variable_list saved = ctx->get_saved_variables();
    const OptionalTensor seed = ops::Given(saved.back()),
                         starts = ops::Given(saved[saved.size() - 2]),
                         lengths = ops::Given(saved[saved.size() - 3]);
    saved.resize(saved.size() - 3);
    const at::TensorList inputs = saved;
    const size_t count_x = size_t(ctx->saved_data["count_x"].toInt()),
                 count_weights = size_t(ctx->saved_data["count_weights"].toInt());
    variable_list weighed;
    for (const at::Tensor& g : grads) {
      if (Floats(g)) weighed.push_back(g);
    }
    variable_list result = BackwardOp().call(
        weighed, inputs.slice(0, count_x), inputs.slice(count_x, count_weights),
        inputs.slice(count_x + count_weights), lengths, starts,
        ctx->saved_data["spec"].toStringRef(), ctx->saved_data["verb"].toStringRef(),
        ctx->saved_data["training"].toBool(), ctx->saved_data["keep_state"].toBool(), seed);
    for (size_t i = 0; i < result.size(); ++i) {
      if (!Floats(inputs[i])) result[i] = at::Tensor();
    }
    result.resize(result.size() + 9);  // of the other arguments there is none
    return result;
  }
};

bool Traced(const at::Tensor& x) {
  return x.is_meta() || x.key_set().has(c10::DispatchKey::Python) ||
         c10::impl::dispatch_mode_enabled();
}

Result AttendAutograd(at::TensorList x, at::TensorList weights, at::TensorList state,
                      const OptionalTensor& lengths, const OptionalTensor& starts,
                      std::string_view spec, std::string_view verb, bool training, bool keep_state,
                      const OptionalTensor& seed_in) {
  CISTERN_CHECK(!x.empty(), "[attend] expected at least one tensor");
  if (!Traced(x[0])) {
    const SeedScope seeded(seed_in, x[0].device());
    return Run(x, weights, state, lengths, starts, spec, verb, training, keep_state);
  }
  OptionalTensor seed = seed_in;
  if (!seed && training) {  // the backward has to draw what the forward drew
    const CoreScope core{std::string(spec)};
    if (core->info().stochastic || core->dims().dropout > 0 ||
        (core.memory() && core.memory()->MemoryDropout() > 0))
      seed = at::randint(int64_t{1} << 62, {1}, at::TensorOptions().dtype(at::kLong));
  }
  variable_list inputs = x.vec();
  for (const at::TensorList list : {weights, state})
    inputs.insert(inputs.end(), list.begin(), list.end());
  if (!torch::autograd::compute_requires_grad(inputs)) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return AttendOp().call(x, weights, state, lengths, starts, spec, verb, training, keep_state,
                           seed);
  }
  const variable_list r = AttendFunction::apply(
      at::TensorList(inputs), int64_t(x.size()), int64_t(weights.size()), lengths, starts,
      std::string(spec), std::string(verb), training, keep_state, seed);
  return {r[0], {r.begin() + 1, r.end()}};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cistern, m) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  m.def(
      "attend(Tensor[] x, Tensor[] weights, Tensor[] state, Tensor? lengths, Tensor? starts, str "
      "spec, str verb, bool training, bool keep_state, Tensor? seed=None) -> (Tensor, Tensor[])",
      tags);
  m.def(
      "attend_backward(Tensor[] grads, Tensor[] x, Tensor[] weights, Tensor[] state, Tensor? "
      "lengths, Tensor? starts, str spec, str verb, "
      "bool training, bool keep_state, Tensor? seed=None) -> Tensor[]",
      tags);
}
TORCH_LIBRARY_IMPL(cistern, CompositeExplicitAutograd, m) {
  m.impl("attend", &Attend);
  m.impl("attend_backward", &AttendBackward);
}
TORCH_LIBRARY_IMPL(cistern, Meta, m) {
  m.impl("attend", &AttendMeta);
  m.impl("attend_backward", &AttendBackwardMeta);
}
TORCH_LIBRARY_IMPL(cistern, Autograd, m) {
  m.impl("attend", &AttendAutograd);
  m.impl("attend_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace cistern::python
