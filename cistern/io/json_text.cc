#include "cistern/io/json_text.h"

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <type_traits>
#include <unordered_set>

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

// What the library lets pass, looked for before it builds anything: its own hook for that, a
// callback of `parse`, takes time quadratic in the number of objects.
class JsonWatch : public nlohmann::json_sax<nlohmann::json> {
 public:
  JsonWatch(std::string where, size_t most_keys)
      : where_(std::move(where)), most_keys_(most_keys) {}

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override {
    keys_.emplace_back();
    return Open();
  }
  bool end_object() override {
    keys_.pop_back();
    return Close();
  }
  bool start_array(size_t) override { return Open(); }
  bool end_array() override { return Close(); }
  bool key(string_t& key) override {
    if (!keys_.back().insert(key).second)
      Fail(where_, ": key '", key, "' is given twice in one object");
    if (keys_.back().size() > most_keys_)
      Fail(where_, ": an object has more than ", most_keys_, " keys");
    return true;
  }
  // The text is not JSON: building will say so, with the place.
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception&) override {
    return false;
  }

 private:
  bool Open() {
    if (++depth_ > kMaxJsonDepth) Fail(where_, ": nested deeper than ", kMaxJsonDepth, " levels");
    return true;
  }
  bool Close() {
    --depth_;
    return true;
  }

  std::string where_;
  size_t most_keys_;
  int depth_ = 0;
  std::vector<std::unordered_set<std::string>> keys_;  // of the objects that are open
};

template <class J>
J Parse(std::string_view text, const std::string& name, size_t first_line) {
  const std::string line = first_line > 1 ? StrCat(":", first_line) : "";
  JsonWatch watch(name + line, std::is_same_v<J, Json> ? kMaxOrderedKeys : SIZE_MAX);
  nlohmann::json::sax_parse(text.begin(), text.end(), &watch);
  try {
    return J::parse(text.begin(), text.end());
  } catch (const typename J::parse_error& e) {
    Fail(Place(text, e.byte > 0 ? e.byte - 1 : 0, name, first_line),
         ": not valid JSON: ", Reason(e.what()));
  } catch (const typename J::exception& e) {  // a number that no double holds
    Fail(name, line, ": not valid JSON: ", Reason(e.what()));
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
         ": not valid TOML: a character outside ASCII must be in quotes");
  }
  try {
    return FromToml(toml::parse(text), name, 0);
  } catch (const toml::parse_error& e) {
    Fail(name, ":", e.source().begin.line, ":", e.source().begin.column,
         ": not valid TOML: ", e.description());
  }
}

Json ReadJsonFile(const std::string& path) { return ParseJson(ReadFile(path), path); }

Json ReadTomlFile(const std::string& path) {
  constexpr size_t kMost = size_t{1} << 24;  // a configuration; the parser needs many times that
  const std::string text = ReadFile(path);
  CISTERN_CHECK(text.size() <= kMost, path, ": more than 16 MiB; is this a configuration?");
  return ParseToml(text, path);
}

std::string JsonLine(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string JsonFileText(const Json& json) {
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

bool IsUtf8(const std::string& text) {
  return Json::parse(JsonLine(text)).get_ref<const std::string&>() == text;
}

}  // namespace cistern
