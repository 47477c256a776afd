#include <ATen/Parallel.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "cistern/base/cpu_share.h"
#include "cistern/base/error.h"
#include "cistern/base/format.h"
#include "cistern/base/parallel.h"
#include "cistern/base/progress.h"
#include "cistern/base/subprocess.h"
#include "cistern/cli/command.h"
#include "cistern/io/atomic_file.h"
#include "cistern/kernels/isa.h"
#include "cistern/tensors/device.h"

namespace cistern::cli {

void AddCommon(CLI::App& command, Common& common) {
  command.add_flag("--json", common.json, "machine-readable output on standard output");
  command.add_flag("-q,--quiet", common.quiet, "no progress bars, no notes");
  command.add_option("--threads", common.threads, "threads to use; 0: all cores")
      ->check(CLI::Range(0, 1024));
  command.add_option("--seed", common.seed, "seed of everything random");
}

void AddDtype(CLI::App& command, Common& common, Dtypes dtypes) {
  std::string which = "float32 or float64";
  if (dtypes != Dtypes::kExact)
    which = "float32, float64, or bfloat16 (linear maps in bfloat16, the rest in float32)";
  if (dtypes == Dtypes::kTraining)
    which = "auto (bfloat16 where this machine's matrix products are faster in it), " + which;
  CLI::Option* const option = command.add_option("--dtype", common.dtype, which);
  if (dtypes == Dtypes::kTraining) option->default_str("auto");
}

void AddDevice(CLI::App& command, Common& common) {
  command.add_option("--device", common.device, "where the model runs: cpu, cuda, cuda:1, ...");
}

void AddSkipBadRows(CLI::App& command, bool* skip) {
  command.add_flag("--skip-bad-rows", *skip,
                   "pass over rows that cannot be read and count them, instead of stopping at the "
                   "first");
}

void AddSetOfUse(CLI::App& command, std::vector<std::string>* set) {
  command
      .add_option("--set", *set,
                  "KEY=VALUE of the task, of what training does not depend on, such as task.beam=5 "
                  "of translation; may be repeated")
      ->take_all()
      ->allow_extra_args(false);
}

void ApplyCommon(const Common& common) {
  if (common.dtype != "float32" && common.dtype != "float64" && common.dtype != "bfloat16") {
    throw UsageError(UnknownName("dtype", common.dtype, {"float32", "float64", "bfloat16"}));
  }
  if (common.threads > 0) {
    at::set_num_threads(int(common.threads));
    SetNumThreads(int(common.threads));
  }
  SetActiveDevice(ParseDevice(common.device));
  SetQuiet(common.quiet);
  ActiveIsa();  // a wrong CISTERN_ISA is an error now, not in the middle of the work
}

std::string CommandLine(const CLI::App& command, const std::vector<std::string>& without) {
  std::string text = "cistern " + command.get_name();
  std::vector<const CLI::Option*> said;
  for (const CLI::Option* option : command.parse_order()) {
    const std::string name = option->get_name();
    if (std::count(said.begin(), said.end(), option) > 0 ||
        std::count(without.begin(), without.end(), name) > 0)
      continue;
    said.push_back(option);
    const std::string before = option->get_positional() ? " " : StrCat(" ", name, " ");
    const std::vector<std::string> values = option->reduced_results();
    if (option->get_items_expected_max() == 0) {
      text += " " + name;  // a flag
    } else if (const char between = option->get_delimiter(); between != '\0') {
      std::string joined;
      for (const std::string& v : values)
        joined += (joined.empty() ? "" : std::string(1, between)) + v;
      text += before + ShellWord(joined);
    } else {
      for (const std::string& v : values) text += before + ShellWord(v);
    }
  }
  return text;
}

std::string BusyNote(double cpu_share) {
  if (cpu_share >= kBusyShare) return "";
  return StrCat(" (the machine was busy: this process got ", Fixed(100 * cpu_share, 0),
                " % of the processor time that it was ready to use)");
}

void CheckWritable(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::is_other(path, ignored))
    AtomicFile probe(path);  // a pipe must not be opened twice
}

void RefuseForeignFiles(const std::string& out,
                        const std::function<bool(const std::string& name)>& own) {
  std::error_code ignored;
  if (!std::filesystem::exists(out, ignored)) return;
  if (!std::filesystem::is_directory(out, ignored))
    FailUsage("--out ", out, " is a file; name a folder");
  for (const auto& entry : std::filesystem::directory_iterator(out, ignored)) {
    if (!own(entry.path().filename().string()))
      FailUsage("--out ", out, " has files of something else in it; name a new folder");
  }
}

CLI::Validator CheckSeconds() {
  return CLI::Validator(
      [](std::string& text) {
        double seconds = 0;
        const char* end = text.data() + text.size();
        const auto [stop, error] = std::from_chars(text.data(), end, seconds);
        if (error == std::errc() && stop == end && seconds >= 0.001 && seconds <= 1e9)
          return std::string();
        return "expected seconds from 0.001 to 1e9, got " + text;
      },
      "SECONDS");
}

}  // namespace cistern::cli
