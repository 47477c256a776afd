// GPT-2's two files, with a NUL byte between them.
#include "cistern/text/tokenizer.h"
#include "fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return cistern::FuzzOne(data, size, [](std::string_view both) {
    const size_t nul = std::min(both.find('\0'), both.size());
    const auto tokenizer =
        cistern::ParseGpt2(both.substr(0, nul), "encoder.json",
                           both.substr(std::min(nul + 1, both.size())), "vocab.bpe");
    const std::string text = "the ship, 12 \xf0\x9f\x8c\x8d<|endoftext|> sea";
    if (tokenizer->Decode(tokenizer->Encode(text)) != text) __builtin_trap();
  });
}
