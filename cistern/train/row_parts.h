#pragma once
// How the threads of a process share a training step. Where they can, each takes some rows of the
// batch through forward and backward in a graph of its own, and meets the others once a step:
// processors that wait for each other at every operation lose most of their time as soon as another
// process needs one of them. Otherwise all threads share each operation.
#include <functional>

#include "cistern/tasks/task.h"

namespace cistern {

// Whether a mechanism of the model draws features or slots anew in training: from one generator, so
// that rows in several threads would draw different ones each time. (Dropout and layer_drop draw by
// counter, ops/draws.h.)
bool DrawsFromGenerator(const ModelConfig& config);

// kAuto takes rows where they do not depend on each other and nothing is drawn from the generator,
// there are as many as threads, they divide evenly, or nearly so, and the gradients of the threads
// but one, a copy each of the parameters, are small.
enum class ThreadsTake { kOperations, kRows, kAuto };
inline constexpr int64_t kAutoGradientBytes = int64_t{1} << 28;
const EnumNames<ThreadsTake>& ThreadsTakeNames();

// Parts that the rows of a batch are cut into; 1: threads share the operations. kRows is a
// UsageError, with the reason, where rows are not possible.
int64_t RowParts(ThreadsTake take, const Model& model, int64_t rows);

// The loss of some rows, and of how many terms it is the mean. Both may be called by several
// threads at once.
struct RowsLoss {
  std::function<at::Tensor(const Batch&)> loss;
  std::function<double(const Batch&)> terms;
};
RowsLoss LossOf(const Task& task, Model& model, double label_smoothing);

// Adds the gradients of scale * loss of the batch to those of the parameters, and returns the loss.
// With several parts: of each part's rows, weighted by their terms, added in the parts' order, so
// that the same number of parts gives the same bits. What is dropped follows from `seed`, whatever
// the number of parts. A loss that is not finite is returned without gradients.
double AddGradients(const Model& model, const RowsLoss& of, const Batch& batch, double scale,
                    bool bfloat16, int64_t parts, uint64_t seed);

}  // namespace cistern
