// Grey PNG: what is written is read again; every filter; broken files.
#include "cistern/io/png.h"

#include <gtest/gtest.h>
#include <zlib.h>

#include <cstdlib>

#include "cistern/base/error.h"
#include "cistern/base/random.h"
#include "cistern/io/test_folder.h"

namespace cistern {
namespace {

GreyImage RandomImage(int64_t height, int64_t width, uint64_t seed) {
  Random random(seed);
  GreyImage image{height, width, {}};
  for (int64_t i = 0; i < height * width; ++i)
    image.pixels.push_back(uint8_t(random.Below(i % 3 ? 256 : 8)));
  return image;
}

void ExpectSays(const std::string& message, std::initializer_list<const char*> phrases) {
  for (const char* phrase : phrases)
    EXPECT_NE(message.find(phrase), std::string::npos) << message << "\n  lacks: " << phrase;
}

std::string Part(const std::string& type, const std::string& data) {
  const auto number = [](uint32_t n) {
    return std::string{char(n >> 24), char(n >> 16), char(n >> 8), char(n)};
  };
  const std::string both = type + data;
  return number(uint32_t(data.size())) + both +
         number(uint32_t(crc32(0, reinterpret_cast<const Bytef*>(both.data()), uInt(both.size()))));
}

// A PNG with this filter in each row, from the standard's formulas.
std::string Filtered(const GreyImage& image, int filter, const std::string& kind) {
  std::string rows;
  const auto at = [&](int64_t y, int64_t x) {
    return y < 0 || x < 0 ? 0 : int{image.pixels[size_t(y * image.width + x)]};
  };
  for (int64_t y = 0; y < image.height; ++y) {
    rows += char(filter);
    for (int64_t x = 0; x < image.width; ++x) {
      const int a = at(y, x - 1), b = at(y - 1, x), c = x > 0 ? at(y - 1, x - 1) : 0;
      const int p = a + b - c;
      const int paeth = std::abs(p - a) <= std::abs(p - b) && std::abs(p - a) <= std::abs(p - c) ? a
                        : std::abs(p - b) <= std::abs(p - c)                                     ? b
                                                             : c;
      const int predictions[] = {0, a, b, (a + b) / 2, paeth, 0};
      rows += char(at(y, x) - predictions[filter]);
    }
  }
  uLongf size = compressBound(uLong(rows.size()));
  std::string packed(size, '\0');
  compress(reinterpret_cast<Bytef*>(packed.data()), &size,
           reinterpret_cast<const Bytef*>(rows.data()), uLong(rows.size()));
  packed.resize(size);
  const std::string header = {0, 0, 0, char(image.width), 0, 0, 0, char(image.height)};
  return "\x89PNG\r\n\x1a\n" + Part("IHDR", header + kind) + Part("tEXt", "a part to skip") +
         Part("IDAT", packed.substr(0, 20)) + Part("IDAT", packed.substr(20)) + Part("IEND", "");
}

const std::string kGrey = std::string("\x08\0\0\0\0", 5);

TEST(Png, WhatIsWrittenIsRead) {
  for (const auto& [height, width] : {std::pair{1, 1}, {1, 40}, {33, 7}, {128, 128}}) {
    const GreyImage image = RandomImage(height, width, 4);
    const GreyImage again = ReadPng(PngBytes(image), "a.png");
    EXPECT_EQ(again.height, height);
    EXPECT_EQ(again.width, width);
    EXPECT_EQ(again.pixels, image.pixels);
  }
  ExpectSays(ErrorMessage([] { PngBytes({2, 2, {1, 2, 3}}); }), {"2 x 2", "got 3"});
}

TEST(Png, EveryFilter) {
  const GreyImage image = RandomImage(19, 23, 6);
  for (int filter = 0; filter <= 4; ++filter)
    EXPECT_EQ(ReadPng(Filtered(image, filter, kGrey), "f.png").pixels, image.pixels) << filter;
  ExpectSays(ErrorMessage([&] { ReadPng(Filtered(image, 5, kGrey), "f.png"); }),
             {"f.png: row 0", "filter 5"});
}

TEST(Png, OtherKindsAreNamed) {
  const GreyImage image = RandomImage(4, 4, 6);
  const auto message = [&](const char* kind) {
    return ErrorMessage([&] { ReadPng(Filtered(image, 0, std::string(kind, 5)), "k.png"); });
  };
  ExpectSays(message("\x08\x02\0\0\0"), {"k.png", "grey image of 8 bits", "colour type 2"});
  ExpectSays(message("\x10\0\0\0\0"), {"16 bits"});
  ExpectSays(message("\x08\0\0\0\x01"), {"interlacing 1"});
  ExpectSays(ErrorMessage([] { ReadPng("", "e.png"); }), {"e.png", "empty"});
  ExpectSays(ErrorMessage([] { ReadPng("GIF89a", "g.png"); }), {"g.png: not a PNG"});
  // A header that says more than the data can hold costs no memory.
  const std::string huge = std::string("\0\1\0\0\0\1\0\0", 8) + kGrey;
  ExpectSays(ErrorMessage([&] {
               ReadPng(
                   "\x89PNG\r\n\x1a\n" + Part("IHDR", huge) + Part("IDAT", "x") + Part("IEND", ""),
                   "h.png");
             }),
             {"cannot hold 65536 x 65536"});
}

TEST(Png, TruncatedAndMutatedFiles) {
  const std::string good = PngBytes(RandomImage(12, 9, 2));
  for (size_t cut = 0; cut < good.size(); ++cut)
    EXPECT_NE(ErrorMessage([&] { ReadPng(good.substr(0, cut), "c.png"); }), "no error") << cut;
  Random random(1);
  for (int trial = 0; trial < 500; ++trial) {
    std::string bytes = good;
    bytes[size_t(random.Below(int64_t(bytes.size())))] ^= char(1 + random.Below(255));
    EXPECT_NE(ErrorMessage([&] { ReadPng(bytes, "m.png"); }), "no error");
  }
}

}  // namespace
}  // namespace cistern
