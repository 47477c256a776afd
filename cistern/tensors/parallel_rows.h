#pragma once
// The rows of a batch, several at once.
#include <cstdint>
#include <functional>

namespace cistern {

// fn(row) for each of `rows` rows, without gradients and autocast, in parallel, each row in one
// thread; an Error is that of the first row that fails. fn writes to places of its row alone, and
// may run what all rows share as training with train.parallel=rows does: modules after a first
// forward. Results do not depend on the number of threads.
void ForRows(int64_t rows, const std::function<void(int64_t)>& fn);

}  // namespace cistern
