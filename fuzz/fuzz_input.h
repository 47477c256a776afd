#pragma once
// What all fuzz targets share.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "cistern/base/error.h"

namespace cistern {

// Runs f on the input. Bad input may only end in an Error with a message; anything else is a
// finding.
template <class F>
int FuzzOne(const uint8_t* data, size_t size, const F& f) {
  try {
    f(std::string_view(reinterpret_cast<const char*>(data), size));
  } catch (const Error& e) {
    if (std::string_view(e.what()).empty()) __builtin_trap();
  }
  return 0;
}

// A file in memory that holds the input, for readers that take a path. With a suffix, such as
// ".csv", the path is a link of that name in $TMPDIR, removed at the end.
class FuzzFile {
 public:
  explicit FuzzFile(const std::string& suffix = "")
      : fd_(memfd_create("fuzz", 0)), path_("/proc/self/fd/" + std::to_string(fd_)) {
    if (suffix.empty()) return;
    const char* folder = std::getenv("TMPDIR");
    link_ = std::string(folder ? folder : "/tmp") + "/cistern-fuzz-" + std::to_string(getpid()) +
            suffix;
    unlink(link_.c_str());  // of a process that had this number before
    if (symlink(path_.c_str(), link_.c_str()) != 0) std::abort();
    path_ = link_;
  }
  ~FuzzFile() {
    if (!link_.empty()) unlink(link_.c_str());
  }
  FuzzFile(const FuzzFile&) = delete;
  FuzzFile& operator=(const FuzzFile&) = delete;
  const std::string& Holding(std::string_view bytes) {
    if (ftruncate(fd_, 0) != 0 ||
        pwrite(fd_, bytes.data(), bytes.size(), 0) != ssize_t(bytes.size()))
      std::abort();
    return path_;
  }

 private:
  int fd_;
  std::string path_, link_;
};

}  // namespace cistern
