#include <cstring>

#include "cistern/io/atomic_file.h"
#include "cistern/io/safetensors.h"
#include "fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return cistern::FuzzOne(data, size, [](std::string_view bytes) {
    const cistern::SafetensorsFile file(bytes, "fuzz");
    unsigned sum = 0;  // every byte handed out can be read
    for (const auto& entry : file.entries()) {
      if (file.Find(entry.name) != &entry) __builtin_trap();
      for (int64_t i = 0; i < entry.bytes; ++i)
        sum += static_cast<const unsigned char*>(entry.data)[i];
    }
    if (sum == 0xFFFFFFFFu) __builtin_trap();
    if (sum % 16 != 0) return;  // files are slow
    // What is read is written, and read again unchanged, with a checksum; another bit is seen.
    static const std::string path = "/tmp/cistern-fuzz-" + std::to_string(getpid());
    cistern::WriteSafetensors(path, file.entries(), file.metadata());
    std::string again = cistern::ReadFile(path);
    {
      const cistern::SafetensorsFile copy(again, "again");
      if (!copy.checked() || copy.entries().size() != file.entries().size()) __builtin_trap();
    }
    again.back() = char(again.back() ^ 1);
    try {
      const cistern::SafetensorsFile changed(again, "changed");
      // The last byte of a file without data is a blank or the header's end.
      if (!file.entries().empty() && file.entries().back().bytes > 0) __builtin_trap();
    } catch (const cistern::Error&) {
    }
  });
}
