#include "cistern/io/folder_files.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "cistern/base/error.h"

namespace cistern {
namespace fs = std::filesystem;
namespace {

constexpr size_t kNamed = 5;  // skipped files that are named

}  // namespace

void Skipped::Add(const std::string& path) {
  if (count_++ < kNamed) paths_.push_back(path);
}

void Skipped::Note(std::vector<std::string>* notes) const {
  if (count_ == 0) return;
  std::string note = StrCat("skipped ", count_, " ", what_, count_ == 1 ? ": " : "s: ");
  for (size_t i = 0; i < paths_.size(); ++i) note += (i ? ", " : "") + paths_[i];
  if (count_ > paths_.size()) note += StrCat(" and ", count_ - paths_.size(), " more");
  notes->push_back(note);
}

void FolderFiles::Note(std::vector<std::string>* notes) const {
  for (const Skipped* kind : {&hidden, &folders, &linked, &broken, &special}) kind->Note(notes);
}

std::string AsReasons(const std::vector<std::string>& notes) {
  std::string reasons;
  for (const std::string& note : notes) reasons += "; " + note;
  return reasons;
}

void FindFiles(const std::string& folder, Folders folders, FolderFiles* found) {
  std::vector<std::string> files;
  std::error_code error, ignored;
  fs::recursive_directory_iterator entry(folder, error), end;
  CISTERN_CHECK(!error, "cannot read folder ", folder, ": ", error.message());
  while (entry != end) {
    const std::string path = entry->path().string(), name = entry->path().filename().string();
    const fs::file_status status = entry->status(ignored);  // of what a link leads to
    const bool link = entry->is_symlink(ignored);
    if (name.starts_with('.')) {
      found->hidden.Add(path);
      if (fs::is_directory(status)) entry.disable_recursion_pending();
    } else if (fs::is_regular_file(status)) {
      files.push_back(path);
    } else if (fs::is_directory(status) && folders == Folders::kSkip) {
      found->folders.Add(path);
      entry.disable_recursion_pending();
    } else if (fs::is_directory(status)) {
      if (link) found->linked.Add(path);
    } else if (link && !fs::exists(status)) {
      found->broken.Add(path);
    } else {
      CISTERN_CHECK(fs::status_known(status), "cannot read ", path);
      found->special.Add(path);
    }
    entry.increment(error);
    CISTERN_CHECK(!error, "cannot read folder ", folder, " near ", path, ": ", error.message());
  }
  std::sort(files.begin(), files.end());
  found->paths.insert(found->paths.end(), files.begin(), files.end());
}

}  // namespace cistern
