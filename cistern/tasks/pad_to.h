#pragma once
// How long the rows of a batch are made by padding.
#include "cistern/io/fields.h"

namespace cistern {

enum class PadTo { kLongest, kLength };

inline const EnumNames<PadTo>& PadToNames() {
  static const EnumNames<PadTo> names = {{PadTo::kLongest, "longest"}, {PadTo::kLength, "length"}};
  return names;
}

}  // namespace cistern
