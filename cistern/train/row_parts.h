#pragma once
// How the threads of a process share a training step. Where they can, each takes some rows of the
// batch through forward and backward in a graph of its own, and meets the others once a step:
// processors that wait for each other at every operation lose most of their time as soon as another
// process needs one of them. Otherwise all threads share each operation.
#include <string>

#include "cistern/tasks/task.h"

namespace cistern {

// Whether a training step of the model draws random numbers (dropout, features, slots). They come
// from one generator, so that rows in several threads would draw different ones each time.
bool DrawsInTraining(const ModelConfig& config);

// Parts that the rows of a batch are cut into; 1: threads share the operations. `parallel`: "auto"
// takes rows where there are as many as threads and they divide evenly, or nearly so; "rows" is a
// UsageError, with the reason, where that is not possible; "operations".
int64_t RowParts(const std::string& parallel, const Model& model, int64_t rows);

// Adds the gradients of scale * task.Loss(model, batch) to those of the parameters, and returns the
// loss. With several parts: of each part's rows, weighted by Task::Terms, added in the parts'
// order, so that the same number of parts gives the same bits. A loss that is not finite is
// returned without gradients.
double AddGradients(Model& model, const Task& task, const Batch& batch, double label_smoothing,
                    double scale, bool bfloat16, int64_t parts);

}  // namespace cistern
