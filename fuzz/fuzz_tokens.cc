// Token files. Half of the inputs get a header whose checksum fits, so that what lies behind it is
// reached.
#include <cstring>

#include "cistern/base/hash.h"
#include "cistern/data/token_cache.h"
#include "fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static cistern::FuzzFile file;
  return cistern::FuzzOne(data, size, [](std::string_view input) {
    std::string bytes(input);
    cistern::TokenHeader header;
    if (bytes.size() >= sizeof header && bytes.size() % 2 == 0) {
      std::memcpy(&header, bytes.data(), sizeof header);
      header.header_checksum =
          cistern::XxHash64({bytes.data(), offsetof(cistern::TokenHeader, header_checksum)});
      std::memcpy(bytes.data(), &header, sizeof header);
    }
    const cistern::TokenFile tokens(file.Holding(bytes));
    std::vector<int64_t> ids(size_t(tokens.size()));
    tokens.Copy(0, tokens.size(), ids.data());
    for (const int64_t id : ids) {
      if (id < 0 || uint64_t(id) >= tokens.header().vocab_size) __builtin_trap();
    }
    tokens.Verify();
  });
}
