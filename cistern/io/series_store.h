#pragma once
// The series of a file for reading in any order: values of a .npy stay in it; those of a text are
// held in memory, and beyond some size in a nameless file that is gone when the store is. In memory
// stands what belongs to a whole series: some tens of bytes each.
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cistern/io/npy.h"
#include "cistern/io/series_source.h"

namespace cistern {

// Numbers that are written once, in order, and then read anywhere.
class NumberStore {
 public:
  // Beyond `in_memory` numbers they go to a file in `folder`, which must exist by then.
  NumberStore(std::string folder, int64_t in_memory)
      : folder_(std::move(folder)), in_memory_(in_memory) {}
  ~NumberStore();
  NumberStore(const NumberStore&) = delete;
  NumberStore& operator=(const NumberStore&) = delete;
  // Error where the file cannot be written.
  void Append(const double* values, int64_t count);
  // Safe from any thread once nothing is appended any more.
  void Read(int64_t begin, int64_t count, double* out) const;
  int64_t size() const { return written_ + int64_t(held_.size()); }
  bool on_disk() const { return fd_ >= 0; }

 private:
  void Flush();

  std::string folder_;
  int64_t in_memory_, written_ = 0;
  int fd_ = -1;
  std::vector<double> held_;  // of the end; without a file all of them
};

class SeriesStore {
 public:
  static constexpr int64_t kInMemory = int64_t{1} << 25;  // numbers: 256 MiB
  // Reads the file once. Error as of its source, and where it has no series.
  SeriesStore(const std::string& path, const SeriesFormat& format, const std::string& folder,
              int64_t in_memory = kInMemory);

  const std::string& path() const { return path_; }
  int64_t size() const { return int64_t(lines_.size()); }
  int64_t channels() const { return int64_t(channels_.size()); }
  const std::vector<std::string>& channel_names() const { return channels_; }
  int64_t Steps(int64_t i) const { return begins_[size_t(i) + 1] - begins_[size_t(i)]; }
  int64_t Longest() const;
  int64_t Line(int64_t i) const { return lines_[size_t(i)]; }
  std::string Name(int64_t i) const { return names_.empty() ? "" : names_[size_t(i)]; }
  // Of classes: which of labels() it is. -1: the file has none.
  int64_t Label(int64_t i) const { return codes_.empty() ? -1 : codes_[size_t(i)]; }
  const std::vector<std::string>& labels() const { return labels_; }    // as they occur
  const std::vector<std::string>& classes() const { return classes_; }  // that the file lists
  double Number(int64_t i) const { return numbers_[size_t(i)]; }        // Labels::kNumbers
  // Steps begin .. begin + count - 1 of series i, [count,channels]; NaN: missing. Doubles, because
  // what matters of a value may be small beside its channel's mean.
  void Read(int64_t i, int64_t begin, int64_t count, double* out) const;

  const std::string& label_column() const { return label_column_; }
  const std::vector<std::string>& value_columns() const { return value_columns_; }
  size_t unnamed_columns() const { return unnamed_columns_; }
  const std::vector<std::string>& notes() const { return notes_; }
  int64_t skipped() const { return skipped_; }
  int64_t missing() const { return missing_; }
  // XXH64 of values as float32, lengths and labels; and of the values themselves, which an earlier
  // version did not keep.
  uint64_t hash() const { return hash_; }
  uint64_t exact_hash() const { return exact_hash_; }
  bool on_disk() const { return npy_ || values_.on_disk(); }

 private:
  std::string path_, label_column_;
  std::vector<std::string> channels_, labels_, classes_, notes_, names_, value_columns_;
  std::vector<int64_t> begins_ = {0}, lines_;  // begins_: in steps
  std::vector<int32_t> codes_;
  std::vector<double> numbers_;
  size_t unnamed_columns_ = 0;
  int64_t skipped_ = 0, missing_ = 0;
  uint64_t hash_ = 0, exact_hash_ = 0;
  std::unique_ptr<NpyFile> npy_;  // else values_
  NumberStore values_;
};

}  // namespace cistern
