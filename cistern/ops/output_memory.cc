#include "cistern/ops/output_memory.h"

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <list>
#include <mutex>
#include <new>

namespace cistern::ops {
namespace {

constexpr size_t kReused = size_t{1} << 20, kHugePage = size_t{2} << 20;

struct Block {
  void* data;
  size_t bytes;
};

class Allocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < kReused) return c10::GetDefaultCPUAllocator()->allocate(bytes);
    // Classes an eighth apart, so that lengths that differ a little share blocks.
    size_t step = kReused / 8;
    while (step * 16 <= bytes) step *= 2;
    Block* block = Take((bytes + step - 1) / step * step);
    return {block->data, block, &Release, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
  size_t waiting() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return waiting_;
  }
  static Allocator& Instance() {
    static auto* const allocator = new Allocator;  // outlives every tensor
    return *allocator;
  }

 private:
  Block* Take(size_t bytes) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      live_ += bytes;
      peak_ = std::max(peak_, live_);
      const auto found =
          std::find_if(free_.begin(), free_.end(), [&](Block* b) { return b->bytes == bytes; });
      if (found != free_.end()) {
        Block* const block = *found;
        free_.erase(found);
        waiting_ -= bytes;
        return block;
      }
      Trim();
    }
    const size_t alignment = bytes >= kHugePage ? kHugePage : 4096;
    void* const data =
        std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (data == nullptr) {
      const std::lock_guard<std::mutex> lock(mutex_);
      live_ -= bytes;
      throw std::bad_alloc();
    }
    if (bytes >= kHugePage) madvise(data, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
    return new Block{data, bytes};
  }

  static void Release(void* context) {
    auto* const block = static_cast<Block*>(context);
    Allocator& all = Instance();
    const std::lock_guard<std::mutex> lock(all.mutex_);
    all.live_ -= block->bytes;
    all.waiting_ += block->bytes;
    if (block->bytes >= kHugePage)
      madvise(block->data, block->bytes / kHugePage * kHugePage, MADV_FREE);
    all.free_.push_front(block);
    all.Trim();
  }

  // Gives back the blocks that waited longest.
  void Trim() {
    while (!free_.empty() && live_ + waiting_ > peak_ / 4 * 5) {
      Block* const block = free_.back();
      free_.pop_back();
      waiting_ -= block->bytes;
      std::free(block->data);
      delete block;
    }
  }

  std::mutex mutex_;
  std::list<Block*> free_;  // the last one freed comes first
  size_t live_ = 0, waiting_ = 0, peak_ = 0;
};

}  // namespace

c10::Allocator& OutputAllocator() { return Allocator::Instance(); }
size_t WaitingOutputBytes() { return Allocator::Instance().waiting(); }

}  // namespace cistern::ops
