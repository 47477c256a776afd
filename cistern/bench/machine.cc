#include "cistern/bench/machine.h"

#include <torch/version.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "cistern/base/parallel.h"
#include "cistern/base/subprocess.h"
#include "cistern/kernels/isa.h"

namespace cistern::bench {
namespace {

std::string Processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != line.npos) return line.substr(colon + 2);
  }
  return "unknown processor";
}

// Of the git tree around the running program, asked now: a build does not know what was committed
// after it.
std::string Commit() {
  namespace fs = std::filesystem;
  constexpr char kGit[] = "/usr/bin/git";
  std::error_code ignored;
  if (!fs::exists(kGit, ignored)) return "";
  fs::path folder = fs::path(ThisProgram()).parent_path();
  while (!fs::exists(folder / ".git", ignored)) {
    if (folder == folder.parent_path()) return "";
    folder = folder.parent_path();
  }
  if (!fs::exists(folder / "cistern" / "base", ignored)) return "";
  try {
    const ProcessResult result = RunProcess(kGit, {"-C", folder.string(), "describe", "--always",
                                                   "--dirty=+", "--abbrev=10", "--exclude=*"});
    if (result.code != 0) return "";
    return result.output.substr(0, result.output.find('\n'));
  } catch (const Error&) {
    return "";
  }
}

}  // namespace

Machine ThisMachine(const std::string& program_version) {
  return {Processor(),   sysconf(_SC_NPROCESSORS_ONLN),
          NumThreads(),  ActiveIsa(),
          TORCH_VERSION, program_version,
          Commit()};
}

std::string Machine::Line() const {
  return StrCat(processor, ", ", cores, cores == 1 ? " core; " : " cores; ", threads,
                threads == 1 ? " thread, " : " threads, ", isa, "; torch ", torch, "; cistern ",
                program, commit.empty() ? "" : " of commit " + commit);
}

Json MachineJson(const Machine& m) {
  return {
      {"processor", m.processor}, {"cores", m.cores},     {"threads", m.threads}, {"isa", m.isa},
      {"torch", m.torch},         {"version", m.program}, {"commit", m.commit}};
}

Machine ReadMachine(const Json& json) {
  const auto value = [&](const char* key) {
    CISTERN_CHECK(json.is_object() && json.contains(key), "the machine lacks '", key, "'");
    return json[key];
  };
  const auto text = [&](const char* key) {
    const Json v = value(key);
    CISTERN_CHECK(v.is_string(), "the machine's '", key, "' is no text");
    return v.get<std::string>();
  };
  const auto number = [&](const char* key) {
    const Json v = value(key);
    CISTERN_CHECK(v.is_number_integer(), "the machine's '", key, "' is no whole number");
    return v.get<int64_t>();
  };
  return {text("processor"), number("cores"), number("threads"), text("isa"),
          text("torch"),     text("version"), text("commit")};
}

std::string Difference(const Machine& a, const Machine& b) {
  const auto differ = [](const char* what, const auto& x, const auto& y) {
    return StrCat(what, " ", x, " and ", y);
  };
  if (a.processor != b.processor) return differ("the processors", a.processor, b.processor);
  if (a.cores != b.cores) return differ("the numbers of cores", a.cores, b.cores);
  if (a.threads != b.threads) return differ("the numbers of threads", a.threads, b.threads);
  if (a.isa != b.isa) return differ("the SIMD targets", a.isa, b.isa);
  return "";
}

}  // namespace cistern::bench
