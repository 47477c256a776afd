#include "cistern/base/terminal.h"

#include <cstdio>

#include "cistern/base/progress.h"

namespace cistern {

std::string Printable(std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    // C1 controls are two bytes in UTF-8: 0xc2 0x80 .. 0xc2 0x9f.
    const bool c1 = c == 0xc2 && i + 1 < text.size() && (uint8_t(text[i + 1]) & 0xe0) == 0x80;
    if (c1 || c == 0x7f || (c < 32 && c != '\n' && c != '\t')) {
      const unsigned code = c1 ? static_cast<unsigned char>(text[++i]) : c;
      out += "\\x";
      out += kHex[code >> 4];
      out += kHex[code & 15];
    } else {
      out += text[i];
    }
  }
  return out;
}

void Note(const std::string& text) {
  if (!Quiet()) std::fprintf(stderr, "note: %s\n", Printable(text).c_str());
}

}  // namespace cistern
