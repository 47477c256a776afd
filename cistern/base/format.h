#pragma once
// Numbers as people read them. NaN has no sign: what a processor gives it says nothing.
#include <cstdint>
#include <string>

namespace cistern {

std::string Fixed(double x, int digits);        // 3.142
std::string Significant(double x, int digits);  // 3.142, 1e+09
std::string Thousands(int64_t x);               // 12,345
std::string ByteCount(double bytes);            // 512 B, 305 kB, 1.2 GB
std::string Seconds(double seconds);            // 8 s, 12 min, 1.5 h

}  // namespace cistern
