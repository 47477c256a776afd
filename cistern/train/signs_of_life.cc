#include "cistern/train/signs_of_life.h"

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include "cistern/base/error.h"
#include "cistern/tensors/torch_error.h"

namespace cistern {
namespace {

constexpr int kLooks = 24;

using Sign = std::vector<uint8_t>;

std::string KeyOf(int64_t rank) { return StrCat("sign_of_life/", rank); }

}  // namespace

// With the thread, which may outlive the object.
struct SignsOfLife::Shared {
  c10::intrusive_ptr<c10d::Store> store;
  int64_t rank = 0, next = 0;
  double silence = 0;

  std::mutex mutex;
  std::condition_variable changed;
  bool stop = false, ended = false;
  int64_t looks = 0;
  std::string lost;

  void Give(uint64_t number) {
    const std::string text = std::to_string(number);
    store->set(KeyOf(rank), Sign(text.begin(), text.end()));
  }
  bool Stopped(double seconds) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return stop; });
  }
  // Returns when told to stop, or with what is lost.
  std::string Look() {
    Sign last;
    int same = 0;
    for (uint64_t number = 1; !Stopped(silence / kLooks); ++number) {
      Give(number);
      const Sign sign = store->get(KeyOf(next));
      {
        const std::lock_guard lock(mutex);
        ++looks;
      }
      same = sign == last ? same + 1 : 0;
      last = sign;
      if (same == kLooks)
        return StrCat("process ", next, " has given no sign of life for ", silence,
                      " s: it was stopped, or its machine cannot be reached");
    }
    return "";
  }
  void Run() {
    std::string what;
    try {
      what = Look();
    } catch (const std::exception& e) {
      what = StrCat("the store where they met has failed: ", FirstLine(e));
    }
    const std::lock_guard lock(mutex);
    lost = what;
    ended = true;
    changed.notify_all();
  }
};

SignsOfLife::SignsOfLife(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t count,
                         double silence)
    : shared_(std::make_shared<Shared>()) {
  shared_->store = std::move(store);
  shared_->rank = rank;
  shared_->next = (rank + 1) % count;
  shared_->silence = silence;
  shared_->Give(0);
  thread_ = std::thread([shared = shared_] { shared->Run(); });
}

SignsOfLife::~SignsOfLife() {
  std::unique_lock lock(shared_->mutex);
  shared_->stop = true;
  shared_->changed.notify_all();
  const bool ended =
      shared_->changed.wait_for(lock, std::chrono::seconds(1), [&] { return shared_->ended; });
  lock.unlock();
  if (ended) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

int64_t SignsOfLife::Looks() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->looks;
}

std::string SignsOfLife::Lost() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->lost;
}

}  // namespace cistern
