#include "cistern/base/hash.h"

#define XXH_INLINE_ALL  // the header alone: no library at run time
#include <xxhash.h>

namespace cistern {

uint64_t XxHash64(std::string_view bytes, uint64_t seed) {
  return XXH64(bytes.data(), bytes.size(), seed);
}

struct XxHash64Stream::State {
  XXH64_state_t xxh;
};

XxHash64Stream::XxHash64Stream() : state_(std::make_unique<State>()) {
  XXH64_reset(&state_->xxh, 0);
}
XxHash64Stream::~XxHash64Stream() = default;

void XxHash64Stream::Add(std::string_view bytes) {
  XXH64_update(&state_->xxh, bytes.data(), bytes.size());
}

uint64_t XxHash64Stream::Value() const { return XXH64_digest(&state_->xxh); }

std::string HexText(uint64_t hash) {
  std::string text(16, '0');
  for (size_t i = 16; i-- > 0; hash >>= 4) text[i] = "0123456789abcdef"[hash & 15];
  return text;
}

}  // namespace cistern
