#include "cistern/base/random.h"

#include <gtest/gtest.h>

#include <cmath>

namespace cistern {
namespace {

TEST(Philox, KnownAnswers) {  // Random123's published vectors
  EXPECT_EQ(Philox(0, 0, 0),
            (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox(~0ull, ~0ull, ~0ull),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
}

TEST(Random, PositionIsTheWholeState) {
  Random a(7), b(7);
  for (int i = 0; i < 5; ++i) a.Next();
  b.set_position(5);
  EXPECT_EQ(a.Next(), b.Next());
  EXPECT_NE(Random(7).Next(), Random(8).Next());
  EXPECT_NE(Random(7, 0).Next(), Random(7, 1).Next());
}

TEST(Random, Moments) {
  Random r(1);
  double sum = 0, squares = 0;
  const int n = 100000;
  for (int i = 0; i < n; ++i) {
    const double x = r.Normal();
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / n, 0, 0.02);
  EXPECT_NEAR(squares / n, 1, 0.03);
  for (int i = 0; i < 1000; ++i) {
    const int64_t k = r.Below(7);
    EXPECT_TRUE(k >= 0 && k < 7);
  }
}

}  // namespace
}  // namespace cistern
