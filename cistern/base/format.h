#pragma once
// Numbers as people read them. NaN has no sign: what a processor gives it says nothing.
#include <cstdint>
#include <string>

namespace cistern {

std::string Fixed(double x, int digits);        // 3.142
std::string Significant(double x, int digits);  // 3.142, 1e+09
std::string Trimmed(double x, int digits);      // 3.14, 3.1, 3: Fixed without zeros at the end
std::string ThreeDigits(double x);              // 1234, 12.4, 0.532: of a rate
// 0.004, 16384, 250k, 2M, 1e-08: beside an axis. Whole numbers below 10^7 are never rounded.
std::string Tick(double x);
std::string Thousands(int64_t x);     // 12,345
std::string ByteCount(double bytes);  // 512 B, 305 kB, 1.2 GB
std::string Seconds(double seconds);  // 8 s, 12 min, 1.5 h
std::string Clock(double seconds);    // 4:09, 1:02:03, 3d 04:00

}  // namespace cistern
