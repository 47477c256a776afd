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
// split, as numbers named "memory/LAYER/MEMORY/FIGURE"; where the folder's metrics.jsonl has none
// yet also those of a model of this config with random weights, as "memory_random/...". UsageError
// where the model has no slots.
std::function<Json(Model& model)> MemoryObserver(std::shared_ptr<Model> model, const Task& task,
                                                 uint64_t seed, const std::string& folder);

// What a run's metrics.jsonl has of an analysis, as curves over the steps, one picture for each
// figure; no parts where it has none.
Figures OverTraining(const std::string& folder, const std::string& analysis);

}  // namespace cistern::cli
