#pragma once
// Reads rows 0 .. count-1 of data that is held in memory.
#include <algorithm>
#include <functional>
#include <utility>

#include "cistern/base/error.h"
#include "cistern/tasks/task.h"

namespace cistern {

class RowReader : public BatchReader {
 public:
  // `make` gives the batch of rows begin .. end-1; `rows` of each batch. skipped: rows that the
  // data had beside them. spread: `make` takes them from all over the data.
  RowReader(int64_t count, int64_t rows, std::function<Batch(int64_t begin, int64_t end)> make,
            int64_t skipped = 0, bool spread = false)
      : count_(count), rows_(rows), skipped_(skipped), spread_(spread), make_(std::move(make)) {}
  std::optional<Batch> Next() override {
    if (done_ >= count_) return std::nullopt;
    const int64_t begin = done_;
    done_ = std::min(count_, begin + rows_);
    return make_(begin, done_);
  }
  int64_t total() const override { return count_; }
  int64_t done() const override { return done_; }
  int64_t skipped() const override { return skipped_; }
  Json Facts() const override {
    if (!spread_ || done_ == 0 || done_ == count_) return Json::object();
    return {{"part", StrCat(done_, " of ", count_, " rows, spread evenly")}};
  }

 private:
  int64_t count_, rows_, skipped_, done_ = 0;
  bool spread_;
  std::function<Batch(int64_t begin, int64_t end)> make_;
};

}  // namespace cistern
