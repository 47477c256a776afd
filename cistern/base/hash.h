#pragma once
// XXH64 (Collet 2014, libxxhash): a fast 64-bit hash that tells contents apart and finds damage. It
// is no protection against someone who wants two contents to look the same.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace cistern {

// O(bytes). Several contents in a row: give each the hash of what came before as its seed.
uint64_t XxHash64(std::string_view bytes, uint64_t seed = 0);

// The same of bytes that come in pieces, however they are cut.
class XxHash64Stream {
 public:
  XxHash64Stream();
  ~XxHash64Stream();
  void Add(std::string_view bytes);
  uint64_t Value() const;  // of all so far

 private:
  struct State;
  std::unique_ptr<State> state_;
};

std::string HexText(uint64_t hash);  // 16 digits

}  // namespace cistern
