#pragma once
// Whole files: read at once, or written so that a reader sees the old contents or the new ones,
// never a part. Errors name the path and the system's reason: "cannot write out/model.safetensors:
// No space left on device".
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace cistern {

// Streams to PATH.tmp-<pid>-<n> next to the target. Commit() syncs it to disk and renames it over
// PATH; without Commit() the destructor removes it and the old file stays as it was. A symbolic
// link keeps pointing where it did: its target is replaced. What exists and is no regular file
// (/dev/stdout, a pipe) is written directly. Any failure throws Error and leaves the old file
// untouched.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void Write(const void* data, size_t bytes);
  void Write(std::string_view text) { Write(text.data(), text.size()); }
  // Puts `bytes` in the place of as many that were written before, such as a header that is known
  // last.
  void Overwrite(size_t offset, const void* data, size_t bytes);
  void Commit();  // call once, last

 private:
  void Flush();
  [[noreturn]] void FailWrite();

  std::string path_, target_, temporary_, buffer_;
  int fd_ = -1;
};

void WriteFileAtomically(const std::string& path, std::string_view bytes);

std::string ReadFile(const std::string& path);

// XXH64 of a file of any size, read in pieces.
uint64_t HashFile(const std::string& path);

// Makes renames in a directory survive a power cut; best effort.
void SyncDirectory(const std::string& path);

// Creates the directory and its parents where missing.
void EnsureDirectory(const std::string& path);

}  // namespace cistern
