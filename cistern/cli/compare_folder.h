#pragma once
// What a folder of `cistern compare` holds: where each run lies, and, when a comparison goes on,
// whether what was begun there is what is asked for now.
#include <cstdint>
#include <string>
#include <vector>

#include "cistern/cli/command.h"
#include "cistern/cli/experiment.h"

namespace cistern::cli {

struct CompareArguments {
  Common common;
  std::string data, task, file, out;
  std::vector<std::string> mechanisms, set;
  double seconds = 120;
  int64_t sample_tokens = 120, decode_tokens = 4000, seeds = 1, efficiency = 0;
  std::vector<int64_t> lengths;
  bool resume = false, skip_bad_rows = false;
};

// "window:2+latte:2" lies in window2-latte2.
std::string FolderName(std::string mechanism);

// Of one run: OUT/latte, OUT/latte-512 with a length, OUT/latte/seed-2 with --seeds. A run that was
// begun with another number of seeds stays where it is.
std::string RunPlace(const CompareArguments& a, const std::string& mechanism, int64_t length,
                     int64_t seed);

// The dtype that the runs of an interrupted comparison were begun with; empty: none was begun.
std::string BegunDtype(const CompareArguments& a);

// Options of the task for which the runs of an interrupted comparison have another value than runs
// begun now would: they were begun by an earlier version.
std::vector<std::string> BegunTaskOptions(const CompareArguments& a, const TaskInfo& task);

// Whether a run has begun in a folder of `out`, or in a folder of one of those.
bool HoldsRuns(const std::string& out);

// OUT/settings.json holds what all runs of the folder are trained with, but for the mechanism.
// Written while no run has begun, and where it is missing (in a folder of an earlier version).
// UsageError where it says something else than `experiment`, the device, and the threads of now:
// the kept rows and the new ones could not be compared. Where the data lie may change.
void KeepSettings(const std::string& out, Experiment experiment, const std::string& device);

// UsageError where a run of this length that has ended learned from other data than those that the
// experiment names now. Reads the data where there is such a run. Tasks that generate their data
// have none.
void RequireSameData(const CompareArguments& a, Experiment experiment, int64_t length);

}  // namespace cistern::cli
