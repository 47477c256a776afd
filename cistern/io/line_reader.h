#pragma once
// A text file line by line, plain or compressed (.gz by zlib, .xz by liblzma, told by the first
// bytes), of any size.
#include <cstdint>
#include <string>

#include "cistern/io/byte_source.h"

namespace cistern {

class LineReader {
 public:
  // Error where the file is missing or cannot be read.
  explicit LineReader(const std::string& path) : source_(path) {}
  // The next line without its end (\n or \r\n), the first one without a byte order mark; false at
  // the end of the file. Error, with the line's number, where the compressed data is broken or ends
  // early, and for a line above 1 GiB.
  bool Next(std::string* line);
  int64_t number() const { return number_; }                   // of the last line, from 1
  int64_t bytes_read() const { return source_.bytes_read(); }  // of the file as it lies on disk
  int64_t bytes_total() const { return source_.bytes_total(); }
  const std::string& path() const { return source_.path(); }

 private:
  bool Fill();

  ByteSource source_;
  std::string buffer_;
  size_t begin_ = 0;
  bool ended_ = false;
  int64_t number_ = 0;
};

}  // namespace cistern
