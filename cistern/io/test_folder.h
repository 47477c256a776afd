#pragma once
// For tests: a fresh temporary folder, removed at the end.
#include <filesystem>
#include <iterator>
#include <string>

#include "cistern/base/error.h"
#include "cistern/io/scratch_folder.h"

namespace cistern {

class TestFolder : public ScratchFolder {
 public:
  TestFolder() : ScratchFolder("cistern-test") {}
  int Count() const {
    return int(std::distance(std::filesystem::directory_iterator(path()),
                             std::filesystem::directory_iterator()));
  }
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
