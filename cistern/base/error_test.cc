#include "cistern/base/error.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace cistern {
namespace {

TEST(UnknownName, SuggestsTheNearest) {
  EXPECT_EQ(UnknownName("mechanism", "late", {"softmax", "latte"}),
            "unknown mechanism 'late'; did you mean 'latte'?");
  EXPECT_EQ(UnknownName("mechanism", "zzzzzzzz", {"softmax", "latte"}),
            "unknown mechanism 'zzzzzzzz'; known are: softmax, latte");
}

TEST(Messages, NanHasNoSign) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(StrCat("x ", std::copysign(nan, -1.0), " ", std::copysign(float(nan), -1.0F), " ",
                   std::copysign(nan, 1.0)),
            "x nan nan nan");
  EXPECT_EQ(StrCat(-0.5, " ", -std::numeric_limits<double>::infinity()), "-0.5 -inf");
}

TEST(Errors, UsageErrorIsAnError) { EXPECT_THROW(FailUsage("x ", 1), Error); }

}  // namespace
}  // namespace cistern
