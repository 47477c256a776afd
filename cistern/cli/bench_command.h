#pragma once
// What the sub-commands of `cistern bench` share (cli/bench*.cc).
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cistern/bench/ops.h"
#include "cistern/bench/record.h"
#include "cistern/cli/command.h"

namespace cistern::cli {

struct BenchOptions {
  std::string json;  // file; "-": standard output, in place of the table
  bool quiet = false;
  uint64_t seed = 1;
  double seconds = 0.5;
  int64_t runs = 5;

  bench::TimerSettings Timer() const;
};
void AddBenchOptions(CLI::App& command, BenchOptions& options);
// Applies quiet and the seed; checks CISTERN_ISA and CISTERN_IMPL, and that the file of --json can
// be written.
void ApplyBenchOptions(const BenchOptions& options);

// The machine, the peaks, what all rows share, the table, and what `more` prints below it; then the
// file where one is wanted, and a warning where the machine was busy. The exit code: 130
// interrupted, 1 some values were wrong or nothing was measured.
int FinishBench(const bench::Record& record, const std::vector<bench::Column>& columns,
                const BenchOptions& options, const std::function<void()>& more = nullptr);
// UsageError where the lists of a sweep ask twice for the same: rows of a file are told apart by
// what they measured.
void RefuseRepeats(const std::vector<bench::Case>& cases);
// UsageError with the reasons, where each of the rows has a reason to be skipped and all of them
// are that it is not supported.
void RefuseUnsupported(const std::vector<std::string>& skipped);
void PrintHead(const bench::Record& record);
// CLI::Range of fractions takes NaN; this does not.
CLI::Validator RangeWithoutNan(double low, double high);

// The lists that `bench ops` and its efficiency lengths are made of, as words of the command line.
struct SweepOptions {
  std::vector<std::string> mechanisms, forms, passes, dtypes, isas, implementations, layouts, set;
  std::vector<int64_t> lengths, batches, heads, widths, threads;
};
void AddSweepOptions(CLI::App& command, SweepOptions& options);
bench::Sweep SweepOf(const SweepOptions& options);

void AddBenchOps(CLI::App& bench, Run& run);
void AddBenchDiff(CLI::App& bench, Run& run);
void AddBenchEfficiency(CLI::App& bench, Run& run);
void AddBenchModel(CLI::App& bench, Run& run);
void AddBenchPapers(CLI::App& bench, Run& run);

}  // namespace cistern::cli
