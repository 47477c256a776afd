#include "cistern/train/row_parts.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "cistern/base/error.h"
#include "cistern/base/parallel_items.h"
#include "cistern/ops/draws.h"
#include "cistern/tensors/device.h"

namespace cistern {

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

// Why rows of a batch cannot go through the model apart from each other; empty: they can.
std::string WhyTogether(const Model& model) {
  if (model.options().device() != at::Device(at::kCPU)) return "the model is not on the CPU";
  if (DrawsFromGenerator(model.config()))
    return "a mechanism of it draws random numbers in training";
  if (RowsMeet(model))
    return "its options let the rows of a batch change each other (nystrom: start=batch)";
  return "";
}

}  // namespace

void CheckProcesses(int64_t count, const Model& model, int64_t rows) {
  std::string why = WhyTogether(model);
  if (why.empty() && rows < count)
    why = StrCat("a batch of ", rows, " has fewer rows than that; raise train.batch");
  if (count > 1 && !why.empty())
    FailUsage(count, " processes cannot share the rows of a batch: ", why,
              "; start cistern train without torchrun's variables");
}

int64_t RowParts(ThreadsTake take, const Model& model, int64_t rows) {
  const int64_t threads = NumThreads();
  if (take == ThreadsTake::kOperations || threads == 1) return 1;
  std::string why = WhyTogether(model);
  if (why.empty() && rows < threads) {
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

std::vector<std::vector<size_t>> Shared(const std::vector<RowGroup>& groups, int64_t parts) {
  std::vector<size_t> order(groups.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return groups[a].tokens > groups[b].tokens; });
  std::vector<std::vector<size_t>> of_parts(static_cast<size_t>(parts));
  std::vector<double> tokens(of_parts.size());
  for (const size_t g : order) {  // to the part with the fewest so far
    const size_t p = size_t(std::min_element(tokens.begin(), tokens.end()) - tokens.begin());
    of_parts[p].push_back(g);
    tokens[p] += groups[g].tokens;
  }
  return of_parts;
}

namespace {

at::Tensor Loss(const RowsLoss& of, const Batch& batch, bool bfloat16, at::Device device,
                uint64_t seed, int64_t first_row) {
  const BFloat16Scope scope(bfloat16, device);
  const ops::DrawScope draws(seed, first_row);
  return of.loss(batch);
}

// Adds `more` to `sums`; an undefined tensor is zero.
void AddTo(std::vector<at::Tensor>& sums, const std::vector<at::Tensor>& more) {
  std::vector<at::Tensor> to, from;
  for (size_t i = 0; i < sums.size(); ++i) {
    if (!more[i].defined()) continue;
    if (sums[i].defined()) {
      to.push_back(sums[i]), from.push_back(more[i]);
    } else {  // what autograd gives may be another parameter's gradient as well, or expanded
      const bool own = more[i].use_count() == 1 && more[i].storage().use_count() == 1 &&
                       more[i].is_non_overlapping_and_dense();
      sums[i] = own ? more[i] : more[i].clone();
    }
  }
  if (!to.empty()) at::_foreach_add_(to, from);
}

// The sums over all processes of what the rows of each give, in one tensor on the way. A gradient
// stays undefined where none has it.
void SumOverProcesses(const Processes& processes, const std::vector<at::Tensor>& parameters,
                      std::vector<at::Tensor>* gradients, double* loss) {
  if (processes.alone()) return;
  std::vector<double> numbers{*loss};
  std::vector<at::Tensor> flat;
  std::vector<int64_t> sizes;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& p = parameters[i];
    CISTERN_CHECK(p.scalar_type() == parameters[0].scalar_type(),
                  "processes share parameters of one type");
    const at::Tensor& mine = (*gradients)[i];
    numbers.push_back(mine.defined() ? 1 : 0);
    flat.push_back(mine.defined() ? mine.reshape({-1}) : at::zeros({p.numel()}, p.options()));
    sizes.push_back(p.numel());
  }
  const at::Tensor all = at::cat(flat), others = at::tensor(numbers, at::kDouble);
  processes.Sum({all, others});
  const auto* const sums = others.const_data_ptr<double>();
  *loss = sums[0];
  const std::vector<at::Tensor> parts = all.split_with_sizes(sizes);
  for (size_t i = 0; i < parameters.size(); ++i)
    (*gradients)[i] = sums[1 + i] > 0 ? parts[i].view(parameters[i].sizes()) : at::Tensor();
}

}  // namespace

RowsLoss LossOf(const Task& task, Model& model, double label_smoothing) {
  return {[&task, &model, label_smoothing](const Batch& batch) {
            return task.Loss(model, batch, label_smoothing);
          },
          [&task](const Batch& batch) { return task.Terms(batch); }};
}

double AddGradients(const Model& model, const RowsLoss& of, const Batch& given, double scale,
                    bool bfloat16, int64_t parts, uint64_t seed, const Processes& processes) {
  const bool alone = RowsStandAlone(model), by_length = alone && !given.padded.empty();
  const int64_t all_parts = parts * processes.count();
  const Batch batch = by_length ? given.InOrder(OrderByLength(given)) : given;
  const std::vector<RowGroup> groups = by_length ? GroupsByLength(batch, all_parts)
                                       : alone   ? GroupsOfRows(batch, all_parts)
                                                 : EvenGroups(batch.rows, all_parts);
  if (groups.size() == 1 && processes.alone()) {
    const at::Tensor loss = Loss(of, batch, bfloat16, model.options().device(), seed, 0);
    const double value = loss.item<double>();
    if (std::isfinite(value)) (scale == 1 ? loss : loss * scale).backward();
    return value;
  }
  const std::vector<at::Tensor> parameters = model.parameters();
  std::vector<Batch> batches;
  std::vector<double> shares, losses(groups.size());
  for (const RowGroup& g : groups) {
    const Batch rows = batch.Rows(g.begin, g.end);
    batches.push_back(by_length ? rows.WithoutPadding() : rows);
    shares.push_back(of.terms(batches.back()));
  }
  double terms = std::accumulate(shares.begin(), shares.end(), 0.0);
  if (terms == 0) {  // a batch that asks nothing: its gradients are zeros
    std::fill(shares.begin(), shares.end(), 1.0);
    terms = double(groups.size());
  }
  for (double& share : shares) share /= terms;
  std::vector<std::vector<size_t>> of_parts = Shared(groups, all_parts);  // then of this process
  of_parts.erase(of_parts.begin(), of_parts.begin() + processes.rank() * parts);
  of_parts.resize(size_t(parts));
  // As the parameters; undefined where the loss needs none.
  std::vector<std::vector<at::Tensor>> gradients(of_parts.size(),
                                                 std::vector<at::Tensor>(parameters.size()));
  const auto take = [&](int64_t part) {
    const at::AutoGradMode grad(true);
    for (const size_t g : of_parts[size_t(part)]) {
      if (shares[g] == 0) continue;
      const at::Tensor loss = Loss(of, batches[g], bfloat16, at::kCPU, seed, groups[g].begin);
      losses[g] = loss.item<double>();
      if (!std::isfinite(losses[g])) return;
      AddTo(gradients[size_t(part)],
            torch::autograd::grad({loss * (scale * shares[g])}, parameters, {}, std::nullopt,
                                  /*create_graph=*/false, /*allow_unused=*/true));
    }
  };
  // Not by at::parallel_for: it is a template that runs in place where it is compiled without
  // -fopenmp, as here. One part is for all threads, which share its operations.
  if (parts == 1) {
    take(0);
  } else {
    ParallelForItems(parts, take);
  }
  double loss = 0;
  for (size_t g = 0; g < groups.size(); ++g) loss += shares[g] * losses[g];
  const at::NoGradGuard guard;
  std::vector<at::Tensor> of_batch(parameters.size());
  for (std::vector<at::Tensor>& part : gradients) {
    AddTo(of_batch, part);
    part.clear();
  }
  SumOverProcesses(processes, parameters, &of_batch, &loss);
  if (!std::isfinite(loss)) return loss;
  std::vector<at::Tensor> sums;
  for (const at::Tensor& p : parameters) sums.push_back(p.grad());
  AddTo(sums, of_batch);
  for (size_t i = 0; i < sums.size(); ++i) parameters[i].mutable_grad() = sums[i];
  return loss;
}

}  // namespace cistern
