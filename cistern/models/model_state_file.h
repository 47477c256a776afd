#pragma once
// The state of a model in one safetensors file, so that what was read once can be continued
// later and elsewhere.
//
// Tensors: "layers.0.memory", ... as the mechanisms name them (layers as in
// StatefulModel::state_layers), caches without their spare room, undefined ones left out;
// "positions" [B]; and what the caller adds under names of its own. Metadata: format, version,
// mechanisms (of each layer), dtype, batch, model (ModelHash), the caller's own keys, and checksum,
// the XXH64 of all of these and of every tensor.
#include <map>
#include <string>
#include <vector>

#include "cistern/models/model_state.h"
#include "cistern/tensors/tensor_file.h"

namespace cistern {

// 2: hashes are XXH64; those of version 1 were others, so that its files fit no model and
// tokenizer. 3: `decoding` says its slots and width.
inline constexpr int kModelStateVersion = 3;

struct ModelStateFile {
  ModelState state;
  std::vector<NamedTensor>
      extra;  // without names that begin with "layers." and without "positions"
  std::map<std::string, std::string>
      made;  // what else must be the same where the file is read, such as {"tokenizer", its hash}
};

// The settings that are not the defaults: those that a later version adds are not among them.
Json ChangedSettings(ModelConfig config);

// XXH64 of what the model's numbers depend on: the settings of its config that are not the
// defaults, and every parameter and buffer by name, type, shape and value. Reads all weights.
uint64_t ModelHash(const Model& model);

// The checksum that LoadModelState expects among the metadata: of everything in the file but
// itself, whatever the order of the tensors.
std::string ModelStateChecksum(const TensorFile& file);

// Written completely or not at all. Error if the file cannot be written.
void SaveModelState(const std::string& path, const StatefulModel& model,
                    const ModelStateFile& file);

// The same bits that were saved. Everything is checked before anything is returned: Error, naming
// the file and the tensor, where it is broken; UsageError where it was made with another model,
// dtype, version or by another `made`.
ModelStateFile LoadModelState(const std::string& path, const StatefulModel& model,
                              const std::map<std::string, std::string>& made = {});

}  // namespace cistern
