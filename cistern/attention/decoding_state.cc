#include "cistern/attention/decoding_state.h"

namespace cistern {
namespace {

at::Tensor* Find(State& state, const StateId& id) {
  return id.index == StateId::kUndeclared ? nullptr : &state[id];
}

}  // namespace

ops::SlotHandles DecodingState::Of(State& state) const {
  return {Find(state, keys), state[values], Find(state, z), Find(state, decoding)};
}

void DecodingState::End(State& state) const {
  if (declared()) ops::EndDecoding(Of(state), slots, width);
}

State DecodingState::Settled(const State& state) const {
  State settled = state;
  End(settled);
  return settled;
}

State DecodingState::Form(const State& empty,
                          const std::function<bool(const std::string&)>& has) const {
  State form = empty;
  if (!declared() || !has(decoding.name)) return form;
  const int64_t batch = form[values].size(0);
  const bool keyed = keys.index != StateId::kUndeclared;
  DropMemories(&form);
  form[decoding] = ops::EmptyDecoding(batch, heads, slots, width, keyed);
  return form;
}

int64_t DecodingState::Bytes(const State& empty, int64_t batch,
                             const at::TensorOptions& options) const {
  if (!declared()) return 0;
  const bool keyed = keys.index != StateId::kUndeclared;
  const int64_t bytes = ops::DecodingStateBytes(batch, heads, slots, width, keyed, options);
  State rest = empty;
  DropMemories(&rest);
  return bytes > 0 ? bytes + rest.Bytes() : 0;
}

void DecodingState::DropMemories(State* state) const {
  for (const StateId& id : {keys, values, z}) {
    if (at::Tensor* tensor = Find(*state, id)) *tensor = at::Tensor();
  }
}

}  // namespace cistern
