// config.json: versions, groups of stacks, head groups, options of mechanisms.
#include "cistern/io/json_text.h"
#include "cistern/models/config.h"
#include "fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return cistern::FuzzOne(data, size, [](std::string_view text) {
    cistern::ModelConfig config =
        cistern::ReadModelConfig(cistern::ParseJson(text, "fuzz"), "fuzz");
    const cistern::Json written = config.Describe().Write();
    cistern::ModelConfig again = cistern::ReadModelConfig(written, "again");
    if (again.Describe().Write() != written || again.Summary() != config.Summary())
      __builtin_trap();
  });
}
