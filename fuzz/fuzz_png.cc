// Grey PNG: what is read is written and read again unchanged.
#include "cistern/io/png.h"
#include "fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return cistern::FuzzOne(data, size, [](std::string_view bytes) {
    const cistern::GreyImage image = cistern::ReadPng(bytes, "fuzz");
    if (int64_t(image.pixels.size()) != image.height * image.width) __builtin_trap();
    const cistern::GreyImage again = cistern::ReadPng(cistern::PngBytes(image), "again");
    if (again.pixels != image.pixels || again.width != image.width) __builtin_trap();
  });
}
