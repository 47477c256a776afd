#pragma once
// The results of `cistern compare`: one row for each mechanism (and length); printed as table, text
// and page.
#include <cstdint>
#include <string>
#include <vector>

#include "cistern/bench/efficiency.h"
#include "cistern/cli/experiment.h"
#include "cistern/decode/measure.h"
#include "cistern/io/html_report.h"

namespace cistern::cli {

struct CompareRow {
  std::string mechanism, folder;  // folder: of the run that `result` is of
  bool bounded = true;
  std::string failed;                   // why there is no result; empty if there is one
  Json result;                          // what `cistern train --json` printed: the first seed's
  int64_t length = 0;                   // task.length, of a sweep (--lengths); 0: as the experiment
  int64_t seed = 0;                     // that `result` is of
  std::vector<Json> results;            // of all seeds that finished
  std::vector<std::string> failures;    // "seed 3: why", of the others
  std::vector<std::string> unmeasured;  // "decoding was not measured: why"
  std::string Name() const;             // "latte", "latte, 512 tokens"
  // Of training, over the seeds that finished: the mean of their speeds, the largest of their
  // peaks, both NaN where none did; the least share of processor time that one got.
  double TokensPerSecond() const;
  double PeakBytes() const;
  double CpuShare() const;
  // Of a language model: one sequence at some positions, then `many` sequences at once from their
  // start, milliseconds a step; what the weights take at least.
  std::vector<DecodePoint> decode;
  int64_t many = 0;
  double many_milliseconds = 0;
  DecodeLimits limits;
};

// The test split of a text in blocks of kLongFactor times the training length: what a memory is
// worth that goes on far beyond what it was trained on. results[i][kLongBlocks], where it was
// measured: the metrics and the length.
inline constexpr char kLongBlocks[] = "long_blocks";
inline constexpr int64_t kLongFactor = 16;

struct Comparison {
  Experiment experiment;         // of all rows, but for the mechanism
  Metric metric;                 // that ranks them
  double seconds = 0;            // of training, of each
  int64_t seeds = 1;             // runs of each row
  std::vector<int64_t> lengths;  // of a sweep; none: one length
  std::string data;              // what they were trained on, for people
  std::vector<CompareRow> rows;
  std::vector<bench::EfficiencyRow>
      efficiency;                    // against softmax (--efficiency); none: not measured
  std::string sample_title, sample;  // text by the best; empty: not a language model

  // Of the metric on the test split, over the seeds that finished: the mean, NaN where none did;
  // and half the width of Student's 95 % interval of it, NaN below two seeds. `part`: the key of
  // the results that has it, "test" or kLongBlocks.
  double Value(const CompareRow& row, const std::string& part = "test") const;
  double HalfWidth(const CompareRow& row, const std::string& part = "test") const;
  // "3.142", "3.142 ± 0.012"; "-" where there is none.
  std::string ValueText(const CompareRow& row, const std::string& part = "test") const;
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
