#pragma once
// One training run in a process of its own, so that its peak of memory is that model's alone:
// begun, resumed, or taken as it is, by what its folder holds. Shared by compare and reproduce.
#include <map>
#include <string>
#include <vector>

#include "cistern/io/fields.h"
#include "cistern/io/svg_plot.h"
#include "cistern/tasks/task.h"

namespace cistern::cli {

// Thrown where the child was interrupted.
struct InterruptedRun {};

struct ChildSettings {
  std::string folder;            // of the run
  std::string file;              // the experiment to start from; empty: none
  std::vector<std::string> set;  // KEY=VALUE
  int64_t threads = 0;
  std::string device = "cpu";
  // Takes a result that is there, and goes on with a run that was begun.
  bool resume = false;
  // A run that fails is a result like any other: it is written down, and what the child says goes
  // to FOLDER/log.txt. Otherwise it is said here, and a resumed run is tried again.
  bool keep_failures = false;
};

struct ChildRun {
  Json result;            // what `cistern train --json` printed; null where the run failed
  std::string failed;     // why there is none
  bool diverged = false;  // failed because numbers were no longer finite
  bool kept = false;      // it had ended before
};

// KEY=VALUE of where the data lie now, by the file and `set`: when a run goes on, they may lie
// elsewhere than its record says.
std::vector<std::string> PlacesOfData(const ChildSettings& settings);

// FOLDER/result.json is what it returns. Waits while another process works in the folder. Error,
// and no result, where the run could not be started. InterruptedRun.
ChildRun RunTraining(const ChildSettings& settings);

// The finished run of a folder; nothing trained. False where there is none.
bool ReadChildRun(const std::string& folder, ChildRun* run);

// Whether runs that have ended learned from the data that their tasks have now, by the XXH64 of
// both. Tasks that generate their data have none.
class SameData {
 public:
  // UsageError where the run of `folder` has ended and had other data. Reads the data where there
  // is such a run, once for all of the same task.
  void Require(const std::string& folder, const TaskOptions& task);

 private:
  std::map<std::string, Json> now_;  // what tasks say of their data, by task
};

// A curve of FOLDER/metrics.jsonl: of the lines of `event`, the numbers under x and y.
Series RunCurve(const std::string& folder, const std::string& name, const std::string& event,
                const std::string& x, const std::string& y);

}  // namespace cistern::cli
