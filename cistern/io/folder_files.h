#pragma once
// The files of a folder, and notes of all that lies beside them and is not read.
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace cistern {

// What was passed over: the first few by name, the rest counted.
class Skipped {
 public:
  explicit Skipped(std::string what) : what_(std::move(what)) {}  // of one: "hidden file"
  void Add(const std::string& path);
  void Note(std::vector<std::string>* notes) const;  // nothing where there are none

 private:
  std::string what_;
  std::vector<std::string> paths_;
  size_t count_ = 0;
};

struct FolderFiles {
  std::vector<std::string> paths;  // regular files, and links to some; those of one search sorted
  Skipped hidden{"hidden file"}, folders{"folder"}, linked{"linked folder"}, broken{"broken link"},
      special{"special file"};
  void Note(std::vector<std::string>* notes) const;
};

// "; " before each: the end of an error that says why a folder has nothing to read.
std::string AsReasons(const std::vector<std::string>& notes);

enum class Folders { kSearch, kSkip };  // what is done with folders inside of the folder

// Adds the files of `folder`. Links to files are files; those to folders are not followed, even
// with kSearch, so that nothing is read twice and the search ends. Hidden files, and all of a
// hidden folder, are left out. An Error where a folder cannot be read.
void FindFiles(const std::string& folder, Folders folders, FolderFiles* found);

}  // namespace cistern
