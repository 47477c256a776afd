#pragma once
// Strict JSON from text, for all of the project: duplicate keys and nesting deeper than
// kMaxJsonDepth are refused, and errors carry line and column. O(n log n) in the text's length.
#include <cstddef>
#include <string>
#include <string_view>

#include "cistern/io/fields.h"

namespace cistern {

constexpr int kMaxJsonDepth = 64;
// Of one object whose keys keep their order: finding one of them takes as long as there are keys.
constexpr size_t kMaxOrderedKeys = 10'000;

// "config.json:3:14: not valid JSON: ...". `first_line` is the number of the text's first line (for
// JSON lines).
Json ParseJson(std::string_view text, const std::string& name, size_t first_line = 1);

// The same with keys sorted: for objects of any number of keys.
nlohmann::json ParseSortedJson(std::string_view text, const std::string& name);

// The same limits: of nesting, dotted keys included, and of keys.
Json ParseToml(std::string_view text, const std::string& name);

// One line of text, whatever the JSON holds: bytes that are not UTF-8 become U+FFFD.
std::string JsonLine(const Json& json);
// The same for a file that people read: indented, with a newline at the end.
std::string JsonFileText(const Json& json);
// Text that JSON can hold as it is.
bool IsUtf8(const std::string& text);

}  // namespace cistern
