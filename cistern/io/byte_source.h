#pragma once
// The bytes of a file, plain or compressed (.gz by zlib, .xz by liblzma, told by the first bytes),
// as a stream of any size.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace cistern {

// A name or path without the .gz or .xz at its end.
std::string WithoutCompression(const std::string& path);
// Error that names two of the paths which differ by .gz or .xz alone: the same data, twice.
void CheckNoTwins(const std::vector<std::string>& paths);

class ByteSource {
 public:
  // Error where the file is missing, a folder, or cannot be read.
  explicit ByteSource(const std::string& path);
  ~ByteSource();
  // Appends some bytes to `out`; false at the end. Error where the compressed data is broken or
  // ends early.
  bool Append(std::string* out);
  // The next bytes, up to `bytes` of them: how many there were, fewer only at the end. Errors as
  // above.
  size_t Read(void* out, size_t bytes);
  int64_t bytes_read() const;  // of the file as it lies on disk
  int64_t bytes_total() const { return bytes_total_; }
  const std::string& path() const { return path_; }

 private:
  class Stream;
  std::string path_, ahead_;  // ahead_: decompressed, and from at_ on not yet read
  size_t at_ = 0;
  std::unique_ptr<Stream> stream_;
  int64_t bytes_total_ = 0;
};

// A text without the byte order mark at its beginning.
std::string_view WithoutMark(std::string_view text);
// All of a file that is one text, without such a mark. Errors as of ByteSource.
std::string ReadText(const std::string& path);

}  // namespace cistern
