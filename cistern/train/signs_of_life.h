#pragma once
// Whether the processes that train together still live. One that has ended closes its connections,
// which the others see at once; one that was stopped, or whose machine has vanished, does not.
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <thread>

namespace cistern {

class SignsOfLife {
 public:
  // Begins a thread that, 24 times in `silence` seconds, gives a sign to the store and looks for
  // that of the next rank, whose next is the first after the last. So each is watched by another,
  // which ends when it is lost, and that is seen by all.
  SignsOfLife(c10::intrusive_ptr<c10d::Store> store, int64_t rank, int64_t count, double silence);
  // Ends the thread, but leaves it where the store does not answer.
  ~SignsOfLife();
  SignsOfLife(const SignsOfLife&) = delete;
  SignsOfLife& operator=(const SignsOfLife&) = delete;

  // What is lost: the next process, which gave no sign for 24 looks, or the store. Else "". Looks
  // are counted and not seconds, so that the time in which all were stopped does not count.
  std::string Lost() const;
  // How many looks have ended: no more of them where the store does not answer.
  int64_t Looks() const;

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
  std::thread thread_;
};

}  // namespace cistern
