#pragma once
// UTF-8, strictly: no overlong forms, no surrogates, nothing above U+10FFFF.
#include <cstdint>
#include <string>
#include <string_view>

namespace cistern {

struct Utf8Char {
  static constexpr int32_t kInvalid =
      -1;  // broken bytes: `length` of them, the longest part that could have begun a character
  static constexpr int32_t kIncomplete =
      -2;        // the text ends inside a character that is fine so far
  int32_t code;  // code point, or one of the above
  int length;    // bytes, at least 1
};

// The character at text[position]; position < text.size().
Utf8Char DecodeUtf8(std::string_view text, size_t position);

// The text with U+FFFD in place of each broken part.
std::string ValidUtf8(std::string_view bytes);

void AppendUtf8(int32_t code, std::string* out);

// What GPT-2's split tells apart, by Unicode category (utf8proc).
enum class CharClass : uint8_t {
  kLetter,
  kNumber,
  kSpace,
  kOther
};  // \p{L}, \p{N}, \s, the rest (invalid bytes too)
CharClass ClassOf(int32_t code);
// White space as Python's str.split and str.strip have it.
bool IsSpace(int32_t code);

}  // namespace cistern
