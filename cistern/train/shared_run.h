#pragma once
// What several processes that train one model need to be one run.
#include <memory>
#include <string>

#include "cistern/io/fields.h"
#include "cistern/io/scratch_folder.h"
#include "cistern/tasks/batch.h"
#include "cistern/train/processes.h"

namespace cistern {

// The run folder of each process: the first has the run's own, the others scratch ones that begin
// as copies of it. So all do the same with it, and none needs to see another's disk.
class RunCopy {
 public:
  // With `filled` the files of the first process's folder go to the others, each of them whole
  // through memory; without it they start with none. Called by all processes.
  RunCopy(const Processes& processes, const std::string& folder, bool filled);
  const std::string& path() const { return path_; }

 private:
  std::unique_ptr<ScratchFolder> scratch_;  // null: the run's own
  std::string path_;
};

// UsageError, naming the process and the first thing that differs, where the experiment of one, or
// the batch that it trains on first, is not that of the first process; or its number of threads, by
// which rows are shared out. The rest of the environment and the places of data may differ. Called
// by all processes.
void RequireSameRun(const Processes& processes, const Json& experiment, const Batch& batch);

}  // namespace cistern
