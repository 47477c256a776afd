#include "cistern/train/optimizer.h"

#include <ATen/ATen.h>

#include <cmath>

#include "cistern/base/error.h"

namespace cistern {

const EnumNames<OptimizerKind>& OptimizerKinds() {
  static const EnumNames<OptimizerKind> names = {{OptimizerKind::kAdamW, "adamw"},
                                                 {OptimizerKind::kAdam, "adam"},
                                                 {OptimizerKind::kSgd, "sgd"},
                                                 {OptimizerKind::kNag, "nag"},
                                                 {OptimizerKind::kAdafactor, "adafactor"},
                                                 {OptimizerKind::kMuon, "muon"}};
  return names;
}

const EnumNames<DecayOf>& DecayOfNames() {
  static const EnumNames<DecayOf> names = {{DecayOf::kMatrices, "matrices"},
                                           {DecayOf::kAll, "all"}};
  return names;
}

Fields AdafactorOptions::Describe() {
  Fields f;
  f.Add("decay_power", &decay_power, "second moments decay by 1 - t^-power at update t",
        {0.0, 10.0});
  f.Add("update_clip", &update_clip, "largest root mean square of an update", {1e-6, 1e6});
  f.Add("relative", &relative, "the rate is relative to the root mean square of the weights");
  f.Add("min_scale", &min_scale, "with relative: that of weights that are smaller", {0.0, 1e3});
  f.Add("eps", &eps, "added to squared gradients", {1e-37, 1.0});
  return f;
}

Fields MuonOptions::Describe() {
  Fields f;
  f.Add("momentum", &momentum, "of the gradients, Nesterov's", {0.0, 0.99999});
  f.Add("iterations", &iterations, "towards the orthogonal matrix", {1, 100});
  return f;
}

void OptimizerOptions::AddTo(Fields& f) {
  f.Add("optimizer", &kind, "rule of the updates", OptimizerKinds());
  f.Add("beta1", &beta1, "decay of the first moment (adamw, adam, muon)", {0.0, 0.99999});
  f.Add("beta2", &beta2, "decay of the second moment (adamw, adam, muon)", {0.0, 0.9999999});
  f.Add("eps", &eps, "added to the root of the second moment (adamw, adam, muon)", {1e-30, 1.0});
  f.Add("momentum", &momentum, "of sgd and nag; sgd with 0 has no buffer", {0.0, 0.99999});
  f.Add("weight_decay", &weight_decay, "decoupled (adamw, nag, adafactor, muon), or L2 (adam, sgd)",
        {0.0, 100.0});
  f.Add("decay", &decay, "what is decayed: matrices alone, or norms and biases as well (P000)",
        DecayOfNames());
  f.Group("adafactor", adafactor.Describe());
  f.Group("muon", muon.Describe());
}

void OptimizerOptions::Validate() const {
  const OptimizerOptions defaults;
  const std::string& name = NameOf(kind, OptimizerKinds());
  const auto refuse = [&](const char* key, bool changed, const char* owners) {
    if (changed)
      FailUsage("train.", key, " has no effect with train.optimizer=", name, "; it belongs to ",
                owners, ": leave it out");
  };
  if (kind != OptimizerKind::kAdamW && kind != OptimizerKind::kAdam &&
      kind != OptimizerKind::kMuon) {
    refuse("beta1", beta1 != defaults.beta1, "adamw, adam and muon");
    refuse("beta2", beta2 != defaults.beta2, "adamw, adam and muon");
    refuse("eps", eps != defaults.eps, "adamw, adam and muon");
  }
  if (kind != OptimizerKind::kSgd && kind != OptimizerKind::kNag)
    refuse("momentum", momentum != defaults.momentum, "sgd and nag");
  const auto refuse_group = [&](const std::string& owner, const Json& said, const Json& unsaid) {
    for (const auto& [key, value] : said.items())
      refuse((owner + "." + key).c_str(), value != unsaid.at(key), owner.c_str());
  };
  if (kind != OptimizerKind::kMuon)
    refuse_group("muon", MuonOptions(muon).Describe().Write(), MuonOptions().Describe().Write());
  if (kind != OptimizerKind::kAdafactor) {
    refuse_group("adafactor", AdafactorOptions(adafactor).Describe().Write(),
                 AdafactorOptions().Describe().Write());
  } else if (!adafactor.relative && adafactor.min_scale != defaults.adafactor.min_scale) {
    FailUsage("train.adafactor.min_scale has no effect with train.adafactor.relative=false; leave ",
              "it out");
  }
  if (weight_decay == 0 && decay != defaults.decay)
    FailUsage("train.decay=", NameOf(decay, DecayOfNames()),
              " has no effect with train.weight_decay=0; leave it out");
}

Optimizer::Optimizer(const Model& model, const OptimizerOptions& options) : options_(options) {
  options_.Validate();
  for (const auto& p : model.named_parameters()) {
    names_.push_back(p.key());
    parameters_.push_back(p.value());
  }
}

double Optimizer::Norm() const {
  std::vector<at::Tensor> grads;
  for (const at::Tensor& p : parameters_) {
    if (p.grad().defined()) grads.push_back(p.grad());
  }
  if (grads.empty()) return -1;
  return at::linalg_vector_norm(at::stack(at::_foreach_norm(grads, 2.0))).item<double>();
}

double Optimizer::SetAside(double clip) {
  at::NoGradGuard guard;
  const double norm = Norm();
  if (norm < 0) return 0;
  if (!std::isfinite(norm)) return norm;
  if (aside_.empty()) aside_.resize(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor gradient = parameters_[i].grad();
    if (!gradient.defined()) continue;
    if (clip > 0 && norm > clip) gradient.mul_(clip / norm);
    if (aside_[i].defined()) {
      aside_[i].add_(gradient);
    } else {
      aside_[i] = gradient;
    }
    parameters_[i].mutable_grad() = at::Tensor();
  }
  return norm;
}

double Optimizer::Step(double lr, double clip) {
  at::NoGradGuard guard;
  for (size_t i = 0; i < aside_.size(); ++i) {
    if (!aside_[i].defined()) continue;
    at::Tensor& gradient = parameters_[i].mutable_grad();
    gradient = gradient.defined() ? gradient + aside_[i] : aside_[i];
  }
  aside_.clear();
  const double norm = Norm();
  if (norm < 0) return 0;
  if (!std::isfinite(norm)) return norm;
  std::vector<size_t> chosen;
  Tensors grads;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].grad().defined())
      continue;  // out of the loss's reach: neither updated nor decayed
    chosen.push_back(i);
    grads.push_back(parameters_[i].grad());
  }
  if (clip > 0 && norm > clip) at::_foreach_mul_(grads, clip / (norm + 1e-6));
  Update(chosen, lr);
  // torch's fused updates do not: what is kept of the weights (FoldedMap) compares versions.
  for (const size_t i : chosen) parameters_[i].unsafeGetTensorImpl()->bump_version();
  for (const at::Tensor& p : parameters_) p.mutable_grad() = at::Tensor();
  return norm;
}

Optimizer::Tensors Optimizer::Of(const Tensors& all, const std::vector<size_t>& chosen) const {
  Tensors some;
  for (const size_t i : chosen) some.push_back(all[i]);
  return some;
}

Optimizer::Tensors Optimizer::Gradients(const std::vector<size_t>& chosen) const {
  Tensors grads;
  for (const size_t i : chosen) grads.push_back(parameters_[i].grad().contiguous());
  return grads;
}

at::Tensor Optimizer::Zeros(size_t i) const { return at::zeros_like(parameters_[i]); }

namespace {

// Not the vectors that have dimensions beside their own: T2R's map.bias [H,C], RFA's sigma [H,1,d]
// and input_gate.bias [H,1,1], cls_token [1,1,D].
bool IsMatrix(const std::string& name, const at::Tensor& parameter) {
  const std::string last = name.substr(name.rfind('.') + 1);
  return parameter.dim() >= 2 && last != "bias" && last != "sigma" && last != "cls_token";
}

}  // namespace

double Optimizer::Decay(size_t i) const {
  return options_.decay == DecayOf::kAll || IsMatrix(names_[i], parameters_[i])
             ? options_.weight_decay
             : 0;
}

std::vector<size_t> Optimizer::Decayed(const std::vector<size_t>& chosen, bool decayed) const {
  std::vector<size_t> some;
  for (const size_t i : chosen) {
    if ((Decay(i) > 0) == decayed) some.push_back(i);
  }
  return some;
}

std::string Optimizer::FirstNonFinite(bool gradients) const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor x = gradients ? parameters_[i].grad() : parameters_[i];
    if (x.defined() && !at::isfinite(x.detach()).all().item<bool>()) return names_[i];
  }
  return "";
}

std::string Optimizer::FirstNonFiniteMoment() const {
  for (const NamedTensor& t : Save()) {
    if (!at::isfinite(t.value).all().item<bool>()) return t.name;
  }
  return "";
}

std::vector<NamedTensor> Optimizer::Save() const {
  std::vector<NamedTensor> out;
  for (size_t i = 0; i < names_.size(); ++i) {
    for (const Moment& m : moments_) {
      if (m.of[i].defined()) out.push_back({m.name + "." + names_[i], m.of[i]});
    }
  }
  out.insert(out.end(), beside_.begin(), beside_.end());
  return out;
}

void Optimizer::Load(const std::vector<NamedTensor>& tensors, const std::string& where) {
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
