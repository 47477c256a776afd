#pragma once
// JSON files of ours with a checksum of their contents inside: a digit that is damaged in them
// would change what follows silently. Files of earlier versions have none, and are read as they
// are.
#include <string>

#include "cistern/io/json_text.h"

namespace cistern {

// `json`, an object, with its checksum: that of it as one line.
Json WithChecksum(Json json);

// Written completely or not at all.
void WriteCheckedJson(const std::string& path, Json json);

// The object without its checksum. Where that does not fit: a note with `meaning` ("predictions may
// be others"), for people may change the file on purpose; with no meaning given an Error, for they
// have no reason to. Error where the file cannot be read.
Json ReadCheckedJson(const std::string& path, const std::string& meaning = "");

}  // namespace cistern
