#pragma once
// A fresh folder in the temporary one, of a name that nobody else has, removed at the end.
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>

#include "cistern/base/error.h"

namespace cistern {

class ScratchFolder {
 public:
  explicit ScratchFolder(const std::string& name = "cistern") {
    std::error_code error;
    const std::filesystem::path parent = std::filesystem::temp_directory_path(error);
    const char* named = std::getenv("TMPDIR");
    CISTERN_CHECK(!error, "no folder for temporary files: TMPDIR=", named ? named : "", ": ",
                  error.message(), "; set TMPDIR to a folder that can be written");
    std::string path = (parent / (name + "-" + std::string(6, 'X'))).string();  // for mkdtemp
    CISTERN_CHECK(::mkdtemp(path.data()) != nullptr, "cannot create ", path, ": ",
                  std::strerror(errno), "; TMPDIR names another place");
    path_ = path;
  }
  ~ScratchFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace cistern
