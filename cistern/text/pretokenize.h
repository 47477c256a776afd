#pragma once
// GPT-2's split of a text into pre-tokens, the pieces inside which byte pairs merge:
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// Invalid UTF-8 counts as "other" characters, so any bytes can be split.
#include <cstddef>
#include <string>
#include <string_view>

namespace cistern {

// The end of the pre-token that begins at text[begin]; begin < text.size().
size_t PreTokenEnd(std::string_view text, size_t begin);

// Cuts a stream where a pre-token is sure to end whatever comes next (before white space that
// follows something else), so that pieces give the same pre-tokens as the whole. A text without
// white space is held whole.
class PreTokenStream {
 public:
  // Adds bytes; returns what is now safe to split, perhaps nothing. The view lives until the next
  // call.
  std::string_view Push(std::string_view bytes);
  std::string_view Finish();

 private:
  std::string buffer_;
  size_t used_ = 0;      // bytes already returned
  size_t searched_ = 0;  // no cut before here
};

}  // namespace cistern
