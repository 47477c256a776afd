// Encoding of arbitrary text, whole and in pieces, by bytes and by a learned vocabulary.
#include <algorithm>

#include "cistern/text/tokenizer.h"
#include "fuzz/fuzz_input.h"

namespace {

std::unique_ptr<cistern::Tokenizer> Learned() {
  std::string text;
  for (int i = 0; i < 300; ++i)
    text +=
        "line " + std::to_string(i * i % 97) + " of the book's caf\xc3\xa9  tells \xe4\xb8\xad\n";
  bool given = false;
  return cistern::TrainBpe(
      [&]() -> std::string_view {
        if (given) return {};
        given = true;
        return text;
      },
      400);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto bytes = cistern::MakeByteTokenizer(), bpe = Learned();
  return cistern::FuzzOne(data, size, [](std::string_view text) {
    if (text.empty()) return;
    const size_t piece = size_t(uint8_t(text[0])) % 17 + 1;
    text.remove_prefix(1);
    for (const cistern::Tokenizer* tokenizer : {bytes.get(), bpe.get()}) {
      const std::vector<int32_t> whole = tokenizer->Encode(text);
      if (tokenizer->Decode(whole) != text) __builtin_trap();
      cistern::StreamEncoder stream(*tokenizer);
      std::vector<int32_t> parts;
      const auto add = [&](const std::vector<int32_t>& ids) {
        parts.insert(parts.end(), ids.begin(), ids.end());
      };
      for (size_t i = 0; i < text.size(); i += piece) add(stream.Push(text.substr(i, piece)));
      add(stream.Finish());
      if (parts != whole) __builtin_trap();
    }
    cistern::Utf8Stream shown;
    std::string out;
    for (size_t i = 0; i < text.size(); i += piece) out += shown.Push(text.substr(i, piece));
    out += shown.Finish();
    cistern::Utf8Stream at_once;
    if (out != at_once.Push(text) + at_once.Finish()) __builtin_trap();
  });
}
