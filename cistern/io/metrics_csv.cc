#include "cistern/io/metrics_csv.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <vector>

#include "cistern/base/error.h"
#include "cistern/io/atomic_file.h"
#include "cistern/io/json_text.h"

namespace cistern {

void ForEachLogLine(const std::string& folder, const std::function<void(const Json& line)>& f) {
  const std::string log = folder + "/metrics.jsonl";
  std::ifstream file(log, std::ios::binary);
  size_t number = 0;
  for (std::string text; std::getline(file, text);) {
    Json line;
    try {
      line = ParseJson(text, log, ++number);
    } catch (const Error&) {
      continue;
    }
    if (line.is_object()) f(line);
  }
}

void WriteMetricsCsv(const std::string& folder) {
  std::error_code error;
  if (!std::filesystem::exists(folder + "/metrics.jsonl", error)) return;
  std::vector<std::string> columns = {"event", "step", "seconds"};
  ForEachLogLine(folder, [&](const Json& line) {
    for (const auto& [key, value] : line.items()) {
      if (value.is_number() && std::find(columns.begin(), columns.end(), key) == columns.end())
        columns.push_back(key);
    }
  });
  std::string text;
  for (const std::string& column : columns) text += (text.empty() ? "" : ",") + column;
  text += '\n';
  ForEachLogLine(folder, [&](const Json& line) {
    for (size_t c = 0; c < columns.size(); ++c) {
      if (c > 0) text += ',';
      const auto at = line.find(columns[c]);
      if (at == line.end()) continue;
      if (at->is_number()) text += at->dump();
      if (c == 0 && at->is_string()) text += at->get<std::string>();  // words of this program
    }
    text += '\n';
  });
  WriteFileAtomically(folder + "/metrics.csv", text);
}

}  // namespace cistern
