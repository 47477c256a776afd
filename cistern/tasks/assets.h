#pragma once
// The JSON files in which a task keeps what it learned from its training data (names of classes,
// edges of bins), with a checksum: a digit that is damaged there would change predictions silently.
#include <string>

#include "cistern/io/json_text.h"

namespace cistern {

// Written completely or not at all; the checksum is that of `json` as one line.
void SaveAssetFile(const std::string& path, Json json);

// Without the checksum. A note where it does not fit, for the file may be changed on purpose; files
// of earlier versions have none. Error where it cannot be read.
Json LoadAssetFile(const std::string& path);

}  // namespace cistern
