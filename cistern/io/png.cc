#include "cistern/io/png.h"

#include <zlib.h>

#include <algorithm>
#include <cstdlib>

#include "cistern/base/error.h"

namespace cistern {
namespace {

constexpr std::string_view kSignature = "\x89PNG\r\n\x1a\n";
constexpr int64_t kLargestSide = 1 << 16;

std::string BigEndian32(uint64_t n) {
  return {char(n >> 24), char(n >> 16), char(n >> 8), char(n)};
}

uint32_t Number32(std::string_view bytes) {
  uint32_t n = 0;
  for (int i = 0; i < 4; ++i) n = n << 8 | uint8_t(bytes[size_t(i)]);
  return n;
}

uint32_t Checksum(std::string_view bytes) {
  return uint32_t(crc32(0, reinterpret_cast<const Bytef*>(bytes.data()), uInt(bytes.size())));
}

std::string Chunk(const std::string& type, const std::string& data) {
  return BigEndian32(data.size()) + type + data + BigEndian32(Checksum(type + data));
}

// The filter of a row (section 9.2 of the standard), undone in place. `above`: the row before, or
// zeros.
bool Unfilter(int filter, const uint8_t* above, uint8_t* row, int64_t width) {
  for (int64_t x = 0; x < width; ++x) {
    const int a = x > 0 ? row[x - 1] : 0, b = above[x], c = x > 0 ? above[x - 1] : 0;
    int predicted = 0;
    if (filter == 1) predicted = a;
    if (filter == 2) predicted = b;
    if (filter == 3) predicted = (a + b) / 2;
    if (filter == 4) {
      const int p = a + b - c, pa = std::abs(p - a), pb = std::abs(p - b), pc = std::abs(p - c);
      predicted = pa <= pb && pa <= pc ? a : pb <= pc ? b : c;
    }
    row[x] = uint8_t(row[x] + predicted);
  }
  return filter >= 0 && filter <= 4;
}

}  // namespace

std::string PngBytes(const GreyImage& image) {
  CISTERN_CHECK(image.height >= 1 && image.width >= 1 && image.height <= kLargestSide &&
                    image.width <= kLargestSide &&
                    int64_t(image.pixels.size()) == image.height * image.width,
                "[png] expected ", image.height, " x ", image.width, " pixels with sides of 1 to ",
                kLargestSide, ", got ", image.pixels.size());
  std::string rows;
  for (int64_t y = 0; y < image.height; ++y) {
    rows += '\0';  // no filter
    rows.append(reinterpret_cast<const char*>(image.pixels.data()) + y * image.width,
                size_t(image.width));
  }
  uLongf size = compressBound(uLong(rows.size()));
  std::string packed(size, '\0');
  CISTERN_CHECK(compress2(reinterpret_cast<Bytef*>(packed.data()), &size,
                          reinterpret_cast<const Bytef*>(rows.data()), uLong(rows.size()),
                          Z_DEFAULT_COMPRESSION) == Z_OK,
                "[png] zlib cannot compress the image");
  packed.resize(size);
  return std::string(kSignature) +
         Chunk("IHDR", BigEndian32(uint64_t(image.width)) + BigEndian32(uint64_t(image.height)) +
                           std::string("\x08\0\0\0\0", 5)) +
         Chunk("IDAT", packed) + Chunk("IEND", "");
}

GreyImage ReadPng(std::string_view bytes, const std::string& name) {
  CISTERN_CHECK(bytes.starts_with(kSignature), name, ": not a PNG file",
                bytes.empty() ? " (it is empty)" : "");
  GreyImage image;
  std::string packed;
  bool ended = false;
  for (size_t at = kSignature.size(); !ended;) {
    CISTERN_CHECK(bytes.size() - at >= 12, name, ": the PNG ends early, at byte ", bytes.size());
    const uint32_t size = Number32(bytes.substr(at));
    CISTERN_CHECK(size <= bytes.size() - at - 12, name, ": the PNG ends early: its part at byte ",
                  at, " says that it has ", size, " bytes");
    const std::string_view type = bytes.substr(at + 4, 4), data = bytes.substr(at + 8, size);
    CISTERN_CHECK(
        Checksum(bytes.substr(at + 4, size_t{4} + size)) == Number32(bytes.substr(at + 8 + size)),
        name, ": broken PNG: the part at byte ", at, " does not fit its checksum");
    CISTERN_CHECK((at == kSignature.size()) == (type == "IHDR"), name,
                  ": broken PNG: its header is not its first part, or occurs twice");
    if (type == "IHDR") {
      CISTERN_CHECK(size == 13, name, ": broken PNG: a header of ", size, " bytes; expected 13");
      image.width = Number32(data), image.height = Number32(data.substr(4));
      CISTERN_CHECK(image.width >= 1 && image.height >= 1 && image.width <= kLargestSide &&
                        image.height <= kLargestSide,
                    name, ": ", image.height, " x ", image.width,
                    " pixels; expected sides of 1 to ", kLargestSide);
      CISTERN_CHECK(data.substr(8) == std::string_view("\x08\0\0\0\0", 5), name,
                    ": expected a grey image of 8 bits that is not interlaced; this one has ",
                    int(data[8]), " bits, colour type ", int(data[9]), ", interlacing ",
                    int(data[12]));
    }
    if (type == "IDAT") packed += data;
    ended = type == "IEND";
    at += size_t{12} + size;
  }
  // What zlib makes of the data is at most 1,032 times as much: no size in the header alone costs
  // memory.
  const size_t wanted = size_t(image.height * (image.width + 1));
  CISTERN_CHECK(wanted <= 1100 * (packed.size() + 64), name, ": ", packed.size(),
                " bytes of image data cannot hold ", image.height, " x ", image.width, " pixels");
  std::vector<uint8_t> rows(wanted);
  uLongf size = uLongf(wanted);
  const int status = uncompress(rows.data(), &size, reinterpret_cast<const Bytef*>(packed.data()),
                                uLong(packed.size()));
  CISTERN_CHECK(status == Z_OK && size == wanted, name, ": broken image data; expected ", wanted,
                " bytes for ", image.height, " x ", image.width, " pixels");
  image.pixels.resize(size_t(image.height * image.width));
  std::vector<uint8_t> above(size_t(image.width), 0);
  for (int64_t y = 0; y < image.height; ++y) {
    uint8_t* row = rows.data() + y * (image.width + 1) + 1;
    CISTERN_CHECK(Unfilter(row[-1], above.data(), row, image.width), name, ": row ", y,
                  " has the filter ", int{row[-1]}, "; expected 0 to 4");
    above.assign(row, row + image.width);
    std::copy(row, row + image.width, image.pixels.begin() + y * image.width);
  }
  return image;
}

}  // namespace cistern
