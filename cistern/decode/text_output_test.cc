#include "cistern/decode/text_output.h"

#include <gtest/gtest.h>

#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

// Everything that is shown when `text` comes in pieces of `size` bytes.
std::string Shown(const std::vector<std::string>& stops, const std::string& text, size_t size) {
  TextOutput output(stops);
  std::string shown;
  for (size_t i = 0; i < text.size() && !output.stopped(); i += size)
    shown += output.Push(std::string_view(text).substr(i, size));
  return shown + output.Finish();
}

TEST(TextOutput, StopsAreFoundWhereverPiecesAreCut) {
  const std::string text = "one aab aaab END two";
  for (size_t size = 1; size <= text.size(); ++size) {
    EXPECT_EQ(Shown({"END"}, text, size), "one aab aaab ") << size;
    EXPECT_EQ(Shown({"aaab"}, text, size), "one aab ") << size;
    EXPECT_EQ(Shown({"two", "b aaab EN", "aab "}, text, size), "one ") << size;
    EXPECT_EQ(Shown({"ab aaab E", "aaa"}, text, size), "one aab ")
        << size;  // the one that ends first
    EXPECT_EQ(Shown({"aaab", "ab"}, text, size), "one a") << size;
    EXPECT_EQ(Shown({"no such", "two."}, text, size), text) << size;  // held back, then shown
    EXPECT_EQ(Shown({}, text, size), text) << size;
  }
}

TEST(TextOutput, HoldsBackOnlyWhatMayBeginAStop) {
  TextOutput output({"END"});
  EXPECT_EQ(output.Push("a E"), "a ");
  EXPECT_EQ(output.Push("N"), "");
  EXPECT_EQ(output.Push("E"), "EN");
  EXPECT_EQ(output.Push("x"), "Ex");
  EXPECT_FALSE(output.stopped());
}

TEST(TextOutput, NeverSplitsACharacter) {
  const std::string text = "caf\xC3\xA9 \xF0\x9F\x98\x80!";
  for (size_t size = 1; size <= text.size(); ++size) EXPECT_EQ(Shown({"\xC3z"}, text, size), text);
  TextOutput output({});
  EXPECT_EQ(output.Push("\xF0\x9F"), "");
  EXPECT_EQ(output.Push("\x98\x80"), "\xF0\x9F\x98\x80");
  EXPECT_EQ(output.Push("\xC3"), "");
  EXPECT_EQ(output.Finish(), "\xEF\xBF\xBD");  // half a character at the end: U+FFFD
}

TEST(TextOutput, AnEmptyStopIsRefused) {
  EXPECT_NE(ErrorMessage([] {
              TextOutput({"a", ""});
            }).find("must not be empty"),
            std::string::npos);
}

}  // namespace
}  // namespace cistern
