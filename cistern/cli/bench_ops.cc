// cistern bench ops: mechanisms alone, without a model around them.
#include "cistern/base/interrupt.h"
#include "cistern/base/progress.h"
#include "cistern/cli/bench_command.h"

namespace cistern::cli {
namespace {

struct OpsArguments {
  BenchOptions options;
  SweepOptions sweep;
  bool no_memory = false;
};

int RunBenchOps(const OpsArguments& a) {
  ApplyBenchOptions(a.options);
  const bench::Sweep sweep = SweepOf(a.sweep);
  const std::vector<bench::Case> cases = sweep.Cases();
  if (cases.empty())
    FailUsage("nothing to measure: decoding has no backward pass; add the pass forward");
  RefuseRepeats(cases);
  bench::Record record;
  record.kind = "ops";
  record.machine = bench::ThisMachine(CISTERN_VERSION);
  record.settings = {
      {"seconds", a.options.seconds}, {"runs", a.options.runs}, {"seed", a.options.seed}};
  bench::Peaks peaks;
  {
    ProgressBar bar({.total = int64_t(cases.size()), .label = "bench", .unit = "rows"});
    bench::MeasureSettings settings;
    settings.timer = a.options.Timer();
    settings.memory = !a.no_memory;
    settings.seed = a.options.seed;
    settings.stop = [] { return Interrupted().load(); };
    settings.progress = [&](const bench::Case& c, int64_t done) {
      bar.Update(done, StrCat(c.info->name, " T=", c.length));
    };
    const bench::LoadWatch watch;
    record.rows = bench::Measure(cases, settings, peaks);
    watch.Leave(&record);
  }
  record.interrupted = Interrupted();
  std::vector<std::string> skipped;
  for (const bench::Row& row : record.rows) skipped.push_back(row.skipped);
  RefuseUnsupported(skipped);
  record.peaks = peaks.Written();
  return FinishBench(record, bench::OpsColumns(), a.options);
}

}  // namespace

void AddBenchOps(CLI::App& bench, Run& run) {
  auto a = std::make_shared<OpsArguments>();
  CLI::App* command = bench.add_subcommand(
      "ops",
      "mechanisms alone: time, tokens/s, share of the processor's peak, memory. Values are checked "
      "before anything is timed; lists make a sweep");
  command->footer(
      "GFLOP/s count what the mathematics takes at least (attention/operations.h), so that a "
      "faster "
      "way shows as a\nhigher share; 'of peak' compares them with the multiply-adds that were "
      "measured in the same run. Rows that\ndiffer in mechanism, options, dtype, target or "
      "implementation alone take turns. 'spread' is the distance of\nthe quartiles. 'memory' is "
      "the "
      "highest beyond the inputs in one run.\n"
      "Examples:\n"
      "  cistern bench ops                                  every mechanism, causal, 1,024 tokens\n"
      "  cistern bench ops --mechanisms latte,abc_mlp --lengths 1024,4096,16384 --json ops.json\n"
      "  cistern bench ops --mechanisms latte --set latte.latents=128,256,512 --forms decode "
      "--batches 1,256\n"
      "  cistern bench ops --mechanisms linear --isas avx512,avx2 --threads 1,2 --passes forward");
  AddSweepOptions(*command, a->sweep);
  command->add_flag("--no-memory", a->no_memory, "omit the extra run that measures the memory");
  AddBenchOptions(*command, a->options);
  command->callback([a, &run] { run = [a] { return RunBenchOps(*a); }; });
}

}  // namespace cistern::cli
