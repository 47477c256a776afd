// Packed Pathfinder files: whatever is opened can be read, every image.
#include <vector>

#include "cistern/data/pathfinder.h"
#include "fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return cistern::FuzzOne(data, size, [](std::string_view bytes) {
    static cistern::FuzzFile file;
    const auto set = cistern::OpenPathfinder(file.Holding(bytes));
    std::vector<uint8_t> image(size_t(set->side() * set->side()));
    for (int64_t i = 0; i < set->size(); ++i) {
      set->Read(i, image.data());
      if (set->Label(i) > 1) __builtin_trap();
    }
  });
}
