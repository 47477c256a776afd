#include "cistern/base/hash.h"

#include <bit>
#include <cstring>

namespace cistern {
namespace {

static_assert(std::endian::native == std::endian::little, "the hash reads little-endian words");

// The odd constants of the specification.
constexpr uint64_t kP1 = 0x9E3779B185EBCA87u, kP2 = 0xC2B2AE3D27D4EB4Fu, kP3 = 0x165667B19E3779F9u,
                   kP4 = 0x85EBCA77C2B2AE63u, kP5 = 0x27D4EB2F165667C5u;

template <class Word>
uint64_t Load(const unsigned char* p) {
  Word word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

uint64_t Round(uint64_t lane, uint64_t word) { return std::rotl(lane + word * kP2, 31) * kP1; }

}  // namespace

uint64_t XxHash64(std::string_view bytes, uint64_t seed) {
  const unsigned char* p = reinterpret_cast<const unsigned char*>(bytes.data());
  size_t left = bytes.size();
  uint64_t hash = seed + kP5;
  if (left >= 32) {  // four lanes of eight bytes
    uint64_t lanes[4] = {seed + kP1 + kP2, seed + kP2, seed, seed - kP1};
    for (; left >= 32; left -= 32, p += 32) {
      for (int i = 0; i < 4; ++i) lanes[i] = Round(lanes[i], Load<uint64_t>(p + 8 * i));
    }
    hash = std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) +
           std::rotl(lanes[3], 18);
    for (const uint64_t lane : lanes) hash = (hash ^ Round(0, lane)) * kP1 + kP4;
  }
  hash += bytes.size();
  for (; left >= 8; left -= 8, p += 8)
    hash = std::rotl(hash ^ Round(0, Load<uint64_t>(p)), 27) * kP1 + kP4;
  for (; left >= 4; left -= 4, p += 4)
    hash = std::rotl(hash ^ (Load<uint32_t>(p) * kP1), 23) * kP2 + kP3;
  for (; left > 0; --left, ++p) hash = std::rotl(hash ^ (*p * kP5), 11) * kP1;
  hash = (hash ^ (hash >> 33)) * kP2;
  hash = (hash ^ (hash >> 29)) * kP3;
  return hash ^ (hash >> 32);
}

std::string HexText(uint64_t hash) {
  std::string text(16, '0');
  for (size_t i = 16; i-- > 0; hash >>= 4) text[i] = "0123456789abcdef"[hash & 15];
  return text;
}

}  // namespace cistern
