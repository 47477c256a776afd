#include "cistern/train/optimizer.h"

#include <ATen/ATen.h>

#include <cmath>

#include "cistern/base/error.h"

namespace cistern {

AdamW::AdamW(const Model& model, const AdamWOptions& options) : options_(options) {
  groups_[0].weight_decay = options.weight_decay;
  groups_[1].weight_decay = 0;
  for (const auto& p : model.named_parameters()) {
    const int group = p.value().dim() >= 2 ? 0 : 1;
    Group& g = groups_[group];
    names_.push_back(p.key());
    parameters_.push_back(p.value());
    places_.push_back({group, g.parameters.size()});
    g.parameters.push_back(p.value());
    g.means.push_back(at::zeros_like(p.value()));
    g.squares.push_back(at::zeros_like(p.value()));
    g.steps.push_back(at::zeros({}, at::kFloat));
  }
}

double AdamW::Step(double lr, double clip) {
  at::NoGradGuard guard;
  std::vector<at::Tensor> grads;
  for (const at::Tensor& p : parameters_) {
    if (p.grad().defined()) grads.push_back(p.grad());
  }
  if (grads.empty()) return 0;
  const double norm =
      at::linalg_vector_norm(at::stack(at::_foreach_norm(grads, 2.0))).item<double>();
  if (!std::isfinite(norm)) return norm;
  if (clip > 0 && norm > clip) at::_foreach_mul_(grads, clip / (norm + 1e-6));
  for (Group& g : groups_) {
    std::vector<at::Tensor> parameters, gradients, means, squares, steps;
    for (size_t i = 0; i < g.parameters.size(); ++i) {
      if (!g.parameters[i].grad().defined())
        continue;  // out of the loss's reach: neither updated nor decayed
      parameters.push_back(g.parameters[i]);
      gradients.push_back(g.parameters[i].grad().contiguous());
      means.push_back(g.means[i]);
      squares.push_back(g.squares[i]);
      g.steps[i].add_(1);
      steps.push_back(g.steps[i]);
    }
    if (parameters.empty()) continue;
    at::_fused_adamw_(parameters, gradients, means, squares, {}, steps, lr, options_.beta1,
                      options_.beta2, g.weight_decay, options_.eps,
                      /*amsgrad=*/false, /*maximize=*/false);
  }
  for (const at::Tensor& p : parameters_) p.mutable_grad() = at::Tensor();
  return norm;
}

std::string AdamW::FirstNonFinite(bool gradients) const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor x = gradients ? parameters_[i].grad() : parameters_[i];
    if (x.defined() && !at::isfinite(x.detach()).all().item<bool>()) return names_[i];
  }
  return "";
}

std::string AdamW::FirstNonFiniteMoment() const {
  for (const NamedTensor& t : Save()) {
    if (!at::isfinite(t.value).all().item<bool>()) return t.name;
  }
  return "";
}

std::vector<NamedTensor> AdamW::Save() const {
  std::vector<NamedTensor> out;
  for (size_t i = 0; i < names_.size(); ++i) {
    const Group& g = groups_[places_[i].group];
    const size_t k = places_[i].index;
    out.push_back({"exp_avg." + names_[i], g.means[k]});
    out.push_back({"exp_avg_sq." + names_[i], g.squares[k]});
    out.push_back({"step." + names_[i], g.steps[k]});
  }
  return out;
}

void AdamW::Load(const std::vector<NamedTensor>& tensors, const std::string& where) {
  const std::vector<NamedTensor> mine = Save();
  for (const NamedTensor& target : mine) {
    bool found = false;
    for (const NamedTensor& t : tensors) {
      if (t.name != target.name) continue;
      CISTERN_CHECK(t.value.sizes() == target.value.sizes(), where, ": tensor '", t.name,
                    "' has shape ", t.value.sizes(), ", expected ", target.value.sizes());
      at::Tensor(target.value).copy_(t.value);
      found = true;
    }
    CISTERN_CHECK(found, where, ": tensor '", target.name, "' is missing");
  }
}

}  // namespace cistern
