#include "cistern/attention/state.h"

#include <ATen/ATen.h>

#include "cistern/base/error.h"

namespace cistern {
namespace {

template <class F>
State Map(const State& state, F&& f) {
  State out;
  for (const NamedTensor& t : state.tensors)
    out.tensors.push_back({t.name, t.value.defined() ? f(t.value) : t.value});
  return out;
}

}  // namespace

const at::Tensor& State::operator[](const std::string& name) const {
  for (const NamedTensor& t : tensors) {
    if (t.name == name) return t.value;
  }
  std::vector<std::string> known;
  for (const NamedTensor& t : tensors) known.push_back(t.name);
  throw Error(UnknownName("state tensor", name, known));
}

at::Tensor& State::operator[](const std::string& name) {
  return const_cast<at::Tensor&>(std::as_const(*this)[name]);
}

const at::Tensor& State::operator[](const StateId& id) const {
  if (id.index < tensors.size() && tensors[id.index].name == id.name)
    return tensors[id.index].value;
  CISTERN_CHECK(id.index != StateId::kUndeclared, "a state tensor that nobody declared");
  return (*this)[id.name];
}

at::Tensor& State::operator[](const StateId& id) {
  return const_cast<at::Tensor&>(std::as_const(*this)[id]);
}

bool State::Has(const std::string& name) const {
  for (const NamedTensor& t : tensors) {
    if (t.name == name) return t.value.defined();
  }
  return false;
}

int64_t State::Bytes() const {
  int64_t bytes = 0;
  for (const NamedTensor& t : tensors)
    bytes += t.value.defined() ? t.value.numel() * t.value.element_size() : 0;
  return bytes;
}

State State::Clone() const {
  return Map(*this, [](const at::Tensor& t) { return t.clone(); });
}
State State::Detach() const {
  return Map(*this, [](const at::Tensor& t) { return t.detach(); });
}
State State::Reorder(const at::Tensor& rows) const {
  const at::Tensor chosen = rows.to(at::kCPU, at::kLong).contiguous();
  return Map(*this, [&](const at::Tensor& t) {
    for (int64_t i = 0; i < chosen.numel(); ++i) {
      const int64_t row = chosen.const_data_ptr<int64_t>()[i];
      CISTERN_CHECK(row >= 0 && row < t.size(0), "[reorder] row ", row,
                    " is not one of the state's ", t.size(0), "; rows are counted from 0");
    }
    return t.index_select(0, chosen.to(t.device()));
  });
}

at::Tensor SumOf(const StateId& id, const State& first, const State& second) {
  const at::Tensor &a = first[id], &b = second[id];
  CISTERN_CHECK(a.sizes() == b.sizes(), "[merge] expected two states of one shape, got ", id.name,
                " of ", a.sizes(), " and ", b.sizes());
  return a + b;
}

}  // namespace cistern
