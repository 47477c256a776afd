// Time series of the UCR and UEA archives: whole series of as many values as their length says.
#include <cmath>

#include "cistern/io/series_source.h"
#include "fuzz/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using Labels = cistern::SeriesFormat::Labels;
  for (const Labels labels : {Labels::kClasses, Labels::kNumbers, Labels::kNone}) {
    for (const bool skip : {false, true}) {
      cistern::FuzzOne(data, size, [&](std::string_view bytes) {
        static cistern::FuzzFile file;
        cistern::SeriesFormat format;
        format.labels = labels;
        format.skip_bad = skip;
        const auto source = cistern::OpenTsSeries(file.Holding(bytes), format);
        for (cistern::SeriesPiece piece; source->Next(&piece);) {
          if (!piece.first || piece.steps < 1 || piece.line < 1 || source->channels().empty())
            __builtin_trap();
          if (piece.values.size() != size_t(piece.steps) * source->channels().size())
            __builtin_trap();
          for (const double x : piece.values) {
            if (std::isinf(x)) __builtin_trap();
          }
        }
      });
    }
  }
  return 0;
}
