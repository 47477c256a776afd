#pragma once
// A run's log as a table, for spreadsheets: FOLDER/metrics.csv from FOLDER/metrics.jsonl.
#include <string>

namespace cistern {

// One line for each of the log's; columns event, step, seconds, then every other number in the
// order of first appearance; an empty cell where a line lacks it. What is no number (confusion
// matrices, texts) is in the .jsonl alone. Nothing is written without a log. O(size of the log).
void WriteMetricsCsv(const std::string& folder);

}  // namespace cistern
