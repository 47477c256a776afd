#pragma once
// Strict JSON from text: duplicate keys and nesting deeper than kMaxJsonDepth are refused, and
// errors carry line and column.
#include <cstddef>
#include <string>
#include <string_view>

#include "cistern/io/fields.h"

namespace cistern {

constexpr int kMaxJsonDepth = 100;

// "config.json:3:14: not valid JSON: ...". `first_line` is the number of the text's first line (for
// JSON lines).
Json ParseJson(std::string_view text, const std::string& name, size_t first_line = 1);

// The same with keys sorted: for objects with very many keys, where the ordered kind is slow.
nlohmann::json ParseSortedJson(std::string_view text, const std::string& name);

Json ParseToml(std::string_view text, const std::string& name);

// One line of text, whatever the JSON holds: bytes that are not UTF-8 become U+FFFD.
std::string JsonLine(const Json& json);

}  // namespace cistern
