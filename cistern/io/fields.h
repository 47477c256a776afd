#pragma once
// One description of an options struct serves reading (JSON, TOML, --set key=value), checking, writing and help.
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace cistern {

using Json = nlohmann::ordered_json;

template <class T>
struct Range {
  T min = std::numeric_limits<T>::lowest();
  T max = std::numeric_limits<T>::max();
};

class Fields {
 public:
  // The pointers must outlive the Fields; they hold the defaults when added.
  Fields& Add(const std::string& name, int64_t* value, const std::string& help, Range<int64_t> range = {});
  Fields& Add(const std::string& name, double* value, const std::string& help, Range<double> range = {});
  Fields& Add(const std::string& name, bool* value, const std::string& help);
  Fields& Add(const std::string& name, std::string* value, const std::string& help, std::vector<std::string> choices = {});
  // A single value is read as a list of one. `--set name=a,b` gives a list.
  Fields& Add(const std::string& name, std::vector<std::string>* value, const std::string& help, std::vector<std::string> choices = {});
  Fields& Add(const std::string& name, std::vector<int64_t>* value, const std::string& help, Range<int64_t> range = {});
  // Anything JSON, checked by its owner later (a mechanism's own options).
  Fields& Add(const std::string& name, Json* value, const std::string& help);
  Fields& Group(const std::string& name, Fields group);  // a nested object: "train.lr"

  // Reads an object. Unknown keys, wrong types and values out of range are a UsageError that names `where`, the dotted key, the value
  // and what is allowed, with the nearest known key.
  void Read(const Json& object, const std::string& where);
  void Set(const std::string& assignment);  // "train.lr=4e-3"
  Json Write() const;
  std::string Help(int indent = 0) const;   // one line per field: name, type, default, range, help
  std::vector<std::string> Names() const;   // dotted

 private:
  struct Field;
  std::vector<std::shared_ptr<Field>> fields_;
  Field* Find(const std::string& dotted) const;
};

// Files. Errors name the file, line and column.
Json ReadJsonFile(const std::string& path);
Json ReadTomlFile(const std::string& path);  // as JSON

}  // namespace cistern
