#pragma once
// Rows of memory that a walk over tokens reads soon. A core waits for some dozens of lines of
// memory at once: all rows of a chunk asked for in one place stop it there. So a walk notes them
// where a chunk begins, and the products of the chunk ask for some after each of their tiles
// (gemm-inl.h), while they compute.
#include <algorithm>
#include <cstddef>

#include "hwy/cache_control.h"

namespace cistern {

class RowsAhead {
 public:
  static RowsAhead& OfThisThread() {
    // Every tile asks: a pointer that is found without a call, also in a shared library.
    [[gnu::tls_model("initial-exec")]] static thread_local RowsAhead* here = nullptr;
    if (here == nullptr) here = &Own();
    return *here;
  }

  // Forgets what was noted and not asked for: where a chunk begins, it is read anyway.
  void Clear() {
    if (asks_ > 0) lines_of_ask_ = lines_ / asks_ + 1;
    size_ = at_ = lines_ = asks_ = 0;
  }

  // Notes `count` rows of `bytes`, `step` bytes apart.
  void Note(const void* rows, ptrdiff_t step, size_t count, size_t bytes) {
    if (count == 0 || bytes == 0 || size_ == kMost) return;
    const size_t lines = (bytes + kLine - 1) / kLine;
    blocks_[size_++] = {static_cast<const char*>(rows), step, count, lines};
    lines_ += count * lines;
  }

  // Asks for the next rows: as many lines as spread those of a chunk over as many calls as the last
  // chunk had. Returns their number.
  size_t Ask() {
    ++asks_;
    size_t lines = 0;
    while (at_ < size_ && lines < lines_of_ask_) lines += AskForRow();
    return lines;
  }

 private:
  [[gnu::noinline]] static RowsAhead& Own() {
    static thread_local RowsAhead ahead;
    return ahead;
  }

  static constexpr size_t kMost = 10, kLine = 64;
  struct Block {
    const char* row;
    ptrdiff_t step;
    size_t rows, lines;
  };

  size_t AskForRow() {
    Block& block = blocks_[at_];
    for (size_t i = 0; i < block.lines; ++i) hwy::Prefetch(block.row + i * kLine);
    block.row += block.step;
    if (--block.rows == 0) ++at_;
    return block.lines;
  }

  Block blocks_[kMost] = {};
  size_t size_ = 0, at_ = 0;  // blocks, and the one whose rows come next
  size_t lines_ = 0, asks_ = 0, lines_of_ask_ = 16;
};

}  // namespace cistern
