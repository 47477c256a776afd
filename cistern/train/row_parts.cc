#include "cistern/train/row_parts.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "cistern/base/error.h"
#include "cistern/base/parallel_items.h"
#include "cistern/nn/attention_layer.h"
#include "cistern/tensors/device.h"

namespace cistern {

namespace {

// Whether an option of these, or of one of their groups, drops something: every dropout's name says
// so, and so does layer_drop's.
bool Drops(const Json& options) {
  for (const auto& [key, value] : options.items()) {
    if (value.is_structured()
            ? Drops(value)
            : value.is_number() && key.find("drop") != std::string::npos && value.get<double>() > 0)
      return true;
  }
  return false;
}

}  // namespace

bool DrawsInTraining(const ModelConfig& config) {
  if (Drops(ModelConfig(config).Describe().Write()) || Drops(Json(config.own))) return true;
  for (const Form form : config.info().forms) {
    const LayerStack stack = config.Stack(form);
    for (int64_t layer = 0; layer < stack.layers(); ++layer) {
      if (FindMechanism(stack.Mechanism(layer)).stochastic || Drops(stack.Options(layer)))
        return true;
    }
  }
  return false;
}

const EnumNames<ThreadsTake>& ThreadsTakeNames() {
  static const EnumNames<ThreadsTake> names = {{ThreadsTake::kOperations, "operations"},
                                               {ThreadsTake::kRows, "rows"},
                                               {ThreadsTake::kAuto, "auto"}};
  return names;
}

namespace {

int64_t GradientBytes(const Model& model) {
  int64_t bytes = 0;
  for (const at::Tensor& p : model.parameters()) bytes += int64_t(p.nbytes());
  return bytes;
}

// Whether what a row of a batch becomes depends on the others.
bool RowsMeet(const Model& model) {
  for (const auto& module : model.modules(/*include_self=*/false)) {
    const auto* layer = dynamic_cast<const AttentionLayer*>(module.get());
    if (layer && layer->mechanism().SeesBatch()) return true;
  }
  return false;
}

}  // namespace

int64_t RowParts(ThreadsTake take, const Model& model, int64_t rows) {
  const int64_t threads = NumThreads();
  if (take == ThreadsTake::kOperations || threads == 1) return 1;
  std::string why;
  if (model.options().device() != at::Device(at::kCPU)) {
    why = "the model is not on the CPU";
  } else if (DrawsInTraining(model.config())) {
    why = "its training draws random numbers (dropout, layer_drop, or a mechanism that draws)";
  } else if (RowsMeet(model)) {
    why = "its options let the rows of a batch change each other (nystrom: start=batch)";
  } else if (rows < threads) {
    why = StrCat("a batch of ", rows, " has fewer rows than there are threads (", threads, ")");
  }
  if (take == ThreadsTake::kRows) {
    if (why.empty()) return threads;
    FailUsage("train.parallel=rows is not possible: ", why, "; train.parallel=operations is");
  }
  const bool even = rows % threads == 0 || rows >= 4 * threads;
  return why.empty() && even && (threads - 1) * GradientBytes(model) <= kAutoGradientBytes ? threads
                                                                                           : 1;
}

namespace {

struct Part {
  double loss = 0;
  std::vector<at::Tensor> gradients;  // as the parameters; undefined where the loss needs none
};

// The gradients of weight * loss, by this thread alone.
void Differentiate(const RowsLoss& of, const Batch& batch, double weight, bool bfloat16,
                   const std::vector<at::Tensor>& parameters, Part* part) {
  at::Tensor loss;
  {
    const BFloat16Scope scope(bfloat16, at::kCPU);
    loss = of.loss(batch);
  }
  part->loss = loss.item<double>();
  if (!std::isfinite(part->loss)) return;
  part->gradients = torch::autograd::grad({loss * weight}, parameters, {}, std::nullopt,
                                          /*create_graph=*/false, /*allow_unused=*/true);
}

}  // namespace

RowsLoss LossOf(const Task& task, Model& model, double label_smoothing) {
  return {[&task, &model, label_smoothing](const Batch& batch) {
            return task.Loss(model, batch, label_smoothing);
          },
          [&task](const Batch& batch) { return task.Terms(batch); }};
}

double AddGradients(const Model& model, const RowsLoss& of, const Batch& batch, double scale,
                    bool bfloat16, int64_t parts) {
  if (parts == 1) {
    at::Tensor loss;
    {
      const BFloat16Scope scope(bfloat16, model.options().device());
      loss = of.loss(batch);
    }
    const double value = loss.item<double>();
    if (std::isfinite(value)) (scale == 1 ? loss : loss * scale).backward();
    return value;
  }
  const std::vector<at::Tensor> parameters = model.parameters();
  std::vector<Part> done(static_cast<size_t>(parts));
  std::vector<Batch> batches;
  std::vector<double> shares;
  for (int64_t p = 0; p < parts; ++p) {
    batches.push_back(batch.Rows(batch.rows * p / parts, batch.rows * (p + 1) / parts));
    shares.push_back(of.terms(batches.back()));
  }
  const double terms = std::accumulate(shares.begin(), shares.end(), 0.0);
  // Not by at::parallel_for: it is a template that runs in place where it is compiled without
  // -fopenmp, as here.
  ParallelForItems(parts, [&](int64_t p) {
    const at::AutoGradMode grad(true);
    const size_t i = size_t(p);
    if (shares[i] == 0) return;
    shares[i] /= terms;
    Differentiate(of, batches[i], scale * shares[i], bfloat16, parameters, &done[i]);
  });
  double loss = 0;
  for (size_t i = 0; i < done.size(); ++i) loss += shares[i] * done[i].loss;
  if (!std::isfinite(loss)) return loss;
  const at::NoGradGuard guard;
  for (Part& part : done) {
    std::vector<at::Tensor> sums, more;
    for (size_t i = 0; i < part.gradients.size(); ++i) {
      const at::Tensor& gradient = part.gradients[i];
      if (!gradient.defined()) continue;
      at::Tensor& sum = parameters[i].mutable_grad();
      if (sum.defined()) {
        sums.push_back(sum), more.push_back(gradient);
      } else {
        sum = gradient;
      }
    }
    if (!sums.empty()) at::_foreach_add_(sums, more);
    part.gradients.clear();
  }
  return loss;
}

}  // namespace cistern
