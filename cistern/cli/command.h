#pragma once
// The program's subcommands. Each file cli/NAME.cc adds one to the CLI11 app; main.cc parses, runs
// it and turns errors into exit codes: 0, 1 the work failed (Error), 2 the command line or a
// configuration is wrong (UsageError), 130 interrupted.
#include <CLI/CLI.hpp>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace cistern::cli {

// Options that every subcommand takes.
struct Common {
  bool json = false;    // machine-readable output on stdout
  bool quiet = false;   // no progress, no notes
  int64_t threads = 0;  // 0: all cores
  uint64_t seed = 1;
  std::string dtype = "float32";  // float32 | float64 | bfloat16 (linear maps in bfloat16,
                                  // everything else in float32)
  std::string device = "cpu";
  // Of a command that trains: --dtype may be auto (experiment.h), which is none for a model.
  Common OrAuto() const {
    Common checked = *this;
    if (dtype == "auto") checked.dtype = "float32";
    return checked;
  }
};

// Adds --json, --quiet, --threads and --seed to a subcommand.
void AddCommon(CLI::App& command, Common& common);
// --dtype, of commands that run a model: what it may be.
enum class Dtypes {
  kTraining,  // auto, float32, float64, bfloat16
  kAny,       // float32, float64, bfloat16
  kExact,     // float32, float64
};
void AddDtype(CLI::App& command, Common& common, Dtypes dtypes);
// --skip-bad-rows, of commands that read data.
void AddSkipBadRows(CLI::App& command, bool* skip);
// --set of commands that use a trained model (OpenRun).
void AddSetOfUse(CLI::App& command, std::vector<std::string>* set);
void AddDevice(CLI::App& command, Common& common);  // --device, for those that run a model
// Applies threads, seed, quiet; checks dtype. Call first in a subcommand's run function.
void ApplyCommon(const Common& common);

// "cistern compare my.txt --seconds 60": the command as it was given, for people to copy, but for
// the options of those names.
std::string CommandLine(const CLI::App& command, const std::vector<std::string>& without);
// " (this process got 55 % of the processor time it was ready to use: ...)" when the machine was
// too busy for a speed to mean anything (base/cpu_share.h); otherwise empty.
std::string BusyNote(double cpu_share);
// Before the work: that a file cannot be written should not come out after it. Error.
void CheckWritable(const std::string& path);
// UsageError where --out is a file, or a folder that holds what `own` does not name.
void RefuseForeignFiles(const std::string& out,
                        const std::function<bool(const std::string& name)>& own);
// For an option that is a time budget: a number from 0.001 to 1e9, not NaN.
CLI::Validator CheckSeconds();

// Each returns the subcommand's CLI::App; its callback stores what to run in `run`, which main
// calls after parsing.
using Run = std::function<int()>;
void AddTrain(CLI::App& app, Run& run);
void AddEval(CLI::App& app, Run& run);
void AddPredict(CLI::App& app, Run& run);
void AddGenerate(CLI::App& app, Run& run);
void AddCompare(CLI::App& app, Run& run);
void AddReproduce(CLI::App& app, Run& run);
void AddAnalyze(CLI::App& app, Run& run);
void AddStatistics(CLI::App& app, Run& run);
void AddBench(CLI::App& app, Run& run);
void AddCompletion(CLI::App& app, Run& run);  // of all that were added
void AddData(CLI::App& app, Run& run);
void AddImport(CLI::App& app, Run& run);
void AddInfo(CLI::App& app, Run& run);
void AddVerify(CLI::App& app, Run& run);

}  // namespace cistern::cli
