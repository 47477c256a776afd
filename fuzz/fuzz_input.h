#pragma once
// What all fuzz targets share.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "cistern/base/error.h"

namespace cistern {

// Runs f on the input. Bad input may only end in an Error with a message; anything else is a
// finding.
template <class F>
int FuzzOne(const uint8_t* data, size_t size, const F& f) {
  try {
    f(std::string_view(reinterpret_cast<const char*>(data), size));
  } catch (const Error& e) {
    if (std::string_view(e.what()).empty()) __builtin_trap();
  }
  return 0;
}

}  // namespace cistern
