#pragma once
// A lock between processes: a file that holds the owner's process number while it is held. The
// system lets go of it when its owner dies, however that happens, so a file left behind by a killed
// process locks nothing.
#include <string>

namespace cistern {

class FileLock {
 public:
  enum class Wait { kNo, kYes };
  // Makes the file (its folder must exist) and takes the lock. Where another process holds it:
  // kNo: an Error "WHAT is in use by process 123 (LOCK FILE)"; kYes: waits, with a note.
  FileLock(const std::string& path, const std::string& what, Wait wait = Wait::kNo);
  ~FileLock();  // removes the file
  // An Error when the file is no longer there: somebody has removed or replaced its folder.
  void Check() const;
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  std::string path_, what_;
  int fd_ = -1;
};

// Removes what processes that died in the middle of writing left in a folder: files
// NAME.tmp-<pid>-<n> of AtomicFile, and folders of that name, whose process is no more; of any NAME
// when it is empty. Call while holding a lock, or where nobody else writes.
void RemoveLeftovers(const std::string& folder, const std::string& name = "");

// PATH.tmp-<pid>-<n>, another one at each call: where to make what is then renamed to PATH.
std::string TemporaryName(const std::string& path);

}  // namespace cistern
