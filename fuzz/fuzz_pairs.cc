// AAN's pairs: every text lies within its line.
#include "cistern/data/text_pairs.h"
#include "fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return cistern::FuzzOne(data, size, [](std::string_view bytes) {
    static cistern::FuzzFile file;
    for (const bool skip : {false, true}) {
      const auto pairs = cistern::OpenPairFile(file.Holding(bytes), {.skip_bad = skip});
      for (int64_t i = 0; i < pairs->size(); ++i) {
        std::string first, second;
        pairs->Read(i, 1 << 20, &first, &second);
        if ((first + second).find_first_of("\t\n") != std::string::npos) __builtin_trap();
        if (pairs->Label(i) != 0 && pairs->Label(i) != 1) __builtin_trap();
      }
    }
  });
}
