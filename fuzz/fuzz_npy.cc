#include "cistern/io/npy.h"
#include "fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return cistern::FuzzOne(data, size, [](std::string_view bytes) {
    const cistern::NpyArray array = cistern::ParseNpy(bytes, "fuzz");
    if (array.bytes > int64_t(bytes.size()) || array.size() < 0) __builtin_trap();
  });
}
