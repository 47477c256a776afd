#pragma once
// What `cistern reproduce` leaves: the table beside the source's, as Markdown for docs, CSV, JSON
// and one page; from the runs that have ended, however many these are.
#include <string>
#include <vector>

#include "cistern/cli/reproduce_plan.h"
#include "cistern/io/html_report.h"

namespace cistern::cli {

struct Reproduction {
  PaperTable table;
  std::vector<ReproducedCell> cells;  // in the table's order
  bool small = false;
  int64_t seeds = 1, first_seed = 1;
  std::string out, command, machine;  // machine: threads and instruction set
};

// Of the runs of a cell. Means over those that finished; the deviation is that of a sample (n - 1).
struct CellSummary {
  int64_t finished = 0, failed = 0, diverged = 0;  // failed: diverged ones included
  double mean = 0, deviation = 0;                  // of the metric
  double parameters = 0, tokens_per_second = 0, peak_bytes = 0, seconds = 0, least_share = 1;
};
CellSummary Summarize(const ReproducedCell& cell, const std::string& metric);

// Rows, with the source's figure behind each: "63.10 ± 0.40 (65.67)".
HtmlTable OverviewTable(const Reproduction& r);
// One column of the table: runs, metric, source, gap, cost; chance and baselines below.
HtmlTable ColumnTable(const Reproduction& r, size_t column);
std::string MarkdownTable(const HtmlTable& table);
// What is otherwise than in the source, failed runs, a busy machine, how to read the figures.
std::vector<std::string> Remarks(const Reproduction& r);

// FOLDER/table.md, runs.csv, results.json and report.html; where the table asks for it and runs of
// two seeds or more are there, statistics.json and its tables. Returns the statistics as text.
std::string WriteReproduction(const Reproduction& r);

}  // namespace cistern::cli
