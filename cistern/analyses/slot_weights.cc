#include "cistern/analyses/slot_weights.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "cistern/analyses/identity_values.h"
#include "cistern/analyses/implied_weights.h"
#include "cistern/base/error.h"

namespace cistern {
namespace {

using Tensors = std::vector<at::Tensor>;

// Tokens begin .. begin + count - 1 of the projections of tokens; of one side, or of both.
Tensors Tokens(const Mechanism& core, const Tensors& x, int64_t begin, int64_t count,
               std::optional<Side> side = {}) {
  Tensors out = x;
  const auto& projections = core.Projections();
  for (size_t i = 0; i < projections.size() && i < x.size(); ++i) {
    if (!projections[i].OfTokens() || !x[i].defined()) continue;
    out[i] = side && projections[i].side != *side ? at::Tensor() : x[i].narrow(2, begin, count);
  }
  return out;
}

// One row of a layer with slots in its state.
class StateSlots {
 public:
  StateSlots(const CapturedLayer& layer, int64_t row)
      : untied_(UntiedCore(layer)), core_(untied_ ? untied_.get() : layer.core) {
    const bool cross = layer.form == Form::kCross, all = layer.core->SeesPadding();
    sources_ = all ? layer.sources() : layer.RealSources(row);
    queries_ = all ? layer.queries() : layer.RealQueries(row);
    read_ = RowOf(layer.x, row);
    written_ = cross ? RowOf(layer.written, row) : read_;
    if (untied_) {
      read_ = Untied(*layer.core, *core_, read_, false);
      written_ = Untied(*layer.core, *core_, written_, false);
    }
    const std::vector<size_t> values = ValuesOf(*core_, false);
    CISTERN_CHECK(values.size() == 1, "[slots] ", core_->info().name, " has ", values.size(),
                  " projections of values; expected 1");
    value_ = values[0];
    v_ = written_[value_].narrow(2, 0, sources_);
    y_ = layer.y[row];
    memory_ = SlotMemoryName(*core_);
  }

  SlotMoment After(const State& state, int64_t tokens, int64_t first_query, int64_t queries) const {
    const int64_t width = v_.size(3);
    const at::Tensor memory = state[memory_].narrow(3, 0, width);  // [copies,H,n,d]
    SlotMoment moment;
    moment.tokens = tokens;
    moment.write = AsColumns(memory, tokens);
    const at::Tensor identity = IdentityValues(memory.narrow(0, 0, 1), 0, memory.size(2));
    State probe = state.Reorder(at::zeros({identity.size(0)}, at::kLong));
    probe[memory_].narrow(3, 0, width).copy_(identity);
    const Tensors x =
        Copies(Tokens(*core_, read_, first_query, queries, Side::kQuery), identity.size(0));
    moment.read = AsColumns(core_->Read(x, probe), memory.size(2)).to(at::kDouble);
    return moment;
  }

  // What the moment's weights give for its queries, less what the layer gave: sums of squares.
  void Compare(const SlotMoment& moment, int64_t first_query, double* missed, double* size) const {
    const at::Tensor held =
        at::matmul(moment.write.to(v_.scalar_type()), v_[0].narrow(1, 0, moment.tokens));
    const at::Tensor got = at::matmul(moment.read, held.to(at::kDouble));
    const at::Tensor want = y_.narrow(1, first_query, got.size(1)).to(at::kDouble);
    *missed += (got - want).square().sum().item<double>();
    *size += want.square().sum().item<double>();
  }

  State Empty(int64_t copies) const {
    return core_->EmptyState(copies, v_.options().requires_grad(false));
  }
  // The state with copies more, whose values were all zero so far: what else it holds does not
  // depend on values.
  State WithCopies(const State& state, int64_t copies) const {
    const int64_t before = state[memory_].size(0);
    if (copies == before) return state;
    const at::Tensor from = at::arange(copies, at::kLong);
    State more = state.Reorder(at::where(from < before, from, at::zeros_like(from)));
    more[memory_].narrow(0, before, copies - before).narrow(3, 0, v_.size(3)).zero_();
    return more;
  }
  // Those that have a value among the first `tokens`.
  int64_t CopiesOf(int64_t tokens) const { return (tokens + v_.size(3) - 1) / v_.size(3); }
  // A piece of the written tokens with slices of the identity as their values.
  Tensors Piece(const at::Tensor& identity, int64_t begin, int64_t count) const {
    Tensors x = Copies(Tokens(*core_, written_, begin, count), identity.size(0));
    x[value_] = identity.narrow(2, begin, count);
    return x;
  }
  at::Tensor Identity() const { return IdentityValues(v_, 0, sources_); }
  Mechanism& core() const { return *core_; }
  int64_t sources() const { return sources_; }
  int64_t queries() const { return queries_; }

 private:
  std::shared_ptr<Mechanism> untied_;
  Mechanism* core_;
  Tensors read_, written_;
  at::Tensor v_, y_;
  size_t value_ = 0;
  int64_t sources_ = 0, queries_ = 0;
  std::string memory_;
};

void Check(const CapturedLayer& layer, double missed, double size) {
  const double error = size > 0 ? std::sqrt(missed / size) : std::sqrt(missed);
  CISTERN_CHECK(error <= kImpliedTolerance, "[", layer.core->info().name, "] ", layer.name,
                " does not read what its state holds: the weights of its slots miss its output by ",
                error, " (at most ", kImpliedTolerance,
                " is rounding). Clusters of a whole row (abc_cluster, bidirectional) and filtered "
                "packing by a maximum are such; analyze the causal form, or filter=conv");
}

}  // namespace

std::string SlotMemoryName(const Mechanism& mechanism) {
  const auto& names = mechanism.StateNames();
  const auto has = [&](const char* name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (has("value_memory")) return "value_memory";
  // Luna's `memory` in cross attention holds what was packed, not values.
  return has("memory") && mechanism.info().memory == MemoryUse::kNone ? "memory" : "";
}

std::vector<SlotMoment> WatchSlots(const CapturedLayer& layer, int64_t row,
                                   const std::vector<int64_t>& times) {
  if (layer.packed.defined()) {
    const ImpliedWeights weights(layer, row);  // checks both attentions
    const bool all = layer.core->SeesPadding();
    const int64_t sources = all ? layer.sources() : layer.RealSources(row),
                  queries = all ? layer.queries() : layer.RealQueries(row);
    return {{sources, weights.Packing().narrow(2, 0, sources),
             weights.Unpacking().narrow(1, 0, queries).to(at::kDouble)}};
  }
  if (SlotMemoryName(*layer.core).empty())
    FailUsage("[", layer.core->info().name, "] ", layer.name,
              " has no slots: its state has no memory of values of a fixed number");
  if (layer.mask.starts || layer.written_mask.starts)
    FailUsage(
        "[slots] a row of several documents empties its slots at each; analyze documents in "
        "rows of their own");
  const StateSlots slots(layer, row);
  const at::Tensor identity = slots.Identity();
  std::vector<SlotMoment> moments;
  double missed = 0, size = 0;
  if (layer.form != Form::kCausal) {
    State state = slots.Empty(identity.size(0));
    slots.core().Write(slots.Piece(identity, 0, slots.sources()), state, {});
    moments.push_back(slots.After(state, slots.sources(), 0, slots.queries()));
    slots.Compare(moments[0], 0, &missed, &size);
  } else {
    int64_t done = 0;
    State state = slots.Empty(slots.CopiesOf(times.empty() ? 1 : times[0]));
    for (const int64_t time : times) {
      CISTERN_CHECK(time > done && time <= slots.sources(), "[slots] time ", time, " after ", done,
                    " of ", slots.sources(), " tokens");
      const int64_t copies = slots.CopiesOf(time);
      state = slots.WithCopies(state, copies);
      slots.core().Extend(slots.Piece(identity.narrow(0, 0, copies), done, time - done), state, {});
      state = slots.core().Settled(state);
      done = time;
      moments.push_back(slots.After(state, time, time - 1, 1));
      slots.Compare(moments.back(), time - 1, &missed, &size);
    }
    CISTERN_CHECK(done == slots.sources(), "[slots] the last time has to be the row's ",
                  slots.sources(), " tokens, got ", done);
  }
  Check(layer, missed, size);
  return moments;
}

}  // namespace cistern
