#include "cistern/io/fields.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <variant>

#include "cistern/base/error.h"
#include "cistern/io/json_text.h"
#include "cistern/io/table_reader.h"

namespace cistern {

struct Fields::Field {
  using Target = std::variant<int64_t*, double*, bool*, std::string*, std::vector<std::string>*,
                              std::vector<int64_t>*, Json*, Enum, Fields>;
  std::string name, help;
  Target target;
  Range<int64_t> integers = {};
  Range<double> numbers = {};
  std::vector<std::string> choices = {};
  Json initial = {};
  std::optional<Json> unset = {};  // Write leaves the field out while it has this value

  bool IsGroup() const { return std::holds_alternative<Fields>(target); }
  Fields& group() { return std::get<Fields>(target); }
};

namespace {

template <class... F>
struct Overloaded : F... {
  using F::operator()...;
};
template <class... F>
Overloaded(F...) -> Overloaded<F...>;

using Ints = std::vector<int64_t>;
using Texts = std::vector<std::string>;

std::string NumberText(double x) {
  char text[64];
  const auto end = std::to_chars(text, text + sizeof(text), NanUnsigned(x)).ptr;
  return std::string(text, end);
}
std::string NumberText(int64_t x) { return std::to_string(x); }

// "0 .. 10", "at least 1", "at most 10", or nothing when all is allowed.
template <class T>
std::string RangeText(const Range<T>& range) {
  const Range<T> all;
  if (range.min == all.min && range.max == all.max) return "";
  if (range.max == all.max) return "at least " + NumberText(range.min);
  if (range.min == all.min) return "at most " + NumberText(range.max);
  return NumberText(range.min) + " .. " + NumberText(range.max);
}

std::string ChoicesText(const Texts& choices) {
  std::string text;
  for (const std::string& c : choices) text += (text.empty() ? "" : ", ") + c;
  return text;
}

std::string Shown(const Json& json) {
  std::string text = JsonLine(json);
  if (text.size() > 80) text = text.substr(0, 77) + "...";
  return text;
}

// 3, and 3.0 or 1e6 as well: whole numbers that a double holds exactly.
std::optional<int64_t> AsInteger(const Json& json) {
  if (json.is_number_unsigned()) {
    const uint64_t u = json.get<uint64_t>();
    return u <= uint64_t(std::numeric_limits<int64_t>::max()) ? std::optional(int64_t(u))
                                                              : std::nullopt;
  }
  if (json.is_number_integer()) return json.get<int64_t>();
  if (json.is_number_float()) {
    const double x = json.get<double>();
    if (std::abs(x) <= 0x1p53 && x == std::floor(x)) return int64_t(x);
  }
  return std::nullopt;
}

// Reads one value into a field; complains with the dotted key, the value and what is allowed.
struct Reader {
  const std::string& where;
  const std::string& dotted;

  [[noreturn]] void Expected(const Json& got, const std::string& kind,
                             const std::string& range) const {
    FailUsage(where, ": '", dotted, "' is ", Shown(got), "; expected ", kind,
              range.empty() ? "" : " (" + range + ")");
  }
  int64_t Integer(const Json& json, const Range<int64_t>& range, const std::string& kind) const {
    const std::optional<int64_t> x = AsInteger(json);
    if (!x || *x < range.min || *x > range.max) Expected(json, kind, RangeText(range));
    return *x;
  }
  double Number(const Json& json, const Range<double>& range) const {
    const double x = json.is_number() ? json.get<double>() : NAN;
    if (!(x >= range.min && x <= range.max))
      Expected(json, "a number", RangeText(range));  // catches NaN
    return x;
  }
  std::string Text(const Json& json, const Texts& choices, const std::string& kind) const {
    if (!json.is_string())
      Expected(json, kind, choices.empty() ? "" : "one of " + ChoicesText(choices));
    std::string text = json.get<std::string>();
    if (!choices.empty() && std::find(choices.begin(), choices.end(), text) == choices.end()) {
      FailUsage(where, ": '", dotted, "': ", UnknownName("value", text, choices));
    }
    return text;
  }
  template <class List, class Item>
  List Items(const Json& json, const Item& item) const {
    List list;
    if (json.is_array()) {
      for (const Json& value : json) list.push_back(item(value));
    } else {
      list.push_back(item(json));
    }
    return list;
  }
};

std::string Trimmed(const std::string& text) {
  const char* const blank = " \t\r\n";
  const size_t begin = text.find_first_not_of(blank);
  return begin == std::string::npos ? ""
                                    : text.substr(begin, text.find_last_not_of(blank) - begin + 1);
}

// A command-line number as JSON; anything else stays text, for the error message.
Json NumberOrText(const std::string& text) {
  Json json = Json::parse(text, nullptr, false);
  if (json.is_number()) return json;
  double value = 0;  // .5 and 5. are numbers to users
  return ParseFinite(text, &value) ? Json(value) : Json(text);
}

Json CommaList(const std::string& text, bool numbers) {
  if (!text.empty() && text[0] == '[') return ParseJson(text, "--set");
  Json list = Json::array();
  for (size_t begin = 0; begin <= text.size() && !text.empty();) {
    const size_t comma = std::min(text.find(',', begin), text.size());
    const std::string item = Trimmed(text.substr(begin, comma - begin));
    list.push_back(numbers ? NumberOrText(item) : Json(item));
    begin = comma + 1;
  }
  return list;
}

// JSON, a list without its brackets, or a bare word or path as text: "elu", but not "{a" or "3x".
Json JsonOrWord(const std::string& text, const std::string& dotted) {
  Json json = Json::parse(text, nullptr, false);
  if (json.is_discarded() && text.find(',') != std::string::npos)
    json = Json::parse("[" + text + "]", nullptr, false);
  if (!json.is_discarded() && text.find_first_of("[{") == std::string::npos) return json;
  if (!text.empty() && std::isalpha(static_cast<unsigned char>(text[0])) &&
      text.find_first_of("\"{}[]") == std::string::npos)
    return text;
  return ParseJson(text, "--set " + dotted);  // strict, and complains
}

bool StartsWith(const std::string& text, const std::string& prefix) {
  return text.rfind(prefix, 0) == 0;
}
bool EndsWith(const std::string& text, const std::string& suffix) {
  return text.size() >= suffix.size() &&
         text.compare(text.size() - suffix.size(), suffix.size(), suffix) == 0;
}

// The nearest of all dotted names; "lr" finds "train.lr"; with nothing near, only the names of the
// same group are listed.
std::string UnknownKey(const std::string& dotted, const Texts& all, const std::string& prefix) {
  for (const std::string& name : all) {
    if (EndsWith(name, "." + dotted))
      return StrCat("unknown key '", dotted, "'; did you mean '", name, "'?");
  }
  std::string message = UnknownName("key", dotted, all);
  if (message.find("; did you mean '") != std::string::npos) return message;
  Texts siblings;
  for (const std::string& name : all) {
    if (!StartsWith(name, prefix)) continue;
    const std::string sibling = name.substr(0, name.find('.', prefix.size()));
    if (siblings.empty() || siblings.back() != sibling) siblings.push_back(sibling);
  }
  return UnknownName("key", dotted, siblings.empty() ? all : siblings);
}

}  // namespace

std::string AssignedText(const std::string& value) {
  const std::string text = Trimmed(value);
  const bool quoted = text.size() >= 2 && text.front() == '"' && text.back() == '"';
  return quoted ? text.substr(1, text.size() - 2) : text;
}

std::string AsAssigned(const std::string& text) {
  return AssignedText(text) == text ? text : StrCat('"', text, '"');
}

Fields& Fields::AddField(Field field) {
  CISTERN_CHECK(!field.name.empty() && field.name.find_first_of(".= ") == std::string::npos,
                "bad field name '", field.name, "'");
  for (const auto& f : fields_)
    CISTERN_CHECK(f->name != field.name, "field '", field.name, "' is added twice");
  fields_.push_back(std::make_shared<Field>(std::move(field)));
  fields_.back()->initial = WriteField(*fields_.back());
  return *this;
}

Fields& Fields::Add(const std::string& name, int64_t* value, const std::string& help,
                    Range<int64_t> range) {
  return AddField({.name = name, .help = help, .target = value, .integers = range});
}
Fields& Fields::Add(const std::string& name, double* value, const std::string& help,
                    Range<double> range) {
  return AddField({.name = name, .help = help, .target = value, .numbers = range});
}
Fields& Fields::Add(const std::string& name, bool* value, const std::string& help) {
  return AddField({.name = name, .help = help, .target = value});
}
Fields& Fields::Add(const std::string& name, std::string* value, const std::string& help,
                    Texts choices) {
  return AddField({.name = name, .help = help, .target = value, .choices = std::move(choices)});
}
Fields& Fields::Add(const std::string& name, Texts* value, const std::string& help, Texts choices) {
  return AddField({.name = name, .help = help, .target = value, .choices = std::move(choices)});
}
Fields& Fields::Add(const std::string& name, Ints* value, const std::string& help,
                    Range<int64_t> range) {
  return AddField({.name = name, .help = help, .target = value, .integers = range});
}
Fields& Fields::AddEnum(const std::string& name, const std::string& help, Texts choices,
                        Enum value) {
  return AddField(
      {.name = name, .help = help, .target = std::move(value), .choices = std::move(choices)});
}
Fields& Fields::Add(const std::string& name, Json* value, const std::string& help) {
  return AddField({.name = name, .help = help, .target = value});
}
Fields& Fields::Group(const std::string& name, Fields group) {
  return AddField({.name = name, .help = "", .target = std::move(group)});
}

Fields& Fields::OmitWhen(Json value) {
  fields_.back()->unset = std::move(value);
  return *this;
}

Json Fields::WriteField(const Field& field) {
  return std::visit(Overloaded{[](const Fields& group) { return group.Write(); },
                               [](const Enum& value) { return Json(value.get()); },
                               [](const auto* value) { return Json(*value); }},
                    field.target);
}

Json Fields::Write() const {
  Json object = Json::object();
  for (const auto& field : fields_) {
    Json value = WriteField(*field);
    if (field->unset && value == *field->unset) continue;
    if (field->IsGroup() && value.empty() && !field->group().fields_.empty()) continue;
    object[field->name] = std::move(value);
  }
  return object;
}

Texts Fields::Names() const {
  Texts names;
  for (const auto& field : fields_) {
    if (!field->IsGroup()) {
      names.push_back(field->name);
    } else {
      for (const std::string& inner : field->group().Names())
        names.push_back(field->name + "." + inner);
    }
  }
  return names;
}

void Fields::ReadField(Field& field, const Json& json, const std::string& where,
                       const std::string& dotted, const Texts& all) {
  const Reader reader{where, dotted};
  std::visit(
      Overloaded{
          [&](int64_t* value) { *value = reader.Integer(json, field.integers, "an integer"); },
          [&](double* value) { *value = reader.Number(json, field.numbers); },
          [&](bool* value) {
            if (!json.is_boolean()) reader.Expected(json, "true or false", "");
            *value = json.get<bool>();
          },
          [&](std::string* value) { *value = reader.Text(json, field.choices, "a text"); },
          [&](Texts* value) {
            *value = reader.Items<Texts>(json, [&](const Json& item) {
              return reader.Text(item, field.choices, "a list of texts");
            });
          },
          [&](Ints* value) {
            *value = reader.Items<Ints>(json, [&](const Json& item) {
              return reader.Integer(item, field.integers, "a list of integers");
            });
          },
          [&](Json* value) { *value = json; },
          [&](Enum& value) { value.set(reader.Text(json, field.choices, "a text")); },
          [&](Fields& group) { group.ReadObject(json, where, dotted + ".", all); },
      },
      field.target);
}

void Fields::ReadObject(const Json& object, const std::string& where, const std::string& prefix,
                        const Texts& all) {
  if (!object.is_object()) {
    const std::string key =
        prefix.empty() ? "" : "'" + prefix.substr(0, prefix.size() - 1) + "' is ";
    FailUsage(where, ": ", prefix.empty() ? "expected an object, got " : key, Shown(object),
              prefix.empty() ? "" : "; expected an object");
  }
  for (const auto& [key, value] : object.items()) {
    Field* field = Find(key);
    if (field == nullptr || key.find('.') != std::string::npos)
      FailUsage(where, ": ", UnknownKey(prefix + key, all, prefix));
    ReadField(*field, value, where, prefix + key, all);
  }
}

void Fields::Read(const Json& object, const std::string& where) {
  ReadObject(object, where, "", Names());
}

Fields::Field* Fields::Find(const std::string& dotted) const {
  const size_t dot = dotted.find('.');
  for (const auto& field : fields_) {
    if (field->name != dotted.substr(0, dot)) continue;
    if (dot == std::string::npos) return field.get();
    return field->IsGroup() ? field->group().Find(dotted.substr(dot + 1)) : nullptr;
  }
  return nullptr;
}

void Fields::Set(const std::string& assignment) {
  const std::string where = "--set";
  const size_t equals = assignment.find('=');
  if (equals == std::string::npos) FailUsage(where, ": expected key=value, got '", assignment, "'");
  const std::string dotted = Trimmed(assignment.substr(0, equals));
  const std::string text = Trimmed(assignment.substr(equals + 1));
  if (!IsUtf8(assignment)) {  // it could not be written down as it is
    FailUsage(where, ": '", dotted, "' is ", JsonLine(text),
              "; expected UTF-8 (rename or link a path in another encoding)");
  }
  const Texts all = Names();
  Field* field = Find(dotted);
  if (field == nullptr && SetInside(dotted, text)) return;
  if (field == nullptr) {
    const size_t dot = dotted.rfind('.');
    FailUsage(where, ": ",
              UnknownKey(dotted, all, dot == std::string::npos ? "" : dotted.substr(0, dot + 1)));
  }
  Json json;
  try {
    json = std::visit(Overloaded{
                          [&](int64_t*) { return NumberOrText(text); },
                          [&](double*) { return NumberOrText(text); },
                          [&](bool*) {
                            for (const char* word : {"true", "1", "yes", "on"}) {
                              if (text == word) return Json(true);
                            }
                            for (const char* word : {"false", "0", "no", "off"}) {
                              if (text == word) return Json(false);
                            }
                            return Json(text);
                          },
                          [&](std::string*) { return Json(AssignedText(text)); },
                          [&](Texts*) { return CommaList(text, false); },
                          [&](Ints*) { return CommaList(text, true); },
                          [&](Json*) { return JsonOrWord(text, dotted); },
                          [&](Enum&) { return Json(AssignedText(text)); },
                          [&](Fields&) { return ParseJson(text, where + " " + dotted); },
                      },
                      field->target);
  } catch (const UsageError&) {
    throw;
  } catch (const Error& e) {
    throw UsageError(e.what());
  }
  ReadField(*field, json, where, dotted, all);
}

// "options.feature=elu" where "options" is a Json field: sets that place inside it.
bool Fields::SetInside(const std::string& dotted, const std::string& text) {
  for (size_t dot = dotted.find('.'); dot != std::string::npos; dot = dotted.find('.', dot + 1)) {
    Field* field = Find(dotted.substr(0, dot));
    if (field == nullptr || !std::holds_alternative<Json*>(field->target)) continue;
    if (std::count(dotted.begin() + int64_t(dot), dotted.end(), '.') >= kMaxJsonDepth)
      FailUsage("--set: '", dotted.substr(0, dot), "' would be nested deeper than ", kMaxJsonDepth,
                " levels");
    Json* place = std::get<Json*>(field->target);
    for (size_t begin = dot + 1; begin <= dotted.size();) {
      const size_t end = std::min(dotted.find('.', begin), dotted.size());
      if (!place->is_object() && !place->is_null()) {
        FailUsage("--set: '", dotted.substr(0, begin - 1), "' is ", Shown(*place),
                  ", which has no keys");
      }
      place = &(*place)[dotted.substr(begin, end - begin)];
      begin = end + 1;
    }
    try {
      *place = JsonOrWord(text, dotted);
    } catch (const Error& e) {
      throw UsageError(e.what());
    }
    return true;
  }
  return false;
}

void Fields::HelpRows(const std::string& prefix,
                      std::vector<std::array<std::string, 3>>* rows) const {
  for (const auto& field : fields_) {
    if (field->IsGroup()) {
      field->group().HelpRows(prefix + field->name + ".", rows);
      continue;
    }
    const std::string kind = std::visit(Overloaded{
                                            [](int64_t*) { return "integer"; },
                                            [](double*) { return "number"; },
                                            [](bool*) { return "bool"; },
                                            [](std::string*) { return "text"; },
                                            [](Texts*) { return "texts"; },
                                            [](Ints*) { return "integers"; },
                                            [](Json*) { return "json"; },
                                            [](const Enum&) { return "text"; },
                                            [](Fields&) { return ""; },
                                        },
                                        field->target);
    std::string initial;
    if (field->initial.is_array() && !field->initial.empty() &&
        !field->initial[0].is_structured()) {
      for (const Json& item : field->initial) {
        initial += (initial.empty() ? "" : ",") +
                   (item.is_string() ? item.get<std::string>() : JsonLine(item));
      }
    } else if (field->initial.is_string() &&
               !field->initial.get_ref<const std::string&>().empty()) {
      initial = field->initial.get<std::string>();
    } else if (field->initial.is_number_float()) {
      initial = NumberText(field->initial.get<double>());
    } else {
      initial = JsonLine(field->initial);
    }
    std::string allowed =
        !field->choices.empty() ? ChoicesText(field->choices) : RangeText(field->integers);
    if (std::holds_alternative<double*>(field->target)) allowed = RangeText(field->numbers);
    rows->push_back({prefix + field->name, StrCat(kind, " = ", initial),
                     StrCat(field->help, allowed.empty() ? "" : StrCat(" (", allowed, ")"))});
  }
}

std::string Fields::Help(int indent) const {
  constexpr size_t kWidest = 32;  // a longer cell pushes its own line only
  std::vector<std::array<std::string, 3>> rows;
  HelpRows("", &rows);
  size_t width[2] = {0, 0};
  for (const auto& row : rows) {
    for (int i : {0, 1}) width[i] = std::max(width[i], std::min(row[i].size(), kWidest));
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line(size_t(indent), ' ');
    for (int i : {0, 1})
      line +=
          row[i] + std::string(row[i].size() < width[i] ? width[i] - row[i].size() : 0, ' ') + "  ";
    line += row[2];
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

}  // namespace cistern
