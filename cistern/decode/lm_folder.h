#pragma once
// A model folder of a language model: config.json, model.safetensors, tokenizer.json (and
// experiment.json, how it was trained).
#include <memory>
#include <string>

#include "cistern/models/language_model.h"
#include "cistern/text/tokenizer.h"

namespace cistern {

struct LmFolder {
  std::shared_ptr<LanguageModel> model;  // in eval mode
  std::shared_ptr<const Tokenizer> tokenizer;
};

// Errors name the missing file, and the model folders inside when there are some, or how a run
// comes to its first model. A model of another kind and a tokenizer of another size are refused.
// dtype "bfloat16": weights in float32, for a BFloat16Decoding.
LmFolder OpenLmFolder(const std::string& folder, const std::string& dtype = "float32");

// The config of any model folder, with the same errors about what is missing.
ModelConfig ReadFolderConfig(const std::string& folder);

}  // namespace cistern
