#include "cistern/base/format.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace cistern {
namespace {

TEST(Format, NumbersAsPeopleReadThem) {
  EXPECT_EQ(Fixed(3.14159, 3), "3.142");
  EXPECT_EQ(Fixed(-2.0, 0), "-2");
  EXPECT_EQ(Significant(1234567, 3), "1.23e+06");
  EXPECT_EQ(Trimmed(3.14159, 2), "3.14");
  EXPECT_EQ(Trimmed(2.5, 2), "2.5");
  EXPECT_EQ(Trimmed(100, 2), "100");
  EXPECT_EQ(Trimmed(100, 0), "100");
  EXPECT_EQ(Trimmed(-0.001, 2), "0");
  EXPECT_EQ(ThreeDigits(1234.4), "1234");
  EXPECT_EQ(ThreeDigits(12.44), "12.4");
  EXPECT_EQ(ThreeDigits(1.5), "1.50");
  EXPECT_EQ(ThreeDigits(0.5321), "0.532");
  EXPECT_EQ(Tick(0), "0");
  EXPECT_EQ(Tick(0.004), "0.004");
  EXPECT_EQ(Tick(16384), "16384");
  EXPECT_EQ(Tick(1234567), "1234567");
  EXPECT_EQ(Tick(250e3), "250k");
  EXPECT_EQ(Tick(-2e6), "-2M");
  EXPECT_EQ(Tick(1e-8), "1e-08");
  EXPECT_EQ(Tick(3e15), "3e+15");
  EXPECT_EQ(Thousands(0), "0");
  EXPECT_EQ(Thousands(999), "999");
  EXPECT_EQ(Thousands(1000), "1,000");
  EXPECT_EQ(Thousands(-1234567), "-1,234,567");
  EXPECT_EQ(ByteCount(9999), "9999 B");
  EXPECT_EQ(ByteCount(305e3), "305 kB");
  EXPECT_EQ(ByteCount(12e6), "12 MB");
  EXPECT_EQ(ByteCount(12.34e9), "12.3 GB");
  EXPECT_EQ(Seconds(59.6), "60 s");
  EXPECT_EQ(Seconds(600), "10 min");
  EXPECT_EQ(Seconds(5 * 3600), "5.0 h");
  EXPECT_EQ(Clock(249), "4:09");
  EXPECT_EQ(Clock(3723), "1:02:03");
  EXPECT_EQ(Clock(3 * 86400 + 4 * 3600), "3d 04:00");
}

TEST(Format, NanHasNoSign) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(Fixed(nan, 2), "nan");
  EXPECT_EQ(Fixed(-nan, 2), "nan");
  EXPECT_EQ(Significant(std::copysign(nan, -1.0), 4), "nan");
}

TEST(Format, TheLargestDoubleFits) {
  EXPECT_EQ(Fixed(std::numeric_limits<double>::max(), 2).size(), 312u);
}

}  // namespace
}  // namespace cistern
