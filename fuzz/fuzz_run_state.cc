// trainer.json of a checkpoint. The checksum of an input that is an object is mended, so that what
// lies behind it is reached.
#include "cistern/base/hash.h"
#include "cistern/io/json_text.h"
#include "cistern/train/run_state.h"
#include "fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return cistern::FuzzOne(data, size, [](std::string_view text) {
    cistern::Json json = cistern::ParseJson(text, "fuzz");
    if (json.is_object()) {
      json.erase("checksum");
      json["checksum"] = cistern::HexText(cistern::XxHash64(cistern::JsonLine(json)));
    }
    const cistern::RunState state = cistern::ParseRunState(cistern::JsonLine(json), "fuzz");
    const std::string written = cistern::RunStateText(state);
    if (cistern::RunStateText(cistern::ParseRunState(written, "again")) != written)
      __builtin_trap();
  });
}
