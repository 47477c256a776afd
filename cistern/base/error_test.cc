#include "cistern/base/error.h"

#include <gtest/gtest.h>

namespace cistern {
namespace {

TEST(UnknownName, SuggestsTheNearest) {
  EXPECT_EQ(UnknownName("mechanism", "late", {"softmax", "latte"}),
            "unknown mechanism 'late'; did you mean 'latte'?");
  EXPECT_EQ(UnknownName("mechanism", "zzzzzzzz", {"softmax", "latte"}),
            "unknown mechanism 'zzzzzzzz'; known are: softmax, latte");
}

TEST(Errors, UsageErrorIsAnError) { EXPECT_THROW(FailUsage("x ", 1), Error); }

}  // namespace
}  // namespace cistern
