#pragma once
// For tests: a fresh temporary folder, removed at the end.
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <string>

#include "cistern/base/error.h"

namespace cistern {

class TestFolder {
 public:
  TestFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "cistern-test-XXXXXX").string();
    CISTERN_CHECK(::mkdtemp(name.data()) != nullptr, "cannot create ", name);
    path_ = name;
  }
  ~TestFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  int Count() const {
    return int(std::distance(std::filesystem::directory_iterator(path_),
                             std::filesystem::directory_iterator()));
  }

 private:
  std::string path_;
};

// The message of the Error that f throws, or "no error".
template <class F>
std::string ErrorMessage(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

}  // namespace cistern
