#include "cistern/base/random.h"

#include <cmath>

namespace cistern {

std::array<uint32_t, 4> Philox(uint64_t seed, uint64_t stream, uint64_t counter) {
  std::array<uint32_t, 4> x = {uint32_t(counter), uint32_t(counter >> 32), uint32_t(stream),
                               uint32_t(stream >> 32)};
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * x[0], p1 = uint64_t{0xCD9E8D57u} * x[2];
    x = {uint32_t(p1 >> 32) ^ x[1] ^ k0, uint32_t(p1), uint32_t(p0 >> 32) ^ x[3] ^ k1,
         uint32_t(p0)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return x;
}

uint64_t Random::Next() {
  const auto x = Philox(seed_, stream_, position_ / 2);
  const bool second = position_++ % 2 != 0;
  return second ? (uint64_t{x[3]} << 32 | x[2]) : (uint64_t{x[1]} << 32 | x[0]);
}

double Random::Uniform() { return double(Next() >> 11) * 0x1p-53; }

int64_t Random::Below(int64_t n) {
  const uint64_t range = uint64_t(n),
                 limit = -range % range;  // rejects the first 2^64 mod n values
  for (;;) {
    const uint64_t x = Next();
    if (x >= limit) return int64_t(x % range);
  }
}

double Random::Normal() {  // Box-Muller, one of the two values
  const double u = 1.0 - Uniform(), v = Uniform();
  return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * M_PI * v);
}

}  // namespace cistern
