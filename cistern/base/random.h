#pragma once
// Counter-based random numbers (Philox 4x32-10, Salmon et al. 2011): the draw depends on (seed,
// stream, counter) alone, so pieces of a sequence, threads and resumed runs draw exactly what the
// whole does.
#include <array>
#include <cstdint>

namespace cistern {

std::array<uint32_t, 4> Philox(uint64_t seed, uint64_t stream, uint64_t counter);

// A sequential generator on top; its whole state is (seed, stream, position).
class Random {
 public:
  explicit Random(uint64_t seed, uint64_t stream = 0) : seed_(seed), stream_(stream) {}
  uint64_t Next();           // 64 random bits
  double Uniform();          // [0, 1)
  int64_t Below(int64_t n);  // 0 .. n-1, unbiased; n >= 1
  double Normal();           // mean 0, variance 1
  uint64_t position() const { return position_; }
  void set_position(uint64_t position) { position_ = position; }

 private:
  uint64_t seed_, stream_, position_ = 0;
};

}  // namespace cistern
