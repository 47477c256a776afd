#include "cistern/tensors/named_tensors.h"

#include "cistern/base/error.h"

namespace cistern {

const at::Tensor& NamedTensors::operator[](const std::string& name) const {
  std::vector<std::string> known;
  for (const NamedTensor& t : all_) {
    if (t.name == name) return t.value;
    known.push_back(t.name);
  }
  throw Error(UnknownName("tensor", name, known));
}

at::Tensor NamedTensors::Find(const std::string& name) const {
  for (const NamedTensor& t : all_) {
    if (t.name == name) return t.value;
  }
  return {};
}

void NamedTensors::Set(const std::string& name, const at::Tensor& value) {
  for (NamedTensor& t : all_) {
    if (t.name == name) {
      t.value = value;
      return;
    }
  }
  all_.push_back({name, value});
}

NamedTensors NamedTensors::To(at::Device device) const {
  NamedTensors out;
  for (const NamedTensor& t : all_)
    out.all_.push_back({t.name, t.value.defined() ? t.value.to(device) : t.value});
  return out;
}

}  // namespace cistern
