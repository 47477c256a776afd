#pragma once
// A fresh folder in the temporary one, of a name that nobody else has, removed at the end.
#include <cstdlib>
#include <filesystem>
#include <string>

#include "cistern/base/error.h"

namespace cistern {

class ScratchFolder {
 public:
  explicit ScratchFolder(const std::string& name = "cistern") {
    std::string path = (std::filesystem::temp_directory_path() / (name + "-" + std::string(6, 'X')))
                           .string();  // mkdtemp's template
    CISTERN_CHECK(::mkdtemp(path.data()) != nullptr, "cannot create ", path);
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
