#include "cistern/base/format.h"

#include <algorithm>
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

std::string Trimmed(double x, int digits) {
  std::string text = Fixed(x, digits);
  if (text.find('.') == std::string::npos) return text;
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text == "-0" ? "0" : text;
}

std::string ThreeDigits(double x) { return Fixed(x, x >= 100 ? 0 : x >= 10 ? 1 : x >= 1 ? 2 : 3); }

std::string Tick(double x) {
  if (x == 0) return "0";
  const double magnitude = std::abs(x);
  const bool exact = magnitude < 1e5 || (magnitude < 1e7 && std::fmod(x, 1000) != 0);
  if (exact && x == std::floor(x)) return Fixed(x, 0);
  if (magnitude < 1e4 || magnitude >= 1e15) return Significant(x, magnitude >= 1e-4 ? 6 : 3);
  size_t power = 0;
  double scaled = x;
  for (; std::abs(scaled) >= 1000 && power < 4; ++power) scaled /= 1000;
  return Significant(scaled, 4) + (power > 0 ? std::string(1, "kMGT"[power - 1]) : "");
}

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

std::string Clock(double seconds) {
  const int64_t s = std::llround(std::clamp(seconds, 0.0, 1e9));
  char text[64];
  if (s >= 86400) {
    std::snprintf(text, sizeof(text), "%lldd %02lld:%02lld", (long long)(s / 86400),
                  (long long)(s / 3600 % 24), (long long)(s / 60 % 60));
  } else if (s >= 3600) {
    std::snprintf(text, sizeof(text), "%lld:%02lld:%02lld", (long long)(s / 3600),
                  (long long)(s / 60 % 60), (long long)(s % 60));
  } else {
    std::snprintf(text, sizeof(text), "%lld:%02lld", (long long)(s / 60), (long long)(s % 60));
  }
  return text;
}

}  // namespace cistern
