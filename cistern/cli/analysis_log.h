#pragma once
// An analysis that is logged while a model trains, and its curves afterwards.
#include <functional>
#include <memory>
#include <string>

#include "cistern/analyses/figures.h"
#include "cistern/models/model.h"
#include "cistern/tasks/task.h"

namespace cistern::cli {

// For Trainer::Observe: the memory analysis (docs/analyses.md) of a few rows of the validation
// split, as numbers named "memory/LAYER/MEMORY/FIGURE"; at the first call also those of a model of
// this config with random weights, as "memory_random/...". UsageError where the model has no slots.
std::function<Json(Model& model)> MemoryObserver(std::shared_ptr<Model> model, const Task& task,
                                                 uint64_t seed);

// What a run's metrics.jsonl has of an analysis, as curves over the steps, one picture for each
// figure; no parts where it has none.
Figures OverTraining(const std::string& folder, const std::string& analysis);

}  // namespace cistern::cli
