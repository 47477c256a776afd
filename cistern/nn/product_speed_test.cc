#include "cistern/nn/product_speed.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

#include <cmath>

namespace cistern {
namespace {

TEST(ProductSpeed, MeasuresBothAndLeavesNothingBehind) {
  const ProductSpeed speed = MeasureProducts(64, 32, 128);
  for (const double x : {speed.float32, speed.bfloat16}) {
    EXPECT_TRUE(std::isfinite(x) && x > 0) << x;
    EXPECT_LT(x, 1e6);  // no machine does a petaflop here
  }
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST(ProductSpeed, DecidesWithAMargin) {
  EXPECT_TRUE((ProductSpeed{200, 412}).PrefersBFloat16());
  EXPECT_FALSE((ProductSpeed{270, 160}).PrefersBFloat16());
  EXPECT_FALSE((ProductSpeed{200, 210}).PrefersBFloat16());
}

}  // namespace
}  // namespace cistern
