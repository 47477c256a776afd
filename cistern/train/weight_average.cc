#include "cistern/train/weight_average.h"

#include <ATen/ATen.h>

#include "cistern/base/error.h"

namespace cistern {

WeightAverage::WeightAverage(const Model& model, double decay) : decay_(decay) {
  if (decay == 0) return;
  for (const auto& p : model.named_parameters()) {
    names_.push_back("average." + p.key());
    parameters_.push_back(p.value());
    averages_.push_back(p.value().detach().clone());
  }
}

void WeightAverage::Update() {
  if (averages_.empty()) return;
  const at::NoGradGuard guard;
  at::_foreach_mul_(averages_, decay_);
  at::_foreach_add_(averages_, parameters_, 1 - decay_);
}

std::vector<NamedTensor> WeightAverage::Save() const {
  std::vector<NamedTensor> out;
  for (size_t i = 0; i < names_.size(); ++i) out.push_back({names_[i], averages_[i]});
  return out;
}

void WeightAverage::Load(const std::vector<NamedTensor>& tensors, const std::string& where) {
  for (size_t i = 0; i < names_.size(); ++i) {
    const NamedTensor* found = nullptr;
    for (const NamedTensor& t : tensors) {
      if (t.name == names_[i]) found = &t;
    }
    CISTERN_CHECK(found, where, ": tensor '", names_[i], "' is missing");
    CISTERN_CHECK(found->value.sizes() == averages_[i].sizes(), where, ": tensor '", names_[i],
                  "' has shape ", found->value.sizes(), ", expected ", averages_[i].sizes());
    averages_[i].copy_(found->value);
  }
}

std::string WeightAverage::FirstNonFinite() const {
  for (size_t i = 0; i < names_.size(); ++i) {
    if (!at::isfinite(averages_[i]).all().item<bool>()) return names_[i];
  }
  return "";
}

WeightAverage::Use::Use(const WeightAverage& average) : average_(average) {
  const at::NoGradGuard guard;
  for (size_t i = 0; i < average.averages_.size(); ++i) {
    own_.push_back(average.parameters_[i].detach().clone());
    at::Tensor(average.parameters_[i]).copy_(average.averages_[i]);
  }
}

WeightAverage::Use::~Use() {
  const at::NoGradGuard guard;
  for (size_t i = 0; i < own_.size(); ++i) at::Tensor(average_.parameters_[i]).copy_(own_[i]);
}

}  // namespace cistern
