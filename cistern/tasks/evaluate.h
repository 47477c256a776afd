#pragma once
// The one evaluation loop: batches -> sums -> metrics. Used while training and by eval, predict and
// compare, for every task.
#include <atomic>
#include <functional>

#include "cistern/tasks/task.h"

namespace cistern {

struct EvalOptions {
  ReadOptions read;                                // max_tokens 0: all rows
  bool whole_batches = false;                      // leaves out a batch of fewer than read.rows
  const std::atomic<bool>* interrupted = nullptr;  // stops early, with what is done so far
  std::function<void(const BatchReader& reader)> progress = nullptr;
  // Of several processes that read the same batches, this one measures every `of`-th, from the
  // `share`-th on, and its score holds the sums of those alone. Rows and tokens are of all batches.
  int64_t share = 0, of = 1;
};

struct Evaluation {
  Score score;
  int64_t rows = 0, tokens = 0;
  bool complete = true;  // false: interrupted, and the sums are of some rows alone
};

// All rows of `reader`, by the model in evaluation mode (its former mode comes back), on its
// device.
Evaluation Evaluate(const Task& task, Model& model, BatchReader& reader,
                    const EvalOptions& options = {});
Evaluation Evaluate(const Task& task, Model& model, Split split, const EvalOptions& options = {});

}  // namespace cistern
