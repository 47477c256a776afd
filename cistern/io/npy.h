#pragma once
// NumPy's .npy files (format versions 1 to 3; numpy.lib.format), read in place: only the header is
// held in memory. What is read: one array of numbers, little-endian, in C order.
#include <cstdint>
#include <string>
#include <vector>

#include "cistern/io/read_at.h"

namespace cistern {

class NpyFile {
 public:
  // Error, naming the file, where it is no .npy, holds other things than float32, float64, integers
  // or bools, is big-endian or in Fortran order, or is shorter or longer than its header says.
  // O(1).
  explicit NpyFile(const std::string& path);
  ~NpyFile();
  NpyFile(const NpyFile&) = delete;
  NpyFile& operator=(const NpyFile&) = delete;

  const std::string& path() const { return path_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t size() const { return size_; }       // numbers in the file
  bool whole() const { return kind_ != 'f'; }  // integers or bools
  std::string ShapeText() const;               // "(3, 4)", as NumPy prints it
  // Numbers begin .. begin + count - 1 of the array as it lies in the file; integers beyond 2^53
  // are rounded. NaN stays NaN. Error for an infinity, and where the file has changed since it was
  // opened. Safe from any thread.
  void Read(int64_t begin, int64_t count, double* out) const;

 private:
  void ReadHeader();
  void Descr(const std::string& text);

  std::string path_;
  int fd_ = -1;
  FileVersion version_;
  char kind_ = 'f';    // f, i, u, b
  int64_t width_ = 4;  // bytes of a number
  int64_t data_ = 0, size_ = 0;
  std::vector<int64_t> shape_;
};

}  // namespace cistern
