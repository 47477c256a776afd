// ListOps TSV: what is read with its values checked is written and read again unchanged.
#include <sstream>

#include "cistern/data/listops.h"
#include "fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return cistern::FuzzOne(data, size, [](std::string_view text) {
    for (const bool check : {false, true}) {
      const cistern::ListOpsReadOptions options{.max_length = check ? 0 : 7, .check = check};
      std::istringstream stream{std::string(text)};
      const cistern::ListOpsSet set = cistern::ReadListOps(stream, "fuzz", options);
      for (int64_t i = 0; i < set.size(); ++i) {
        if (set.Row(i).empty() || set.labels[size_t(i)] > 9) __builtin_trap();
        if (check && cistern::EvaluateListOps(set.Row(i)) != set.labels[size_t(i)])
          __builtin_trap();
      }
      if (!check) continue;
      std::string written = "Source\tTarget\n";
      for (int64_t i = 0; i < set.size(); ++i)
        written +=
            cistern::ListOpsText(set.Row(i)) + "\t" + std::to_string(set.labels[size_t(i)]) + "\n";
      std::istringstream second(written);
      const cistern::ListOpsSet again = cistern::ReadListOps(second, "again", options);
      if (again.tokens != set.tokens || again.labels != set.labels) __builtin_trap();
    }
  });
}
