#pragma once
// Checkpoints: folders checkpoint-<step> inside a run folder. Each appears whole under its name.
#include <optional>
#include <string>

#include "cistern/train/optimizer.h"
#include "cistern/train/run_state.h"
#include "cistern/train/weight_average.h"

namespace cistern {

// Writes checkpoint-<state.step>, then removes the others: of the folders with such a name, those
// that hold trainer.json. Any error leaves the others alone. A step has one set of weights: where
// its checkpoint is there already, trainer.json alone is replaced.
void WriteCheckpoint(const std::string& run, const Model& model, const Optimizer& optimizer,
                     const RunState& state, const WeightAverage* average = nullptr);

// The newest complete checkpoint of a run; empty when there is none.
std::optional<std::string> NewestCheckpoint(const std::string& run);

// Reads all of it, checks it, then changes model, optimizer and average. Error where another
// optimizer wrote it; one that names none is of adamw.
RunState ReadCheckpoint(const std::string& folder, Model& model, Optimizer& optimizer,
                        WeightAverage* average = nullptr);

// trainer.json alone.
RunState ReadRunState(const std::string& folder);

// Empty when every file of the checkpoint loads, fits its checksum and holds finite numbers; else
// the first thing that is wrong.
std::string CheckpointProblem(const std::string& folder);

// What is wrong with the folder's metrics.jsonl, as its newest checkpoint knows it; empty: nothing
// that is known. Reads all of it.
std::string LogProblem(const std::string& run);

// A run has begun in this folder, and there is something to continue or to keep.
bool HoldsRun(const std::string& folder);

// UsageError where another program has filled the folder: it has files of the names that a run
// writes or removes, and no experiment.json, which a run writes first.
void RefuseOtherFiles(const std::string& folder);

}  // namespace cistern
