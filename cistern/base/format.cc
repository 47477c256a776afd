#include "cistern/base/format.h"

#include <cmath>
#include <cstdio>

namespace cistern {
namespace {

std::string Printed(const char* format, int digits, double x) {
  if (std::isnan(x)) return "nan";
  char text[512];  // the longest double in %f has 309 digits before the point
  std::snprintf(text, sizeof text, format, digits, x);
  return text;
}

}  // namespace

std::string Fixed(double x, int digits) { return Printed("%.*f", digits, x); }
std::string Significant(double x, int digits) { return Printed("%.*g", digits, x); }

std::string Thousands(int64_t x) {
  std::string text = std::to_string(x);
  const size_t first = x < 0 ? 1 : 0;
  for (size_t i = text.size(); i > first + 3;) text.insert(i -= 3, ",");
  return text;
}

std::string ByteCount(double bytes) {
  if (bytes < 10e3) return Fixed(bytes, 0) + " B";
  if (bytes < 10e6) return Fixed(bytes / 1e3, 0) + " kB";
  if (bytes < 10e9) return Fixed(bytes / 1e6, 0) + " MB";
  return Fixed(bytes / 1e9, 1) + " GB";
}

std::string Seconds(double seconds) {
  if (seconds < 120) return Fixed(seconds, 0) + " s";
  if (seconds < 120 * 60) return Fixed(seconds / 60, 0) + " min";
  return Fixed(seconds / 3600, 1) + " h";
}

}  // namespace cistern
