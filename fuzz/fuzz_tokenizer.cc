#include "cistern/text/tokenizer.h"
#include "fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return cistern::FuzzOne(data, size, [](std::string_view json) {
    const auto tokenizer = cistern::ParseTokenizer(json, "fuzz");
    const std::string text = "Hello, w\xc3\xb6rld 123\n\n  \xff\x00 x";
    if (tokenizer->Decode(tokenizer->Encode(text)) != text) __builtin_trap();
    const auto again = cistern::ParseTokenizer(tokenizer->ToJson(), "again");
    if (again->ToJson() != tokenizer->ToJson()) __builtin_trap();
  });
}
