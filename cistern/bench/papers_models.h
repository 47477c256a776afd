#pragma once
// Figures of the papers that were measured on whole models (ModelWork).
#include "cistern/bench/papers.h"
#include "cistern/models/config.h"

namespace cistern::bench {

// The model of an arm, for rows of `length` tokens. UsageError where its settings do not fit.
ModelConfig ConfigOf(const Protocol& protocol, const Arm& arm, int64_t length);

// Rows as MeasureProtocol gives them. The arms of a length take turns: in each round, every second
// one in reverse order, each is made, runs a step that is not timed, then those that are, and is
// gone before the next one is made. An arm that the free memory is too small for is skipped with
// the estimate. "peak_bytes" is what the first step holds at its highest, weights, gradients and
// the optimizer's state included.
std::vector<Row> MeasureWholeModels(const Protocol& scaled, const Case& like,
                                    const MeasureSettings& settings);

}  // namespace cistern::bench
