// cistern bench diff: two files of `cistern bench ... --json`.
#include <cstdio>
#include <map>

#include "cistern/base/error.h"
#include "cistern/bench/diff.h"
#include "cistern/cli/bench_command.h"
#include "cistern/io/checked_json.h"

namespace cistern::cli {
namespace {

struct DiffArguments {
  std::string before, after;
  bench::DiffSettings settings;
  bool json = false, fail = false;
};

bench::Record ReadRecordFile(const std::string& path) {
  return bench::ReadRecord(ReadCheckedJson(path, "its figures may be others"), path);
}

int RunBenchDiff(const DiffArguments& a) {
  const bench::Record before = ReadRecordFile(a.before), after = ReadRecordFile(a.after);
  const std::vector<bench::Change> changes = bench::Diff(before, after, a.settings);
  std::map<bench::Verdict, int64_t> count;
  for (const bench::Change& c : changes) ++count[c.verdict];
  const int64_t slower = count[bench::Verdict::kSlower];
  if (a.json) {
    const Json out = {{"before", a.before},
                      {"after", a.after},
                      {"slower", slower},
                      {"faster", count[bench::Verdict::kFaster]},
                      {"rows", bench::DiffJson(changes)}};
    std::printf("%s\n", JsonLine(out).c_str());
  } else {
    std::printf("before: %s\nafter:  %s\n\n", before.machine.Line().c_str(),
                after.machine.Line().c_str());
    bench::PrintTable(bench::DiffTable(changes));
    std::string summary;
    for (const auto& [verdict, name] : bench::Verdicts()) {
      if (count[verdict] > 0)
        summary += StrCat(summary.empty() ? "" : ", ", count[verdict], " ",
                          verdict == bench::Verdict::kNotMeasured ? "not measured" : name);
    }
    std::printf("\n%s\n", summary.empty() ? "no rows" : summary.c_str());
  }
  if (!a.fail) return 0;
  const int64_t compared = slower + count[bench::Verdict::kFaster] + count[bench::Verdict::kSame];
  CISTERN_CHECK(compared > 0, "--fail-slower: no row was measured in both ", a.before, " and ",
                a.after, ", so that nothing was compared; measure the same rows in both");
  return slower > 0 ? 1 : 0;
}

}  // namespace

void AddBenchDiff(CLI::App& bench, Run& run) {
  auto a = std::make_shared<DiffArguments>();
  CLI::App* command = bench.add_subcommand(
      "diff",
      "compare two files of cistern bench --json, row by row, with verdicts that know the "
      "noise");
  command->footer(
      "'faster' and 'slower' stand where the medians differ by more than the threshold and by more "
      "than the root of the sum\nof the squares of both files' spreads, and the quartiles do not "
      "overlap; all else is 'same'.\n"
      "Examples:\n"
      "  cistern bench diff before.json after.json\n"
      "  cistern bench diff before.json after.json --fail-slower    exit code 1 where a row got "
      "slower, or none was compared");
  command->add_option("before", a->before, "file of the earlier run")->required();
  command->add_option("after", a->after, "file of the later run")->required();
  command->add_option("--threshold", a->settings.threshold, "smaller relative changes are none")
      ->check(RangeWithoutNan(0.0, 10.0))
      ->capture_default_str();
  command->add_flag("--any-machine", a->settings.any_machine,
                    "compare although processor, threads or SIMD target differ");
  command->add_flag("--fail-slower", a->fail,
                    "exit code 1 where a row got slower, or no row is in both files");
  command->add_flag("--json", a->json, "machine-readable output on standard output");
  command->callback([a, &run] { run = [a] { return RunBenchDiff(*a); }; });
}

}  // namespace cistern::cli
