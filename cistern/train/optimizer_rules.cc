// The update rules of optimizer.h.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

#include "cistern/base/error.h"
#include "cistern/train/optimizer.h"

namespace cistern {
namespace {

at::Tensor Count(const at::Tensor& p) {
  return at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(p.device()));
}

// AdamW and Adam, of the parameters for which `takes` is true.
class Adam : public Optimizer {
 public:
  using Takes = std::function<bool(const std::string& name, const at::Tensor& parameter)>;
  Adam(const Model& model, const OptimizerOptions& options, const Takes& takes = nullptr)
      : Optimizer(model, options) {
    const auto of_taken = [&](auto&& make) {
      return [this, &takes, make](size_t i) {
        return !takes || takes(names_[i], parameters_[i]) ? make(i) : at::Tensor();
      };
    };
    const auto zeros = [this](size_t i) { return Zeros(i); };
    mean_ = AddMoment("exp_avg", of_taken(zeros));
    square_ = AddMoment("exp_avg_sq", of_taken(zeros));
    step_ = AddMoment("step", of_taken([this](size_t i) { return Count(parameters_[i]); }));
  }

 protected:
  void Update(const std::vector<size_t>& all, double lr) override {
    for (const bool decayed : {true, false}) {
      const std::vector<size_t> chosen = Decayed(all, decayed);
      if (chosen.empty()) continue;
      const Tensors steps = Of(moments_[step_].of, chosen);
      for (const at::Tensor& step : steps) step.add_(1);
      auto* const update = options_.kind == OptimizerKind::kAdam
                               ? static_cast<Fused*>(&at::_fused_adam_)
                               : static_cast<Fused*>(&at::_fused_adamw_);
      update(Of(parameters_, chosen), Gradients(chosen), Of(moments_[mean_].of, chosen),
             Of(moments_[square_].of, chosen), {}, steps, lr, options_.beta1, options_.beta2,
             decayed ? options_.weight_decay : 0, options_.eps,
             /*amsgrad=*/false, /*maximize=*/false, {}, {});
    }
  }

 private:
  using Fused = void(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                     at::TensorList, double, double, double, double, double, bool, bool,
                     const std::optional<at::Tensor>&, const std::optional<at::Tensor>&);
  size_t mean_, square_, step_;
};

class Sgd : public Optimizer {
 public:
  Sgd(const Model& model, const OptimizerOptions& options) : Optimizer(model, options) {
    if (options_.momentum > 0) AddMoment("momentum", [this](size_t i) { return Zeros(i); });
  }

 protected:
  void Update(const std::vector<size_t>& all, double lr) override {
    for (const bool decayed : {true, false}) {
      const std::vector<size_t> chosen = Decayed(all, decayed);
      if (chosen.empty()) continue;
      // A buffer of zeros is what torch's first step makes of none.
      const Tensors buffers = moments_.empty() ? Tensors() : Of(moments_[0].of, chosen);
      at::_fused_sgd_(Of(parameters_, chosen), Gradients(chosen), buffers,
                      decayed ? options_.weight_decay : 0, options_.momentum, lr, /*dampening=*/0,
                      /*nesterov=*/false, /*maximize=*/false, /*is_first_step=*/false);
    }
  }
};

// [R fairseq:fairseq/optim/nag.py]: with b the buffer, m the momentum, c = lr / the rate before,
//   w += m^2 c b - (1 + m) lr g,   b = m c b - lr g
class Nag : public Optimizer {
 public:
  Nag(const Model& model, const OptimizerOptions& options) : Optimizer(model, options) {
    AddMoment("momentum", [this](size_t i) { return Zeros(i); });
    beside_.push_back({"last_rate", at::full({}, -1, at::kDouble)});  // none yet
  }

 protected:
  void Update(const std::vector<size_t>& chosen, double lr) override {
    const at::Tensor& last = beside_[0].value;
    const double before = last.item<double>(), m = options_.momentum;
    const double correction = before > 0 ? lr / before : 1;  // at a rate of 0 all buffers are 0
    const Tensors parameters = Of(parameters_, chosen), grads = Gradients(chosen),
                  buffers = Of(moments_[0].of, chosen);
    for (const size_t i : chosen) {
      if (Decay(i) > 0) parameters_[i].mul_(1 - lr * Decay(i));
    }
    at::_foreach_add_(parameters, buffers, m * m * correction);
    at::_foreach_add_(parameters, grads, -(1 + m) * lr);
    at::_foreach_mul_(buffers, m * correction);
    at::_foreach_add_(buffers, grads, -lr);
    last.fill_(lr);
  }
};

// A tensor of two dimensions or more has the means of its last two.
class Adafactor : public Optimizer {
 public:
  Adafactor(const Model& model, const OptimizerOptions& options) : Optimizer(model, options) {
    const auto reduced = [this](size_t i, int64_t dim) {
      const at::Tensor& p = parameters_[i];
      return p.dim() < 2 ? at::Tensor() : at::zeros_like(p.detach().select(dim, 0)).contiguous();
    };
    rows_ = AddMoment("row_squares", [&](size_t i) { return reduced(i, -1); });
    columns_ = AddMoment("column_squares", [&](size_t i) { return reduced(i, -2); });
    squares_ = AddMoment(
        "squares", [this](size_t i) { return parameters_[i].dim() < 2 ? Zeros(i) : at::Tensor(); });
    step_ = AddMoment("step", [this](size_t i) { return Count(parameters_[i]); });
  }

 protected:
  void Update(const std::vector<size_t>& chosen, double lr) override {
    const AdafactorOptions& o = options_.adafactor;
    const auto root_mean_square = [](const at::Tensor& x) {
      return at::linalg_vector_norm(x).item<double>() / std::sqrt(double(x.numel()));
    };
    for (const size_t i : chosen) {
      const at::Tensor p = parameters_[i].detach(), g = parameters_[i].grad();
      const double t = moments_[step_].of[i].add_(1).item<double>(),
                   fresh = std::pow(t, -o.decay_power);
      const auto keep = [&](size_t moment, const at::Tensor& now) {
        return moments_[moment].of[i].mul_(1 - fresh).add_(now, fresh);
      };
      at::Tensor update, squared = g.square().add_(o.eps);
      if (p.dim() < 2) {
        update = g * keep(squares_, squared).rsqrt();
      } else {
        const at::Tensor rows = keep(rows_, squared.mean(-1)),
                         columns = keep(columns_, squared.mean(-2));
        squared.reset();  // the update is as large
        update = g * (rows / rows.mean(-1, /*keepdim=*/true)).rsqrt().unsqueeze(-1);
        update.mul_(columns.rsqrt().unsqueeze(-2));
      }
      const double size = root_mean_square(update) / o.update_clip,
                   scale = o.relative ? std::max(o.min_scale, root_mean_square(p)) : 1;
      if (Decay(i) > 0) p.mul_(1 - lr * Decay(i));
      p.sub_(update, lr * scale / std::max(1.0, size));
    }
  }

 private:
  size_t rows_, columns_, squares_, step_;
};

bool IsMapOfBlock(const std::string& name, const at::Tensor& parameter) {
  return parameter.dim() == 2 && name.find("layers.") != std::string::npos &&
         name.ends_with("_proj.weight");
}

// Nearly the orthogonal factor of each matrix of y, [n,R,C], which is written over: a quintic
// iteration of Newton and Schulz, after which singular values lie between 0.7 and 1.2 (Jordan et
// al. 2024).
at::Tensor Orthogonal(at::Tensor y, int64_t iterations) {
  constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;
  const bool tall = y.size(1) > y.size(2);
  y.div_(at::linalg_vector_norm(y, 2, {1, 2}, /*keepdim=*/true) + 1e-7);
  if (tall) y = y.transpose(1, 2).contiguous();
  for (int64_t i = 0; i < iterations; ++i) {
    const at::Tensor square = at::bmm(y, y.transpose(1, 2));
    y = at::baddbmm(y, at::baddbmm(square, square, square, kB, kC), y, kA);
  }
  return tall ? y.transpose(1, 2) : y;
}

class Muon : public Adam {
 public:
  Muon(const Model& model, const OptimizerOptions& options)
      : Adam(model, options, std::not_fn(IsMapOfBlock)) {
    momentum_ =
        AddMoment("momentum", [this](size_t i) { return IsMap(i) ? Zeros(i) : at::Tensor(); });
  }

 protected:
  void Update(const std::vector<size_t>& all, double lr) override {
    std::vector<size_t> others;
    std::map<std::pair<int64_t, int64_t>, std::vector<size_t>> maps;  // by shape: one product each
    for (const size_t i : all) {
      const at::Tensor& p = parameters_[i];
      if (!IsMap(i)) {
        others.push_back(i);
      } else {
        maps[{p.size(0), p.size(1)}].push_back(i);
      }
    }
    Adam::Update(others, lr);
    // Some of a shape at a time: the iteration holds four times as many numbers.
    constexpr int64_t kAtOnce = 1 << 21;
    for (const auto& [shape, chosen] : maps) {
      const auto count = int64_t(chosen.size()),
                 piece = std::max<int64_t>(1, kAtOnce / (shape.first * shape.second));
      for (int64_t i = 0; i < count; i += piece)
        UpdateMaps({chosen.begin() + i, chosen.begin() + std::min(count, i + piece)}, lr);
    }
  }

 private:
  bool IsMap(size_t i) const { return IsMapOfBlock(names_[i], parameters_[i]); }
  void UpdateMaps(const std::vector<size_t>& chosen, double lr) {
    const double m = options_.muon.momentum;
    const Tensors moments = Of(moments_[momentum_].of, chosen), grads = Gradients(chosen),
                  parameters = Of(parameters_, chosen);
    at::_foreach_lerp_(moments, grads, 1 - m);
    const at::Tensor ahead = at::stack(at::_foreach_lerp(grads, moments, m)),
                     update = Orthogonal(ahead, options_.muon.iterations);
    const double size = 0.2 * std::sqrt(double(std::max(ahead.size(1), ahead.size(2))));
    for (size_t k = 0; k < chosen.size(); ++k) {
      if (const double decay = Decay(chosen[k]); decay > 0) parameters[k].mul_(1 - lr * decay);
      parameters[k].sub_(update[int64_t(k)], lr * size);
    }
  }

  size_t momentum_;
};

}  // namespace

std::unique_ptr<Optimizer> MakeOptimizer(const Model& model, const OptimizerOptions& options) {
  switch (options.kind) {
    case OptimizerKind::kSgd:
      return std::make_unique<Sgd>(model, options);
    case OptimizerKind::kNag:
      return std::make_unique<Nag>(model, options);
    case OptimizerKind::kAdafactor:
      return std::make_unique<Adafactor>(model, options);
    case OptimizerKind::kMuon:
      return std::make_unique<Muon>(model, options);
    case OptimizerKind::kAdamW:
    case OptimizerKind::kAdam:
      break;
  }
  return std::make_unique<Adam>(model, options);
}

}  // namespace cistern
