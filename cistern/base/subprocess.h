#pragma once
// Another program, run to its end.
#include <string>
#include <vector>

namespace cistern {

struct ProcessResult {
  int code = 0;        // exit code, or 128 + the signal that ended it
  std::string output;  // what it wrote to standard output
};

// Starts `program` with these arguments; standard error stays that of this process. When this
// process ends, however that happens, the child is told to end as well (SIGTERM). Error where it
// cannot be started.
ProcessResult RunProcess(const std::string& program, const std::vector<std::string>& arguments);

// The path of the running program.
std::string ThisProgram();

}  // namespace cistern
