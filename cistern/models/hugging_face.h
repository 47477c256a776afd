#pragma once
// Models that other programs trained: GPT-2 and RoBERTa in a folder of Hugging Face's transformers.
#include <memory>
#include <string>
#include <vector>

#include "cistern/models/model.h"

namespace cistern {

struct ForeignModel {
  std::shared_ptr<Model> model;    // a decoder_lm (GPT-2) or masked_lm (RoBERTa), in float
  std::vector<std::string> notes;  // what the folder has that the model has no place for
};

// Reads config.json (model_type gpt2 or roberta) and model.safetensors in float32, float16 or
// bfloat16. mask_row: the id whose embedding stands for a hidden token, which a masked_lm keeps
// apart; a decoder_lm has none. The model gives the same logits as its source, for tokens at
// positions from 0 on (RoBERTa's positions count from pad_token_id + 1, and the embedding of its
// only segment is added to all: both are in embed_positions here).
//
// Error, naming the file and the setting or tensor, where something would be computed in another
// way, is missing, has another shape, or would be left out unsaid.
ForeignModel ReadHuggingFace(const std::string& folder, int64_t mask_row);

// The kind of model that such a folder holds: decoder_lm or masked_lm; Error where none of ours.
std::string HuggingFaceKind(const std::string& folder);

}  // namespace cistern
