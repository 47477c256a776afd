#pragma once
// The results of `cistern compare`: one row for each mechanism; printed as table, text and page.
#include <string>
#include <vector>

#include "cistern/cli/experiment.h"
#include "cistern/decode/measure.h"
#include "cistern/io/html_report.h"

namespace cistern::cli {

struct CompareRow {
  std::string mechanism, folder;
  bool bounded = true;
  std::string failed;               // why there is no result; empty if there is one
  Json result;                      // what `cistern train --json` printed
  std::vector<DecodePoint> decode;  // of a language model
};

struct Comparison {
  Experiment experiment;  // of all rows, but for the mechanism
  Metric metric;          // that ranks them
  double seconds = 0;     // of training, of each
  std::string data;       // what they were trained on, for people
  std::vector<CompareRow> rows;
  std::string sample_title, sample;  // text by the best; empty: not a language model

  double Value(
      const CompareRow& row) const;  // of the metric on the test split; NaN if the run failed
  bool Better(const CompareRow& a, const CompareRow& b) const;
  // The best row, with bounded memory if there is one; null if all failed.
  const CompareRow* Best() const;
};

HtmlTable CompareTable(const Comparison& c);
void PrintTable(const HtmlTable& table);
// What was equal for all, what differed, what the figures mean.
std::vector<std::string> Fairness(const Comparison& c);
Json CompareJson(const Comparison& c);
void WriteReport(const Comparison& c, const std::string& path);

}  // namespace cistern::cli
