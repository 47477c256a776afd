#pragma once
// One description of an options struct serves reading (JSON, TOML, --set key=value), checking,
// writing and help.
#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "cistern/base/error.h"

namespace cistern {

using Json = nlohmann::ordered_json;

template <class T>
struct Range {
  T min = std::numeric_limits<T>::lowest();
  T max = std::numeric_limits<T>::max();
};

// The values of an enumeration and what files and messages call them.
template <class E>
using EnumNames = std::vector<std::pair<E, std::string>>;

template <class E>
const std::string& NameOf(E value, const EnumNames<E>& names) {
  for (const auto& [known, name] : names) {
    if (known == value) return name;
  }
  Fail("an enumeration has a value without a name: ", int64_t(value));
}
// UsageError with the nearest name; `what` is what the value is: "weight".
template <class E>
E ValueOf(const std::string& name, const EnumNames<E>& names, const std::string& what = "value") {
  std::vector<std::string> known;
  for (const auto& [value, text] : names) {
    if (text == name) return value;
    known.push_back(text);
  }
  throw UsageError(UnknownName(what, name, known));
}

class Fields {
 public:
  // The pointers must outlive the Fields; they hold the defaults when added.
  Fields& Add(const std::string& name, int64_t* value, const std::string& help,
              Range<int64_t> range = {});
  Fields& Add(const std::string& name, double* value, const std::string& help,
              Range<double> range = {});
  Fields& Add(const std::string& name, bool* value, const std::string& help);
  Fields& Add(const std::string& name, std::string* value, const std::string& help,
              std::vector<std::string> choices = {});
  // A single value is read as a list of one. `--set name=a,b` gives a list.
  Fields& Add(const std::string& name, std::vector<std::string>* value, const std::string& help,
              std::vector<std::string> choices = {});
  Fields& Add(const std::string& name, std::vector<int64_t>* value, const std::string& help,
              Range<int64_t> range = {});
  // One of the names, which stands for a value of the enumeration.
  template <class E>
  requires std::is_enum_v<E> Fields& Add(const std::string& name, E* value, const std::string& help,
                                         const EnumNames<E>& names) {
    std::vector<std::string> choices;
    for (const auto& [known, text] : names) choices.push_back(text);
    return AddEnum(name, help, std::move(choices),
                   {[value, names] { return NameOf(*value, names); },
                    [value, names](const std::string& text) { *value = ValueOf(text, names); }});
  }
  // The same, which may be left unsaid: then Write leaves it out.
  template <class E>
  requires std::is_enum_v<E> Fields& Add(const std::string& name, std::optional<E>* value,
                                         const std::string& help, const EnumNames<E>& names) {
    std::vector<std::string> choices;
    for (const auto& [known, text] : names) choices.push_back(text);
    return AddEnum(name, help, std::move(choices),
                   {[value, names] { return *value ? NameOf(**value, names) : std::string(); },
                    [value, names](const std::string& text) { *value = ValueOf(text, names); }})
        .OmitWhen("");
  }
  // Anything JSON, checked by its owner later (a mechanism's own options).
  Fields& Add(const std::string& name, Json* value, const std::string& help);
  Fields& Group(const std::string& name, Fields group);  // a nested object: "train.lr"
  // Write leaves the field added last out while it has this value, which stands for nothing said; a
  // group of which nothing is left is left out, too.
  Fields& OmitWhen(Json value);

  // Reads an object. Unknown keys, wrong types and values out of range are a UsageError that names
  // `where`, the dotted key, the value and what is allowed, with the nearest known key.
  void Read(const Json& object, const std::string& where);
  // "train.lr=4e-3", by the field's type: lists as `a,b` or JSON, true/false/1/0/yes/no/on/off,
  // JSON or a bare word for Json fields, whose insides are reached by their own dotted names
  // ("model.options.slots=32"); texts by AssignedText. Errors as of Read, with where = "--set".
  void Set(const std::string& assignment);
  Json Write() const;
  std::string Help(int indent = 0) const;  // one line per field: name, type, default, range, help
  std::vector<std::string> Names() const;  // dotted

 private:
  struct Field;
  struct Enum {  // the name of the value; the value of one of the names
    std::function<std::string()> get;
    std::function<void(const std::string&)> set;
  };
  std::vector<std::shared_ptr<Field>> fields_;

  Field* Find(const std::string& dotted) const;
  Fields& AddField(Field field);
  Fields& AddEnum(const std::string& name, const std::string& help,
                  std::vector<std::string> choices, Enum value);
  void ReadObject(const Json& object, const std::string& where, const std::string& prefix,
                  const std::vector<std::string>& all);
  bool SetInside(const std::string& dotted, const std::string& text);
  void HelpRows(const std::string& prefix, std::vector<std::array<std::string, 3>>* rows) const;
  static void ReadField(Field& field, const Json& json, const std::string& where,
                        const std::string& dotted, const std::vector<std::string>& all);
  static Json WriteField(const Field& field);
};

// The text that a value of an assignment stands for: without the blanks at its ends, or what stands
// between double quotes as it is. AsAssigned: the value that stands for a text.
std::string AssignedText(const std::string& value);
std::string AsAssigned(const std::string& text);

// Files. Errors name the file, line and column.
Json ReadJsonFile(const std::string& path);
Json ReadTomlFile(const std::string& path);  // as JSON

}  // namespace cistern
