#pragma once
// A piece of an open file, at any place of it, by any thread: unlike mapped memory, a file that is
// cut short while it is in use is an Error.
#include <cstddef>
#include <cstdint>
#include <string>

namespace cistern {

// `bytes` from byte `at` on. Error that names `where` (the path, perhaps with a line) and the
// system's reason, or the byte at which the file ends.
void ReadAt(int fd, int64_t at, size_t bytes, void* out, const std::string& where);

// What tells whether an open file was changed in place: its size and its time of modification.
struct FileVersion {
  int64_t bytes = 0, seconds = 0, nanoseconds = 0;
  bool operator==(const FileVersion&) const = default;
};
FileVersion VersionOf(int fd, const std::string& path);
// Error where it is another one: what was read since then may be of two files. After the reads.
void CheckVersion(int fd, const FileVersion& version, const std::string& path);

}  // namespace cistern
