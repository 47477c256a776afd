#pragma once
// A run's log, FOLDER/metrics.jsonl, and the same as a table for spreadsheets, FOLDER/metrics.csv.
#include <functional>
#include <string>

#include "cistern/io/fields.h"

namespace cistern {

// The lines of the log that can be read: it is no part of the run, and damage to it costs no more.
void ForEachLogLine(const std::string& folder, const std::function<void(const Json& line)>& f);

// One line for each of the log's; columns event, step, seconds, then every other number in the
// order of first appearance; an empty cell where a line lacks it. What is no number (confusion
// matrices, texts) is in the .jsonl alone. Nothing is written without a log. O(size of the log).
void WriteMetricsCsv(const std::string& folder);

}  // namespace cistern
