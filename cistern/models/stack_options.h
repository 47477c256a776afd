#pragma once
// The group of one stack in config.json: a key set here applies only to this stack; a key that is
// not set takes the model's key of the same name.
#include <optional>
#include <string>
#include <vector>

#include "cistern/attention/position_kind.h"

namespace cistern {

// The memory of a decoder's luna (its cross attention) and luna_causal: each layer's own; or one
// that goes from layer to layer, begun by a learned one or by the encoder's last (Luna's code).
enum class SourceMemory { kOwn, kDecoder, kEncoder };
const EnumNames<SourceMemory>& SourceMemories();  // own, decoder, encoder

struct StackOptions {
  SourceMemory memory = SourceMemory::kOwn;  // of the group cross
  int64_t dim = 0, layers = 0, heads = 0, ffn_dim = -1, max_length = 0, conv = -1, qkv_dim = 0;
  std::vector<std::string> attention = {};
  Json attention_options = Json::object();  // by mechanism: {"latte": {"latents": 64}}
  Json layer_options = Json::object();      // by layer: {"2": {"latte": {"latents": 8}}}
  std::optional<PositionKind> positions = {};
  double dropout = -1, attention_dropout = -1, ffn_dropout = -1;
  std::vector<int64_t> tied_layers = {};

  Fields Describe();
  Fields DescribeCross();  // heads, mechanisms and their options, memory
};

}  // namespace cistern
