#pragma once
// A fresh folder in the temporary one, of a name that nobody else has, removed at the end; one that
// a killed process left is a leftover (io/file_lock.h).
#include <sys/stat.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>

#include "cistern/base/error.h"
#include "cistern/io/file_lock.h"

namespace cistern {

class ScratchFolder {
 public:
  explicit ScratchFolder(const std::string& name = "cistern") {
    std::error_code error;
    const std::filesystem::path parent = std::filesystem::temp_directory_path(error);
    const char* named = std::getenv("TMPDIR");
    CISTERN_CHECK(!error, "no folder for temporary files: TMPDIR=", named ? named : "", ": ",
                  error.message(), "; set TMPDIR to a folder that can be written");
    do {
      path_ = TemporaryName((parent / name).string());
      if (::mkdir(path_.c_str(), 0700) == 0) return;
    } while (errno == EEXIST);
    Fail("cannot create ", path_, ": ", std::strerror(errno), "; TMPDIR names another place");
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
