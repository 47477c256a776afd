#pragma once
// The rows of a batch, several at once.
#include <functional>

#include "cistern/analyses/captured_layers.h"

namespace cistern {

// fn(row) for each of `rows` rows, without gradients; an Error is that of the first row that fails.
// Rows run in parallel, each in a thread, where all layers' implied weights are explicit
// (implied_weights.h): then no core is run, whose state threads would share. Elsewhere one after
// the other. fn writes to places of its row alone; results do not depend on the number of threads.
void ForRows(int64_t rows, const std::vector<const CapturedLayer*>& layers,
             const std::function<void(int64_t)>& fn);

}  // namespace cistern
