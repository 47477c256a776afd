#include "cistern/io/json_text.h"
#include "cistern/io/jsonl.h"
#include "fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return cistern::FuzzOne(data, size, [](std::string_view text) {
    std::string again;
    const std::vector<cistern::Json> lines = cistern::ParseJsonl(text, "fuzz");
    for (const cistern::Json& line : lines) again += cistern::JsonLine(line) + "\n";
    if (cistern::ParseJsonl(again, "again") != lines) __builtin_trap();  // what we write, we read
  });
}
