#pragma once
// A folder that something is about to be written into.
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "cistern/io/atomic_file.h"

namespace cistern {

// Makes it, and those above it, where they are missing; those that it made and that are still empty
// at the end are removed again.
class MadeFolder {
 public:
  explicit MadeFolder(const std::string& path) {
    std::error_code ignored;
    for (std::filesystem::path p = path; !p.empty() && !std::filesystem::exists(p, ignored);
         p = p.parent_path())
      made_.push_back(p);
    EnsureDirectory(path);
  }
  ~MadeFolder() {
    std::error_code ignored;  // of one that has something in it
    for (const std::filesystem::path& p : made_) std::filesystem::remove(p, ignored);
  }
  MadeFolder(const MadeFolder&) = delete;
  MadeFolder& operator=(const MadeFolder&) = delete;

 private:
  std::vector<std::filesystem::path> made_;  // the deepest first
};

}  // namespace cistern
