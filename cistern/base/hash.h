#pragma once
// XXH64 (Collet 2014, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md): a fast
// 64-bit hash that tells contents apart. It is no protection against someone who wants two contents
// to look the same.
#include <cstdint>
#include <string>
#include <string_view>

namespace cistern {

// O(bytes). Several contents in a row: give each the hash of what came before as its seed.
uint64_t XxHash64(std::string_view bytes, uint64_t seed = 0);

std::string HexText(uint64_t hash);  // 16 digits

}  // namespace cistern
