#pragma once
// How the threads of a process share a training step. Where they can, each takes some rows of the
// batch through forward and backward in a graph of its own, and meets the others once a step:
// processors that wait for each other at every operation lose most of their time as soon as another
// process needs one of them. Otherwise all threads share each operation.
#include <functional>
#include <vector>

#include "cistern/tasks/row_groups.h"
#include "cistern/tasks/task.h"
#include "cistern/train/processes.h"

namespace cistern {

// kAuto takes rows where they do not depend on each other and nothing is drawn from the generator,
// there are as many as threads, they divide evenly, or nearly so, and the gradients of the threads
// but one, a copy each of the parameters, are small.
enum class ThreadsTake { kOperations, kRows, kAuto };
inline constexpr int64_t kAutoGradientBytes = int64_t{1} << 28;
const EnumNames<ThreadsTake>& ThreadsTakeNames();

// Parts that the rows of a batch, or a process's share of them, are cut into; 1: threads share the
// operations. kRows is a UsageError, with the reason, where rows are not possible.
int64_t RowParts(ThreadsTake take, const Model& model, int64_t rows);
// UsageError, with the reason, where `count` processes cannot share the rows of a batch.
void CheckProcesses(int64_t count, const Model& model, int64_t rows);

// The loss of some rows, and of how many terms it is the mean. Both may be called by several
// threads at once.
struct RowsLoss {
  std::function<at::Tensor(const Batch&)> loss;
  std::function<double(const Batch&)> terms;
};
RowsLoss LossOf(const Task& task, Model& model, double label_smoothing);

// The groups that each part takes, so that parts have about as many tokens.
std::vector<std::vector<size_t>> Shared(const std::vector<RowGroup>& groups, int64_t parts);

// Adds the gradients of scale * loss of the batch to those of the parameters, and returns the loss.
// Rows that stand alone go in groups of some 4,096 tokens, so that what the backward pass keeps is
// of one group of each part at a time; where they have padding that may be left out
// (Batch::padded), in GroupsByLength, each without the padding behind its longest row. Other
// batches are cut into `parts`.
//
// Each part's groups are taken one after another and weighted by their terms; sums are formed in
// the order of groups and parts, so that the same number of parts gives the same bits. What is
// dropped follows from `seed`, whatever the number of parts. A loss that is not finite is returned
// without gradients.
//
// Several processes, given the same batch, take `parts` parts each; all get the sums over all, the
// same bits.
double AddGradients(const Model& model, const RowsLoss& of, const Batch& given, double scale,
                    bool bfloat16, int64_t parts, uint64_t seed, const Processes& processes = {});

}  // namespace cistern
