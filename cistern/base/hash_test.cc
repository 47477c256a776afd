#include "cistern/base/hash.h"

#include <gtest/gtest.h>

#include <string>

namespace cistern {
namespace {

// Made with the reference implementation (the xxhash package of PyPI).
TEST(XxHash64, IsThatOfTheSpecification) {
  EXPECT_EQ(HexText(XxHash64("")), "ef46db3751d8e999");
  EXPECT_EQ(HexText(XxHash64("a")), "d24ec4f1a98c6e5b");
  EXPECT_EQ(HexText(XxHash64("abc")), "44bc2cf5ad770999");
  EXPECT_EQ(HexText(XxHash64("abc", 7)), "9e755206156676d7");
  std::string bytes;
  for (int i = 0; i < 101; ++i) bytes += char(i);
  const std::string_view all = bytes;
  EXPECT_EQ(HexText(XxHash64(all.substr(0, 31), 1)), "f031031d65977dfc");
  EXPECT_EQ(HexText(XxHash64(all.substr(0, 32), 1)), "d74e6766ce9dba94");
  EXPECT_EQ(HexText(XxHash64(all, 12345678901234567u)), "2c70ff74552cc5f3");
}

TEST(XxHash64, EveryByteAndLengthCounts) {
  std::string bytes(70, 'x');
  for (size_t length = 1; length <= bytes.size(); ++length) {
    const uint64_t hash = XxHash64(std::string_view(bytes).substr(0, length));
    EXPECT_NE(hash, XxHash64(std::string_view(bytes).substr(0, length - 1)));
    for (size_t i = 0; i < length; ++i) {
      std::string changed = bytes.substr(0, length);
      changed[i] ^= 1;
      EXPECT_NE(XxHash64(changed), hash) << length << " " << i;
    }
  }
}

TEST(XxHash64Stream, PiecesDoNotMatter) {
  const std::string text = "the quick brown fox jumps over the lazy dog and away";
  EXPECT_EQ(XxHash64Stream().Value(), XxHash64(""));
  for (size_t piece = 1; piece < text.size(); ++piece) {
    XxHash64Stream stream;
    for (size_t i = 0; i < text.size(); i += piece) stream.Add(text.substr(i, piece));
    EXPECT_EQ(stream.Value(), XxHash64(text)) << piece;
  }
}

TEST(HexText, HasSixteenDigits) {
  EXPECT_EQ(HexText(0), "0000000000000000");
  EXPECT_EQ(HexText(0xfedcba9876543210u), "fedcba9876543210");
}

}  // namespace
}  // namespace cistern
