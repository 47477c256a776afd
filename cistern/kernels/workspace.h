#pragma once
// Scratch memory of one thread, kept between calls: 64-byte aligned pieces that start as zeros or
// as leftovers of an earlier call.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace cistern {

class Workspace {
 public:
  static Workspace& OfThisThread() {
    thread_local Workspace workspace;
    return workspace;
  }

  // Another one, for copies of tokens beside what a kernel keeps in the first.
  static Workspace& StagingOfThisThread() {
    thread_local Workspace workspace;
    return workspace;
  }

  // Verification: from now on every Start leaves bytes of 0xff, NaN as float and double, instead of
  // leftovers.
  static void PoisonAll(bool on) { Poisoned().store(on, std::memory_order_relaxed); }

  // Makes room for `bytes` (plus 64 per piece) and forgets all earlier pieces.
  void Start(size_t bytes, size_t pieces) {
    bytes = (bytes + 64 * pieces + 63) / 64 * 64;
    used_ = 0;
    if (bytes > size_) {
      data_.reset(static_cast<std::byte*>(std::aligned_alloc(64, bytes)));
      size_ = data_ == nullptr ? 0 : bytes;
      if (data_ == nullptr) throw std::bad_alloc();
      std::memset(data_.get(), 0, bytes);
    }
    if (Poisoned().load(std::memory_order_relaxed)) std::memset(data_.get(), 0xff, size_);
  }

  template <class T>
  T* Take(size_t count) {
    T* piece = reinterpret_cast<T*>(data_.get() + used_);
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    return piece;
  }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  static std::atomic<bool>& Poisoned() {
    static std::atomic<bool> on{false};
    return on;
  }
  std::unique_ptr<std::byte, Free> data_;
  size_t size_ = 0, used_ = 0;
};

}  // namespace cistern
