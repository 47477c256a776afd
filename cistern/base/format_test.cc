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
