#include "cistern/io/series_source.h"

#include <cmath>
#include <filesystem>
#include <limits>

#include "cistern/base/error.h"

namespace cistern {

bool FiniteInFloat(double value) { return std::isfinite(float(value)); }

bool ParseSeriesValue(std::string_view cell, bool empty_is_missing, double* value) {
  const auto is = [&](char a, size_t i) { return (cell[i] | 0x20) == a; };
  if ((cell.empty() && empty_is_missing) || cell == "?" ||
      (cell.size() == 3 && is('n', 0) && is('a', 1) && is('n', 2))) {
    *value = std::numeric_limits<double>::quiet_NaN();
    return true;
  }
  return ParseFinite(cell, value) && FiniteInFloat(*value);
}

bool IsTsFile(const std::string& path) {
  return path.ends_with(".ts") || path.ends_with(".ts.gz") || path.ends_with(".ts.xz");
}

bool IsNpyFile(const std::string& path) { return path.ends_with(".npy"); }

std::string NpyLabelsOf(const std::string& path) {
  const std::filesystem::path file(path);
  const std::string name = file.filename().string();
  const std::string labels = name.starts_with("X_")
                                 ? "y_" + name.substr(2)
                                 : name.substr(0, name.size() - 4) + "_labels.npy";
  return (file.parent_path() / labels).string();
}

std::unique_ptr<SeriesSource> OpenSeries(const std::string& path, const SeriesFormat& format) {
  if (IsTsFile(path)) return OpenTsSeries(path, format);
  if (IsNpyFile(path)) return OpenNpySeries(path, format);
  TableReader::Format table;
  if (!TableReader::FormatOf(path, &table))
    FailUsage(path,
              ": a file of series ends in .ts, .csv, .tsv or .jsonl, each also .gz or .xz, or in "
              ".npy");
  return OpenTableSeries(path, format);
}

}  // namespace cistern
