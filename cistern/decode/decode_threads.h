#pragma once
// How many threads draw tokens: all of them, or one while other programs hold the cores. A token is
// a hundred short loops, and at the end of each one thread waits for the other; where that one's
// core is taken, one thread alone is faster (docs/notes/decoding.md).
#include <cstdint>
#include <vector>

#include "cistern/base/cpu_share.h"

namespace cistern {

// The choice, block of tokens by block of tokens, by what was measured.
class ThreadChoice {
 public:
  explicit ThreadChoice(int all) : all_(all), threads_(all) {}
  int threads() const { return threads_; }
  // Looking whether all threads are the faster ones again, which a few tokens tell.
  bool probing() const { return threads_ > 1 && blocks_ == 0 && of_one_ > 0; }
  // The median time of a token of the last block, and the share of processor time that the process
  // got of what it was ready to use (base/cpu_share.h).
  void Took(double seconds, double share);

 private:
  const int all_;
  int threads_;
  double of_all_ = 0, of_one_ = 0;  // what a token took when last measured
  int blocks_ = 0;                  // since the last change
  int patience_ = kPatience;        // blocks until the other choice is looked at again
  static constexpr int kPatience = 8, kMostPatience = 256;
};

// Applies it to the loop that it lives in. The numbers that are drawn do not depend on it: up to so
// many rows every kernel gives the same bits with any number of threads.
class DecodeThreads {
 public:
  explicit DecodeThreads(int64_t rows);
  ~DecodeThreads();
  DecodeThreads(const DecodeThreads&) = delete;
  DecodeThreads& operator=(const DecodeThreads&) = delete;

  void Token(double seconds);                 // after each
  int64_t of_one() const { return of_one_; }  // tokens that one thread drew, though it had more
  static constexpr int64_t kRows = 32;

 private:
  const int before_;
  const bool chooses_;
  ThreadChoice choice_;
  CpuShare share_;
  std::vector<double> block_;
  double block_seconds_ = 0;
  int64_t of_one_ = 0;
};

}  // namespace cistern
