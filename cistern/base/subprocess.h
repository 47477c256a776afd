#pragma once
// Another program, run to its end.
#include <string>
#include <vector>

namespace cistern {

struct ProcessResult {
  int code = 0;        // exit code, or 128 + the signal that ended it
  std::string output;  // what it wrote to standard output
};

// Starts `program` with these arguments; standard error stays that of this process, or is appended
// to the file `errors`. When this process ends, however that happens, the child is told to end as
// well (SIGTERM), and when it is interrupted (base/interrupt.h), to save and end. ThisProgram() is
// this very program, even where another one has its path by now. Error where it cannot be started.
ProcessResult RunProcess(const std::string& program, const std::vector<std::string>& arguments,
                         const std::string& errors = "");

// The path that the running program was started from.
std::string ThisProgram();

// A word of a command line that people copy, in single quotes where a shell would not take it as it
// is.
std::string ShellWord(const std::string& word);

}  // namespace cistern
