#include "cistern/tensors/torch_error.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "cistern/base/error.h"

namespace cistern {
namespace {

template <class F>
std::string FirstLineOf(F&& f) {
  try {
    f();
  } catch (const std::exception& e) {
    return FirstLine(e);
  }
  return "no error";
}

TEST(TorchError, FirstLine) {
  EXPECT_EQ(FirstLineOf([] { TORCH_CHECK(false, "expected ", 3); }), "expected 3");
  EXPECT_EQ(FirstLineOf([] { TORCH_CHECK(false, "expected 3\nof 4"); }), "expected 3");
  EXPECT_EQ(FirstLineOf([] { Fail("a file\nis gone"); }), "a file");
  EXPECT_EQ(FirstLineOf([] { Fail(""); }), "");
}

}  // namespace
}  // namespace cistern
