// Experiment files: TOML with `extends` and [published]. What is read can be written as TOML and
// read again, and is the same. After a zero byte follows a second file, base.toml.
#include <fcntl.h>

#include "cistern/cli/experiment.h"
#include "cistern/io/atomic_file.h"
#include "fuzz/fuzz_input.h"

namespace cistern::cli {
namespace {

void Put(const std::string& path, std::string_view bytes) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  if (fd < 0 || write(fd, bytes.data(), bytes.size()) != ssize_t(bytes.size())) std::abort();
  close(fd);
}

void ReadBoth(const std::string& folder, std::string_view bytes) {
  const size_t zero = std::min(bytes.find('\0'), bytes.size());
  Put(folder + "/file.toml", bytes.substr(0, zero));
  Put(folder + "/base.toml", zero < bytes.size() ? bytes.substr(zero + 1) : "");
  Experiment experiment;
  ReadExperiment(experiment, folder + "/file.toml", {});
  experiment.model.Validate();
  experiment.train.Validate();
  const Json written = experiment.Write();
  Put(folder + "/again.toml", ExperimentToml(experiment));
  Experiment again;
  ReadExperiment(again, folder + "/again.toml", {});
  if (again.Write() != written) __builtin_trap();
}

}  // namespace
}  // namespace cistern::cli

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string folder = [] {
    const std::string path = "/tmp/cistern-fuzz-experiment-" + std::to_string(getpid());
    cistern::EnsureDirectory(path);
    return path;
  }();
  return cistern::FuzzOne(data, size,
                          [](std::string_view bytes) { cistern::cli::ReadBoth(folder, bytes); });
}
