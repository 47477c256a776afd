#pragma once
// The options of `cistern eval`; shared by its two files.
#include <string>
#include <vector>

#include "cistern/cli/command.h"
#include "cistern/cli/run_folder.h"

namespace cistern::cli {

struct EvalCommand {
  Common common;
  std::string folder, data, split = "test", svg;
  int64_t max_tokens = 0, length = 0, context = -1, batch = 0, rows = 4, buckets = 0;
  bool by_position = false, skip_bad_rows = false;
  std::vector<std::string> set;
};

Split ParseSplit(const std::string& name);

// eval --by-position: a language model along one text, the state carried on.
int EvaluatePositions(const EvalCommand& c, const RunFolder& run);

}  // namespace cistern::cli
