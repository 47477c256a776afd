// cistern bench papers: the efficiency experiments of the papers, with verdicts.
#include <algorithm>
#include <cstdio>

#include "cistern/base/format.h"
#include "cistern/base/interrupt.h"
#include "cistern/base/parallel.h"
#include "cistern/base/progress.h"
#include "cistern/base/terminal.h"
#include "cistern/bench/papers.h"
#include "cistern/cli/bench_command.h"
#include "cistern/kernels/isa.h"

namespace cistern::cli {
namespace {

struct PapersArguments {
  BenchOptions options;
  std::vector<std::string> figures;
  std::string report;
  double scale = 1;
  bool scale_batch = false, list = false, no_memory = false;
};

std::string Lengths(const bench::Protocol& p) {
  return p.lengths.size() == 1 ? "1 length" : StrCat(p.lengths.size(), " lengths");
}

int List() {
  for (const bench::Protocol& p : bench::Protocols()) {
    const std::string minutes =
        p.whole ? StrCat("; about ", Trimmed(p.minutes, 1), " min on two cores") : "";
    std::printf("%-26s %s: %zu arms, %s, %zu claims%s\n%26s %s\n", p.name.c_str(), p.source.c_str(),
                p.arms.size(), Lengths(p).c_str(), p.claims.size(), minutes.c_str(), "",
                p.setup.c_str());
  }
  return 0;
}

int RunBenchPapers(const PapersArguments& a) {
  ApplyBenchOptions(a.options);
  if (a.list) return List();
  if (!a.report.empty()) CheckWritable(a.report);
  std::vector<bench::Protocol> protocols;
  for (const bench::Protocol& p : bench::ChosenProtocols(a.figures))
    protocols.push_back(bench::Scaled(p, a.scale, a.scale_batch));
  bench::Record record;
  record.kind = "papers";
  record.machine = bench::ThisMachine(CISTERN_VERSION);
  record.settings = {{"seconds", a.options.seconds},
                     {"runs", a.options.runs},
                     {"seed", a.options.seed},
                     {"scale", a.scale},
                     {"scale_batch", a.scale_batch}};
  bench::Case like;
  like.threads = NumThreads(), like.isa = ActiveIsa(), like.implementation = ops::ActiveImpl();
  bench::Peaks peaks;
  std::vector<bench::Finding> findings;
  {
    ProgressBar bar({.total = 0, .label = "bench", .unit = "rows"});
    bench::MeasureSettings settings;
    settings.timer = a.options.Timer();
    settings.memory = !a.no_memory;
    settings.seed = a.options.seed;
    settings.stop = [] { return Interrupted().load(); };
    const bench::LoadWatch watch;
    for (const bench::Protocol& p : protocols) {
      settings.progress = [&](const bench::Case& c, int64_t done) {
        bar.Update(int64_t(record.rows.size()) + done, StrCat(p.name, " T=", c.length));
      };
      const std::vector<bench::Row> rows = bench::MeasureProtocol(p, like, settings, peaks);
      const std::vector<bench::Finding> found = bench::Findings(p, rows);
      record.rows.insert(record.rows.end(), rows.begin(), rows.end());
      findings.insert(findings.end(), found.begin(), found.end());
      if (Interrupted()) break;
    }
    watch.Leave(&record);
  }
  record.interrupted = Interrupted();
  record.peaks = peaks.Written();
  record.settings["findings"] = bench::FindingJson(findings);
  const int code = FinishBench(record, bench::PapersColumns(), a.options, [&] {
    std::printf("\nlengths are those of the papers times %s\n", Trimmed(a.scale, 4).c_str());
    bench::PrintTable(bench::FindingTable(findings));
  });
  if (!a.report.empty()) bench::WritePapersReport(protocols, record, findings, a.scale, a.report);
  constexpr int64_t kFewest = 3;  // that have a spread
  const bool few = std::any_of(record.rows.begin(), record.rows.end(), [](const bench::Row& row) {
    return row.skipped.empty() && row.ms.runs > 0 && row.ms.runs < kFewest;
  });
  if (few)
    Note("some rows were run once or twice, so that their verdicts know no spread; give --runs 3");
  if (a.options.json != "-") {
    if (!a.report.empty()) std::printf("\nreport in %s\n", a.report.c_str());
    if (a.figures.empty())
      Note(
          "figures of whole models are measured where they are named: cistern bench papers models");
  }
  return code;
}

}  // namespace

void AddBenchPapers(CLI::App& bench, Run& run) {
  auto a = std::make_shared<PapersArguments>();
  CLI::App* command = bench.add_subcommand(
      "papers",
      "the efficiency experiments of the papers on this machine, beside what the papers say: a "
      "verdict on each ordering, slope and crossing");
  command->footer(
      "Times of the papers' hardware cannot be compared; orders, growth and crossings can. "
      "'level': "
      "the quartiles overlap.\nFigures of whole models (training steps, inference) take minutes "
      "each on two cores, as --list says, and are measured only where they are named. --list says, "
      "too, how each figure differs from the paper's.\n"
      "Examples:\n"
      "  cistern bench papers --list\n"
      "  cistern bench papers --scale 0.25 --report papers.html --json papers.json\n"
      "  cistern bench papers ucu-fig3-d64 latte-fig2-causal\n"
      "  cistern bench papers models --scale 0.5 --report models.html");
  command->add_option(
      "figures", a->figures,
      "names of --list; cores: all of mechanisms alone; models: all of whole models; "
      "none: cores");
  command->add_option("--scale", a->scale, "lengths of the papers times this")
      ->check(RangeWithoutNan(0.001, 16.0))
      ->capture_default_str();
  command->add_flag("--scale-batch", a->scale_batch, "with --scale below 1: the batch as well");
  command->add_option("--report", a->report, "write a page (HTML) with the figures redrawn");
  command->add_flag("--list", a->list, "print the figures, what they measured and stop");
  command->add_flag("--no-memory", a->no_memory,
                    "omit the memory, and the extra run that measures that of mechanisms alone");
  AddBenchOptions(*command, a->options);
  command->callback([a, &run] { run = [a] { return RunBenchPapers(*a); }; });
}

}  // namespace cistern::cli
