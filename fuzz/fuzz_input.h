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

// A file in memory that holds the input, for readers that take a path.
class FuzzFile {
 public:
  FuzzFile() : fd_(memfd_create("fuzz", 0)), path_("/proc/self/fd/" + std::to_string(fd_)) {}
  const std::string& Holding(std::string_view bytes) {
    if (ftruncate(fd_, 0) != 0 ||
        pwrite(fd_, bytes.data(), bytes.size(), 0) != ssize_t(bytes.size()))
      std::abort();
    return path_;
  }

 private:
  int fd_;
  std::string path_;
};

}  // namespace cistern
