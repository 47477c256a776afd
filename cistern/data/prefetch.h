#pragma once
// Makes the next batches on its own thread while the current one is in use.
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace cistern {

template <class T>
class Prefetcher {
 public:
  // `produce` runs on the background thread alone, in order, and returns nullopt at the end. At
  // most `capacity` (at least 1) results wait.
  Prefetcher(std::function<std::optional<T>()> produce, size_t capacity)
      : produce_(std::move(produce)),
        capacity_(std::max<size_t>(capacity, 1)),
        thread_([this] { Run(); }) {}

  // Waits for a call of `produce` in progress; results not fetched are dropped.
  ~Prefetcher() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  // The next result; nullopt at the end and ever after. What `produce` threw is thrown here, after
  // the results that came before it, and again by every later call.
  std::optional<T> Next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !ready_.empty() || done_; });
    if (!ready_.empty()) {
      std::optional<T> result(std::move(ready_.front()));
      ready_.pop_front();
      lock.unlock();
      changed_.notify_all();
      return result;
    }
    if (error_) std::rethrow_exception(error_);
    return std::nullopt;
  }

 private:
  void Run() {
    for (;;) {
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return stop_ || ready_.size() < capacity_; });
        if (stop_) return;
      }
      std::exception_ptr error;
      bool more = false;
      try {
        // Declared here, not before the try: g++ 12 drops the initialization of an optional that a
        // throwing call would have assigned.
        if (std::optional<T> result = produce_()) {
          std::lock_guard lock(mutex_);
          ready_.push_back(std::move(*result));
          more = true;
        }
      } catch (...) {
        error = std::current_exception();
      }
      {
        std::lock_guard lock(mutex_);
        error_ = error;
        done_ = !more;
      }
      changed_.notify_all();
      if (!more) return;
    }
  }

  std::function<std::optional<T>()> produce_;
  size_t capacity_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<T> ready_;
  std::exception_ptr error_;
  bool done_ = false, stop_ = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace cistern
