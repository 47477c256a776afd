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
std::string Place(std::string_view text, size_t offset, const std::string& name, size_t first_line) {
  offset = std::min(offset, text.size());
  const std::string_view before = text.substr(0, offset);
  const size_t line = size_t(std::count(before.begin(), before.end(), '\n'));
  const size_t start = before.rfind('\n') + 1;  // npos + 1 = 0
  return StrCat(name, ":", first_line + line, ":", offset - start + 1);
}

// The library's reason without its own prefix: "[json.exception.parse_error.101] parse error at line 1, column 2: REASON".
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
        Fail(name, first_line > 1 ? StrCat(":", first_line) : "", ": key '", key, "' is given twice in one object");
      }
    }
    return true;
  };
  try {
    return J::parse(text.begin(), text.end(), watch);
  } catch (const typename J::parse_error& e) {
    Fail(Place(text, e.byte > 0 ? e.byte - 1 : 0, name, first_line), ": not valid JSON: ", Reason(e.what()));
  } catch (const typename J::exception& e) {  // a number that no double holds
    Fail(name, first_line > 1 ? StrCat(":", first_line) : "", ": not valid JSON: ", Reason(e.what()));
  }
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
    for (const auto& [key, value] : items) object.push_back({key, FromToml(*value, name, depth + 1)});
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

Json ParseJson(std::string_view text, const std::string& name, size_t first_line) { return Parse<Json>(text, name, first_line); }

nlohmann::json ParseSortedJson(std::string_view text, const std::string& name) { return Parse<nlohmann::json>(text, name, 1); }

Json ParseToml(std::string_view text, const std::string& name) {
  try {
    return FromToml(toml::parse(text), name, 0);
  } catch (const toml::parse_error& e) {
    Fail(name, ":", e.source().begin.line, ":", e.source().begin.column, ": not valid TOML: ", e.description());
  }
}

Json ReadJsonFile(const std::string& path) { return ParseJson(ReadFile(path), path); }

Json ReadTomlFile(const std::string& path) { return ParseToml(ReadFile(path), path); }

std::string JsonLine(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

}  // namespace cistern
