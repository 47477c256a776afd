#include "cistern/base/terminal.h"

#include <gtest/gtest.h>

#include "cistern/base/progress.h"

namespace cistern {
namespace {

TEST(Printable, ControlsAreShown) {
  EXPECT_EQ(Printable("a\n\tb \xc3\xa9"), "a\n\tb \xc3\xa9");
  EXPECT_EQ(Printable("\x1b]0;x\a\x7f"), "\\x1b]0;x\\x07\\x7f");
  EXPECT_EQ(Printable("\xc2\x9b"
                      "2J \xc2\xa0"),
            "\\x9b"
            "2J \xc2\xa0");
  EXPECT_EQ(Printable(std::string_view("\0", 1)), "\\x00");
}

TEST(Note, GoesToStandardErrorUnlessQuiet) {
  testing::internal::CaptureStderr();
  Note("odd \x1b");
  SetQuiet(true);
  Note("not this");
  SetQuiet(false);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "note: odd \\x1b\n");
}

}  // namespace
}  // namespace cistern
