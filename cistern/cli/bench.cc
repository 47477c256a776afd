// cistern bench: how fast this machine is with all this. Sub-commands: bench_*.cc.
#include "cistern/cli/bench_command.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string_view>

#include "cistern/base/format.h"
#include "cistern/base/progress.h"
#include "cistern/base/terminal.h"
#include "cistern/kernels/isa.h"
#include "cistern/ops/impl.h"

namespace cistern::cli {

bench::TimerSettings BenchOptions::Timer() const {
  bench::TimerSettings timer;
  timer.seconds = seconds, timer.runs = runs;
  return timer;
}

void AddBenchOptions(CLI::App& command, BenchOptions& options) {
  command.add_option("--json", options.json,
                     "write everything to this file; -: to standard output, instead of the table");
  command.add_flag("-q,--quiet", options.quiet, "no progress bars, no notes");
  command.add_option("--seed", options.seed, "seed of weights and inputs");
  command.add_option("--seconds", options.seconds, "of timed runs, for each row")
      ->check(CheckSeconds())
      ->capture_default_str();
  command.add_option("--runs", options.runs, "timed runs of each row at least")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
}

void ApplyBenchOptions(const BenchOptions& options) {
  Common common;
  common.quiet = options.quiet, common.seed = options.seed;
  ApplyCommon(common);
  ops::ActiveImpl();
  if (!options.json.empty() && options.json != "-") CheckWritable(options.json);
}

CLI::Validator RangeWithoutNan(double low, double high) {
  const CLI::Range range(low, high);
  return CLI::Validator(
      [range, low, high](std::string& text) {
        const std::string wrong = range(text);
        if (!wrong.empty() || !std::isnan(std::strtod(text.c_str(), nullptr))) return wrong;
        return StrCat("expected a number from ", low, " to ", high, ", got ", text);
      },
      range.get_description());
}

void PrintHead(const bench::Record& record) {
  std::printf("%s\n", record.machine.Line().c_str());
  std::string peaks;
  for (const Json& peak : record.peaks) {
    const std::string threads =
        StrCat(peak["threads"].get<int64_t>(), peak["threads"] == 1 ? " thread" : " threads");
    peaks += peaks.empty() ? "peaks measured now: " : "; ";
    peaks += peak.contains("gflops")
                 ? StrCat(Fixed(peak["gflops"].get<double>(), 0), " GFLOP/s (",
                          peak["dtype"].get<std::string>(), ", ", peak["isa"].get<std::string>(),
                          ", ", threads, ")")
                 : StrCat(Fixed(peak["gb_per_s"].get<double>(), 0), " GB/s (", threads, ")");
  }
  if (!peaks.empty()) std::printf("%s\n", peaks.c_str());
}

int FinishBench(const bench::Record& record, const std::vector<bench::Column>& columns,
                const BenchOptions& options, const std::function<void()>& more) {
  if (options.json != "-") {
    PrintHead(record);
    if (const std::string shared = bench::SharedText(record); !shared.empty())
      std::printf("%s\n", shared.c_str());
    std::printf("\n");
    bench::PrintTable(bench::RecordTable(record, columns));
    if (more) more();
    std::fflush(stdout);
  }
  if (!options.json.empty()) bench::WriteRecord(record, options.json);
  if (!options.json.empty() && options.json != "-")
    std::printf("\nwritten to %s\n", options.json.c_str());
  int64_t wrong = 0, measured = 0;
  for (const bench::Row& row : record.rows) {
    wrong += row.wrong;
    measured += row.skipped.empty();
  }
  if (const std::string busy = record.Busy(); !busy.empty()) Note(busy);
  if (wrong > 0)
    std::fprintf(stderr, "cistern: %ld of %zu rows gave wrong values and were not timed\n",
                 long(wrong), record.rows.size());
  if (wrong > 0) return 1;
  if (record.interrupted) return 130;
  if (measured == 0) std::fprintf(stderr, "cistern: no row was measured\n");
  return measured == 0 ? 1 : 0;
}

void RefuseRepeats(const std::vector<bench::Case>& cases) {
  std::set<std::string> seen;
  for (const bench::Case& c : cases) {
    if (!seen.insert(c.What().dump()).second)
      FailUsage("the lists ask twice for ", c.What().dump(), "; give every value once");
  }
}

void RefuseUnsupported(const std::vector<std::string>& skipped) {
  constexpr std::string_view kStart = "not supported: ";
  std::vector<std::string> reasons;
  for (const std::string& why : skipped) {
    const size_t at = why.find(kStart);
    if (at == why.npos) return;
    const std::string reason = why.substr(at + kStart.size());
    if (std::find(reasons.begin(), reasons.end(), reason) == reasons.end())
      reasons.push_back(reason);
  }
  if (reasons.empty()) return;
  std::string text;
  for (const std::string& reason : reasons) text += (reasons.size() > 1 ? "\n  " : " ") + reason;
  FailUsage("nothing of this can be measured:", text);
}

void AddBench(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand(
      "bench", "measure the speed and the memory of mechanisms and models on this machine");
  command->require_subcommand(1);
  command->footer(
      "Examples:\n"
      "  cistern bench ops --mechanisms latte,softmax --lengths 1024,4096\n"
      "  cistern bench ops --mechanisms latte --json before.json\n"
      "  cistern bench diff before.json after.json\n"
      "  cistern bench efficiency --mechanisms latte,abc_mlp\n"
      "  cistern bench model --set model.attention=latte --profile");
  AddBenchOps(*command, run);
  AddBenchEfficiency(*command, run);
  AddBenchModel(*command, run);
  AddBenchPapers(*command, run);
  AddBenchDiff(*command, run);
}

}  // namespace cistern::cli
