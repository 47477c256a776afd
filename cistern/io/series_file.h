#pragma once
// Time series as the UCR and UEA archives have them (.ts, as sktime and aeon read and write it),
// plain, .gz or .xz. Lines of `#` are comments, lines of `@` say what is in the file, and after
// `@data` each line is a series: its channels between `:`, their values between `,`, then the
// label.
//   @classLabel true a b     labels are of these classes; @targetLabel true: they are numbers
//   @dimensions 2            channels; not said: those of the first series
//   @seriesLength 50         where @equalLength is true, every channel has that many values
//   ?, NaN                   a value that is missing
#include <cstdint>
#include <string>
#include <vector>

namespace cistern {

struct SeriesFile {
  int64_t channels = 0;
  bool regression = false;            // labels are numbers
  std::vector<std::string> classes;   // of the header; none for regression
  std::vector<float> values;          // of all series, [steps,channels] each; NaN: missing
  std::vector<int64_t> begins = {0};  // of each series, in steps; one more than there are series
  std::vector<std::string> labels;
  std::vector<int64_t> lines;  // where each is in the file
  int64_t skipped = 0, missing = 0;

  int64_t size() const { return int64_t(labels.size()); }
  int64_t Steps(int64_t i) const { return begins[size_t(i) + 1] - begins[size_t(i)]; }
  const float* At(int64_t i) const { return values.data() + begins[size_t(i)] * channels; }
};

// Error "file.ts:12: ..." with what was expected: a value that is no number, channels of different
// lengths or of another number than the file says, a label that is no class of it or no number, no
// `@data`; timestamps, which this reader does not take. `skip_bad`: such series (not the header)
// are counted and passed over.
SeriesFile ReadSeriesFile(const std::string& path, bool skip_bad);

}  // namespace cistern
