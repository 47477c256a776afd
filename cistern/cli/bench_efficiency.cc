// cistern bench efficiency: from which length a mechanism beats exact softmax.
#include <algorithm>
#include <cstdio>

#include "cistern/base/interrupt.h"
#include "cistern/base/progress.h"
#include "cistern/bench/efficiency.h"
#include "cistern/cli/bench_command.h"

namespace cistern::cli {
namespace {

struct EfficiencyArguments {
  BenchOptions options;
  SweepOptions sweep;
  std::string against = "softmax";
  int64_t shortest = 64, longest = 16384;
  bool every = false;
};

// UsageError where nothing would meet the other mechanism.
void RequireWork(const bench::Sweep& sweep, const MechanismInfo& against) {
  if (std::all_of(sweep.mechanisms.begin(), sweep.mechanisms.end(),
                  [&](const auto& m) { return m.first == &against && m.second.empty(); }))
    FailUsage(
        "nothing to measure: ", against.name,
        " is what the others are compared with; name another mechanism, or another --against");
  const auto decodes = [](bench::Way way) { return way == bench::Way::kDecode; };
  const auto backward = [](bench::Pass pass) { return pass == bench::Pass::kBoth; };
  if (std::all_of(sweep.ways.begin(), sweep.ways.end(), decodes) &&
      std::all_of(sweep.passes.begin(), sweep.passes.end(), backward))
    FailUsage("nothing to measure: decoding has no backward pass; add the pass forward");
}

int RunBenchEfficiency(const EfficiencyArguments& a) {
  ApplyBenchOptions(a.options);
  if (!a.sweep.lengths.empty())
    FailUsage("efficiency lengths are searched for; give --from and --to in place of --lengths");
  if (a.shortest > a.longest) FailUsage("--from ", a.shortest, " is more than --to ", a.longest);
  SweepOptions words = a.sweep;
  if (words.forms.empty()) words.forms = {"causal", "decode"};
  bench::Sweep sweep = SweepOf(words);
  sweep.lengths = {a.shortest};
  RefuseRepeats(sweep.Cases());
  bench::EfficiencySettings settings;
  settings.against = &FindMechanism(a.against);
  RequireWork(sweep, *settings.against);
  settings.shortest = a.shortest, settings.longest = a.longest, settings.every = a.every;
  settings.measure.timer = a.options.Timer();
  settings.measure.seed = a.options.seed;
  settings.measure.stop = [] { return Interrupted().load(); };
  bench::Record record;
  record.kind = "efficiency";
  record.machine = bench::ThisMachine(CISTERN_VERSION);
  record.settings = {{"seconds", a.options.seconds}, {"runs", a.options.runs},
                     {"seed", a.options.seed},       {"against", a.against},
                     {"from", a.shortest},           {"to", a.longest}};
  bench::Peaks peaks;
  std::vector<bench::EfficiencyRow> rows;
  {
    ProgressBar bar({.total = 0, .label = "bench", .unit = "rows"});
    settings.measure.progress = [&](const bench::Case& c, int64_t) {
      bar.Update(int64_t(record.rows.size()), StrCat(c.info->name, " T=", c.length));
    };
    const bench::LoadWatch watch;
    rows = bench::MeasureEfficiency(sweep, settings, peaks, &record);
    watch.Leave(&record);
  }
  record.interrupted = Interrupted();
  std::vector<std::string> skipped;
  for (const bench::EfficiencyRow& row : rows) skipped.push_back(row.skipped);
  RefuseUnsupported(skipped);
  record.peaks = peaks.Written();
  record.settings["efficiency"] = bench::EfficiencyJson(rows);
  if (a.options.json != "-") {
    bench::PrintTable(bench::EfficiencyTable(rows));
    std::printf("\n'1,024 to 2,048': less than %s at 2,048 and longer, not at 1,024.\n\n",
                a.against.c_str());
  }
  return FinishBench(record, bench::OpsColumns(), a.options);
}

}  // namespace

void AddBenchEfficiency(CLI::App& bench, Run& run) {
  auto a = std::make_shared<EfficiencyArguments>();
  CLI::App* command = bench.add_subcommand(
      "efficiency",
      "efficiency length: from which length each mechanism takes less time, and less memory, than "
      "exact softmax; forward, forward+backward, decoding");
  command->footer(
      "Lengths double from --from to --to. A mechanism is ahead where its upper quartile is below "
      "the other's lower one.\nOne that was ahead twice in a row, in time and in memory, is left "
      "out "
      "of longer lengths (--every: it is not).\nMemory is the peak of one run beyond the inputs, "
      "or, "
      "decoding, the size of the state.\n"
      "Examples:\n"
      "  cistern bench efficiency --mechanisms latte,abc_mlp,linear\n"
      "  cistern bench efficiency --mechanisms linformer --forms bidirectional --to 65536\n"
      "  cistern bench efficiency --mechanisms latte --against window --forms causal");
  AddSweepOptions(*command, a->sweep);
  command->get_option("--lengths")->group("");  // not in the help: RunBenchEfficiency refuses it
  command->get_option("--forms")->description(
      "causal, bidirectional, cross, decode (one token after LENGTH); causal and decode");
  command->add_option("--against", a->against, "the mechanism that all are compared with")
      ->capture_default_str();
  command->add_option("--from", a->shortest, "shortest length")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
      ->capture_default_str();
  command->add_option("--to", a->longest, "longest length")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
      ->capture_default_str();
  command->add_flag("--every", a->every, "measure every mechanism at every length");
  AddBenchOptions(*command, a->options);
  command->callback([a, &run] { run = [a] { return RunBenchEfficiency(*a); }; });
}

}  // namespace cistern::cli
