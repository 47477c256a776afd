#include "cistern/io/json_text.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <sstream>
#include <type_traits>
#include <unordered_set>

#include <toml++/toml.h>

#include "cistern/base/error.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/byte_source.h"

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

// toml++ 3.3 runs into undefined behaviour on characters outside ASCII, wherever it asks whether
// one is white space. So it sees none: each of their bytes is shown to it as `xx` (two hexadecimal
// digits between backticks), and each backtick, too.
std::string ToAscii(std::string_view text) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string ascii;
  ascii.reserve(text.size());
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 128 && c != '`') {
      ascii += c;
    } else {
      ascii += {'`', kDigits[byte >> 4], kDigits[byte & 15], '`'};
    }
  }
  return ascii;
}

std::string FromAscii(std::string_view ascii) {
  std::string text;
  for (size_t i = 0; i < ascii.size(); ++i) {
    if (ascii[i] == '`' && i + 3 < ascii.size()) {
      text += char(std::stoi(std::string(ascii.substr(i + 1, 2)), nullptr, 16));
      i += 3;
    } else {
      text += ascii[i];
    }
  }
  return text;
}

template <class T>
std::string Printed(const T& value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

// toml++ makes a table of each part of a dotted key, without a limit, and ends them by recursion.
// So it sees no key of more parts than there may be levels. Strings and comments are passed over as
// toml++ reads them; where the text is no TOML, it reads no further.
void RefuseLongKeys(std::string_view text, const std::string& name) {
  int dots = 0;
  for (size_t i = 0; i < text.size();) {
    const char c = text[i];
    if (c == '#') {
      i = std::min(text.find('\n', i), text.size());
    } else if (c == '"' || c == '\'') {
      const std::string end(text.substr(i, 3) == std::string(3, c) ? 3 : 1, c);
      for (i += end.size(); i < text.size() && text.substr(i, end.size()) != end; ++i) {
        if (end.size() == 1 && text[i] == '\n') break;
        if (c == '"' && text[i] == '\\') ++i;
      }
      i += end.size();
      // Up to two quotes may stand before the three that end a text of many lines.
      for (int more = 0; end.size() == 3 && more < 2 && i < text.size() && text[i] == c; ++more)
        ++i;
    } else {
      const bool in_key = std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-' ||
                          c == ' ' || c == '\t';
      dots = c == '.' ? dots + 1 : in_key ? dots : 0;
      if (dots >= kMaxJsonDepth) Fail(name, ": nested deeper than ", kMaxJsonDepth, " levels");
      ++i;
    }
  }
}

Json FromToml(const toml::node& node, const std::string& name, int depth) {
  if (depth > kMaxJsonDepth) Fail(name, ": nested deeper than ", kMaxJsonDepth, " levels");
  if (const auto* table = node.as_table()) {
    if (table->size() > kMaxOrderedKeys)
      Fail(name, ": an object has more than ", kMaxOrderedKeys, " keys");
    // toml++ sorts keys; the file's order is that of the places in it
    std::vector<std::pair<std::string, const toml::node*>> items;
    for (const auto& [key, value] : *table) items.emplace_back(std::string(key.str()), &value);
    std::stable_sort(items.begin(), items.end(), [](const auto& a, const auto& b) {
      const auto &x = a.second->source().begin, &y = b.second->source().begin;
      return std::pair(x.line, x.column) < std::pair(y.line, y.column);
    });
    Json object = Json::object();
    for (const auto& [key, value] : items)
      object.push_back({FromAscii(key), FromToml(*value, name, depth + 1)});
    return object;
  }
  if (const auto* array = node.as_array()) {
    Json list = Json::array();
    for (const auto& value : *array) list.push_back(FromToml(value, name, depth + 1));
    return list;
  }
  if (const auto* v = node.as_string()) return FromAscii(v->get());
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
  text = WithoutMark(text);
  CISTERN_CHECK(IsUtf8(std::string(text)), name, ": not valid TOML: not UTF-8");
  for (const std::string_view escape : {"\\u0060", "\\U00000060"}) {
    const size_t place = text.find(escape);
    if (place != std::string_view::npos)
      Fail(Place(text, place, name, 1), ": write a backtick as itself, not as ", escape);
  }
  RefuseLongKeys(text, name);
  const std::string ascii = ToAscii(text);
  try {
    return FromToml(toml::parse(ascii), name, 0);
  } catch (const toml::parse_error& e) {
    size_t place = 0;
    for (toml::source_index line = 1; line < e.source().begin.line; ++line)
      place = ascii.find('\n', place) + 1;
    place = std::min(place + e.source().begin.column - 1, ascii.size());
    const std::string reason = ascii[place] == '`'
                                   ? "unexpected here: a character outside ASCII, or a "
                                     "backtick, must be in quotes"
                                   : std::string(e.description());
    Fail(Place(text, FromAscii(std::string_view(ascii).substr(0, place)).size(), name, 1),
         ": not valid TOML: ", reason);
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
