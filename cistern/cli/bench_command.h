#pragma once
// What the sub-commands of `cistern bench` share (cli/bench*.cc).
#include <cstdint>
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
// Applies quiet and the seed, and checks CISTERN_ISA and CISTERN_IMPL.
void ApplyBenchOptions(const BenchOptions& options);

// The machine, the peaks, what all rows share, the table, and a warning where the machine was busy;
// the file where one is wanted. The exit code: 130 interrupted, 1 some values were wrong.
int FinishBench(const bench::Record& record, const std::vector<bench::Column>& columns,
                const BenchOptions& options);
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
