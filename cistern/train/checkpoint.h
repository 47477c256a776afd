#pragma once
// Checkpoints: folders checkpoint-<step> inside a run folder. trainer.json is written last, so a
// folder that has it is complete.
#include <optional>
#include <string>

#include "cistern/train/optimizer.h"

namespace cistern {

// Writes checkpoint-<step>, then removes older ones. Any error leaves the older ones alone.
void WriteCheckpoint(const std::string& run, int64_t step, const Model& model,
                     const AdamW& optimizer, const Json& trainer);

// The newest complete checkpoint of a run; empty when there is none.
std::optional<std::string> NewestCheckpoint(const std::string& run);

// Reads all of it, checks it, then changes model and optimizer. Returns trainer.json.
Json ReadCheckpoint(const std::string& folder, Model& model, AdamW& optimizer);

}  // namespace cistern
