#pragma once
// Tensors with names: what a file holds, what a state consists of, what a model is given to read.
#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <string>
#include <vector>

namespace cistern {

struct NamedTensor {
  std::string name;
  at::Tensor value;
};

// In the order in which they were added. A value: copies share the tensors' memory.
class NamedTensors {
 public:
  NamedTensors() = default;
  NamedTensors(std::initializer_list<NamedTensor> all) : all_(all) {}
  // Error with the nearest name where there is none.
  const at::Tensor& operator[](const std::string& name) const;
  // Undefined where there is none.
  at::Tensor Find(const std::string& name) const;
  bool Has(const std::string& name) const { return Find(name).defined(); }
  // Adds it, or puts it in the place of the one with that name.
  void Set(const std::string& name, const at::Tensor& value);
  NamedTensors To(at::Device device) const;
  const std::vector<NamedTensor>& all() const { return all_; }

 private:
  std::vector<NamedTensor> all_;
};

}  // namespace cistern
