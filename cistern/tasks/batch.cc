#include "cistern/tasks/batch.h"

#include "cistern/base/error.h"

namespace cistern {

at::Tensor Batch::Find(const std::string& name) const {
  for (const NamedTensor& t : tensors) {
    if (t.name == name) return t.value;
  }
  return {};
}

const at::Tensor& Batch::operator[](const std::string& name) const {
  std::vector<std::string> names;
  for (const NamedTensor& t : tensors) {
    if (t.name == name) return t.value;
    names.push_back(t.name);
  }
  throw Error("[batch] " + UnknownName("tensor", name, names));
}

Batch Batch::To(at::Device device) const {
  Batch out = *this;
  for (NamedTensor& t : out.tensors) t.value = t.value.to(device);
  return out;
}

}  // namespace cistern
