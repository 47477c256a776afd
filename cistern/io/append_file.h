#pragma once
// A log that grows by whole records: each Append is one write; when the system refuses part of it,
// the file goes back to its former end.
#include <cstdint>
#include <string>
#include <string_view>

namespace cistern {

class AppendFile {
 public:
  // Opens or creates; what exists is kept. Error "cannot write PATH: ...".
  explicit AppendFile(const std::string& path);
  ~AppendFile();
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;

  void Append(std::string_view record);
  void Truncate(int64_t bytes);  // keeps the first `bytes`
  int64_t Bytes() const;         // of the file; 0 where it has no size
  void Sync();                   // to the disk; Append alone survives the process, not a power cut
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int fd_ = -1;
};

}  // namespace cistern
