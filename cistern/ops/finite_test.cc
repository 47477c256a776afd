#include "cistern/ops/finite.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>

#include "cistern/ops/testing.h"

namespace cistern::ops {
namespace {

TEST(Finite, PaddingIsBelowLooksAtPaddingAlone) {
  const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
  const at::Tensor lengths = at::tensor({5, 0, 9, 2}, at::kLong);
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    for (const bool heads_last : {false, true}) {
      const at::Tensor x = testing::WithLayout(at::ones({4, 2, 6, 3}, dtype).mul(-9), heads_last);
      EXPECT_TRUE(PaddingIsBelow(x, lengths, 10));
      EXPECT_FALSE(PaddingIsBelow(x, lengths, 9));
      for (const double value : {nan, inf, -inf, 1e6}) {
        at::Tensor real = x.clone(), pad = x.clone();
        real[0].narrow(1, 0, 5).fill_(value), real[2].fill_(value);
        EXPECT_TRUE(PaddingIsBelow(real, lengths, 10)) << value;
        pad[3][1][2][2] = value;
        EXPECT_FALSE(PaddingIsBelow(pad, lengths, 10)) << value;
      }
    }
  }
}

TEST(Finite, PaddingIsBelowSaysNoWhereItCannotLook) {
  const at::Tensor lengths = at::tensor({2}, at::kLong);
  EXPECT_TRUE(PaddingIsBelow(at::zeros({1, 2, 6, 3}), lengths, 10));
  EXPECT_FALSE(PaddingIsBelow(at::zeros({1, 2, 6, 3}, at::kMeta), lengths, 10));
  EXPECT_FALSE(PaddingIsBelow(at::zeros({1, 2, 6, 3}, at::kHalf), lengths, 10));
  EXPECT_FALSE(PaddingIsBelow(at::zeros({1, 2, 3, 6}).transpose(2, 3), lengths, 10));
}

TEST(Finite, AllOfThem) {
  const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
  for (const int64_t size : {3, 4000}) {  // by a loop, by torch
    at::Tensor x = at::ones({1, 2, 2, size});
    EXPECT_TRUE(AllFinite(x) && AllBelowInfinity(x));
    x[0][1][0][2] = -inf;
    EXPECT_FALSE(AllFinite(x));
    EXPECT_TRUE(AllBelowInfinity(x));
    for (const double value : {nan, inf}) {
      x[0][1][0][2] = value;
      EXPECT_FALSE(AllFinite(x) || AllBelowInfinity(x));
    }
  }
}

}  // namespace
}  // namespace cistern::ops
