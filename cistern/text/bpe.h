#pragma once
// Byte-level BPE over GPT-2's pre-tokens: the model behind both kinds of tokenizer, and its file
// form.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cistern/text/tokenizer.h"

namespace cistern {

struct BpeAdded {
  std::string content;
  int32_t id;
  bool special;
  bool in_vocab;  // listed in the model's own vocabulary too, as GPT-2's <|endoftext|> is
};

struct BpeModel {
  std::vector<std::string> tokens;  // the bytes of each id
  std::vector<std::pair<int32_t, int32_t>>
      merges;                   // by rank; the two tokens' joined bytes are a token
  std::vector<BpeAdded> added;  // found in the text before anything is split
};

// Checks the model (all 256 bytes, no duplicates, merges of known tokens into known tokens); an
// Error begins with `where`.
std::unique_ptr<Tokenizer> MakeBpe(BpeModel model, const std::string& where);

std::string BpeJson(const BpeModel& model);

// GPT-2's printable names of bytes: "Ġ" for a space.
std::string BytesToName(std::string_view bytes);
// The inverse; false when the name has a character that stands for no byte.
bool NameToBytes(std::string_view name, std::string* bytes);

}  // namespace cistern
