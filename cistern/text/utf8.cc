#include "cistern/text/utf8.h"

#include <utf8proc.h>

#include <array>

#include "cistern/text/tokenizer.h"

namespace cistern {
namespace {

CharClass UnicodeClass(int32_t code) {
  // Unicode's White_Space, which is what \s means to GPT-2's regular expression.
  if ((code >= 9 && code <= 13) || code == 0x20 || code == 0x85 || code == 0xA0 || code == 0x1680 ||
      (code >= 0x2000 && code <= 0x200A) || code == 0x2028 || code == 0x2029 || code == 0x202F ||
      code == 0x205F || code == 0x3000) {
    return CharClass::kSpace;
  }
  const utf8proc_category_t category = utf8proc_category(code);
  if (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO)
    return CharClass::kLetter;
  if (category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO)
    return CharClass::kNumber;
  return CharClass::kOther;
}

constexpr char kReplacement[] = "\xEF\xBF\xBD";  // U+FFFD

}  // namespace

Utf8Char DecodeUtf8(std::string_view text, size_t position) {
  const auto byte = [&](size_t i) { return uint8_t(text[position + i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  if (lead < 0xC2 || lead > 0xF4) return {Utf8Char::kInvalid, 1};
  const int length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  int32_t code = lead & (0x7F >> length);
  for (int i = 1; i < length; ++i) {
    if (position + i >= text.size()) return {Utf8Char::kIncomplete, i};
    // The second byte's range rules out overlong forms, surrogates and what lies above U+10FFFF.
    const uint8_t low = i > 1 ? 0x80 : lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    const uint8_t high = i > 1 ? 0xBF : lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    if (byte(i) < low || byte(i) > high) return {Utf8Char::kInvalid, i};
    code = code << 6 | (byte(i) & 0x3F);
  }
  return {code, length};
}

void AppendUtf8(int32_t code, std::string* out) {
  if (code < 0x80) {
    *out += char(code);
  } else if (code < 0x800) {
    *out += {char(0xC0 | code >> 6), char(0x80 | (code & 0x3F))};
  } else if (code < 0x10000) {
    *out += {char(0xE0 | code >> 12), char(0x80 | (code >> 6 & 0x3F)), char(0x80 | (code & 0x3F))};
  } else {
    *out += {char(0xF0 | code >> 18), char(0x80 | (code >> 12 & 0x3F)),
             char(0x80 | (code >> 6 & 0x3F)), char(0x80 | (code & 0x3F))};
  }
}

CharClass ClassOf(int32_t code) {
  static const std::array<CharClass, 0x800> kTable = [] {
    std::array<CharClass, 0x800> table;
    for (int32_t c = 0; c < int32_t(table.size()); ++c) table[c] = UnicodeClass(c);
    return table;
  }();
  if (code < 0) return CharClass::kOther;
  return code < int32_t(kTable.size()) ? kTable[code] : UnicodeClass(code);
}

bool IsSpace(int32_t code) {
  return (code >= 0x1c && code <= 0x1f) || ClassOf(code) == CharClass::kSpace;
}

std::string ValidUtf8(std::string_view bytes) {
  Utf8Stream whole;
  const std::string text = whole.Push(bytes);
  return text + whole.Finish();
}

std::string Utf8Stream::Push(std::string_view bytes) {
  held_ += bytes;
  std::string out;
  size_t position = 0;
  while (position < held_.size()) {
    const Utf8Char c = DecodeUtf8(held_, position);
    if (c.code == Utf8Char::kIncomplete) break;
    out += c.code == Utf8Char::kInvalid ? kReplacement
                                        : std::string_view(held_).substr(position, c.length);
    position += c.length;
  }
  held_.erase(0, position);
  return out;
}

std::string Utf8Stream::Finish() {
  std::string out = held_.empty() ? "" : kReplacement;
  held_.clear();
  return out;
}

}  // namespace cistern
