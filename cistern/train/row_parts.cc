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
#include "cistern/ops/draws.h"
#include "cistern/tensors/device.h"

namespace cistern {

bool DrawsFromGenerator(const ModelConfig& config) {
  for (const Form form : config.info().forms) {
    const LayerStack stack = config.Stack(form);
    for (int64_t layer = 0; layer < stack.layers(); ++layer) {
      if (FindMechanism(stack.Mechanism(layer)).stochastic) return true;
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
  } else if (DrawsFromGenerator(model.config())) {
    why = "a mechanism of it draws random numbers in training";
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

at::Tensor Loss(const RowsLoss& of, const Batch& batch, bool bfloat16, at::Device device,
                uint64_t seed, int64_t first_row) {
  const BFloat16Scope scope(bfloat16, device);
  const ops::DrawScope draws(seed, first_row);
  return of.loss(batch);
}

// The gradients of weight * loss, by this thread alone.
void Differentiate(const at::Tensor& loss, double weight, const std::vector<at::Tensor>& parameters,
                   Part* part) {
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
                    bool bfloat16, int64_t parts, uint64_t seed) {
  if (parts == 1) {
    const at::Tensor loss = Loss(of, batch, bfloat16, model.options().device(), seed, 0);
    const double value = loss.item<double>();
    if (std::isfinite(value)) (scale == 1 ? loss : loss * scale).backward();
    return value;
  }
  const std::vector<at::Tensor> parameters = model.parameters();
  std::vector<Part> done(static_cast<size_t>(parts));
  std::vector<Batch> batches;
  std::vector<double> shares;
  const auto first_row = [&](int64_t part) { return batch.rows * part / parts; };
  for (int64_t p = 0; p < parts; ++p) {
    batches.push_back(batch.Rows(first_row(p), first_row(p + 1)));
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
    Differentiate(Loss(of, batches[i], bfloat16, at::kCPU, seed, first_row(p)), scale * shares[i],
                  parameters, &done[i]);
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
