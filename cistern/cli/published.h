#pragma once
// What a source says of the experiment in a file: the [published] table. It changes nothing that
// runs; `train` prints the source's figures beside its own, `info FILE` compares the size of the
// model, and scripts/check-published makes docs/published.md of all files in configs/.
#include <cstdint>
#include <string>
#include <vector>

#include "cistern/io/fields.h"
#include "cistern/tasks/task.h"

namespace cistern::cli {

struct Published {
  std::string source;       // "P004 Table 2": the table that the row is in
  std::string row;          // what the table calls it: "Latte, L = 40"
  std::string parameters;   // as printed: "90313105", "246.9M"; ".95" with relative_to
  std::string relative_to;  // the file whose model has the size 1, a path from this file's folder
  Json results = Json::object();  // metric of the task -> the value printed: {"accuracy": 40.18}
  Json spread = Json::object();   // of those, where printed
  std::vector<std::string> differences;  // what the file does otherwise than the source, and why

  Fields Describe();
  // UsageError where a result is no metric of the task or not a number, or the size is not one.
  void Validate(const TaskInfo& task) const;
  // "P004 Table 2, Latte, L = 40: accuracy 40.18"; empty where no result is given.
  std::string Line() const;
};

// Whether `size` is what a source prints with as many digits as it does: 246,880,123 is "246.9M",
// 0.9462 is ".95". UsageError where the text is no number, with K, M or B after it or without.
bool IsPrintedAs(double size, const std::string& text);

}  // namespace cistern::cli
