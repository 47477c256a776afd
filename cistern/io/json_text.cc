#include "cistern/io/json_text.h"

#include <algorithm>
#include <set>
#include <sstream>

#include <toml++/toml.h>

#include "cistern/base/error.h"
#include "cistern/io/atomic_file.h"

namespace cistern {
namespace {

// name:line:column of the byte at `offset`.
std::string Place(std::string_view text, size_t offset, const std::string& name,
                  size_t first_line) {
  offset = std::min(offset, text.size());
  const std::string_view before = text.substr(0, offset);
  const size_t line = size_t(std::count(before.begin(), before.end(), '\n'));
  const size_t start = before.rfind('\n') + 1;  // npos + 1 = 0
  return StrCat(name, ":", first_line + line, ":", offset - start + 1);
}

// The library's reason without its own prefix: "[json.exception.parse_error.101] parse error at
// line 1, column 2: REASON".
std::string Reason(const std::string& what) {
  const size_t prefix = what.find("] ");
  std::string reason = prefix == std::string::npos ? what : what.substr(prefix + 2);
  if (reason.rfind("parse error", 0) == 0) {
    const size_t colon = reason.find(": ");
    if (colon != std::string::npos) reason = reason.substr(colon + 2);
  }
  return reason;
}

template <class J>
J Parse(std::string_view text, const std::string& name, size_t first_line) {
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const auto watch = [&](int depth, typename J::parse_event_t event, J& parsed) {
    if (depth >= kMaxJsonDepth) Fail(name, ": nested deeper than ", kMaxJsonDepth, " levels");
    if (event == J::parse_event_t::object_start) keys.emplace_back();
    if (event == J::parse_event_t::object_end) keys.pop_back();
    if (event == J::parse_event_t::key) {
      const std::string& key = parsed.template get_ref<const std::string&>();
      if (!keys.back().insert(key).second) {
        Fail(name, first_line > 1 ? StrCat(":", first_line) : "", ": key '", key,
             "' is given twice in one object");
      }
    }
    return true;
  };
  try {
    return J::parse(text.begin(), text.end(), watch);
  } catch (const typename J::parse_error& e) {
    Fail(Place(text, e.byte > 0 ? e.byte - 1 : 0, name, first_line),
         ": not valid JSON: ", Reason(e.what()));
  } catch (const typename J::exception& e) {  // a number that no double holds
    Fail(name, first_line > 1 ? StrCat(":", first_line) : "",
         ": not valid JSON: ", Reason(e.what()));
  }
}

// The first byte above 127 outside strings and comments, where TOML 1.0 allows none, or npos.
// toml++ 3.3 runs into undefined behaviour on some of them (is_non_ascii_horizontal_whitespace), so
// it must not see any.
size_t BareNonAscii(std::string_view text) {
  size_t i = text.substr(0, 3) == "\xef\xbb\xbf" ? 3 : 0;  // byte order mark
  while (i < text.size()) {
    const char c = text[i];
    if (static_cast<unsigned char>(c) > 127) return i;
    if (c == '#') {
      i = std::min(text.find('\n', i), text.size());
    } else if (c == '"' || c == '\'') {
      const bool block = text.substr(i, 3) == std::string(3, c);
      for (i += block ? 3 : 1; i < text.size(); ++i) {
        if (c == '"' && text[i] == '\\') {
          ++i;
        } else if (!block && (text[i] == c || text[i] == '\n')) {
          ++i;
          break;
        } else if (block && text.substr(i, 3) == std::string(3, c)) {
          for (int quotes = 0; quotes < 5 && i < text.size() && text[i] == c; ++quotes)
            ++i;  // up to two belong to the string
          break;
        }
      }
    } else {
      ++i;
    }
  }
  return std::string_view::npos;
}

template <class T>
std::string Printed(const T& value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

Json FromToml(const toml::node& node, const std::string& name, int depth) {
  if (depth > kMaxJsonDepth) Fail(name, ": nested deeper than ", kMaxJsonDepth, " levels");
  if (const auto* table = node.as_table()) {
    // toml++ sorts keys; the file's order is that of the places in it
    std::vector<std::pair<std::string, const toml::node*>> items;
    for (const auto& [key, value] : *table) items.emplace_back(std::string(key.str()), &value);
    std::stable_sort(items.begin(), items.end(), [](const auto& a, const auto& b) {
      const auto &x = a.second->source().begin, &y = b.second->source().begin;
      return std::pair(x.line, x.column) < std::pair(y.line, y.column);
    });
    Json object = Json::object();
    for (const auto& [key, value] : items)
      object.push_back({key, FromToml(*value, name, depth + 1)});
    return object;
  }
  if (const auto* array = node.as_array()) {
    Json list = Json::array();
    for (const auto& value : *array) list.push_back(FromToml(value, name, depth + 1));
    return list;
  }
  if (const auto* v = node.as_string()) return v->get();
  if (const auto* v = node.as_integer()) return v->get();
  if (const auto* v = node.as_floating_point()) return v->get();
  if (const auto* v = node.as_boolean()) return v->get();
  if (const auto* v = node.as_date()) return Printed(v->get());
  if (const auto* v = node.as_time()) return Printed(v->get());
  return Printed(node.as_date_time()->get());
}

}  // namespace

Json ParseJson(std::string_view text, const std::string& name, size_t first_line) {
  return Parse<Json>(text, name, first_line);
}

nlohmann::json ParseSortedJson(std::string_view text, const std::string& name) {
  return Parse<nlohmann::json>(text, name, 1);
}

Json ParseToml(std::string_view text, const std::string& name) {
  const size_t bare = BareNonAscii(text);
  if (bare != std::string_view::npos) {
    Fail(Place(text, bare, name, 1),
         ": not valid TOML: a character outside ASCII must stand in quotes");
  }
  try {
    return FromToml(toml::parse(text), name, 0);
  } catch (const toml::parse_error& e) {
    Fail(name, ":", e.source().begin.line, ":", e.source().begin.column,
         ": not valid TOML: ", e.description());
  }
}

Json ReadJsonFile(const std::string& path) { return ParseJson(ReadFile(path), path); }

Json ReadTomlFile(const std::string& path) { return ParseToml(ReadFile(path), path); }

std::string JsonLine(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace cistern
