#pragma once
// Prompts of any length: bytes come piece by piece from a string, a file or standard input, and
// leave as tokens piece by piece.
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cistern/text/tokenizer.h"

namespace cistern {

// The next bytes, valid until the next call; an empty view at the end.
using PromptSource = std::function<std::string_view()>;

PromptSource StringSource(std::string text);
// "-" is standard input. Errors name the file: at once when it cannot be opened, later when it
// cannot be read. A read broken off by a signal ends the source.
PromptSource FileSource(const std::string& path);

class PromptReader {
 public:
  // The tokenizer must outlive it. `start`: an empty prompt gives one token, <|endoftext|> where
  // the tokenizer has it, else a newline.
  PromptReader(const Tokenizer& tokenizer, PromptSource source, bool start = true);
  // Up to `count` tokens; none at the end.
  std::vector<int32_t> Take(int64_t count);
  int64_t taken() const { return taken_; }

 private:
  const Tokenizer& tokenizer_;
  StreamEncoder encoder_;
  PromptSource source_;
  std::vector<int32_t> ready_;
  size_t next_ = 0;
  int64_t taken_ = 0;
  bool ended_ = false, start_;
};

}  // namespace cistern
