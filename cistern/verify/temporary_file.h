#pragma once
// A file name of its own in the temporary folder; the file is removed at the end.
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <string>

#include "cistern/base/error.h"

namespace cistern::verify {

class TemporaryFile {
 public:
  TemporaryFile() {
    static std::atomic<int> number{0};
    path_ = (std::filesystem::temp_directory_path() /
             StrCat("cistern-verify-", ::getpid(), "-", number++, ".safetensors"))
                .string();
  }
  ~TemporaryFile() {
    std::error_code ignored;
    std::filesystem::remove(path_, ignored);
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace cistern::verify
