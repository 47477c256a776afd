#include "cistern/io/metrics_csv.h"

#include <algorithm>
#include <filesystem>
#include <vector>

#include "cistern/io/atomic_file.h"
#include "cistern/io/jsonl.h"

namespace cistern {

void WriteMetricsCsv(const std::string& folder) {
  const std::string log = folder + "/metrics.jsonl";
  std::error_code error;
  if (!std::filesystem::exists(log, error)) return;
  std::vector<std::string> columns = {"event", "step", "seconds"};
  ForEachJsonl(log, [&](const Json& line, size_t) {
    for (const auto& [key, value] : line.items()) {
      if (value.is_number() && std::find(columns.begin(), columns.end(), key) == columns.end())
        columns.push_back(key);
    }
  });
  std::string text;
  for (const std::string& column : columns) text += (text.empty() ? "" : ",") + column;
  text += '\n';
  ForEachJsonl(log, [&](const Json& line, size_t) {
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
