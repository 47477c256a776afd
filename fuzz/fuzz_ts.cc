// Time series of the UCR and UEA archives: whole series of as many values as their length says.
#include <cmath>

#include "cistern/io/series_file.h"
#include "fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return cistern::FuzzOne(data, size, [](std::string_view bytes) {
    static cistern::FuzzFile file;
    for (const bool skip : {false, true}) {
      const cistern::SeriesFile series = cistern::ReadSeriesFile(file.Holding(bytes), skip);
      if (series.size() < 1 || series.channels < 1) __builtin_trap();
      if (int64_t(series.values.size()) != series.begins.back() * series.channels) __builtin_trap();
      for (int64_t i = 0; i < series.size(); ++i) {
        if (series.Steps(i) < 1 || series.lines[size_t(i)] < 1) __builtin_trap();
      }
      for (const float x : series.values) {
        if (std::isinf(x)) __builtin_trap();
      }
    }
  });
}
