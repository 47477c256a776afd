#pragma once
// A model folder whose files no longer belong together.
#include <string>
#include <vector>

#include "cistern/io/safetensors.h"

namespace cistern {

// A sentence for each file beside the weights (config.json, tokenizer.json, ...) that is not the
// one they were saved with, by the hashes in their metadata.
std::vector<std::string> ChangedFiles(const SafetensorsFile& weights, const std::string& folder);

}  // namespace cistern
