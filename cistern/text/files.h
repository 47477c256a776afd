#pragma once
// Whole files in and out, and a hash for cache keys.
#include <cstdint>
#include <string>
#include <string_view>

namespace cistern {

// The bytes of a regular file. Missing, unreadable or not a file: an Error that names it.
std::string ReadWholeFile(const std::string& path);

// Writes `path`.tmp and renames it, so that a reader sees the old file or the new one, never half
// of it. An Error names the file.
void WriteFileAtomic(const std::string& path, std::string_view contents);

// 64-bit FNV-1a; chain pieces through `seed`. For cache keys and broken files, not against an
// adversary.
uint64_t Hash64(std::string_view bytes, uint64_t seed = 0xcbf29ce484222325u);

}  // namespace cistern
