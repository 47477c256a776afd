#include "cistern/tensors/parallel_rows.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

#include <vector>

#include "cistern/base/error.h"
#include "cistern/tensors/device.h"

namespace cistern {
namespace {

TEST(ForRows, EachRowOnceTheSameForTheCallersModes) {
  const at::Tensor x = at::randn({16, 8, 8}).requires_grad_();
  std::vector<at::Tensor> plain(16), cast(16);
  ForRows(16, [&](int64_t row) { plain[size_t(row)] = at::matmul(x[row], x[row]); });
  {
    const BFloat16Scope scope(true, at::kCPU);
    ForRows(16, [&](int64_t row) { cast[size_t(row)] = at::matmul(x[row], x[row]); });
    EXPECT_EQ(at::matmul(x[0], x[0]).scalar_type(), at::kBFloat16);
  }
  for (size_t row = 0; row < 16; ++row) {
    EXPECT_FALSE(plain[row].requires_grad());
    EXPECT_TRUE(at::equal(plain[row], cast[row]));
  }
  ForRows(0, [](int64_t) { FAIL(); });
}

TEST(ForRows, TheFirstErrorIsThrown) {
  const auto fails = [](int64_t row) {
    if (row == 3 || row == 14) Fail("row ", row);
  };
  try {
    ForRows(16, fails);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "row 3");
  }
}

}  // namespace
}  // namespace cistern
