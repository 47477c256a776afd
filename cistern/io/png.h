#pragma once
// Grey images of 8 bits as PNG (ISO/IEC 15948), with zlib. Written without filters; read with every
// filter, not interlaced.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cistern {

struct GreyImage {
  int64_t height = 0, width = 0;
  std::vector<uint8_t> pixels;  // [height,width]
};

// Error where the sides are not 1 to 2^16 or the pixels are not as many.
std::string PngBytes(const GreyImage& image);
// Error that begins with `name` and says what was expected: a broken signature, checksum or
// stream, another kind of image, sides beyond 2^16.
GreyImage ReadPng(std::string_view bytes, const std::string& name);

}  // namespace cistern
