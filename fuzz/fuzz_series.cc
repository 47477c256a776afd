// Series of tables, in both layouts, with labels and without, and as they are held for reading.
#include <cmath>

#include "cistern/io/series_store.h"
#include "fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using Format = cistern::SeriesFormat;
  static cistern::FuzzFile csv(".csv"), jsonl(".jsonl");
  for (cistern::FuzzFile* const file : {&csv, &jsonl}) {
    for (int kind = 0; kind < 12; ++kind) {
      cistern::FuzzOne(data, size, [&](std::string_view bytes) {
        Format format;
        format.layout = kind % 2 ? Format::Layout::kSteps : Format::Layout::kAuto;
        format.labels = kind % 3 == 0   ? Format::Labels::kNone
                        : kind % 3 == 1 ? Format::Labels::kClasses
                                        : Format::Labels::kNumbers;
        format.skip_bad = kind >= 6;
        const cistern::SeriesStore store(file->Holding(bytes), format, "/tmp", 64);
        if (store.size() < 1 || store.channels() < 1) __builtin_trap();
        for (int64_t i = 0; i < store.size(); ++i) {
          if (store.Steps(i) < 1 || store.Line(i) < 1) __builtin_trap();
          std::string values(size_t(store.Steps(i) * store.channels()) * sizeof(double), '\0');
          auto* const out = reinterpret_cast<double*>(values.data());
          store.Read(i, 0, store.Steps(i), out);
          for (int64_t j = 0; j < store.Steps(i) * store.channels(); ++j) {
            if (std::isinf(out[j])) __builtin_trap();
          }
          if (format.labels == Format::Labels::kClasses && store.Label(i) < 0) __builtin_trap();
          if (format.labels == Format::Labels::kNumbers && !std::isfinite(store.Number(i)))
            __builtin_trap();
        }
      });
    }
  }
  return 0;
}
